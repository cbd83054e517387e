"""Adds clipped per-example gradients, weighted by their coefficients.

`ghost_clipped_sum.ghost_clipped_sum` is the entry point. For a dense layer `y = x @ w + b` and a
batch of B examples, the types are:

- `ExampleGradients`: the gradient of each example. `w` is a `FactoredGradients`, and `b` is a
  formed gradient, (B, D).
- `GradientSums`: Σ_i c_i G_i, (R, D) for `w`. Small formed gradients share a vector, and `b` is a
  slice of it.

`product_sums` weighs and adds up the segments of a product.

`product_sums` is imported on first use, as an attribute of the package.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpoptax._ghost_clipping.sums import product_sums as product_sums
else:
    from dpoptax._support.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
