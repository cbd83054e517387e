"""Defines the types of a read loss: its values, its steps, and the uses of parameters."""

import dataclasses
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from dpoptax._ghost_clipping.trace import rules, views
from dpoptax._jaxprs import scan_parts


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An equation whose operands are all derived."""

    eqn: JaxprEqn
    operands: tuple["DerivedValue", ...]
    scans: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """The origin of a value that is a parameter, given by the number of its leaf."""

    leaf: int


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """The origin of a value that the trace knows."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """The origin of a value that is a result of an operation, given by its number."""

    operation: Operation
    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class ScanSlices:
    """The origin of the slices that a scan takes of a value; all steps together are `whole`."""

    whole: "DerivedValue"


Origin: TypeAlias = Parameter | Constant | Result | ScanSlices


@dataclasses.dataclass(frozen=True, eq=False)
class DerivedValue:
    """Describes a value computed from parameters and constants only, by its `origin`.

    Inside the body of a scan over a stack of parameters, it represents all steps at once. Its array
    then has one leading axis for each scan in `scans`, outermost first.

    Attributes:
      aval: the type.
      origin: the parameter, constant, operation or scan that the value comes from.
      leaves: the parameters that its gradient flows to.
      varies: whether the value depends on parameters, even behind a `stop_gradient`.
      nonlinear: the operation, if any, whose derivative is not linear in the cotangent. This is a
        `custom_vjp` or a rounding to few bits. Uses then cannot be pulled back one by one.
      scans: the scans that it is stacked over.
      view: the entries of one parameter that it holds, if it holds no others.
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
    """Records one operation in which a derived value meets data under a rule.

    Attributes:
      index: its number among the uses.
      rule: how operand and cotangent become factors.
      value: the derived value.
      output: the type of the result for one example.
      loops: (length, stacked) of each enclosing scan. `stacked` says whether the value has a slice
        for each step.
      operand_varies: whether the data operand may change with the parameters, and the gradient
        reads it.
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

        Steps of scans become positions L, or groups K if the value has a slice for each step.
        """
        factors = self.rule.factors
        for _ in self.loops:
            factors = jax.vmap(factors)
        rows, columns = factors(operand, cotangent)
        return self._fold_loops(rows), self._fold_loops(columns)

    def _fold_loops(self, factor: jax.Array) -> jax.Array:
        lead = len(self.loops)
        stacked = [i for i, (_, s) in enumerate(self.loops) if s]
        shared = [i for i, (_, s) in enumerate(self.loops) if not s]
        # Scans over stacked parameters give groups, all others positions, outermost first.
        order = (*stacked, lead, *shared, *range(lead + 1, factor.ndim))
        groups, _, _ = self.layout.sizes
        trailing = factor.shape[lead + 2 :]
        return factor.transpose(order).reshape(groups, self.positions, *trailing)


@dataclasses.dataclass(eq=False)
class Block:
    """Holds a list of steps with its inputs and results."""

    inputs: list[PrivateValue]
    steps: list["Step"] = dataclasses.field(default_factory=list)
    results: list[Value] = dataclasses.field(default_factory=list)

    def needs(self) -> dict[tuple[DerivedValue, bool], None]:
        """Returns the derived values read, each with whether the read is of shifted parameters.

        Uses read unshifted ones; see `passes.run_passes`.
        """
        # Not a set: the order of its entries, and so of the program, would differ between runs.
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
    """Holds one operation on private values; scans and `jax.checkpoint` have a body.

    `loops` are (scan_id, length) of each enclosing scan, outermost first. `data` is the position of
    the operand that is recorded for a use. `scan_id` is the number of a scan, `None` otherwise.
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
        """Returns each input of a scan's body with the position of the operand it starts as."""
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
    """Holds a traced loss after reading.

    Attributes:
      block: the steps.
      parameters: the parameters' shapes and dtypes.
      uses: the operations in which they meet data under a rule.
      opaque: the parameters that meet data in other operations, with these. Automatic
        differentiation gives their per-example gradients.
      elementwise: the opaque parameters that are only added to, multiplied with or concatenated
        with data of at least their size, such as biases and scales. Nothing is cheaper than their
        per-example gradients.
      result_tree: the structure of (loss, aux).
      vanishing: the parameters whose gradients are zero for every example. An example is a value
        minus its own mean over axes of size one.
      zeros: descriptions of these values.
      constant_bytes: the size of the arrays that the loss closes over, without traced ones.
      joint_on_tpu: whether TPUs would iterate a batch until its last example has converged.
    """

    block: Block
    parameters: tuple[ShapedArray, ...]
    uses: tuple[Use, ...]
    opaque: dict[int, tuple[str, ...]]
    elementwise: frozenset[int]
    result_tree: jax.tree_util.PyTreeDef
    vanishing: frozenset[int]
    zeros: tuple[str, ...]
    constant_bytes: int
    joint_on_tpu: bool

    def separate(self, mask: jax.Array) -> jax.Array:
        """Returns the mask (B,) of the examples that count: none if the platform mixes them.

        The default platform is checked earlier, with an error. A program may be compiled for
        another one.
        """
        if not self.joint_on_tpu:
            return mask
        return lax.platform_dependent(mask, tpu=jnp.zeros_like, default=lambda mask: mask)
