"""Finds where parameters meet data: under a rule, which is a use, or else unseen."""

import dataclasses
import itertools
import math
from collections.abc import Iterable

from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from dpoptax._ghost_clipping.trace.activity import Activity
from dpoptax._ghost_clipping.trace.contraction_rules import Convolution, Dot
from dpoptax._ghost_clipping.trace.entry_rules import Beside, Lookup, Shift
from dpoptax._ghost_clipping.trace.program import Block, Derived, Private, Step, Use, Value, type_of
from dpoptax._ghost_clipping.trace.rules import Rule, is_real

# What a parameter gets there is of the size of a part of the output at most, for each example.
_ELEMENTWISE = {"add", "sub", "mul", "div", "concatenate"}
_CONTRACTIONS: dict[str, type[Dot | Convolution]] = {
    "dot_general": Dot,
    "conv_general_dilated": Convolution,
}


class Finder:
    """Finds the uses of parameters among steps, and what is opaque.

    Attributes:
      uses: the uses found.
      opaque: the parameters that meet data elsewhere, with the operations.
      beyond_elementwise: those among them that do more than scale and shift data.
    """

    def __init__(self, parameters: tuple[ShapedArray, ...], active: Activity) -> None:
        self.parameters = parameters
        self.active = active
        self.opaque: dict[int, list[str]] = {}
        self.beyond_elementwise: set[int] = set()
        self.uses: list[Use] = []

    def mark_opaque(self, values: Iterable[Value], reason: str, reach: int = 0) -> None:
        """Notes that parameters meet data unseen, in an output of `reach` entries."""
        for value in values:
            if isinstance(value, Derived):
                for leaf in value.leaves:
                    reasons = self.opaque.setdefault(leaf, [])
                    if reason not in reasons:
                        reasons.append(reason)
                    if reason not in _ELEMENTWISE or self.parameters[leaf].size > reach:
                        self.beyond_elementwise.add(leaf)

    def find(self, block: Block) -> None:
        """Gives each step of a block its use."""
        block.steps = [self.step(s) if s in self.active.steps else s for s in block.steps]

    def step(self, step: Step) -> Step:
        if step.body is None:
            return self.find_use(step)
        if step.scan is not None:
            outputs, carried = self.active.scanned(step)
            flows = [*carried, *outputs[len(carried) :]]
            self.mark_opaque(
                itertools.compress(step.operands[step.carry], carried), "the carry of scan"
            )
            self.mark_opaque(itertools.compress(step.body.results, flows), "the results of scan")
        self.find(step.body)
        return step

    def find_use(self, step: Step) -> Step:
        """The step with its use, if a rule covers it; else its parameters are opaque."""
        eqn, operands = step.eqn, step.operands
        flowing = [i for i, v in enumerate(operands) if isinstance(v, Derived) and v.leaves]
        if not flowing:
            return step
        private = [isinstance(v, Private) for v in operands]
        found = find_rule(eqn, private, [self.is_part(v) for v in operands])
        if found and flowing == [found[1]]:
            rule, parameter, data = found
            value = operands[parameter]
            assert isinstance(value, Derived)
            if not value.nonlinear:
                around = tuple((n, s in value.scans) for s, n in step.loops)
                read = operands[data]
                read_varies = rule.reads_data and isinstance(read, Private) and read.varies
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
        """Whether a value is some of the entries of one parameter."""
        if not isinstance(value, Derived) or value.view is None:
            return False
        return math.prod(value.view.shape) < self.parameters[value.view.leaf].size


def find_rule(
    eqn: JaxprEqn, private: list[bool], parts: list[bool]
) -> tuple[Rule, int, int] | None:
    """The rule of a use, with the positions of the parameter and of the recorded data operand.

    `private[i]` says whether operand i depends on data (else it is made of parameters), `parts[i]`
    whether it is some entries of one parameter, not all.
    """
    name = eqn.primitive.name
    floats = [*eqn.outvars, *(eqn.invars if name in _CONTRACTIONS else ())]
    if not eqn.outvars or not all(is_real(v.aval.dtype) for v in floats):
        return None
    rule: Rule | None = None
    if name in _CONTRACTIONS:
        parameter, data = private.index(False), private.index(True)
        rule = _CONTRACTIONS[name].build(eqn, parameter)
    elif name == "gather" and not private[0]:
        parameter, data = 0, 1
        rule = Lookup.build_gather(eqn)
    elif name == "dynamic_slice" and not private[0] and sum(private) == 1:
        parameter, data = 0, private.index(True)
        rule = Lookup.build_slice(eqn, data - 1)
    elif name in ("add", "sub") and any(parts):
        parameter = parts.index(True)
        data = 1 - parameter
        rule = Shift.build(eqn, parameter)
    elif name == "concatenate" and any(parts):
        parameter, data = parts.index(True), private.index(True)
        rule = Beside.build(eqn, parameter)
    return None if rule is None else (rule, parameter, data)
