"""The clipped sum of a batch from those of its parts."""

import dataclasses

import jax
import jax.numpy as jnp

from dpoptax._clip.block_sums import compensated_add, parts_rounding
from dpoptax._clip.bounds import check_rounding
from dpoptax._clip.checksum import checksum, of_leaves
from dpoptax._clip.clipped_sum import ClippedSum, check_clipped_sum, is_intact, public_part
from dpoptax._clip.grid import check_capacity
from dpoptax._tree import float32_at_least
from dpoptax._xla import materialize


def accumulate(*sums: ClippedSum) -> ClippedSum:
    """Adds the clipped sums of disjoint parts of one batch: Σ_k S_k, under a seal of its own.

    For batches whose parts come one after the other, such as from files. Where the batch is at
    hand, `clipped_grad(..., microbatch_size=...)` does the same in one call.

    Privacy: the result is the clipped sum of the whole batch. Proof: a record is in at most one
    part k. It moves S_k by at most C = `clip.sensitivity`, in l2 norm, by that part's own bound,
    and none of the others. The parts are added with what rounding takes off, so that it changes in
    the rounding of Σ_k S_k, of B examples together, at most τ C, τ = 1.01 · 2⁻²² B, whatever the
    number of parts, and the total is multiplied by 1 − τ: in each call, so give one call all parts.
    The sums must be of *parts of one draw of the sampler*. Those of several draws, or of several
    losses on one batch, are not disjoint: a record would move their total by C for each one that it
    is in. Nothing here can see that. For several losses, give `clipped_grad` one loss function that
    returns their sum: its gradient is the joint one, clipped as one vector.

    Args:
      sums: at least one `ClippedSum`, of one geometry and one reference, each as it was made.

    Returns:
      A `ClippedSum`. Its seal is broken, and so the release refused, where that of a part is, or
      where the references differ.

    Raises:
      TypeError: something that is no `ClippedSum`, or one that was visibly changed.
      ValueError: no sums, geometries that differ, one sum given twice, rows of a table that
        were selected for each, a sum of nobody knows how many examples, or of so many that τ is
        above 1/2, or on a grid that integers of 32 bits do not hold it.

    >>> import dpoptax
    >>> clip, params = dpoptax.extend.clip_per_example(dpoptax.l2_clip(1.0)), jnp.zeros(1)
    >>> parts = [clip.update(jnp.ones((2, 1)), clip.init(params), params)[0] for _ in range(2)]
    >>> accumulate(*parts).sum.round(3)
    Array([4.], dtype=float32)
    """
    if not sums:
        raise ValueError("accumulate got no sums: want at least one ClippedSum")
    if isinstance(sums[0], list | tuple):
        raise TypeError(
            f"accumulate got a {type(sums[0]).__name__}: want each ClippedSum as an argument of "
            "its own, dpoptax.accumulate(*sums)"
        )
    parts = [check_clipped_sum(part) for part in sums]
    first = parts[0]
    if first.clip.selects:
        raise ValueError(
            "the rows of each sum were selected for itself, by the same noise, and are others: "
            "they can neither be added nor priced together. Give the whole batch to "
            "dpoptax.tables.selected_grad(..., microbatch_size=...), or select rows once with "
            "dpoptax.tables.select_rows"
        )
    for i, part in enumerate(parts):
        if (part.clip, part.grid) != (first.clip, first.grid):
            raise ValueError(
                f"sums[0] was made with clip={first.clip}, sums[{i}] with clip={part.clip} (grids "
                f"{first.grid} and {part.grid}): want parts of one batch, clipped by one geometry"
            )
        if any(part is other for other in parts[:i]):
            raise ValueError(f"sums[{i}] is given twice: want disjoint parts of one batch")
    origins = {part.origin for part in parts}
    if len(origins - {None}) > 1:
        raise ValueError(
            "the sums were taken at points of different methods: take the gradients of all parts "
            "of a batch at the same points"
        )
    structures = {jax.tree.structure((part.sum, public_part(part))) for part in parts}
    if len(structures) > 1:
        raise ValueError(f"the sums have different structures: {structures}")
    sound = jnp.all(jnp.stack([is_intact(part) for part in parts]))
    references = jnp.stack([of_leaves(public_part(part), 0) for part in parts])
    sound &= jnp.all(references == references[0])
    counts = [part.examples for part in parts]
    if None in counts:
        raise ValueError(
            f"sums[{counts.index(None)}] does not say how many examples it is of, and so not what "
            "rounding can do: give dpoptax.extend.trust_clipped(..., examples=B)"
        )
    examples = sum(count for count in counts if count is not None)
    # Two roundings: of the total with what was taken off, and of the product.
    change = parts_rounding(3, examples)
    if first.grid is None:
        check_rounding(change)
    else:
        check_capacity(first.clip, first.grid, examples)

    def add(*leaves: jax.Array) -> jax.Array:
        if first.grid is not None or len(leaves) == 1:
            return sum(leaves[1:], leaves[0])
        wide = float32_at_least(*leaves)  # whose rounding τ is of
        total, *rest = (leaf.astype(wide) for leaf in leaves)
        lost = jnp.zeros_like(total)
        for leaf in rest:
            total, lost = compensated_add(total, lost, leaf)
        return (total + lost) * (1.0 - change)

    total = materialize(jax.tree.map(add, *(part.sum for part in parts)))
    seal = checksum(total, first.clip, public_part(first), first.grid, examples)
    seal = jnp.where(sound, seal, ~seal)
    unmasked = any(part.unmasked for part in parts)
    origin = first.origin if len(origins) == 1 else None
    return dataclasses.replace(
        first, sum=total, seal=seal, examples=examples, unmasked=unmasked, origin=origin
    )
