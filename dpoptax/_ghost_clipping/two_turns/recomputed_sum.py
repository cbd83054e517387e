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
import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpoptax._clips.clip import Clip
from dpoptax._clips.encoding import scaling
from dpoptax._ghost_clipping.backward.batch_devices import ONE_DEVICE, BatchDevices
from dpoptax._ghost_clipping.backward.use_places import (
    UsePlaces,
    UseTotal,
    check_uses,
    leaf_of,
)
from dpoptax._ghost_clipping.backward.use_runner import BatchFunction, run_uses
from dpoptax._ghost_clipping.backward.use_sum import UseSum, tau_of_parts
from dpoptax._ghost_clipping.records.run_block import Arrays, ByIndex
from dpoptax._ghost_clipping.sums import weighted_products
from dpoptax._losses.program import Program
from dpoptax._losses.trace_loss import Examples
from dpoptax._points.points import GradientPoints
from dpoptax._rounding import block_sums, bounds
from dpoptax._rounding.block_sums import Rounding, WholeBatch
from dpoptax._rounding.bounds import Piece
from dpoptax._rounding.part_limits import (
    PartLimits,
    join_lengths,
    limited_coefficients,
    make_limits,
    part_length,
)
from dpoptax._support.tree import PyTree, widen
from dpoptax._support.xla import materialize, opaque_integers

# The arrays of all parts of a gradient: first the uses, then the opaque parameters.
_ByPart: TypeAlias = list[PyTree]


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
    mask, whole = program.loss.separate(examples.mask), examples.whole
    check_uses(program, points, "recompute")
    uses = _LimitedUses(
        scaling(clip, points.reference),
        program,
        UsePlaces(program, leaves, devices.specs),
        whole,
        devices,
        factor_dtype,
    )
    lengths, results = uses.measure(leaves, inputs)
    limits, norms, used = uses.clip_whole(lengths, clip.groups(params), mask)
    statistic = block_sums.sum_statistic(clip, points.reference, norms, used, whole)
    # Without a barrier, the compiler would see that both turns compute the same operands, and would
    # keep those of the first.
    leaves, inputs, limits = lax.optimization_barrier((leaves, inputs, limits))
    # XLA removes barriers on CPU. It cannot know that this number is 1, so it keeps the condition
    # and does not merge its branch with the first turn.
    (always,) = opaque_integers([1])
    sums = lax.cond(always > 0, lambda: uses.sum(leaves, inputs, limits), uses.places.zeros)
    total = jax.tree.unflatten(jax.tree.structure(params), sums)
    return (total, statistic), program.loss.aux(results)


@dataclasses.dataclass(frozen=True, eq=False)
class _LimitedUse(UseSum):
    """Measures the gradients of one use, or sums them within given `PartLimits`.

    While norms are traced, `roundings` collects how one example changes the rounding of each sum.
    """

    roundings: dict[int, Rounding]

    def norms(self, operand: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Returns the lengths of parts, (B,)."""
        found, steps = self.gradients(operand, cotangent), math.prod(n for n, _ in self.use.loops)
        rounding = self.rounding(found)
        # Each step of the scans has its own sum, and all are parts of one gradient.
        self.roundings[self.use.index] = dataclasses.replace(rounding, own=steps * rounding.own)
        return part_length(found.piece())

    def coefficients(self, piece: Piece, given: PartLimits, rounding: Rounding) -> jax.Array:
        return limited_coefficients(given, part_length(piece))


class _LimitedUses:
    """Measures the gradients of a program, and sums them within limits.

    Attributes:
      parts: the parameter of each part of the gradient, and the steps of the scans around it.
    """

    def __init__(
        self,
        clip: Clip,
        program: Program,
        places: UsePlaces,
        whole: WholeBatch,
        devices: BatchDevices,
        factor_dtype: DTypeLike | None,
    ) -> None:
        self.clip = clip
        self.program = program
        self.places = places
        self.whole = whole
        self.devices = devices
        self.roundings: dict[int, Rounding] = {}
        self.uses = {
            use.index: _LimitedUse(
                use, clip.sensitivity, factor_dtype, devices, places.spec(use), self.roundings
            )
            for use in program.uses
        }
        self.parts = [(leaf_of(use), tuple(n for n, _ in use.loops)) for use in program.uses]
        self.parts += [(leaf, ()) for leaf in program.opaque]

    def measure(self, leaves: Arrays, inputs: Arrays) -> tuple[_ByPart, Arrays]:
        """Returns the lengths of all parts of each gradient, and outputs of the loss."""

        def function(use: _LimitedUse) -> BatchFunction:
            norms = self.devices.each(use.norms)
            kind = jax.ShapeDtypeStruct((), jnp.float32)
            return BatchFunction(lambda x, y, _: norms(x, y), kind, mapped=True)

        by_use, gradients, outputs = self._run(leaves, inputs, function, [()] * len(self.uses))
        norms = self.devices.each(_formed_norms)
        lengths = [by_use[i] for i in self.uses]
        return lengths + [norms(gradients[i]) for i in self.program.opaque], outputs

    def sum(self, leaves: Arrays, inputs: Arrays, limits: _ByPart) -> Arrays:
        """Returns the sums of parameters within the limits."""

        def function(use: _LimitedUse) -> BatchFunction:
            kind = jax.ShapeDtypeStruct(use.use.step_rule.layout.split, jnp.float32)
            return BatchFunction(use.batch_sum, kind, mapped=False)

        sums, gradients, _ = self._run(leaves, inputs, function, limits)
        opaque = {
            leaf: self.devices.add(_sum_formed, self.places.specs[leaf])(gradients[leaf], own)
            for leaf, own in zip(self.program.opaque, limits[len(self.uses) :], strict=True)
        }
        return self.places.join(sums, opaque)

    def _run(
        self,
        leaves: Arrays,
        inputs: Arrays,
        function: Callable[[_LimitedUse], BatchFunction],
        own: _ByPart,
    ) -> tuple[ByIndex, ByIndex, Arrays]:
        return run_uses(
            self.program,
            leaves,
            inputs,
            {index: function(use) for index, use in self.uses.items()},
            own=dict(zip(self.uses, own, strict=False)),
            axes=self.devices.axes,
        )

    def clip_whole(
        self, by_part: _ByPart, groups: list[int], mask: jax.Array
    ) -> tuple[_ByPart, jax.Array, jax.Array]:
        """Returns limits of all parts, norms of the first group, and used examples."""
        lengths = [x.reshape(mask.shape[0], -1) for x in by_part]
        by_leaf: dict[int, list[jax.Array]] = collections.defaultdict(list)
        for (leaf, _), length in zip(self.parts, lengths, strict=True):
            by_leaf[leaf].append(length)
        if not by_leaf:
            return [], jnp.zeros(mask.shape, jnp.float32), mask
        most = max(self.places.added.values())
        # One piece for each parameter. Parameters share no entry, but the uses of one may.
        found, norms, used = bounds.clip_coefficients(
            self.clip,
            [Piece(join_lengths(own), groups[leaf]) for leaf, own in by_leaf.items()],
            mask,
            group_count=1 + max(groups),
            tau=tau_of_parts(self.whole, self.roundings.values(), most),
        )
        coefficients = dict(zip(by_leaf, found, strict=True))

        def limit(leaf: int, steps: tuple[int, ...], length: jax.Array) -> PartLimits:
            limits = make_limits(length, coefficients[leaf])
            return PartLimits(*(x.reshape(mask.shape[0], *steps) for x in limits))

        parts = zip(self.parts, lengths, strict=True)
        return [limit(*key, length) for key, length in parts], norms, used


def _measure_formed(gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    gradient = materialize(bounds.within_range(widen(gradient)))
    error = weighted_products.FLOAT32_ERROR
    return gradient, part_length(Piece(bounds.formed_bounds(gradient), sum_error=error))


def _formed_norms(gradient: jax.Array) -> jax.Array:
    return _measure_formed(gradient)[1]


def _sum_formed(gradient: jax.Array, own: PartLimits) -> jax.Array:
    gradient, length = _measure_formed(gradient)
    return block_sums.sum_weighted(limited_coefficients(own, length), gradient)
