"""Adds the clipped sums of the parts of a batch."""

import jax
import jax.numpy as jnp
from jax import lax

from dpoptax._clipped_sum.clipped_sum import ClippedSum, check_clipped_sum, sealed
from dpoptax._rounding.block_sums import compensated_add, parts_rounding
from dpoptax._rounding.bounds import check_rounding
from dpoptax._rounding.integer_sums import check_capacity
from dpoptax._support.tree import float32_at_least


def accumulate(*sums: ClippedSum) -> ClippedSum:
    """Adds the clipped sums of disjoint parts of one batch.

    Use it if the parts arrive one after the other, for example from files. If the whole batch is
    available, `clipped_grad(..., microbatch_size=...)` does the same in one call.

    Privacy: the result is the clipped sum of the whole batch, with sensitivity C =
    `clip.sensitivity`, because a record is in at most one part. The sums must be of *disjoint parts
    of one draw of the sampler*. This cannot be checked. If they are of several draws, or of several
    losses on one batch, one record can change each of them by C. For several losses, give
    `clipped_grad` one loss that returns their sum. Its gradient is clipped as one vector.

    To cover rounding, a total of several sums is multiplied by 1 − τ, with τ = 1.01 · 2⁻²² B for B
    examples (docs/developers/bound.md). Pass all parts in one call.

    Args:
      sums: one or more `ClippedSum`s with the same geometry, gradient points and reference. The
        reference is that of the first; another one costs utility but not privacy.

    Raises:
      TypeError: an argument is not a `ClippedSum`, or was changed.
      ValueError: no sum is given; geometries or points differ; a sum is given twice; rows of a
        table were selected for each sum; the number of examples of a sum is unknown; there are so
        many examples that τ exceeds 1/2; or a sum on a grid does not fit in int32.

    >>> import dpoptax
    >>> clip, params = dpoptax.extend.clip_per_example(dpoptax.l2_clip(1.0)), jnp.zeros(1)
    >>> parts = [clip.update(jnp.ones((2, 1)), clip.init(params), params)[0] for _ in range(2)]
    >>> accumulate(*parts).sum.round(3)
    Array([4.], dtype=float32)
    """
    if not sums:
        raise ValueError("`accumulate` needs at least one `ClippedSum`, got none.")
    if isinstance(sums[0], list | tuple):
        raise TypeError(
            f"Each `ClippedSum` must be a separate argument, got a {type(sums[0]).__name__}. Write "
            "`dpoptax.accumulate(*sums)`."
        )
    parts = [check_clipped_sum(part) for part in sums]
    first = parts[0].terms
    _check_alike(parts)
    examples = _count_examples(parts)
    # Two roundings, as for three totals: of the total with its compensation, and of the product.
    change = parts_rounding(3, examples)
    if first.grid is None:
        check_rounding(change)
    else:
        check_capacity(first.clip, first.grid, examples)

    def add(*leaves: jax.Array) -> jax.Array:
        # Integers add without rounding, and one sum has its allowance already.
        if first.grid is not None or len(leaves) == 1:
            return sum(leaves[1:], leaves[0])
        wide = float32_at_least(*leaves)  # τ bounds the rounding of this dtype
        total, *rest = (leaf.astype(wide) for leaf in leaves)
        total = lax.complex(total, jnp.zeros_like(total))
        for leaf in rest:
            total = compensated_add(total, leaf)
        return total.real * (1.0 - change)

    total = jax.tree.map(add, *(part.sum for part in parts))
    unmasked = any(part.terms.unmasked for part in parts)
    code = min(part.terms.points_code for part in parts)  # 0, unknown, if those of one part are
    terms = first._replace(examples=examples, unmasked=unmasked, points_code=code)
    return sealed(total, terms, parts[0].reference, accumulated=True)


def _check_alike(parts: list[ClippedSum]) -> None:
    """Raises an error if sums are not of disjoint parts of one batch, clipped in the same way."""
    first = parts[0].terms
    for i, part in enumerate(parts):
        terms = part.terms
        if (terms.clip, terms.grid) != (first.clip, first.grid):
            raise ValueError(
                "All sums must have the same clip and grid, got sums[0] with "
                f"clip={first.clip} and grid={first.grid}, sums[{i}] with clip={terms.clip} and "
                f"grid={terms.grid}."
            )
        if any(part is other for other in parts[:i]):
            raise ValueError(f"Sums must be of disjoint parts of one batch, got sums[{i}] twice.")
    if len({part.terms.points_code for part in parts} - {0}) > 1:
        raise ValueError(
            "All sums must be taken at the same gradient points, got points of different methods."
        )
    structures = {jax.tree.structure(part.sealed) for part in parts}
    if len(structures) > 1:
        raise ValueError(f"All sums must have the same structure, got {structures}.")


def _count_examples(parts: list[ClippedSum]) -> int:
    counts = [part.terms.examples for part in parts]
    if None in counts:
        raise ValueError(
            f"The number of examples of sums[{counts.index(None)}] must be known, to bound its "
            "rounding. Call `dpoptax.extend.trust_clipped(..., examples=B)`."
        )
    return sum(count for count in counts if count is not None)
