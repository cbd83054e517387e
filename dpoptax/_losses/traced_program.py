"""Defines types for a traced loss: values, steps, and uses of parameters."""

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from dpoptax._losses.trace_loss import TracedLoss
from dpoptax._support.jaxprs import scan_parts

if TYPE_CHECKING:
    from dpoptax._losses.rules import Rule

# (scan_id, length) of each enclosing scan, outermost first.
Loops: TypeAlias = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """Describes the origin of a value that is a parameter, by its leaf number."""

    leaf: int


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """Describes the origin of a value that is a constant of the trace."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """Describes the origin of a value that is result `index` of a step."""

    step: "ProgramStep"
    index: int

    @property
    def operands(self) -> tuple["DerivedValue", ...]:
        """Returns the operands of the step, which are all derived."""
        return tuple(v for v in self.step.operands if isinstance(v, DerivedValue))


@dataclasses.dataclass(frozen=True, eq=False)
class ScanSlices:
    """Describes the origin of slices for the steps of a scan, cut from `whole`."""

    whole: "DerivedValue"


Origin: TypeAlias = Parameter | Constant | Result | ScanSlices


@dataclasses.dataclass(frozen=True, eq=False)
class DerivedValue:
    """Describes a value computed from parameters and constants only, by its `origin`.

    Attributes:
      aval: the type, in one step of the enclosing scans.
      origin: the parameter, constant, step or scan that the value comes from.
      leaves: the parameters that its gradient flows to.
      varies: whether the value depends on parameters, even behind a `stop_gradient`.
      scans: the scans that have slices of a stack of parameters for it, outermost first. The value
        of all steps together has one leading axis for each.
    """

    aval: ShapedArray
    origin: Origin
    leaves: frozenset[int] = frozenset()
    varies: bool = False
    scans: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateValue:
    """Describes a value that may depend on the example.

    `varies` says whether it may also depend on parameters. If it does not, such as the input of the
    first layer, it is the same at all gradient points.
    """

    aval: ShapedArray
    varies: bool = True


Value: TypeAlias = DerivedValue | PrivateValue


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """Records an operation on a derived value and data that has a rule.

    Attributes:
      index: its number among the uses.
      rule: maps operand and cotangent to factors, of all steps of the enclosing scans together.
      step_rule: the rule for one of these steps; the same as `rule` outside of scans.
      value: the derived value.
      output: the type of the result, for one example and one step.
      shape: the shape of the results of all steps.
      loops: (length, stacked) of each enclosing scan. `stacked` says whether the value has a slice
        for each step.
      operand_varies: whether the gradient reads the data operand, and the operand may depend on
        parameters.
    """

    index: int
    rule: "Rule"
    step_rule: "Rule"
    value: DerivedValue
    output: ShapedArray
    shape: tuple[int, ...]
    loops: tuple[tuple[int, bool], ...]
    operand_varies: bool


@dataclasses.dataclass(eq=False)
class Block:
    """Holds a list of steps, with inputs and results."""

    inputs: list[Value]
    steps: list["ProgramStep"] = dataclasses.field(default_factory=list)
    results: list[Value] = dataclasses.field(default_factory=list)

    def uses(self) -> list[Use]:
        found = []
        for step in self.steps:
            if step.use is not None:
                found.append(step.use)
            if step.body is not None:
                found.extend(step.body.uses())
        return found


@dataclasses.dataclass(eq=False)
class ProgramStep:
    """Holds one operation. Scans and `jax.checkpoint` have a body, unless all operands are derived.

    `loops` are the enclosing scans. For a use, `data` is the position of the operand that is
    recorded. For a scan, `scan_id` is its number; otherwise it is `None`.
    """

    eqn: JaxprEqn
    operands: tuple[Value, ...]
    loops: Loops
    outputs: tuple[Value, ...] = ()
    use: Use | None = None
    # Set together with `use`; without a use it has no meaning.
    data: int = 0
    body: Block | None = None
    scan_id: int | None = None

    @property
    def carry(self) -> slice:
        """Returns the operands of a scan that are its initial carry."""
        consts, carry = scan_parts(self.eqn)
        return slice(consts, consts + carry)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Holds the steps of a traced loss and its uses of parameters.

    Attributes:
      loss: the traced loss.
      block: the steps. Its inputs are the parameters and the arrays of one example.
      parameters: the shapes and dtypes of the parameters.
      uses: the operations on parameters and data that have a rule.
      opaque: the parameters that other operations combine with data, and the names of these
        operations with the least number of entries that one returns. Automatic differentiation
        gives their per-example gradients.
      unused: the parameters from which no gradient flows to the loss.
    """

    loss: TracedLoss
    block: Block
    parameters: tuple[ShapedArray, ...]
    uses: tuple[Use, ...]
    opaque: dict[int, dict[str, int]]
    unused: frozenset[int]
