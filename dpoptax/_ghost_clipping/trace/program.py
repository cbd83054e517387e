"""A traced loss, read: its steps, the values they pass on, and where parameters meet data."""

import dataclasses
import math
from typing import Any, TypeAlias, cast

import jax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var

from dpoptax._ghost_clipping.trace import rules, views


def type_of(atom: Var | Literal) -> ShapedArray:
    """The type of an array in a trace."""
    return cast(ShapedArray, atom.aval)


def scan_parts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many the first value of its carry."""
    if "num_consts" in eqn.params:  # before jax 0.12
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


@dataclasses.dataclass(frozen=True, eq=False)
class Application:
    """An operation whose operands are all derived."""

    eqn: JaxprEqn
    operands: tuple["Derived", ...]
    scans: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """The origin of a value that is a parameter: the leaf of that number."""

    leaf: int


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """The origin of a value that the trace knows."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """The origin of a value that an operation gives, the result of that number."""

    application: Application
    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class StepsOf:
    """The origin of the slices that a scan takes of a value: all steps together are that value."""

    whole: "Derived"


Origin: TypeAlias = Parameter | Constant | Result | StepsOf


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """A value made of parameters and constants, by its `origin`.

    `leaves` are the parameters that its gradient flows to; it `varies` if parameters go into it,
    be it behind a `stop_gradient`. It is a `view` of one parameter, or `tiles`, several such views
    side by side along an axis (counted with the axes of `scans`), or neither. `nonlinear` is
    the operation behind it, if there is one, whose derivative is not linear in what is pulled
    back: a `custom_vjp`, or a rounding to few bits. Then uses cannot be pulled back each alone.

    Inside the body of a scan over a stack of parameters it stands for all steps at once: its
    array then has one leading axis for each scan named in `scans`, outermost first.
    """

    aval: ShapedArray
    origin: Origin
    leaves: frozenset[int] = frozenset()
    varies: bool = False
    nonlinear: str = ""
    scans: tuple[int, ...] = ()
    view: views.View | None = None
    tiles: tuple[int, tuple[views.View, ...]] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Private:
    """A value that may depend on the example; it `varies` if it may on parameters too."""

    aval: ShapedArray
    varies: bool = True


Value: TypeAlias = Derived | Private


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """A derived value meeting data under a rule.

    `output` is the type of the result for one example; `loops` are (length, stacked) of each scan
    around. `operand_varies` says whether the data operand may be another at other parameters, and
    the gradient reads it.
    """

    index: int
    rule: rules.Rule
    value: Derived
    output: ShapedArray
    loops: tuple[tuple[int, bool], ...]
    operand_varies: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output for one example, over all steps."""
        return (*(n for n, _ in self.loops), *self.output.shape)

    @property
    def layout(self) -> rules.Layout:
        layout = self.rule.layout
        for length, stacked in reversed(self.loops):
            layout = layout.stacked(length) if stacked else layout
        return layout

    @property
    def positions(self) -> int:
        return self.rule.positions * math.prod(n for n, stacked in self.loops if not stacked)


@dataclasses.dataclass(eq=False)
class Block:
    """A straight list of steps, with its inputs and results."""

    inputs: list[Private]
    steps: list["Step"] = dataclasses.field(default_factory=list)
    results: list[Value] = dataclasses.field(default_factory=list)

    def needs(self) -> set[tuple[Derived, bool]]:
        """The derived values read, each with whether gradients flow through the read."""
        found = {(v, True) for v in self.results if isinstance(v, Derived)}
        for step in self.steps:
            found |= {(v, step.use is None) for v in step.operands if isinstance(v, Derived)}
            if step.body is not None:
                found |= step.body.needs()
        return found

    def uses(self) -> list[Use]:
        found = []
        for step in self.steps:
            if step.use is not None:
                found.append(step.use)
            if step.body is not None:
                found.extend(step.body.uses())
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One operation that touches private values; a scan or a rematerialised call has a body.

    `loops` are (scan, length) of each scan around it, outermost first.
    """

    eqn: JaxprEqn
    operands: tuple[Value, ...]
    outputs: tuple[Private, ...]
    loops: tuple[tuple[int, int], ...]
    use: Use | None = None
    data: int = 0
    body: Block | None = None
    scan: int | None = None

    def entries(self) -> list[tuple[int, Private]]:
        """For the body of a scan: each of its inputs, with the operand that it starts as."""
        assert self.body is not None
        carry = self.carry
        into = [
            i
            for i, v in enumerate(self.operands)
            if carry.start <= i < carry.stop or isinstance(v, Private)
        ]
        return list(zip(into, self.body.inputs, strict=True))

    @property
    def carry(self) -> slice:
        """The operands of a scan that are its carry's first value."""
        consts, carry = scan_parts(self.eqn)
        return slice(consts, consts + carry)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced loss, read.

    Attributes:
      block: the steps.
      parameters: the parameters' shapes and dtypes.
      uses: where they meet data under a rule.
      opaque: the parameters that meet data elsewhere, with the operations. Their per-example
        gradients come from automatic differentiation.
      elementwise: those among them that only scale, shift or stand beside data in values of at
        least their own size (biases, scales, positions, tokens): nothing is cheaper than their
        per-example gradients.
      result_tree: the structure of (loss, aux).
      vanishing: the parameters whose gradients are zero for every example, as a value minus its
        own mean over axes of size one is.
      zeros: descriptions of these values.
    """

    block: Block
    parameters: tuple[ShapedArray, ...]
    uses: tuple[Use, ...]
    opaque: dict[int, tuple[str, ...]]
    elementwise: frozenset[int]
    result_tree: jax.tree_util.PyTreeDef
    vanishing: frozenset[int]
    zeros: tuple[str, ...]
