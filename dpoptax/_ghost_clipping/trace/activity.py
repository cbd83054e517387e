"""Which steps of a program a gradient flows through: only their operands have a part in it.

What reaches the auxiliary outputs alone, or a comparison, or a `stop_gradient`, has no gradient.
Its operands must not be looked at, since an infinite one times a cotangent of zero is not a number.
"""

import dataclasses

import jax.numpy as jnp
from jax.core import ShapedArray

from dpoptax._ghost_clipping.trace.program import Block, Private, Step, Value

# Operations on floats whose derivative is zero by definition.
CONSTANT = frozenset({"ceil", "floor", "round", "sign", "stop_gradient"})


def carries_gradient(aval: ShapedArray) -> bool:
    """Whether a value of this type can have a gradient that is not zero."""
    return jnp.issubdtype(aval.dtype, jnp.inexact) and aval.size > 0


@dataclasses.dataclass(eq=False)
class Activity:
    """What a gradient flows through: the values, and the steps at any depth.

    It stops at `zeros`, values that are zero for every example.
    """

    zeros: set[Private] = dataclasses.field(default_factory=set)
    values: set[Private] = dataclasses.field(default_factory=set)
    steps: set[Step] = dataclasses.field(default_factory=set)

    def scanned(self, step: Step) -> tuple[list[bool], list[bool]]:
        """For a scan: through which of its outputs a gradient flows, and which of its carry."""
        carry = step.carry
        outputs = [v in self.values for v in step.outputs]
        kept = [v in self.values for i, v in step.entries() if carry.start <= i < carry.stop]
        return outputs, [a or b for a, b in zip(outputs, kept, strict=False)]

    def add(self, value: Value) -> None:
        """Notes that a gradient flows to a value."""
        if not isinstance(value, Private) or value in self.zeros:
            return
        if carries_gradient(value.aval):
            self.values.add(value)

    def flow_through(self, block: Block, results: list[bool]) -> None:
        """Follows gradients back from those results of a block that are marked."""
        for value, used in zip(block.results, results, strict=True):
            if used:
                self.add(value)
        for step in reversed(block.steps):
            if any(v in self.values for v in step.outputs):
                self._flow_back(step)

    def _flow_back(self, step: Step) -> None:
        if step.body is None:
            if step.eqn.primitive.name not in CONSTANT:
                self.steps.add(step)
                for value in step.operands:
                    self.add(value)
            return
        self.steps.add(step)
        if step.scan is None:
            self.flow_through(step.body, [v in self.values for v in step.outputs])
            return
        known = -1
        while known < len(self.values) and step.eqn.params["length"]:
            known = len(self.values)
            outputs, carried = self.scanned(step)  # what one iteration reads, another has written
            self.flow_through(step.body, [*carried, *outputs[len(carried) :]])
        for value, used in zip(step.operands[step.carry], self.scanned(step)[1], strict=True):
            if used:
                self.add(value)
        for i, value in step.entries():
            if value in self.values:
                self.add(step.operands[i])
