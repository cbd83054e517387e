"""Runs programs on machines with the largest roundings that the proof of the bound allows.

`Machine.run` evaluates the jaxpr of a function in float64. To the result of each float32 operation
it adds an error, |error| ≤ k u |result|, with the k roundings that docs/developers/bound.md counts:
1 for a product or a sum of two numbers, `ROOT_ROUNDINGS` for quotients and roots, n − 1 for a sum
of n terms, relative to the sum of their magnitudes, and n for an inner product. Results that every
machine finds exactly have no error, such as products with powers of two. Numbers below the normal
range become zero.

`largest` searches for the errors that make a ratio largest. It starts at the best of random signs
and signs that are all equal. Then it flips the signs of one operation after the other, and of
single numbers, and keeps each flip that makes the ratio larger.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from dpoptax._rounding.bounds import ROOT_ROUNDINGS, UNIT_ROUNDOFF
from dpoptax._support import jaxprs as _jaxprs
from dpoptax._support.marks import SEALED

_SMALLEST_NORMAL = 2.0**-126
# The most numbers of one operation whose signs are flipped one by one.
_SINGLE_FLIPS = 32
# The most flips of a search.
_FLIPS = 96


class Machine:
    """Computes with float32 numbers whose rounding errors are given.

    Attributes:
      programs: the traced program of each call of `run`, which later machines reuse.
      signs: one number in [−1, 1] for each rounded number, times its largest error.
      sizes: how many numbers each operation has rounded so far.
    """

    def __init__(
        self, programs: list[tuple[ClosedJaxpr, Any]], signs: np.ndarray | None = None
    ) -> None:
        self.programs = programs
        self.signs = signs
        self.sizes: list[int] = []
        self._calls = self._used = 0
        # The exact results and signs of the operations of a run, and of the run before it.
        self._log: list[tuple[np.ndarray, np.ndarray]] = []
        self._before: list[tuple[np.ndarray, np.ndarray]] = []

    def run(self, function: Callable[..., Any], *args: Any, again: bool = False) -> Any:
        """Returns `function(*args)` for trees of arrays, in float64 and with errors.

        If the function runs `again`, for other numbers, equal results have the errors of the
        previous run.
        """
        self._before, self._log = self._log if again else [], []
        if self._calls == len(self.programs):
            found = jax.make_jaxpr(lambda *x: function(*x), return_shape=True)(*args)
            self.programs.append(found)
        program, out = self.programs[self._calls]
        self._calls += 1
        with np.errstate(all="ignore"):
            flat = self._evaluate(program.jaxpr, program.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), flat)

    def _rounded(self, exact: np.ndarray, error: np.ndarray) -> np.ndarray:
        exact = np.asarray(exact)
        if self.signs is not None:
            signs = self.signs[self._used : self._used + exact.size].reshape(exact.shape)
            if self._before:
                known, before = self._before[len(self._log)]
                signs = np.where(exact == known, before, signs)
            self._log.append((exact, signs))
            exact = exact + signs * error
        self.sizes.append(exact.size)
        self._used += exact.size
        return np.where(np.abs(exact) < _SMALLEST_NORMAL, 0.0, exact)

    def _evaluate(self, program: Any, consts: Iterable[Any], args: Iterable[Any]) -> list[Any]:
        known: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            if not hasattr(atom, "val"):
                return known[atom]
            return _widen(np.asarray(atom.val, atom.aval.dtype))  # counters keep their dtype

        for var, value in zip([*program.constvars, *program.invars], [*consts, *args], strict=True):
            known[var] = _widen(value)
        for eqn in program.eqns:
            found = self._equation(eqn, list(map(read, eqn.invars)))
            known.update(zip(eqn.outvars, found, strict=True))
        return list(map(read, program.outvars))

    def _equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == "jit" and params["name"] == SEALED:  # only the dtype changes
            return operands
        if name == "jit" and params["name"] in _EXACT_CALLS:
            return [_EXACT_CALLS[params["name"]](*operands)]
        if name in _jaxprs.PROGRAM_CALLS:
            return self._call(params.get("jaxpr", params.get("call_jaxpr")), operands)
        if name == "cond":
            platforms = params.get("branches_platforms")
            if platforms is None:  # of `materialize`, which takes the first branch
                assert operands[0] == 0
                platforms = ["cpu"]
            chosen = [i for i, names in enumerate(platforms) if names is None or "cpu" in names]
            return self._call(params["branches"][chosen[0]], operands[1:])
        if name == "scan":
            return self._scan(eqn, operands)
        if name in _ROUNDED and _is_float(eqn.outvars[0].aval.dtype):
            return [self._rounded(*_ROUNDED[name](eqn, *operands))]
        return _exact(eqn, operands)

    def _call(self, program: Any, operands: list[Any]) -> list[Any]:
        return self._evaluate(_jaxprs.open_jaxpr(program), getattr(program, "consts", ()), operands)

    def _scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        consts, carried = _jaxprs.scan_parts(eqn)
        fixed, carry = operands[:consts], operands[consts : consts + carried]
        stacked, outputs = operands[consts + carried :], []
        assert not eqn.params["reverse"]
        for turn in range(eqn.params["length"]):
            out = self._call(eqn.params["jaxpr"], [*fixed, *carry, *(x[turn] for x in stacked)])
            carry = out[:carried]
            outputs.append(out[carried:])
        return [*carry, *map(np.stack, zip(*outputs, strict=True))]


def _is_float(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, np.floating)


def _widen(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.float64) if _is_float(x.dtype) else x


# Jitted functions that every machine computes exactly.
_EXACT_CALLS: dict[str, Callable[..., np.ndarray]] = {
    "lost_by_addition": lambda total, value, found: (total - found) + value,
}


def _exact(eqn: Any, operands: list[np.ndarray]) -> Sequence[np.ndarray]:
    """Returns results that are not rounded, such as maxima, selections and parts."""
    name, params = eqn.primitive.name, eqn.params
    if name in _SIMPLE:
        return [np.asarray(_SIMPLE[name](*operands))]
    if name == "convert_element_type":
        return [_widen(operands[0].astype(params["new_dtype"]))] if not _is_float(
            params["new_dtype"]
        ) else [operands[0].astype(np.float64)]  # fmt: skip
    if name == "bitcast_convert_type":
        (x,) = (operand.astype(np.float32) if _is_float(operand.dtype) else operand
                for operand in operands)  # fmt: skip
        return [_widen(x.view(params["new_dtype"]))]
    if name == "reshape":
        return [operands[0].reshape(params["new_sizes"])]
    if name == "broadcast_in_dim":
        return [_broadcast(operands[0], params["shape"], params["broadcast_dimensions"])]
    if name == "platform_index":
        return [np.int32(0)]
    assert name in _PARTS or not _is_float(eqn.outvars[0].aval.dtype), f"{name} may round"
    return [_widen(x) for x in _bind(eqn, *operands)]


def _broadcast(x: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, size in zip(axes, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _bind(eqn: Any, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
    """Runs an equation in float64."""
    wide = {
        key: np.dtype(np.float64) if key in ("dtype", "preferred_element_type") and _is_float(x)
        else x
        for key, x in eqn.params.items()
    }  # fmt: skip
    with jax.enable_x64(True):
        out = eqn.primitive.bind(*operands, **wide)
    return tuple(map(np.asarray, out if eqn.primitive.multiple_results else (out,)))


_SIMPLE: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "and": np.bitwise_and, "eq": np.equal, "ge": np.greater_equal,
    "gt": np.greater, "is_finite": np.isfinite, "le": np.less_equal, "lt": np.less,
    "max": np.maximum, "min": np.minimum, "ne": np.not_equal, "neg": np.negative,
    "not": np.invert, "or": np.bitwise_or, "copy": lambda x: x, "real": np.real, "imag": np.imag,
    "complex": lambda real, imag: real + 1j * imag,
    "select_n": lambda which, *cases: np.where(which, *cases[::-1]),
}  # fmt: skip
# Primitives that only move numbers.
_PARTS = frozenset({
    "concatenate", "dynamic_slice", "gather", "iota", "name", "optimization_barrier", "pad",
    "reduce_max", "rev", "slice", "split", "squeeze", "stack", "transpose", "unstack",
})  # fmt: skip


def _is_power(x: np.ndarray) -> np.ndarray:
    """Returns whether numbers are powers of two or zero."""
    mantissa, _ = np.frexp(x)
    return (np.abs(mantissa) == 0.5) | (x == 0)


def _sum_of_two(operator: Any, eqn: Any, a: np.ndarray, b: np.ndarray) -> tuple[Any, Any]:
    exact = operator(a, b)
    return exact, UNIT_ROUNDOFF * np.where((a == 0) | (b == 0), 0.0, np.abs(exact))


def _product(eqn: Any, a: np.ndarray, b: np.ndarray) -> tuple[Any, Any]:
    exact = a * b
    return exact, UNIT_ROUNDOFF * np.where(_is_power(a) | _is_power(b), 0.0, np.abs(exact))


def _square(eqn: Any, x: np.ndarray) -> tuple[Any, Any]:
    assert eqn.params.get("y", 2) == 2
    return _product(eqn, x, x)


def _quotient(eqn: Any, a: np.ndarray, b: np.ndarray) -> tuple[Any, Any]:
    exact = a / b
    error = ROOT_ROUNDINGS * UNIT_ROUNDOFF * np.abs(exact)
    return exact, np.where(_is_power(b) | ~np.isfinite(error), 0.0, error)


def _root(eqn: Any, x: np.ndarray) -> tuple[Any, Any]:
    exact = np.sqrt(x)
    return exact, ROOT_ROUNDINGS * UNIT_ROUNDOFF * exact


def _sum(eqn: Any, x: np.ndarray) -> tuple[Any, Any]:
    axes = eqn.params["axes"]
    terms = math.prod(x.shape[axis] for axis in axes)
    error = max(0, terms - 1) * UNIT_ROUNDOFF * np.sum(np.abs(x), axes)
    return np.sum(x, axes), error


def _inner_product(eqn: Any, a: np.ndarray, b: np.ndarray) -> tuple[Any, Any]:
    assert eqn.params["precision"] == (lax.Precision.HIGHEST,) * 2, "the proof needs full precision"
    terms = math.prod(a.shape[axis] for axis in eqn.params["dimension_numbers"][0][0])
    error = terms * UNIT_ROUNDOFF * _bind(eqn, np.abs(a), np.abs(b))[0]
    return _bind(eqn, a, b)[0], error


def _scatter(
    eqn: Any, target: np.ndarray, index: np.ndarray, updates: np.ndarray
) -> tuple[Any, Any]:
    def add(target: np.ndarray, updates: np.ndarray) -> np.ndarray:
        numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
        with jax.enable_x64(True):
            return np.asarray(lax.scatter_add(target, index, updates, numbers, mode=mode))

    terms = math.prod(index.shape[:-1])
    error = max(0, terms - 1) * UNIT_ROUNDOFF * add(np.abs(target), np.abs(updates))
    return add(target, updates), error


def _narrower(eqn: Any, x: np.ndarray) -> tuple[Any, Any]:
    return x, 2.0 ** -(eqn.params["mantissa_bits"] + 1) * np.abs(x)


_ROUNDED: dict[str, Callable[..., tuple[Any, Any]]] = {
    "add": functools.partial(_sum_of_two, np.add),
    "sub": functools.partial(_sum_of_two, np.subtract),
    "mul": _product,
    "square": _square,
    "integer_pow": _square,
    "div": _quotient,
    "sqrt": _root,
    "reduce_sum": _sum,
    "dot_general": _inner_product,
    "scatter-add": _scatter,
    "reduce_precision": _narrower,
}


def largest(ratio: Callable[[Machine], float], *, seed: int = 0) -> float:
    """Returns the largest `ratio(machine)` over the errors that the search finds.

    Errors are so small that their effects add up, so each sign is tried once.
    """
    programs: list[Any] = []
    probe = Machine(programs)
    ratio(probe)
    rng, sizes = np.random.default_rng(seed), probe.sizes
    ends = np.cumsum(sizes)
    operations = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    random = np.concatenate([np.full(size, rng.choice([-1.0, 1.0])) for size in sizes])

    def found(signs: np.ndarray) -> float:
        return float(ratio(Machine(programs, signs)))

    best, signs = max(((found(s), s) for s in (random, -abs(random), abs(random))), key=_first)
    single = [i[:, None] for i in operations if 1 < len(i) <= _SINGLE_FLIPS]
    places = [*operations, *(place for each in single for place in each)]
    for which in rng.permutation(len(places))[:_FLIPS]:
        signs[places[which]] *= -1
        now = found(signs)
        if now > best:
            best = now
        else:
            signs[places[which]] *= -1
    return best


def _first(pair: tuple[float, np.ndarray]) -> float:
    return pair[0]
