"""Pulls per-example gradients by a value back to a parameter that it is made of, unformed.

The chain rule, one operation after the other, on gradients that are held as few factors
(`cotangents`). An operation that does not keep the form is not pulled through, and the parameter's
per-example gradients are formed instead.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from dpoptax._ghost_clipping.norms.cotangents import NotFactoredError, Outer, Term
from dpoptax._ghost_clipping.passes.evaluate import Evaluation
from dpoptax._ghost_clipping.trace.derived_values import bind
from dpoptax._ghost_clipping.trace.program import Derived, Parameter, Result
from dpoptax._xla import materialize

# Operations on each entry alone, beside those that have a rule of their own.
_ENTRYWISE = frozenset(
    {
        "abs", "cos", "erf", "exp", "exp2", "expm1", "integer_pow", "log", "log1p", "logistic",
        "max", "min", "pow", "rsqrt", "select_n", "sin", "sqrt", "tanh",
    }
)  # fmt: skip
# Where a value is used twice, time after time, its gradients double each time: formed ones do not.
_MOST_PARTS = 32
_SIGNS = {"add": (1, 1), "add_any": (1, 1), "copy": (1,), "neg": (-1,), "sub": (1, -1)}


@dataclasses.dataclass(frozen=True, eq=False)
class Cotangent:
    """The gradients by a value of a shape: a sum of outer products and terms."""

    shape: tuple[int, ...]
    outers: list[Outer]
    terms: list[Term]

    def times(self, y: jax.Array) -> "Cotangent":
        outers, terms = [x.times(y) for x in self.outers], [t.times(y) for t in self.terms]
        return Cotangent(self.shape, outers, terms)

    def total(self, axes: Sequence[int]) -> "Cotangent":
        """Their sum over axes, which are then of size 1."""
        axes = [i for i in axes if self.shape[i] != 1]
        if not axes:
            return self
        shape = tuple(1 if i in axes else n for i, n in enumerate(self.shape))
        found = [x.total(axes) for x in self.outers]
        return Cotangent(shape, [], found + [t.total(axes, self.shape) for t in self.terms])

    def moved(self, source: Sequence[int | None]) -> "Cotangent":
        """By a value whose axis i is axis source[i] of this one, or new and of size 1."""
        every = list(range(len(self.shape)))
        if list(source) == every:
            return self
        kept = [i for i in source if i is not None]
        if self.outers and (sorted(kept) != every or len(source) != len(every)):
            raise NotFactoredError
        shape = tuple(1 if i is None else self.shape[i] for i in source)
        outers = [x.transposed(kept) for x in self.outers]
        return Cotangent(shape, outers, [t.moved(source) for t in self.terms])


class FixedArrays:
    """What is made of the parameters alone, at one point: each computed once."""

    def __init__(self, leaves: list[jax.Array]) -> None:
        self.evaluate = Evaluation(leaves)
        self.known: dict[tuple[Derived, int], jax.Array] = {}

    def value(self, value: Derived, rank: int) -> jax.Array:
        """A value, of size 1 along axes that it is repeated along."""
        if (value, rank) not in self.known:
            found, origin = self.evaluate(value), value.origin
            if isinstance(origin, Result):
                eqn, operands = origin.application.eqn, origin.application.operands
                if eqn.primitive.name == "broadcast_in_dim":
                    into = eqn.params["broadcast_dimensions"]
                    shape = [1] * found.ndim
                    for axis, size in zip(into, operands[0].aval.shape, strict=True):
                        shape[axis] = size
                    found = self.evaluate(operands[0]).reshape(shape)
            # A scalar goes with any shape.
            self.known[value, rank] = materialize(
                found.reshape((1,) * rank) if not found.ndim else found
            )
        return self.known[value, rank]


def pull_back(value: Derived, leaf: int, outer: Outer, fixed: FixedArrays) -> Cotangent:
    """The gradients by a parameter, from those by a value that is made of it.

    Raises:
      NotFactoredError: there is an operation between that does not keep the form.
    """
    return _Pull(leaf, fixed)(value, Cotangent(value.aval.shape, [outer], []))


class _Pull:
    def __init__(self, leaf: int, fixed: FixedArrays) -> None:
        self.leaf, self.fixed = leaf, fixed
        self.arrived: dict[Derived, Cotangent] = {}

    def __call__(self, top: Derived, cotangent: Cotangent) -> Cotangent:
        order = self.order(top)
        self.arrived[top] = cotangent
        for value in reversed(order[1:]):
            self.step(value, self.arrived.pop(value))
        return self.arrived[order[0]]

    def order(self, top: Derived) -> list[Derived]:
        """The values on the way, each behind those that it is made of; first the parameter."""
        order: list[Derived] = []
        seen: set[Derived] = set()
        stack = [(top, False)]
        while stack:
            value, done = stack.pop()
            if done:
                order.append(value)
            elif value not in seen:
                seen.add(value)
                stack.append((value, True))
                if value.aval.dtype != jnp.float32:
                    raise NotFactoredError
                if isinstance(value.origin, Result):
                    operands = value.origin.application.operands
                    stack.extend((v, False) for v in operands if self.leaf in v.leaves)
                elif not isinstance(value.origin, Parameter):
                    raise NotFactoredError
        return order

    def arrive(self, operand: Derived, g: Cotangent) -> None:
        """Adds gradients of the shape of a result to those by an operand that went into it."""
        if self.leaf not in operand.leaves:
            return
        shape = operand.aval.shape
        if not shape:
            g = g.total(range(len(g.shape))).moved([])
        g = g.total([i for i, n in enumerate(shape) if n == 1])
        if g.shape != shape:
            raise NotFactoredError
        if (other := self.arrived.get(operand)) is not None:
            g = Cotangent(shape, other.outers + g.outers, other.terms + g.terms)
        if len(g.outers) + len(g.terms) > _MOST_PARTS:
            raise NotFactoredError
        self.arrived[operand] = g

    def step(self, value: Derived, g: Cotangent) -> None:
        """The rule of the operation that gave a value."""
        assert isinstance(value.origin, Result)
        eqn, operands = value.origin.application.eqn, value.origin.application.operands
        name, rank = eqn.primitive.name, len(g.shape)
        if name in _SIGNS:
            for sign, operand in zip(_SIGNS[name], operands, strict=True):
                self.arrive(operand, g if sign == 1 else g.times(_scalar(-1.0, rank)))
        elif name == "mul":
            for operand, other in zip(operands, reversed(operands), strict=True):
                if self.leaf in operand.leaves:
                    self.arrive(operand, g.times(self.fixed.value(other, rank)))
        elif name == "div":
            self.divide(operands, g)
        elif name == "square" or (name == "integer_pow" and eqn.params["y"] == 2):
            by_itself = g.times(self.fixed.value(operands[0], rank))
            self.arrive(operands[0], by_itself.times(_scalar(2.0, rank)))
        elif name in _ENTRYWISE:
            self.entrywise(eqn, operands, g)
        elif name in ("broadcast_in_dim", "reduce_sum", "reshape", "squeeze", "transpose"):
            self.move(eqn, operands[0], g)
        elif name == "dot_general" and g.outers:
            self.multiply(eqn, operands, g)
        else:
            self.anything(eqn, operands, g)

    def divide(self, operands: tuple[Derived, ...], g: Cotangent) -> None:
        rank = len(g.shape)
        x, y = operands
        inverse = materialize(1.0 / self.fixed.value(y, rank))
        if self.leaf in x.leaves:
            self.arrive(x, g.times(inverse))
        if self.leaf in y.leaves:
            summed = [i for i, n in enumerate(inverse.shape) if n == 1]
            by_product = g.times(self.fixed.value(x, rank)).total(summed)
            self.arrive(y, by_product.times(materialize(-(inverse**2))))

    def entrywise(self, eqn: JaxprEqn, operands: tuple[Derived, ...], g: Cotangent) -> None:
        arrays = jnp.broadcast_arrays(*(self.fixed.value(v, len(g.shape)) for v in operands))
        for i, operand in enumerate(operands):
            if self.leaf in operand.leaves:
                slope = jax.jvp(_by(eqn, arrays, i), (arrays[i],), (jnp.ones_like(arrays[i]),))[1]
                self.arrive(operand, g.times(materialize(slope)))

    def move(self, eqn: JaxprEqn, operand: Derived, g: Cotangent) -> None:
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
            g = g.moved(source)
            # Repeated along what was summed over.
            self.arrive(operand, Cotangent(shape, g.outers, g.terms))
            return
        elif name == "transpose":
            source = [eqn.params["permutation"].index(i) for i in range(rank)]
        else:
            places = iter([i for i, n in enumerate(g.shape) if n != 1])
            source = [next(places, None) if n != 1 else None for n in shape]
            if [n for n in shape if n != 1] != [n for n in g.shape if n != 1]:
                raise NotFactoredError
            if g.outers and list(shape) == list(g.shape):
                source = list(range(rank))
        self.arrive(operand, g.moved(source))

    def multiply(self, eqn: JaxprEqn, operands: tuple[Derived, ...], g: Cotangent) -> None:
        """A product of two matrices, back: one side of outer products goes through the other."""
        ranks = [len(v.aval.shape) for v in operands]
        if eqn.params["dimension_numbers"] != (((1,), (0,)), ((), ())) or ranks != [2, 2]:
            raise NotFactoredError
        if g.terms:
            raise NotFactoredError
        for axis, operand in enumerate(operands):
            if self.leaf in operand.leaves:
                other = materialize(self.fixed.evaluate(operands[1 - axis]))
                outers = [x.through(other, axis) for x in g.outers]
                self.arrive(operand, Cotangent(operand.aval.shape, outers, []))

    def anything(self, eqn: JaxprEqn, operands: tuple[Derived, ...], g: Cotangent) -> None:
        """Any operation, where the gradients are a number of each example times fixed arrays."""
        thin = all(n == 1 for t in g.terms for n in t.thin)
        if g.outers or not thin or len(eqn.outvars) != 1:
            raise NotFactoredError
        arrays = [self.fixed.evaluate(v) for v in operands]
        for i, operand in enumerate(operands):
            if self.leaf in operand.leaves:
                out, transpose = jax.vjp(_by(eqn, arrays, i), arrays[i])
                terms = []
                for term in g.terms:
                    basis = jnp.ones(out.shape, out.dtype) if term.basis is None else term.basis
                    (back,) = transpose(jnp.broadcast_to(basis, out.shape))
                    weights = term.weights.reshape(-1, *(1,) * back.ndim)
                    terms.append(Term(materialize(back), weights))
                self.arrive(operand, Cotangent(operand.aval.shape, [], terms))


def _by(eqn: JaxprEqn, operands: Sequence[jax.Array], i: int) -> Callable[[jax.Array], jax.Array]:
    """An operation as a function of the operand of that number."""
    return lambda x: bind(eqn, [*operands[:i], x, *operands[i + 1 :]])[0]


def _scalar(value: float, rank: int) -> jax.Array:
    return jnp.full((1,) * rank, value, jnp.float32)
