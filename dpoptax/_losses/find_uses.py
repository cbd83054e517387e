"""Finds the uses of parameters in a traced loss, and the opaque parameters.

The gradient of the loss is followed back through the steps of its program.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jax.core import ShapedArray

from dpoptax import _losses
from dpoptax._losses.traced_program import (
    Block,
    DerivedValue,
    Parameter,
    PrivateValue,
    ProgramStep,
    Use,
    Value,
)
from dpoptax._support.jaxprs import ZERO_DERIVATIVE_PRIMITIVES, carries_gradient
from dpoptax._support.tree import is_real

if TYPE_CHECKING:
    from dpoptax._losses.rules import Rule


def has_derivative(step: ProgramStep) -> bool:
    """Returns whether a step passes gradients to its operands."""
    return step.eqn.primitive.name not in ZERO_DERIVATIVE_PRIMITIVES


@dataclasses.dataclass(eq=False)
class UseFinder:
    """Follows a gradient, and collects the uses and the opaque parameters that it meets.

    Attributes:
      parameters: the types of the parameters.
      uses: the uses found, from the last to the first.
      opaque: as `Program.opaque`, from the last operation to the first.
      values: the values that the gradient reaches, at any depth.
      steps: the steps that it passes.
    """

    parameters: tuple[ShapedArray, ...]
    uses: list[Use] = dataclasses.field(default_factory=list, init=False)
    opaque: dict[int, dict[str, int]] = dataclasses.field(default_factory=dict, init=False)
    values: set[Value] = dataclasses.field(default_factory=set, init=False)
    steps: set[ProgramStep] = dataclasses.field(default_factory=set, init=False)

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

    def _follow_body(self, step: ProgramStep, body: Block) -> None:
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
        # A derived value in the carry meets data without a separate operation: the body reads the
        # carry of any step as private. The same holds for results that a body derives from
        # parameters.
        initial = list(itertools.compress(step.operands[step.carry], self._flowing(step, body)))
        self.add(initial)
        entries = zip(step.operands, body.inputs, strict=True)
        self.add(outside for outside, inside in entries if inside in self.values)
        self.meet_opaque(initial, "the carry of scan")
        self.meet_opaque(self._results_with_gradient(step, body), "the results of scan")

    def _results_with_gradient(self, step: ProgramStep, body: Block) -> list[Value]:
        """Returns the results of a body to which a gradient flows."""
        return list(itertools.compress(body.results, self._flowing(step, body)))

    def _flowing(self, step: ProgramStep, body: Block) -> list[bool]:
        """Returns whether a gradient flows to each result of a body.

        One iteration of a scan reads what another has written to the carry.
        """
        found = [v in self.values for v in step.outputs]
        if step.scan_id is not None:
            for i, inside in enumerate(body.inputs[step.carry]):
                found[i] |= inside in self.values
        return found

    def meet(self, step: ProgramStep) -> None:
        """Records the use of a step, or that its parameters are opaque."""
        derived = [(i, v) for i, v in enumerate(step.operands) if isinstance(v, DerivedValue)]
        flowing = [(i, v) for i, v in derived if v.leaves]
        if not flowing:
            return
        # Operations in which several derived values meet data, such as `jnp.where(x > 0, w, v)`,
        # have no rule.
        found = find_rule(step, *flowing[0], self.parameters) if len(flowing) == 1 else None
        if found is None:
            steps = math.prod(length for _, length in step.loops)
            entries = steps * max(v.aval.size for v in step.outputs)
            self.meet_opaque(step.operands, step.eqn.primitive.name, entries)
            return
        # Also sets the position of the operand that is recorded, `step.data`.
        (_, value), (rule, step.data) = flowing[0], found
        if not isinstance(value.origin, Parameter) and (
            nonlinear := _losses.derived_views.find_nonlinear(value)
        ):
            self.meet_opaque([value], nonlinear)
            return
        varies = rule.reads_data and step.operands[step.data].varies
        loops = tuple((length, scan in value.scans) for scan, length in step.loops)
        whole, output = rule, step.outputs[0].aval
        if loops:
            whole = _losses.rules.Repeated.build(rule, loops)
        shape = (*(length for length, _ in loops), *output.shape)
        step.use = Use(len(self.uses), whole, rule, value, output, shape, loops, varies)
        self.uses.append(step.use)

    def meet_opaque(self, values: Iterable[Value], reason: str, entries: int = 0) -> None:
        """Records that an operation with `entries` output entries makes parameters opaque."""
        for value in values:
            for leaf in value.leaves if isinstance(value, DerivedValue) else ():
                found = self.opaque.setdefault(leaf, {})
                # `explain` compares the parameter with the smallest output.
                found[reason] = min(entries, found.get(reason, entries))


def find_rule(
    step: ProgramStep, place: int, value: DerivedValue, parameters: Sequence[ShapedArray]
) -> "tuple[Rule, int] | None":
    """Returns a use's rule and the position of its data operand, or `None`.

    `value` is the only operand, at `place`, to which a gradient of parameters flows.
    """
    eqn, name = step.eqn, step.eqn.primitive.name
    private = [i for i, v in enumerate(step.operands) if isinstance(v, PrivateValue)]
    if not private or not all(is_real(v.aval.dtype) for v in step.outputs):
        return None
    rule: Rule | None = None
    real = all(is_real(v.aval.dtype) for v in step.operands)
    if name == "dot_general" and real:
        rule = _losses.rules.Dot.build(eqn, place)
    elif name == "conv_general_dilated" and real:
        rule = _losses.rules.Convolution.build(eqn, place)
    elif name == "gather" and place == 0:
        rule = _losses.entry_rules.Lookup.build_gather(eqn)
    elif name == "dynamic_slice" and place == 0 and len(private) == 1:
        rule = _losses.entry_rules.Lookup.build_slice(eqn, private[0] - 1)  # after the array
    # The last rule only applies to parts of a parameter. The gradient of a part is smaller than
    # that of the whole parameter, which an opaque parameter would need for each example.
    elif (
        name in ("add", "sub", "concatenate") and len(private) == 1 and _is_part(value, parameters)
    ):
        rule = _losses.entry_rules.EntryUse.build(eqn, place)
    # With each rule, one operand depends on the example: the other factor, the indices, or the
    # data.
    return None if rule is None else (rule, private[0])


def _is_part(value: DerivedValue, parameters: Sequence[ShapedArray]) -> bool:
    """Returns whether a value holds some but not all entries of one parameter."""
    if isinstance(value.origin, Parameter):
        return False
    view = _losses.derived_views.find_view(value)
    return view is not None and math.prod(view.shape) < parameters[view.leaf].size
