"""Defines types for a traced loss: values, steps, and uses of parameters."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from dpoptax._gradients.ghost_clipping.trace import rules, views
from dpoptax._gradients.ghost_clipping.trace.trace_loss import TracedLoss
from dpoptax._support.jaxprs import scan_parts
from dpoptax._support.tree import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """Describes an equation whose operands are all derived."""

    eqn: JaxprEqn
    operands: tuple["DerivedValue", ...]
    scans: tuple[int, ...]


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
    """Describes the origin of a value that is result `index` of an operation."""

    operation: Operation
    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class ScanSlices:
    """Describes the origin of slices for the steps of a scan, cut from `whole`."""

    whole: "DerivedValue"


Origin: TypeAlias = Parameter | Constant | Result | ScanSlices


@dataclasses.dataclass(frozen=True, eq=False)
class DerivedValue:
    """Describes a value computed from parameters and constants only, by its `origin`.

    A parameter itself has the origin `Parameter` and a view of all its entries.

    Inside the body of a scan over a stack of parameters, a value represents all steps at once. Its
    array then has one leading axis for each scan in `scans`, outermost first.

    Attributes:
      aval: the type.
      origin: the parameter, constant, operation or scan that the value comes from.
      leaves: the parameters that its gradient flows to.
      varies: whether the value depends on parameters, even behind a `stop_gradient`.
      nonlinear: the name of an operation whose derivative is not linear in the cotangent, such as a
        `custom_vjp` or a rounding to few bits; otherwise empty. Uses then cannot be pulled back
        separately.
      scans: the scans over which it is stacked.
      view: the entries of the parameter that it holds, if it only holds entries of one parameter.
      tiles: an axis, counted with those of `scans`, and the views concatenated along it.
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
      rule: maps operand and cotangent to factors.
      value: the derived value.
      output: the type of the result for one example.
      loops: (length, stacked) of each enclosing scan. `stacked` says whether the value has a slice
        for each step.
      operand_varies: whether the gradient reads the data operand, and the operand may depend on
        parameters.
    """

    index: int
    rule: rules.Rule
    value: DerivedValue
    output: ShapedArray
    loops: tuple[tuple[int, bool], ...]
    operand_varies: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the output for one example, over all steps."""
        return (*(n for n, _ in self.loops), *self.output.shape)

    @property
    def layout(self) -> rules.FactorLayout:
        layout = self.rule.layout
        for length, stacked in reversed(self.loops):
            layout = layout.stacked(length) if stacked else layout
        return layout

    @property
    def positions(self) -> int:
        return self.rule.positions * math.prod(n for n, stacked in self.loops if not stacked)

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the factors (K, L, R) and (K, L, D) of one example.

        Steps of scans become positions L. If the value has a slice for each step, they become
        groups K.
        """
        if not self.loops:
            return self.rule.factors(operand, cotangent)
        rows, columns = self._map_loops(self.rule.factors)(operand, cotangent)
        return self._fold_loops(rows), self._fold_loops(columns)

    def row_parts(
        self, operand: jax.Array, cotangent: jax.Array
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Returns factors with parts of the rows; see `Rule.row_parts`."""
        parts = self._map_loops(self.rule.row_parts)(operand, cotangent)
        return [(self._fold_loops(rows), self._fold_loops(columns)) for rows, columns in parts]

    def _map_loops(self, factors: Callable[..., PyTree]) -> Callable[..., PyTree]:
        for _ in self.loops:
            factors = jax.vmap(factors)
        return factors

    def _fold_loops(self, factor: jax.Array) -> jax.Array:
        lead = len(self.loops)
        stacked = [i for i, (_, s) in enumerate(self.loops) if s]
        shared = [i for i, (_, s) in enumerate(self.loops) if not s]
        # Scans over stacked parameters give groups and all others positions, outermost first.
        order = (*stacked, lead, *shared, *range(lead + 1, factor.ndim))
        groups, _, _ = self.layout.sizes
        trailing = factor.shape[lead + 2 :]
        return factor.transpose(order).reshape(groups, self.positions, *trailing)


@dataclasses.dataclass(eq=False)
class Block:
    """Holds a list of steps, with inputs and results."""

    inputs: list[PrivateValue]
    steps: list["Step"] = dataclasses.field(default_factory=list)
    results: list[Value] = dataclasses.field(default_factory=list)

    def needs(self) -> dict[tuple[DerivedValue, bool], None]:
        """Returns the derived values that steps read, each with a flag.

        The flag says whether the value is computed from shifted parameters. Uses read unshifted
        parameters; see `passes.run_passes`.
        """
        # Not a set, because its order, and so the order of the program, would differ between runs.
        found = [(v, True) for v in self.results if isinstance(v, DerivedValue)]
        for step in self.steps:
            found += [(v, step.use is None) for v in step.operands if isinstance(v, DerivedValue)]
            if step.body is not None:
                found += step.body.needs()
        return dict.fromkeys(found)

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
    """Holds one operation on private values. Scans and `jax.checkpoint` have a body.

    `loops` are (scan_id, length) of each enclosing scan, outermost first. For a use, `data` is the
    position of the operand that is recorded. For a scan, `scan_id` is its number; otherwise it is
    `None`.
    """

    eqn: JaxprEqn
    operands: tuple[Value, ...]
    outputs: tuple[PrivateValue, ...]
    loops: tuple[tuple[int, int], ...]
    use: Use | None = None
    data: int = 0
    body: Block | None = None
    scan_id: int | None = None

    def entries(self) -> list[tuple[int, PrivateValue]]:
        """Returns the inputs of a scan's body, each with the position of its operand."""
        assert self.body is not None
        carry = self.carry
        into = [
            i
            for i, v in enumerate(self.operands)
            if carry.start <= i < carry.stop or isinstance(v, PrivateValue)
        ]
        return list(zip(into, self.body.inputs, strict=True))

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
      block: the steps.
      parameters: the shapes and dtypes of the parameters.
      uses: the operations on parameters and data that have a rule.
      opaque: the parameters that other operations combine with data, and the names of these
        operations. Automatic differentiation gives their per-example gradients.
      elementwise: the opaque parameters that are only added to, multiplied by or concatenated with
        data of at least their size, such as biases and scales. Forming their per-example gradients
        is cheapest.
    """

    loss: TracedLoss
    block: Block
    parameters: tuple[ShapedArray, ...]
    uses: tuple[Use, ...]
    opaque: dict[int, tuple[str, ...]]
    elementwise: frozenset[int]
