"""Pulls per-example gradients of a derived value back to its parameter.

The chain rule is applied operation by operation to gradients in the form of `cotangents`, without
forming them. If an operation does not preserve this form, pulling back stops, and the parameter's
per-example gradients are formed instead.
"""

import dataclasses
import graphlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from dpoptax._ghost_clipping.records.run_block import ParameterEvaluator
from dpoptax._ghost_clipping.transformed.cotangents import FixedTerm, NotFactoredError, OuterSum
from dpoptax._losses.traced_program import DerivedValue, Parameter, Result
from dpoptax._support.jaxprs import bind
from dpoptax._support.xla import materialize

Operands: TypeAlias = tuple[DerivedValue, ...]

# Elementwise operations, in addition to those with their own rule.
_ENTRYWISE_PRIMITIVES = frozenset(
    {
        "abs", "cos", "erf", "exp", "exp2", "expm1", "integer_pow", "log", "log1p", "logistic",
        "max", "min", "pow", "rsqrt", "select_n", "sin", "sqrt", "tanh",
    }
)  # fmt: skip
# If values are used twice repeatedly, the number of parts doubles each time.
_PART_LIMIT = 32
_OPERAND_SIGNS = {"add": (1, 1), "add_any": (1, 1), "copy": (1,), "neg": (-1,), "sub": (1, -1)}


@dataclasses.dataclass(frozen=True, eq=False)
class CotangentSum:
    """Holds the gradients of a value: a sum of outer products and fixed terms."""

    shape: tuple[int, ...]
    outers: list[OuterSum]
    terms: list[FixedTerm]

    def times(self, y: jax.Array) -> "CotangentSum":
        outers, terms = [x.times(y) for x in self.outers], [t.times(y) for t in self.terms]
        return CotangentSum(self.shape, outers, terms)

    def total(self, axes: Sequence[int]) -> "CotangentSum":
        """Returns the sum over axes, which then have size 1."""
        axes = [i for i in axes if self.shape[i] != 1]
        if not axes:
            return self
        shape = tuple(1 if i in axes else n for i, n in enumerate(self.shape))
        found = [x.total(axes) for x in self.outers]
        return CotangentSum(shape, [], found + [t.total(axes, self.shape) for t in self.terms])

    def permuted(self, source: Sequence[int | None]) -> "CotangentSum":
        """Returns the gradients of a value whose axis i is axis source[i] of this one.

        If source[i] is `None`, the axis is new and has size 1.
        """
        every = list(range(len(self.shape)))
        if list(source) == every:
            return self
        kept = [i for i in source if i is not None]
        if self.outers and (sorted(kept) != every or len(source) != len(every)):
            raise NotFactoredError
        shape = tuple(1 if i is None else self.shape[i] for i in source)
        outers = [x.transposed(kept) for x in self.outers]
        return CotangentSum(shape, outers, [t.permuted(source) for t in self.terms])


class FixedArrays:
    """Computes and caches arrays that depend only on the parameters, at one point."""

    def __init__(self, leaves: list[jax.Array]) -> None:
        self.evaluate = ParameterEvaluator(leaves)
        self.known: dict[tuple[DerivedValue, int], jax.Array] = {}

    def value(self, value: DerivedValue, rank: int) -> jax.Array:
        """Returns a value, with size 1 for axes along which it is repeated."""
        if (value, rank) not in self.known:
            found, origin = self.evaluate(value), value.origin
            if isinstance(origin, Result):
                eqn, operands = origin.step.eqn, origin.operands
                if eqn.primitive.name == "broadcast_in_dim":
                    into = eqn.params["broadcast_dimensions"]
                    shape = [1] * found.ndim
                    for axis, size in zip(into, operands[0].aval.shape, strict=True):
                        shape[axis] = size
                    found = self.evaluate(operands[0]).reshape(shape)
            # A scalar broadcasts to any shape.
            self.known[value, rank] = materialize(
                found.reshape((1,) * rank) if not found.ndim else found
            )
        return self.known[value, rank]


def pull_back(value: DerivedValue, leaf: int, outer: OuterSum, fixed: FixedArrays) -> CotangentSum:
    """Returns the gradients of a parameter from those of a value computed from it.

    Raises:
      NotFactoredError: an operation between them does not preserve the form.
    """
    return _PullBack(leaf, fixed)(value, CotangentSum(value.aval.shape, [outer], []))


class _PullBack:
    """Visits the values between a used value and a parameter, in reverse order."""

    def __init__(self, leaf: int, fixed: FixedArrays) -> None:
        self.leaf, self.fixed = leaf, fixed
        self.arrived: dict[DerivedValue, CotangentSum] = {}

    def __call__(self, top: DerivedValue, cotangent: CotangentSum) -> CotangentSum:
        # A value is visited after all values computed from it, when its gradient is complete.
        order = self.order(top)
        self.arrived[top] = cotangent
        for value in reversed(order[1:]):
            self.step(value, self.arrived.pop(value))
        return self.arrived[order[0]]

    def order(self, top: DerivedValue) -> list[DerivedValue]:
        """Returns these values, with the parameter first and operands before results."""
        before: dict[DerivedValue, list[DerivedValue]] = {}
        stack = [top]
        while stack:
            value = stack.pop()
            # The bounds count roundings of float32.
            narrow = value.aval.dtype != jnp.float32
            if narrow or not isinstance(value.origin, Result | Parameter):
                raise NotFactoredError
            if value not in before:
                # Operands without a path to the parameter get no gradient.
                own = value.origin.operands if isinstance(value.origin, Result) else ()
                before[value] = [v for v in own if self.leaf in v.leaves]
                stack.extend(before[value])
        return list(graphlib.TopologicalSorter(before).static_order())

    def accumulate(self, operand: DerivedValue, g: CotangentSum) -> None:
        """Adds gradients to an operand that was broadcast to the shape of the result."""
        if self.leaf not in operand.leaves:
            return
        shape = operand.aval.shape
        if not shape:
            g = g.total(range(len(g.shape))).permuted([])
        g = g.total([i for i, n in enumerate(shape) if n == 1])
        if g.shape != shape:
            raise NotFactoredError
        if (other := self.arrived.get(operand)) is not None:
            g = CotangentSum(shape, other.outers + g.outers, other.terms + g.terms)
        if len(g.outers) + len(g.terms) > _PART_LIMIT:
            raise NotFactoredError
        self.arrived[operand] = g

    def step(self, value: DerivedValue, g: CotangentSum) -> None:
        """Applies the rule of the operation that computed a value."""
        assert isinstance(value.origin, Result)
        eqn, operands = value.origin.step.eqn, value.origin.operands
        name, rank = eqn.primitive.name, len(g.shape)
        if name in _OPERAND_SIGNS:
            for sign, operand in zip(_OPERAND_SIGNS[name], operands, strict=True):
                self.accumulate(operand, g if sign == 1 else g.times(_scalar(-1.0, rank)))
        elif name == "mul":
            for operand, other in zip(operands, reversed(operands), strict=True):
                if self.leaf in operand.leaves:
                    self.accumulate(operand, g.times(self.fixed.value(other, rank)))
        elif name == "div":
            self.divide(operands, g)
        elif name == "square" or (name == "integer_pow" and eqn.params["y"] == 2):
            scaled = g.times(self.fixed.value(operands[0], rank))
            self.accumulate(operands[0], scaled.times(_scalar(2.0, rank)))
        elif name in _ENTRYWISE_PRIMITIVES:
            self.entrywise(eqn, operands, g)
        elif name in ("broadcast_in_dim", "reduce_sum", "reshape", "squeeze", "transpose"):
            self.move(eqn, operands[0], g)
        elif name == "dot_general" and g.outers:
            self.multiply(eqn, operands, g)
        else:
            self.apply_vjp(eqn, operands, g)

    def divide(self, operands: Operands, g: CotangentSum) -> None:
        rank = len(g.shape)
        x, y = operands
        inverse = materialize(1.0 / self.fixed.value(y, rank))
        if self.leaf in x.leaves:
            self.accumulate(x, g.times(inverse))
        if self.leaf in y.leaves:
            summed = [i for i, n in enumerate(inverse.shape) if n == 1]
            # ∂(x/y)/∂y = −x/y². Broadcast axes, along which y has size 1, are summed first.
            scaled = g.times(self.fixed.value(x, rank)).total(summed)
            self.accumulate(y, scaled.times(materialize(-(inverse**2))))

    def entrywise(self, eqn: JaxprEqn, operands: Operands, g: CotangentSum) -> None:
        arrays = jnp.broadcast_arrays(*(self.fixed.value(v, len(g.shape)) for v in operands))
        for i, operand in enumerate(operands):
            if self.leaf in operand.leaves:
                slope = jax.jvp(
                    _function_of_operand(eqn, arrays, i), (arrays[i],), (jnp.ones_like(arrays[i]),)
                )[1]
                self.accumulate(operand, g.times(materialize(slope)))

    def move(self, eqn: JaxprEqn, operand: DerivedValue, g: CotangentSum) -> None:
        name, shape, rank = eqn.primitive.name, operand.aval.shape, len(operand.aval.shape)
        source: list[int | None]
        if name == "broadcast_in_dim":
            into = eqn.params["broadcast_dimensions"]
            new = [i for i in range(len(g.shape)) if i not in into]
            g = g.total([*new, *(d for n, d in zip(shape, into, strict=True) if n == 1)])
            source = list(into)
        elif name == "reduce_sum":
            left = iter(range(len(g.shape)))
            source = [None if i in eqn.params["axes"] else next(left) for i in range(rank)]
            g = g.permuted(source)
            # The gradient is repeated along the axes of the sum.
            self.accumulate(operand, CotangentSum(shape, g.outers, g.terms))
            return
        elif name == "transpose":
            source = [eqn.params["permutation"].index(i) for i in range(rank)]
        else:
            # Only reshapes that insert or remove axes of size 1 preserve the form.
            places = iter([i for i, n in enumerate(g.shape) if n != 1])
            source = [next(places, None) if n != 1 else None for n in shape]
            if [n for n in shape if n != 1] != [n for n in g.shape if n != 1]:
                raise NotFactoredError
            # Outer products keep their axes. They would refuse `None` for an axis of size 1.
            if g.outers and list(shape) == list(g.shape):
                source = list(range(rank))
        self.accumulate(operand, g.permuted(source))

    def multiply(self, eqn: JaxprEqn, operands: Operands, g: CotangentSum) -> None:
        """Pulls back through a matrix product: multiplies one factor by the other matrix."""
        ranks = [len(v.aval.shape) for v in operands]
        if eqn.params["dimension_numbers"] != (((1,), (0,)), ((), ())) or ranks != [2, 2]:
            raise NotFactoredError
        if g.terms:
            raise NotFactoredError
        for axis, operand in enumerate(operands):
            if self.leaf in operand.leaves:
                other = materialize(self.fixed.evaluate(operands[1 - axis]))
                outers = [x.times_matrix(other, axis) for x in g.outers]
                self.accumulate(operand, CotangentSum(operand.aval.shape, outers, []))

    def apply_vjp(self, eqn: JaxprEqn, operands: Operands, g: CotangentSum) -> None:
        """Pulls back gradients that are scalars times fixed arrays, for any operation."""
        thin = all(n == 1 for t in g.terms for n in t.weight_shape)
        if g.outers or not thin or len(eqn.outvars) != 1:
            raise NotFactoredError
        arrays = [self.fixed.evaluate(v) for v in operands]
        for i, operand in enumerate(operands):
            if self.leaf in operand.leaves:
                out, transpose = jax.vjp(_function_of_operand(eqn, arrays, i), arrays[i])
                terms = []
                for term in g.terms:
                    basis = jnp.ones(out.shape, out.dtype) if term.basis is None else term.basis
                    (back,) = transpose(jnp.broadcast_to(basis, out.shape))
                    weights = term.weights.reshape(-1, *(1,) * back.ndim)
                    terms.append(FixedTerm(materialize(back), weights))
                self.accumulate(operand, CotangentSum(operand.aval.shape, [], terms))


def _function_of_operand(
    eqn: JaxprEqn, operands: Sequence[jax.Array], i: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns an operation as a function of its operand i."""
    return lambda x: bind(eqn, [*operands[:i], x, *operands[i + 1 :]])[0]


def _scalar(value: float, rank: int) -> jax.Array:
    return jnp.full((1,) * rank, value, jnp.float32)
