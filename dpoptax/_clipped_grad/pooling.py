"""The gradient of max-pooling without XLA's scatter, which one thread works through on CPU.

Where windows do not overlap, each entry of the input is in one of them at most, and its gradient is
the window's if it is the first of the greatest, else zero: comparisons, which all threads share,
and the same numbers, bit for bit.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive

Pads = Sequence[tuple[int, int]]


def wants_rewriting(eqn: JaxprEqn) -> bool:
    """Whether the windows of a pooling do not overlap."""
    windows, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    return all(size <= stride for size, stride in zip(windows, strides, strict=True))


def rewritten(eqn: JaxprEqn, source: jax.Array, operand: jax.Array) -> jax.Array:
    """The same selection and scatter, on CPU by comparisons of the entries of each window."""

    def by_comparisons(source: jax.Array, operand: jax.Array) -> jax.Array:
        return _select_and_place(source, operand, **eqn.params)

    def as_given(source: jax.Array, operand: jax.Array) -> jax.Array:
        return eqn.primitive.bind(source, operand, **eqn.params)

    return lax.platform_dependent(source, operand, cpu=by_comparisons, default=as_given)


def _select_and_place(
    source: jax.Array,
    operand: jax.Array,
    *,
    select_prim: Primitive,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Pads,
) -> jax.Array:
    """Puts each entry of `source` where its window of `operand` has the entry that is selected.

    The entries of a window are compared in order, as XLA compares them: the selected one stays
    where `select_prim(selected, next)` holds. Padding stands for what is never better, as in JAX.
    """
    places = list(itertools.product(*map(range, window_dimensions)))
    zero = np.zeros((), operand.dtype)
    never = np.asarray(-np.inf if select_prim is lax.ge_p else np.inf, operand.dtype)
    padded = lax.pad(operand, never, [(low, high, 0) for low, high in padding])
    entries = [
        lax.slice(padded, place, _stop(place, source.shape, window_strides), window_strides)
        for place in places
    ]
    selected, chosen = entries[0], jnp.zeros(source.shape, jnp.int32)
    for i, entry in enumerate(entries[1:], 1):
        stays = select_prim.bind(selected, entry)
        selected, chosen = jnp.where(stays, selected, entry), jnp.where(stays, chosen, i)

    def placed(i: int, place: Sequence[int]) -> jax.Array:
        config = [
            (at - low, size + low - stop, stride - 1)
            for at, stop, (low, _), size, stride in zip(
                place,
                _stop(place, source.shape, window_strides),
                padding,
                operand.shape,
                window_strides,
                strict=True,
            )
        ]
        return lax.pad(jnp.where(chosen == i, source, zero), zero, config)

    return functools.reduce(jnp.add, itertools.starmap(placed, enumerate(places)))


def _stop(place: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Behind the last of the entries that are at `place` of their windows."""
    return [
        at + (size - 1) * stride + 1 for at, size, stride in zip(place, shape, strides, strict=True)
    ]
