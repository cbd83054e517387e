"""Follows the gradient of a loss back through the steps of its program."""

import dataclasses
import itertools
from collections.abc import Iterable

from dpoptax._losses.program import Block, PrivateValue, Step, Value
from dpoptax._support.jaxprs import ZERO_DERIVATIVE_PRIMITIVES, carries_gradient


def has_derivative(step: Step) -> bool:
    """Returns whether a step passes gradients to its operands."""
    return step.eqn.primitive.name not in ZERO_DERIVATIVE_PRIMITIVES


@dataclasses.dataclass(eq=False)
class GradientFlow:
    """Collects the values and steps, at any depth, through which a gradient flows.

    Subclasses record what the flow meets.

    Attributes:
      values: the values that the flow reaches.
      steps: the steps that it passes.
    """

    values: set[Value] = dataclasses.field(default_factory=set, init=False)
    steps: set[Step] = dataclasses.field(default_factory=set, init=False)

    def meet(self, step: Step) -> None:
        """Is called for each step without a body, from the last to the first."""

    def meet_opaque(self, values: Iterable[Value], reason: str) -> None:
        """Is called with values that are combined with data in another way."""

    def add(self, values: Iterable[Value]) -> None:
        """Records that a gradient flows to values."""
        for value in values:
            if isinstance(value, PrivateValue) and carries_gradient(value.aval):
                self.values.add(value)

    def follow(self, block: Block, results: Iterable[Value]) -> None:
        """Follows gradients back from results of a block."""
        self.add(results)
        for step in reversed(block.steps):
            if self.values.isdisjoint(step.outputs):
                continue
            if step.body is not None:
                self._follow_body(step, step.body)
            # Scans are followed repeatedly, and each of their steps is met once.
            elif step not in self.steps and has_derivative(step):
                self.steps.add(step)
                self.add(step.operands)
                self.meet(step)

    def _follow_body(self, step: Step, body: Block) -> None:
        """Follows gradients back through a step with a body."""
        self.steps.add(step)
        if step.scan_id is None:
            self.follow(body, self._results_with_gradient(step, body))
            return
        # Iterate to a fixed point, since a carry may pass a gradient from one step to the next.
        known = -1
        while known < len(self.values) and step.eqn.params["length"]:
            known = len(self.values)
            self.follow(body, self._results_with_gradient(step, body))
        initial = list(itertools.compress(step.operands[step.carry], self._flowing(step, body)))
        self.add(initial)
        entries = zip(step.operands, body.inputs, strict=True)
        self.add(outside for outside, inside in entries if inside in self.values)
        self.meet_opaque(initial, "the carry of scan")
        self.meet_opaque(self._results_with_gradient(step, body), "the results of scan")

    def _results_with_gradient(self, step: Step, body: Block) -> list[Value]:
        """Returns the results of a body to which a gradient flows."""
        return list(itertools.compress(body.results, self._flowing(step, body)))

    def _flowing(self, step: Step, body: Block) -> list[bool]:
        """Returns whether a gradient flows to each result of a body.

        One iteration of a scan reads what another has written to the carry.
        """
        found = [v in self.values for v in step.outputs]
        if step.scan_id is not None:
            for i, inside in enumerate(body.inputs[step.carry]):
                found[i] |= inside in self.values
        return found
