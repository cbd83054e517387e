"""Clips whole gradients in two turns, one for the norms and one for the sum.

`ghost_clipped_sum` keeps the operands and cotangents of all uses until the norms are known. This
module runs the forward and the backward pass twice. The first turn measures each use of a parameter
during the backward pass, and the norms give each example's coefficient. The second turn sums each
use during the backward pass. So `jax.checkpoint` and sharded parameters save memory as without
privacy, at the cost of a second forward and backward pass.

The bound does not require that both turns compute the same numbers; see
`dpoptax._rounding.part_limits`. A barrier keeps the compiler from merging the turns, which would
keep all intermediate values. On CPU, XLA removes barriers, but it does not merge the branch of a
condition that it cannot fold.

Uses of one parameter are measured separately, and their norms are added. For two uses with
orthogonal gradients, the result is at most √2 times the norm.
"""

import collections

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpoptax._clips.clip import Clip
from dpoptax._ghost_clipping.backward.batch_devices import ONE_DEVICE, BatchDevices
from dpoptax._ghost_clipping.backward.part_sums import ByPart, PartSums, UseTotal, check_uses
from dpoptax._ghost_clipping.backward.use_sum import Weighing, tau_of_parts
from dpoptax._losses.trace_loss import Examples
from dpoptax._losses.traced_program import Program
from dpoptax._points.points import GradientPoints
from dpoptax._rounding import bounds
from dpoptax._rounding.block_sums import Rounding
from dpoptax._rounding.bounds import Piece
from dpoptax._rounding.part_limits import (
    PartLimits,
    join_lengths,
    limited_coefficients,
    make_limits,
    part_length,
)
from dpoptax._support.tree import PyTree
from dpoptax._support.xla import opaque_integers


def recomputed_sum(
    program: Program,
    clip: Clip,
    points: GradientPoints,
    examples: Examples,
    *,
    devices: BatchDevices = ONE_DEVICE,
    factor_dtype: DTypeLike | None = None,
) -> tuple[UseTotal, PyTree]:
    """Computes the clipped sum of a batch. The arguments are those of `streamed_sum`.

    Returns:
      The sum, shaped like the parameters, with the sum of the geometry's statistic; and the
      auxiliary outputs, `None` without `has_aux`.

    Raises:
      ValueError: there are several gradient points, or the loss transforms a parameter before
        combining it with data.
    """
    params = points.points[0]
    leaves, inputs = jax.tree.leaves(params), examples.inputs
    mask, whole = examples.mask, examples.whole
    check_uses(program, points, "recompute")
    scaled, groups = clip.scaling(points.reference), clip.groups(params)
    sums = PartSums(program, leaves, devices, factor_dtype)
    lengths, roundings, outputs = sums.measure(inputs)
    # One τ for all parts. No entry of the sum gets more parts than the parameter with most uses.
    tau = tau_of_parts(whole, roundings, max(sums.added.values(), default=1))
    limits, norms, used = _clip_whole(scaled, sums, lengths, groups, mask, tau)
    statistic = bounds.sum_statistic(clip, points.reference, norms, used, whole.examples)
    # Without a barrier, the compiler would see that both turns compute the same operands, and would
    # keep those of the first.
    leaves, inputs, limits = lax.optimization_barrier((leaves, inputs, limits))
    weighings = [Weighing(scaled.sensitivity, _limited)] * len(sums.parts)
    # XLA removes barriers on CPU. It cannot know that this number is 1, so it keeps the condition
    # and does not merge its branch with the first turn.
    (always,) = opaque_integers([1])
    totals = lax.cond(
        always > 0, lambda: sums.sum(leaves, inputs, weighings, limits)[0], sums.zeros
    )
    total = jax.tree.unflatten(jax.tree.structure(params), totals)
    return (total, statistic), program.loss.aux(outputs)


def _limited(piece: Piece, limits: PartLimits, rounding: Rounding) -> jax.Array:
    """Returns the weights of one part; all parts have made room for `rounding` already."""
    del rounding
    return limited_coefficients(limits, part_length(piece))


def _clip_whole(
    clip: Clip, sums: PartSums, by_part: ByPart, groups: list[int], mask: jax.Array, tau: float
) -> tuple[list[PartLimits], jax.Array, jax.Array]:
    """Returns limits of all parts, norms of the first group, and used examples."""
    # (B, *steps) becomes (B, steps). Limits get their axes back below, because scans slice them.
    lengths = [x.reshape(mask.shape[0], -1) for x in by_part]
    by_leaf: dict[int, list[jax.Array]] = collections.defaultdict(list)
    for part, length in zip(sums.parts, lengths, strict=True):
        by_leaf[part.leaf].append(length)
    if not by_leaf:
        return [], jnp.zeros(mask.shape, jnp.float32), mask
    # One piece for each parameter. Parameters share no entry, but the uses of one may.
    pieces = [Piece(join_lengths(own), groups[leaf]) for leaf, own in by_leaf.items()]
    found, norms, used = bounds.clip_coefficients(clip, pieces, mask, groups=groups, tau=tau)
    coefficients = dict(zip(by_leaf, found, strict=True))
    limits = [
        PartLimits(*(x.reshape(mask.shape[0], *part.steps) for x in limit))
        for part, limit in (
            (part, make_limits(length, coefficients[part.leaf]))
            for part, length in zip(sums.parts, lengths, strict=True)
        )
    ]
    return limits, norms, used
