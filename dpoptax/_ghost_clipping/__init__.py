"""Computes the sum of clipped per-example gradients without forming each gradient.

`sums.ghost_clipped_sum.ghost_clipped_sum` is the entry point. `dpoptax._losses` has read the loss.
Imports go one way:

- `records` runs the loss forward and backward, and records operands and cotangents.
- `factor_products` bounds the norms of per-example gradients from these factors.
- `transformed` does so for kernels computed from parameters.
- `plan` chooses, for each parameter, how its norms and its sum are computed. `make_plan` does
  so for parameters that are used several times, in parts, or computed on.
- `sums` scales, clips and adds the gradients.

Two more engines use these stages: `backward.streamed_sum` and `backward.recomputed_sum`.
`dpoptax._clipped_grad.engines` chooses.

`docs/developers/ghost-clipping.md` follows one dense layer through all stages.

`factor_products` is imported on first use, as an attribute of the package.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpoptax._ghost_clipping import factor_products as factor_products
else:
    from dpoptax._support.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
