"""Measures and sums the parts of a gradient during the backward pass.

A part is the gradient of one use of a parameter, or that of an opaque parameter. `streamed_sum`
gives each part a clip of its own. `recomputed_sum` measures all parts in a first turn, and limits
them in a second one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpoptax._ghost_clipping.backward.batch_devices import BatchDevices
from dpoptax._ghost_clipping.backward.use_places import UsePlaces, leaf_of
from dpoptax._ghost_clipping.backward.use_runner import BatchFunction, run_uses
from dpoptax._ghost_clipping.backward.use_sum import UseSum, Weighing, measure_formed, sum_formed
from dpoptax._ghost_clipping.records.run_block import Arrays, ByIndex
from dpoptax._losses.program import Program
from dpoptax._rounding.block_sums import Rounding
from dpoptax._rounding.part_limits import part_length
from dpoptax._support.tree import PyTree

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
      places: where the sums of uses belong.
    """

    def __init__(
        self,
        program: Program,
        leaves: Arrays,
        devices: BatchDevices,
        factor_dtype: DTypeLike | None,
    ) -> None:
        self._program, self._devices = program, devices
        self.places = UsePlaces(program, leaves, devices.specs)
        self._uses = [
            UseSum(use, factor_dtype, devices, self.places.spec(use)) for use in program.uses
        ]
        self.parts = [GradientPart(leaf_of(u), tuple(n for n, _ in u.loops)) for u in program.uses]
        self.parts += [GradientPart(leaf, ()) for leaf in program.opaque]

    def measure(self, leaves: Arrays, inputs: Arrays) -> tuple[ByPart, list[Rounding], Arrays]:
        """Returns the lengths of all parts, the rounding of the uses' sums, and outputs."""
        roundings: dict[int, Rounding] = {}  # filled while the backward pass is traced

        def length_of(own: UseSum) -> Callable[..., jax.Array]:
            def length(operand: jax.Array, cotangent: jax.Array) -> jax.Array:
                measured = own.gradients(operand, cotangent)
                rounding, steps = own.rounding(measured), math.prod(n for n, _ in own.use.loops)
                # Each step of the scans has its own sum, and all are parts of one gradient.
                rounding = dataclasses.replace(rounding, own=steps * rounding.own)
                roundings[own.use.index] = rounding
                return part_length(measured.piece())

            on_each = self._devices.each(length)
            return lambda operand, cotangent, _: on_each(operand, cotangent)

        lengths, gradients, outputs = self._run(
            leaves, inputs, list(map(length_of, self._uses)), [()] * len(self._uses), mapped=True
        )
        formed = self._devices.each(lambda gradient: part_length(measure_formed(gradient)[1]))
        found = [lengths[own.use.index] for own in self._uses]
        found += [formed(gradients[leaf]) for leaf in self._program.opaque]
        return found, list(roundings.values()), outputs

    def sum(
        self, leaves: Arrays, inputs: Arrays, weighings: Sequence[Weighing], given: ByPart
    ) -> tuple[Arrays, Arrays]:
        """Returns the weighted sums of parameters, and outputs of the loss.

        `weighings` and `given`, their arrays, are those of each part.
        """
        by_use = zip(self._uses, weighings, strict=False)
        functions = [functools.partial(own.batch_sum, weighing) for own, weighing in by_use]
        sums, gradients, outputs = self._run(leaves, inputs, functions, given)
        first, opaque = len(self._uses), {}
        for leaf, weighing, own in zip(
            self._program.opaque, weighings[first:], given[first:], strict=True
        ):
            local = functools.partial(sum_formed, weighing, Rounding())
            opaque[leaf] = self._devices.add(local, self.places.specs[leaf])(gradients[leaf], own)
        return self.places.join(sums, opaque), outputs

    def _run(
        self,
        leaves: Arrays,
        inputs: Arrays,
        functions: Sequence[Callable[..., jax.Array]],
        given: ByPart,
        *,
        mapped: bool = False,
    ) -> tuple[ByIndex, ByIndex, Arrays]:
        """Runs the loss with a function for each use; see `run_uses`."""
        by_index, own = {}, {}
        for each, function, arrays in zip(self._uses, functions, given, strict=False):
            use = each.use
            shape = () if mapped else use.step_rule.layout.split
            kind = jax.ShapeDtypeStruct(shape, jnp.float32)
            by_index[use.index] = BatchFunction(function, kind, mapped)
            own[use.index] = arrays
        return run_uses(self._program, leaves, inputs, by_index, own=own, axes=self._devices.axes)
