"""Counts the examples that a clipped sum drops because they are not finite."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpoptax._clipped_grad.clipped_grad import clipped_grad
from dpoptax._clips.clip import UnitClip
from dpoptax._points.points import GradientPoints
from dpoptax._support.tree import PyTree, batch_length, check_mask


@dataclasses.dataclass(frozen=True)
class _Count(UnitClip):
    """Encodes each gradient as 1, so that the clipped sum counts its examples."""

    by_norms: ClassVar[bool] = True

    def factors(self, norms: jax.Array) -> jax.Array:
        """Returns 1; a count needs no allowance for rounding, because it is not released."""
        return jnp.ones_like(norms)

    def statistic(self, norms: jax.Array, reference: PyTree) -> jax.Array:
        """Returns 1 for each example."""
        return jnp.ones_like(norms)

    def join(self, gradient: PyTree, statistic: jax.Array | None) -> PyTree:
        """Returns only the count, so that the compiler removes the gradients."""
        return statistic


def dropped_examples(
    loss_fn: Callable[..., PyTree],
    params: PyTree | GradientPoints,
    batch: PyTree,
    mask: ArrayLike | None = None,
    *,
    key: jax.Array | None = None,
    ids: ArrayLike | None = None,
    **options: Any,
) -> jax.Array:
    """Counts the examples that `clipped_grad` drops because they are not finite.

        Σ_i mask_i 1[∇ℓ(x; ξ_i) overflows or is NaN]

    `clipped_grad` adds exactly zero for such an example, without an error. A few are harmless. Many
    bias the sum: in float16 a large loss scale can drop a large part of the batch. Pass the same
    arguments and options as for the gradient, because "auto" and "vmap" compute different
    intermediate values and may drop different examples.

    Privacy: the count is private and has no noise. Use it only for debugging, preferably on public
    data. Do not publish it or choose hyperparameters with it.

    Args:
      loss_fn: as in `clipped_grad`.
      params: parameters or gradient points. This and the next four arguments are those of the
        function that `clipped_grad` returns.
      batch: the examples, leaves (B, …).
      mask: (B,), True for examples and False for padding; `None` if all rows are examples.
      key: the key of a loss with randomness.
      ids: (B,) integers, the record of each example, if there is a key.
      **options: options of `clipped_grad`, such as `method` and `microbatch_size`, except
        `grid` and method="streaming", which drops parts of examples.

    Returns:
      The number of dropped examples in [0, B], an int32 scalar.

    Raises:
      TypeError: as in `clipped_grad`.
      ValueError: as in `clipped_grad`, or there are more than 65,536 examples under "auto".

    >>> import dpoptax, jax.numpy as jnp
    >>> loss_fn = lambda w, x: jnp.float16(2.0**14) * jnp.sum(w * x)
    >>> batch = jnp.array([[1.0, 2.0], [3.0, 4.0]], jnp.float16)  # 2¹⁴ · 4 overflows
    >>> dropped_examples(loss_fn, jnp.ones(2, jnp.float16), batch)
    Array(1, dtype=int32)
    """
    grad_fn = clipped_grad(loss_fn, _Count(), **options)
    found = grad_fn(params, batch, mask, key=key, ids=ids)
    clipped = found[0] if isinstance(found, tuple) else found
    examples = jnp.sum(check_mask(mask, batch_length(batch)), dtype=jnp.int32)
    return examples - jnp.rint(clipped.sum).astype(jnp.int32)
