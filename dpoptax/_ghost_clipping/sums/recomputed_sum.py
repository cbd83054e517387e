"""Clips whole gradients in two turns, without keeping anything between norms and sums.

Other sums keep the operands and cotangents of all uses until the norms are known. This one runs the
forward and the backward pass twice. The first turn measures each use of a parameter in the backward
pass, and the norms give each example's coefficient. The second turn sums each use in the backward
pass. So `jax.checkpoint` and sharded parameters save what they save without privacy, for the price
of a second forward and backward pass.

Both turns are one program, in a loop that runs twice, so it is compiled once. The bound does not
rely on both turns computing the same numbers; see `dpoptax._clip.limits`.

Uses of one parameter are measured separately, and their norms are added. For tied embeddings, this
is at most √2 times the norm.
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

from dpoptax._clip import block_sums, bounds
from dpoptax._clip.block_sums import Rounding, WholeBatch
from dpoptax._clip.bounds import NormBounds, Scales
from dpoptax._clip.clip import Clip
from dpoptax._clip.limits import (
    Limits,
    PartNorms,
    join_norms,
    limited_coefficients,
    make_limits,
    part_norms,
)
from dpoptax._ghost_clipping.passes.interpreter import Arrays
from dpoptax._ghost_clipping.sums import weighted_products
from dpoptax._ghost_clipping.sums.batch_devices import BatchDevices
from dpoptax._ghost_clipping.sums.ghost_clipped_sum import sum_statistic
from dpoptax._ghost_clipping.sums.use_clip import MeasuredUse, UseSum, tau_of_parts
from dpoptax._ghost_clipping.sums.use_places import UsePlaces, UseTotal, check_uses, leaf_of
from dpoptax._ghost_clipping.sums.use_runner import BatchFunction, run_uses
from dpoptax._ghost_clipping.trace.program import Program, Use
from dpoptax._ghost_clipping.trace.read_program import read_batch_program
from dpoptax._points import GradientPoints
from dpoptax._tree import PyTree
from dpoptax._xla import materialize

# The arrays of all parts of a gradient: of the uses, and then of the opaque parameters.
_ByPart: TypeAlias = list[PyTree]


def recomputed_sum(
    loss_fn: Callable[..., PyTree],
    clip: Clip,
    points: GradientPoints,
    batch: PyTree,
    mask: jax.Array,
    keys: jax.Array | None,
    *,
    has_aux: bool,
    whole: WholeBatch,
    devices: BatchDevices,
    specs: PyTree = None,
    factor_dtype: DTypeLike | None = None,
) -> tuple[UseTotal, PyTree]:
    """Computes the clipped sum of a batch; arguments as for `streamed_sum`.

    Returns:
      The sum, shaped like the parameters, with the sum of the geometry's statistic; and the
      auxiliary outputs, `None` without `has_aux`.

    Raises:
      ValueError: there are several gradient points, or the loss computes on a parameter before the
        parameter meets data.
    """
    params = points.points[0]
    program = read_batch_program(loss_fn, points, batch, keys, has_aux=has_aux)
    mask = program.separate(mask)
    check_uses(program, points, "`method='recompute'`")
    places = UsePlaces(program, jax.tree.leaves(params), specs)
    scaling = clip.scaling(points.reference)
    turns = _Turns(scaling, program, places, whole, devices, factor_dtype)
    inputs, groups = jax.tree.leaves((batch, keys)), clip.groups(params)

    def turn(carry: PyTree, is_second: jax.Array) -> tuple[PyTree, Arrays]:
        limits, _, statistic = carry
        sums, parts, results = turns.run(inputs, limits, is_second)
        # The second turn has no norms, and its limits are not used.
        limits, norms, used = turns.clip_whole(parts, groups, mask)
        measured = sum_statistic(clip, points.reference, norms, used, whole)
        if measured is not None:
            statistic = jnp.where(is_second, statistic, measured)
        return (limits, sums, statistic), results

    nothing = jnp.zeros(mask.shape, jnp.float32)
    statistic = sum_statistic(clip, points.reference, nothing, mask, whole)
    start = turns.zero_limits(mask.shape[0]), places.zeros(), statistic
    (_, sums, statistic), results = lax.scan(turn, start, jnp.array([False, True]))
    outputs = jax.tree.unflatten(program.result_tree, [x[1] for x in results])
    return (jax.tree.unflatten(jax.tree.structure(params), sums), statistic), outputs[1]


@dataclasses.dataclass(frozen=True, eq=False)
class _LimitedUse(UseSum):
    """Measures the gradients of one use, or sums them within the `Limits` given for each example.

    `roundings` collects how one example changes the rounding of the sums, as they are traced.
    """

    roundings: dict[int, Rounding]

    def norms(self, operand: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Returns the packed norms of examples, (B, 2)."""
        measured = self.measure(operand, cotangent)
        return part_norms(measured.scales, measured.size, measured.sum_error).pack()

    def coefficients(
        self, measured: MeasuredUse, rounding: Rounding, examples: Limits
    ) -> jax.Array:
        steps = math.prod(n for n, _ in self.use.loops)
        self.roundings[self.use.index] = dataclasses.replace(rounding, own=steps * rounding.own)
        return limited_coefficients(
            examples,
            measured.scales,
            measured.size,
            ratio=measured.ratio,
            sum_error=measured.sum_error,
        )


class _Turns:
    """Measures the gradients of a program in one turn, and sums them in another.

    Attributes:
      parts: the parameter of each part of the gradient, and the steps of the scans around it.
      roundings: how one example changes the rounding of the sum of each use. They are known once
        the sums are traced.
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
        self.factor_dtype = factor_dtype
        self.roundings: dict[int, Rounding] = {}
        self.parts = [(leaf_of(use), tuple(n for n, _ in use.loops)) for use in program.uses]
        self.parts += [(leaf, ()) for leaf in program.opaque]

    def zero_limits(self, examples: int) -> _ByPart:
        def zero(steps: tuple[int, ...]) -> Limits:
            zeros = jnp.zeros((examples, *steps), jnp.float32)
            return Limits(zeros, zeros, zeros.astype(jnp.int32))

        return [zero(steps) for _, steps in self.parts]

    def run(
        self, inputs: Arrays, limits: _ByPart, is_second: jax.Array
    ) -> tuple[Arrays, _ByPart, Arrays]:
        """Returns the sums of the parameters, the packed norms of all parts, and the outputs.

        The sums are zero in the first turn, and the norms in the second.
        """
        uses, opaque = self.program.uses, list(self.program.opaque)
        by_use, gradients, outputs = run_uses(
            self.program,
            self.places.leaves,
            inputs,
            {use.index: self._use_function(use) for use in uses},
            own=dict(zip([use.index for use in uses], limits, strict=False)),
            shared=is_second,
            axes=self.devices.axes,
        )
        of_opaque = {
            leaf: self._run_opaque(leaf, gradients[leaf], own, is_second)
            for leaf, own in zip(opaque, limits[len(uses) :], strict=True)
        }
        norms = [by_use[use.index][1] for use in uses] + [of_opaque[leaf][1] for leaf in opaque]
        sums = ({i: total for i, (total, _) in found.items()} for found in (by_use, of_opaque))
        return self.places.join(*sums), norms, outputs

    def _use_function(self, use: Use) -> BatchFunction:
        limited = _LimitedUse(
            use,
            self.clip.sensitivity,
            self.factor_dtype,
            self.devices,
            self.places.spec(use),
            self.roundings,
        )
        sums = jax.ShapeDtypeStruct(use.rule.layout.split, jnp.float32)

        def function(
            operand: jax.Array, cotangent: jax.Array, own: Limits, is_second: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            return lax.cond(
                is_second,
                lambda: (limited.batch_sum(operand, cotangent, own), _no_norms(operand)),
                lambda: (
                    jnp.zeros(sums.shape, sums.dtype),
                    self.devices.each(limited.norms)(operand, cotangent),
                ),
            )

        norms = jax.ShapeDtypeStruct((2,), jnp.float32)
        return BatchFunction(function, (sums, norms), (False, True))

    def _run_opaque(
        self, leaf: int, gradient: jax.Array, own: Limits, is_second: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the sum of a parameter's per-example gradients (B, …), and their norms."""
        add = self.devices.add(_sum_formed, self.places.specs[leaf])
        zeros = self.places.zeros()[leaf]
        return lax.cond(
            is_second,
            lambda: (add(gradient, own), _no_norms(gradient)),
            lambda: (zeros, self.devices.each(_formed_norms)(gradient)),
        )

    def clip_whole(
        self, packed: _ByPart, groups: list[int], mask: jax.Array
    ) -> tuple[_ByPart, jax.Array, jax.Array]:
        """Returns the limits of all parts, the norms of the first group, and the used examples."""
        norms = [PartNorms.unpack(x.reshape(mask.shape[0], -1, 2)) for x in packed]
        by_leaf: dict[int, list[PartNorms]] = collections.defaultdict(list)
        for (leaf, _), part in zip(self.parts, norms, strict=True):
            by_leaf[leaf].append(part)
        if not by_leaf:
            return [], jnp.zeros(mask.shape, jnp.float32), mask
        sizes, scales = zip(*map(join_norms, by_leaf.values()), strict=True)
        most = max(self.places.added.values())
        coefficients, whole_norms, used = bounds.clip_coefficients(
            self.clip,
            Scales(*(jnp.concatenate(each) for each in zip(*scales, strict=True))),
            list(sizes),
            [groups[leaf] for leaf in by_leaf],
            mask,
            group_count=1 + max(groups),
            ratios=[1.0] * len(by_leaf),
            sum_errors=[0.0] * len(by_leaf),
            tau=tau_of_parts(self.whole, self.roundings.values(), most),
        )
        found = dict(zip(by_leaf, zip(coefficients, scales, strict=True), strict=True))

        def limit(leaf: int, steps: tuple[int, ...], part: PartNorms) -> Limits:
            coefficient, scale = found[leaf]
            limits = make_limits(part, coefficient, scale.exponent[0])
            return Limits(*(x.reshape(mask.shape[0], *steps) for x in limits))

        parts = zip(self.parts, norms, strict=True)
        return [limit(*key, part) for key, part in parts], whole_norms, used


def _no_norms(x: jax.Array) -> jax.Array:
    return jnp.zeros((x.shape[0], 2), jnp.float32)


def _measure_formed(gradient: jax.Array) -> tuple[jax.Array, NormBounds, Scales]:
    gradient = materialize(gradient)
    exponents, scales = bounds.make_scales([bounds.largest_entry(gradient)[None]])
    return *bounds.scale_formed(gradient, exponents[0, 0]), scales


def _formed_norms(gradient: jax.Array) -> jax.Array:
    _, size, scales = _measure_formed(gradient)
    return part_norms(scales, size, weighted_products.FLOAT32_ERROR).pack()


def _sum_formed(gradient: jax.Array, own: Limits) -> jax.Array:
    unit, size, scales = _measure_formed(gradient)
    error = weighted_products.FLOAT32_ERROR
    weights = limited_coefficients(own, scales, size, ratio=1.0, sum_error=error)
    return block_sums.sum_weighted(weights, unit)
