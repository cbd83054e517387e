"""Finds the operations that combine parameters with data, and through which a gradient flows.

Auxiliary outputs, comparisons and `stop_gradient` have no gradient. Operands that only reach these
must not be used: an infinite operand times a cotangent of zero is NaN.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Self

from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from dpoptax._gradients.ghost_clipping.trace.entry_rules import Addition, Concatenation, Lookup
from dpoptax._gradients.ghost_clipping.trace.program import (
    Block,
    DerivedValue,
    PrivateValue,
    Step,
    Use,
    Value,
)
from dpoptax._gradients.ghost_clipping.trace.rules import Convolution, Dot, Rule
from dpoptax._support.jaxprs import ZERO_DERIVATIVE_PRIMITIVES, carries_gradient, type_of
from dpoptax._support.tree import is_real

# For these, the gradient of a parameter is at most as large as a part of the output.
_ELEMENTWISE_PRIMITIVES = {"add", "sub", "mul", "div", "concatenate"}
_CONTRACTION_RULES: dict[str, type[Dot | Convolution]] = {
    "dot_general": Dot,
    "conv_general_dilated": Convolution,
}


@dataclasses.dataclass(eq=False)
class GradientFlow:
    """Collects the values and steps, at any depth, through which a gradient flows.

    The flow stops at `zeros`, which are values that are zero for every example.
    """

    zeros: set[PrivateValue] = dataclasses.field(default_factory=set)
    values: set[PrivateValue] = dataclasses.field(default_factory=set)
    steps: set[Step] = dataclasses.field(default_factory=set)

    @classmethod
    def from_loss(cls, block: Block, zeros: Iterable[PrivateValue] = ()) -> Self:
        """Follows the gradient of the loss, which is the first result of a program."""
        flow = cls(set(zeros))
        flow.flow_through(block, [True] + [False] * (len(block.results) - 1))
        return flow

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


class UseFinder:
    """Finds the uses of parameters, and the opaque parameters.

    Attributes:
      uses: the uses found.
      opaque: the parameters that operations without a rule combine with data, and these operations.
      beyond_elementwise: the opaque parameters that do more than scale and shift data.
    """

    def __init__(self, parameters: tuple[ShapedArray, ...], flow: GradientFlow) -> None:
        self.parameters = parameters
        self.flow = flow
        self.opaque: dict[int, list[str]] = {}
        self.beyond_elementwise: set[int] = set()
        self.uses: list[Use] = []

    def mark_opaque(self, values: Iterable[Value], reason: str, reach: int = 0) -> None:
        """Records that an operation with `reach` output entries makes parameters opaque."""
        for value in values:
            if isinstance(value, DerivedValue):
                for leaf in value.leaves:
                    reasons = self.opaque.setdefault(leaf, [])
                    if reason not in reasons:
                        reasons.append(reason)
                    if reason not in _ELEMENTWISE_PRIMITIVES or self.parameters[leaf].size > reach:
                        self.beyond_elementwise.add(leaf)

    def find(self, block: Block) -> None:
        """Records the uses and opaque parameters of a block."""
        block.steps = [self.visit(s) if s in self.flow.steps else s for s in block.steps]

    def visit(self, step: Step) -> Step:
        if step.body is None:
            return self.find_use(step)
        if step.scan_id is not None:
            outputs, carried = self.flow.scanned(step)
            flows = [*carried, *outputs[len(carried) :]]
            self.mark_opaque(
                itertools.compress(step.operands[step.carry], carried), "the carry of scan"
            )
            self.mark_opaque(itertools.compress(step.body.results, flows), "the results of scan")
        self.find(step.body)
        return step

    def find_use(self, step: Step) -> Step:
        """Returns the step with its use, or marks its parameters as opaque."""
        eqn, operands = step.eqn, step.operands
        flowing = [i for i, v in enumerate(operands) if isinstance(v, DerivedValue) and v.leaves]
        if not flowing:
            return step
        private = [isinstance(v, PrivateValue) for v in operands]
        found = _find_rule(eqn, private, [self.is_part(v) for v in operands])
        if found and flowing == [found[1]]:
            rule, parameter, data = found
            value = operands[parameter]
            assert isinstance(value, DerivedValue)
            if not value.nonlinear:
                around = tuple((length, scan_id in value.scans) for scan_id, length in step.loops)
                read = operands[data]
                read_varies = rule.reads_data and isinstance(read, PrivateValue) and read.varies
                output = type_of(eqn.outvars[0])
                use = Use(len(self.uses), rule, value, output, around, read_varies)
                self.uses.append(use)
                return dataclasses.replace(step, use=use, data=data)
            self.mark_opaque([value], value.nonlinear)
            return step
        steps = math.prod(length for _, length in step.loops)
        reach = max(v.aval.size for v in step.outputs)
        self.mark_opaque(operands, eqn.primitive.name, steps * reach)
        return step

    def is_part(self, value: Value) -> bool:
        """Returns whether a value holds some but not all entries of one parameter."""
        if not isinstance(value, DerivedValue) or value.view is None:
            return False
        return math.prod(value.view.shape) < self.parameters[value.view.leaf].size


def _find_rule(
    eqn: JaxprEqn, private: list[bool], parts: list[bool]
) -> tuple[Rule, int, int] | None:
    """Returns a use's rule, and the positions of the parameter and the data operand.

    `private[i]` says whether operand i depends on data. `parts[i]` says whether it holds some but
    not all entries of one parameter.
    """
    name = eqn.primitive.name
    floats = [*eqn.outvars, *(eqn.invars if name in _CONTRACTION_RULES else ())]
    if not eqn.outvars or not all(is_real(v.aval.dtype) for v in floats):
        return None
    rule: Rule | None = None
    if name in _CONTRACTION_RULES:
        parameter, data = private.index(False), private.index(True)
        rule = _CONTRACTION_RULES[name].build(eqn, parameter)
    elif name == "gather" and not private[0]:
        parameter, data = 0, 1
        rule = Lookup.build_gather(eqn)
    elif name == "dynamic_slice" and not private[0] and sum(private) == 1:
        parameter, data = 0, private.index(True)
        rule = Lookup.build_slice(eqn, data - 1)
    # The last two rules only apply to parts of a parameter. The gradient of a part is smaller than
    # that of the whole parameter, which an opaque parameter would need for each example. If a whole
    # parameter is added or concatenated, its gradient is at most as large as the cotangent, so a
    # rule would save nothing.
    elif name in ("add", "sub") and any(parts):
        parameter = parts.index(True)
        data = 1 - parameter
        rule = Addition.build(eqn, parameter)
    elif name == "concatenate" and any(parts):
        parameter, data = parts.index(True), private.index(True)
        rule = Concatenation.build(eqn, parameter)
    return None if rule is None else (rule, parameter, data)
