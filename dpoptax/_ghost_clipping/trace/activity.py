"""Finds the steps of a program through which a gradient flows.

Auxiliary outputs, comparisons and `stop_gradient` have no gradient. Operands that only reach these
must not be used: an infinite operand times a cotangent of zero is NaN.
"""

import dataclasses

import jax.numpy as jnp
from jax.core import ShapedArray

from dpoptax._ghost_clipping.trace.program import Block, PrivateValue, Step, Value

# Their derivatives are zero by definition, although they return floats.
ZERO_DERIVATIVE_PRIMITIVES = frozenset({"ceil", "floor", "round", "sign", "stop_gradient"})


def carries_gradient(aval: ShapedArray) -> bool:
    """Returns whether a value of this type can have a nonzero gradient."""
    return jnp.issubdtype(aval.dtype, jnp.inexact) and aval.size > 0


@dataclasses.dataclass(eq=False)
class GradientFlow:
    """Collects the values and steps, at any depth, through which a gradient flows.

    The flow stops at `zeros`, which are values that are zero for every example.
    """

    zeros: set[PrivateValue] = dataclasses.field(default_factory=set)
    values: set[PrivateValue] = dataclasses.field(default_factory=set)
    steps: set[Step] = dataclasses.field(default_factory=set)

    def scanned(self, step: Step) -> tuple[list[bool], list[bool]]:
        """Returns whether a gradient flows through each output, and each carry, of a scan."""
        carry = step.carry
        outputs = [v in self.values for v in step.outputs]
        kept = [v in self.values for i, v in step.entries() if carry.start <= i < carry.stop]
        return outputs, [a or b for a, b in zip(outputs, kept, strict=False)]

    def add(self, value: Value) -> None:
        """Records that a gradient flows to a value."""
        if not isinstance(value, PrivateValue) or value in self.zeros:
            return
        if carries_gradient(value.aval):
            self.values.add(value)

    def flow_through(self, block: Block, results: list[bool]) -> None:
        """Follows gradients back from the marked results of a block."""
        for value, used in zip(block.results, results, strict=True):
            if used:
                self.add(value)
        for step in reversed(block.steps):
            if any(v in self.values for v in step.outputs):
                self._flow_back(step)

    def _flow_back(self, step: Step) -> None:
        if step.body is None:
            if step.eqn.primitive.name not in ZERO_DERIVATIVE_PRIMITIVES:
                self.steps.add(step)
                for value in step.operands:
                    self.add(value)
            return
        self.steps.add(step)
        if step.scan_id is None:
            self.flow_through(step.body, [v in self.values for v in step.outputs])
            return
        # Iterate to a fixed point, since a carry may pass a gradient from one step to the next.
        known = -1
        while known < len(self.values) and step.eqn.params["length"]:
            known = len(self.values)
            outputs, carried = self.scanned(step)  # one iteration reads what another has written
            self.flow_through(step.body, [*carried, *outputs[len(carried) :]])
        for value, used in zip(step.operands[step.carry], self.scanned(step)[1], strict=True):
            if used:
                self.add(value)
        for i, value in step.entries():
            if value in self.values:
                self.add(step.operands[i])
