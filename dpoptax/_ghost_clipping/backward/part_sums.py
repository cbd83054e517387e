"""Measures the parts of per-example gradients, or sums them, during the backward pass.

A part is the gradient of one use of a parameter, or that of an opaque parameter. `streamed_sum`
clips each part separately. `recomputed_sum` measures all parts first, and then sums them with
limits.
"""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from dpoptax._ghost_clipping.backward.batch_devices import BatchDevices
from dpoptax._ghost_clipping.backward.use_runner import run_uses
from dpoptax._ghost_clipping.backward.use_sum import (
    UseSum,
    Weighing,
    spec_of_sum,
    store_and_measure,
    sum_formed,
)
from dpoptax._ghost_clipping.make_plan import read_use
from dpoptax._ghost_clipping.records.run_block import Arrays, ByIndex
from dpoptax._losses.traced_program import Program
from dpoptax._points.points import GradientPoints
from dpoptax._rounding.block_sums import Rounding
from dpoptax._rounding.part_limits import part_length
from dpoptax._support.tree import PyTree, float32_at_least

# The clipped sum, shaped like the parameters, and the sum of the geometry's statistic, if any.
UseTotal: TypeAlias = tuple[PyTree, jax.Array | None]
# Arrays (B, *steps) of each part: first the uses, then the opaque parameters.
ByPart: TypeAlias = Sequence[PyTree]


class GradientPart(NamedTuple):
    """Describes one part of the gradient: its parameter, and the steps of the scans around it."""

    leaf: int
    steps: tuple[int, ...]


class PartSums:
    """Measures the parts of gradients, or sums them with weights.

    Attributes:
      parts: all parts, first the uses, then the opaque parameters.
      added: the number of sums that are added for each parameter.
    """

    def __init__(
        self,
        program: Program,
        leaves: Arrays,
        devices: BatchDevices,
        factor_dtype: DTypeLike | None,
    ) -> None:
        self._program, self._leaves, self._devices = program, leaves, devices
        given = devices.specs
        self._specs = [P()] * len(leaves) if given is None else jax.tree.leaves(given)
        self._uses: list[UseSum] = []
        self.parts: list[GradientPart] = []
        for use in program.uses:
            planned = read_use(use)
            assert planned is not None  # see `check_uses`
            view, steps = planned.view, tuple(n for n, _ in use.loops)
            whole = spec_of_sum(view, leaves[view.leaf].shape, self._specs[view.leaf])
            # Each step of the scans computes a sum, so the leading axes, those of the steps, are
            # left out.
            spec = P(*whole[len(steps) :])
            self._uses.append(UseSum(use, view, factor_dtype, devices, spec))
            self.parts.append(GradientPart(view.leaf, steps))
        self.parts += [GradientPart(leaf, ()) for leaf in program.opaque]
        self.added = collections.Counter(part.leaf for part in self.parts)

    def measure(self, inputs: Arrays) -> tuple[ByPart, list[Rounding], Arrays]:
        """Returns the lengths of all parts, the rounding of the uses' sums, and outputs."""
        # Filled while the backward pass is traced: cotangents carry arrays only, and no roundings.
        roundings: dict[int, Rounding] = {}

        def length_of(use_sum: UseSum) -> Callable[..., jax.Array]:
            def length(operand: jax.Array, cotangent: jax.Array) -> jax.Array:
                measured = use_sum.gradients(operand, cotangent)
                rounding = use_sum.rounding(measured)
                steps = math.prod(n for n, _ in use_sum.use.loops)
                # Each step of the scans has its own sum, and all are parts of one gradient.
                rounding = dataclasses.replace(rounding, own=steps * rounding.own)
                roundings[use_sum.use.index] = rounding
                return part_length(measured.piece())

            on_each = self._devices.each(length)
            return lambda operand, cotangent, _: on_each(operand, cotangent)

        functions = {use_sum.use.index: length_of(use_sum) for use_sum in self._uses}
        lengths, gradients, outputs = run_uses(
            self._program, self._leaves, inputs, functions, mapped=True, axes=self._devices.axes
        )
        formed = self._devices.each(lambda gradient: part_length(store_and_measure(gradient)[1]))
        found = [lengths[use_sum.use.index] for use_sum in self._uses]
        found += [formed(gradients[leaf]) for leaf in self._program.opaque]
        return found, list(roundings.values()), outputs

    def sum(
        self, leaves: Arrays, inputs: Arrays, weighings: Sequence[Weighing], given: ByPart
    ) -> tuple[Arrays, Arrays]:
        """Returns the weighted sums of parameters at `leaves`, and outputs of the loss.

        `weighings` and `given`, their arrays, are those of each part.
        """
        first, functions, by_index = len(self._uses), {}, {}
        # Not strict: the rest of the weighings belongs to opaque parameters.
        for use_sum, weighing, arrays in zip(self._uses, weighings, given, strict=False):
            functions[use_sum.use.index] = functools.partial(use_sum.batch_sum, weighing)
            by_index[use_sum.use.index] = arrays
        sums, gradients, outputs = run_uses(
            self._program, leaves, inputs, functions, own=by_index, axes=self._devices.axes
        )
        opaque = {}
        for leaf, weighing, arrays in zip(
            self._program.opaque, weighings[first:], given[first:], strict=True
        ):
            # `block_sums.tau` already includes the rounding of formed gradients.
            local = functools.partial(sum_formed, weighing, Rounding())
            opaque[leaf] = self._devices.add(local, self._specs[leaf])(gradients[leaf], arrays)
        return self._join(sums, opaque), outputs

    def zeros(self) -> Arrays:
        """Returns sums of zero."""
        return [jnp.zeros(x.shape, float32_at_least(x)) for x in self._leaves]

    def _join(self, sums: ByIndex, opaque: ByIndex) -> Arrays:
        """Returns the sums of parameters from those of uses and opaque parameters."""
        found = collections.defaultdict(list)
        for use_sum in self._uses:
            view = dataclasses.replace(use_sum.view, scale=1.0)  # the factors include the scale
            shape = self._leaves[view.leaf].shape
            # The sum is zero outside of the entries that the use reads.
            found[view.leaf].append(view.scatter(sums[use_sum.use.index], shape))
        for leaf, total in opaque.items():
            found[leaf].append(total)
        return [
            functools.reduce(operator.add, found[i]).astype(x.dtype) if i in found else x
            for i, x in enumerate(self.zeros())
        ]


def check_uses(program: Program, points: GradientPoints, method: str) -> None:
    """Raises an error if uses cannot be summed separately, as a method requires."""
    obstacle = _find_obstacle(program, points)
    if obstacle is not None:
        raise ValueError(f"`method={method!r}` must have {obstacle} Leave the option out.")


def _find_obstacle(program: Program, points: GradientPoints) -> str | None:
    """Returns why uses cannot be summed separately, as part of an error; `None` if they can."""
    params = points.points[0]
    if points.weights != (1.0,):
        return "one gradient point of weight 1.0, and methods such as `dpoptax.disk` have several."
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [jax.tree_util.keystr(path) or "the parameter" for path, _ in leaves]
    for use in program.uses:
        names = ", ".join(paths[leaf] for leaf in sorted(use.value.leaves))
        if read_use(use) is None:
            return (
                "parameters that are only moved or scaled before they meet data, and "
                f"{names} is computed on before {use.rule.name}."
            )
        if not all(stacked for _, stacked in use.loops):
            return (
                "a slice of each parameter for each step of a loop, and all steps use the whole of "
                f"{names}."
            )
    return None
