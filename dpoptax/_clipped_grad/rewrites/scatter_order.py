"""Makes scatters on GPUs independent of the order in which updates arrive.

XLA compiles a scatter for a GPU into one kernel for all examples. Its threads add with atomic
operations, and overwrite without any. Which update arrives first depends on contention, and so on
the indices of other examples, masked ones included. The contribution of an example must depend on
that example only (docs/developers/bound.md#scatters-on-gpus). So each entry of the result becomes
a function of the updates of this entry, in their order in the array or in no order:

- Sums are computed in integers, which are exact in any order.
- Values that are set, products and other functions take one index after the other, as on CPU.

- Operations of `jax.experimental.sparse` hide scatters, so they raise an error on a GPU. In a
  program that is compiled for a GPU elsewhere, their results are NaN, and examples add zero.

Maxima, minima and sums of integers are exact in any order. CPUs and TPUs take the indices of a
scatter one after the other, so they run the operation as it is.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from dpoptax._clipped_grad.rewrites.rewriting import Constants
from dpoptax._clipped_grad.rewrites.xla_rewrites import select_and_place, windows_are_apart
from dpoptax._support.jaxprs import SPARSE, bind, type_of, updates_per_entry
from dpoptax._support.marks import ANY_ORDER
from dpoptax._support.tree import float32_at_least

_GPUS = ("cuda", "rocm")
_SUMS = (lax.scatter_add_p, lax.scatter_sub_p)
# By dtype: the bits that a sum of integers may fill, and the bits of an update that are kept.
_BITS = {np.dtype(np.float32): (30, 32), np.dtype(np.float64): (62, 62)}


def rule(eqn: JaxprEqn, constants: Constants) -> Callable[..., Any] | None:
    """Returns the replacement of a scatter whose result may depend on an order, else `None`."""
    replacement = _find_replacement(eqn, constants)
    if replacement is None:
        return None

    def unchanged(*operands: jax.Array) -> Any:
        outputs = bind(eqn, operands)
        return list(outputs) if eqn.primitive.multiple_results else outputs[0]

    branches = dict.fromkeys(_GPUS, functools.partial(replacement, eqn))
    return functools.partial(lax.platform_dependent, **branches, default=unchanged)


def _find_replacement(eqn: JaxprEqn, constants: Constants) -> Callable[..., Any] | None:
    if eqn.primitive.name.startswith(SPARSE):
        _check_sparse(eqn.primitive.name)
        return _no_numbers
    if eqn.primitive is lax.select_and_scatter_add_p:
        # Windows that overlap are added one place in the window after the other.
        apart = windows_are_apart(eqn)
        return None if apart else lambda eqn, *of: select_and_place(*of, **eqn.params)
    if eqn.primitive not in (*_SUMS, lax.scatter_mul_p, lax.scatter_p):
        return None
    dtype = type_of(eqn.invars[0]).dtype
    # Integers add and multiply exactly in any order, but the last of several set values would win.
    exact = eqn.primitive is not lax.scatter_p and not jnp.issubdtype(dtype, jnp.inexact)
    # The rounding of scatters in this scope is bounded for any order of the updates.
    bounded = ANY_ORDER in str(eqn.source_info.name_stack)
    if exact or bounded or updates_per_entry(eqn) <= 1 or _are_distinct(eqn, constants):
        return None
    return _add if eqn.primitive in _SUMS else _apply_in_turn


def _are_distinct(eqn: JaxprEqn, constants: Constants) -> bool:
    """Returns whether constant indices have windows that do not overlap.

    In `logits[jnp.arange(n), labels]`, the first column of the indices is constant and different
    for each position, whatever the labels are.
    """
    numbers, shape = eqn.params["dimension_numbers"], type_of(eqn.invars[1]).shape[:-1]
    sizes, extents = type_of(eqn.invars[0]).shape, _window_sizes(eqn)
    columns = []
    for column, values in _constant_columns(eqn, constants):
        axis = numbers.scatter_dims_to_operand_dims[column]
        # Two indices outside may be clamped to one place.
        inside = np.all((values >= 0) & (values < sizes[axis]))
        # Windows of one entry along this axis are disjoint if their indices differ.
        if extents[axis] == 1 and inside:
            columns.append(np.broadcast_to(values, shape))
    if not columns:
        return False
    batching = numbers.scatter_indices_batching_dims
    stacked = np.moveaxis(np.stack(columns, -1), batching, range(len(batching)))
    by_batch = stacked.reshape(-1, updates_per_entry(eqn), len(columns))
    return all(len(np.unique(rows, axis=0)) == len(rows) for rows in by_batch)


def _constant_columns(eqn: JaxprEqn, constants: Constants) -> list[tuple[int, np.ndarray]]:
    """Returns the columns of a scatter's indices that are constant, with their numbers."""
    indices = eqn.invars[1]
    parts, last, stacked = [indices], type_of(indices).ndim - 1, False
    # `jnp` joins the indices of several axes along the last axis.
    joined = constants.definition(indices)
    if joined and last in (joined.params.get("dimension"), joined.params.get("axis")):
        stacked = joined.primitive.name == "stack"
        if stacked or joined.primitive is lax.concatenate_p:
            parts = joined.invars
    found, column = [], 0
    for part in parts:
        values, width = constants.value(part), 1 if stacked else type_of(part).shape[-1]
        if values is not None:
            values = values[..., None] if stacked else values
            found += [(column + i, values[..., i]) for i in range(width)]
        column += width
    return found


def _window_sizes(eqn: JaxprEqn) -> tuple[int, ...]:
    """Returns the size of a scatter's windows along each axis of the operand."""
    numbers, updates = eqn.params["dimension_numbers"], type_of(eqn.invars[2]).shape
    windows = iter(numbers.update_window_dims)
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    axes = range(type_of(eqn.invars[0]).ndim)
    return tuple(1 if axis in single else updates[next(windows)] for axis in axes)


def _add(eqn: JaxprEqn, operand: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    """Adds updates to the entries of `operand`, in integers.

    The largest update of an entry has an exponent, so all updates of the entry are multiples of a
    power of two and a remainder, and so are the remainders. Each sum of multiples is exact. An
    infinite sum counts its infinite terms.
    """
    if jnp.iscomplexobj(updates):
        parts = ((f(operand), f(updates)) for f in (jnp.real, jnp.imag))
        return lax.complex(*(_add(eqn, x, indices, y) for x, y in parts))
    wide = float32_at_least(updates)
    kind, (room, needed) = jnp.finfo(wide), _BITS[np.dtype(wide)]
    integer, beyond = jnp.dtype(f"int{kind.bits}"), 2**kind.nexp - 1
    # As many multiples of up to 2^bits as an entry has updates fit into the integer together.
    bits = room - math.ceil(math.log2(updates_per_entry(eqn)))
    # All kernels must read the same updates, so they are stored.
    updates = lax.optimization_barrier(updates.astype(wide))
    updates = -updates if eqn.primitive is lax.scatter_sub_p else updates
    # The biased exponent, without the sign. It is `beyond` for infinities and NaN.
    exponents = (lax.bitcast_convert_type(updates, integer) >> kind.nmant) & beyond
    zeros = lax.full_like(operand, 0, integer)
    largest = _scatter(lax.scatter_max, eqn, zeros, indices, exponents)
    # The exponent of each update's entry, so all updates of an entry have one unit.
    shared = _gather(eqn, largest, indices)
    infinite = [updates == jnp.inf, updates == -jnp.inf]
    # Scaled by the entry's exponent, so that the largest update has `bits` bits before the point.
    # An update with biased exponent e is below 2^(e - maxexp + 2).
    rest = _ldexp(jnp.where(jnp.isfinite(updates), updates, 0.0), bits + kind.maxexp - 2 - shared)
    total, sums = jnp.zeros_like(operand, wide), []
    # At least two sums, since infinities need one for each sign.
    for i in range(max(2, math.ceil(needed / bits))):
        # `rest` is below 2^bits. Both its whole part and its remainder are exact floats.
        whole = jnp.round(rest)
        rest = (rest - whole) * 2.0**bits
        steps = whole.astype(integer)
        if i < 2:  # sums of entries with infinities count these instead, one sign in each sum
            of_sign = infinite[i] | jnp.isnan(updates)
            steps = jnp.where(shared == beyond, of_sign.astype(integer), steps)
        sums.append(_scatter(lax.scatter_add, eqn, zeros, indices, steps))
    # From the finest sum to the coarsest: each is added below the last bits of the next.
    for steps in reversed(sums):
        total = steps.astype(wide) + total * 2.0**-bits
    # In an entry with infinities, these are the counts of both signs. NaN counted for both.
    above, below = (steps > 0 for steps in sums[:2])
    total = jnp.where(
        largest == beyond,
        jnp.where(above & below, jnp.nan, jnp.where(above, jnp.inf, -jnp.inf)),
        _ldexp(total, largest - (bits + kind.maxexp - 2)),
    )
    return (operand.astype(wide) + total).astype(operand.dtype)


def _ldexp(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns x · 2^exponent of finite floats, exactly, by their exponent bits.

    Subnormal numbers and results below the normal range become zero, results above it infinite. A
    product with 2^n would also be exact, but XLA may move the constant through other products.
    """
    kind = jnp.finfo(x.dtype)
    integer, most = jnp.dtype(f"int{kind.bits}"), 2**kind.nexp - 1
    n, bits = exponent.astype(integer), lax.bitcast_convert_type(x, integer)
    before = (bits >> kind.nmant) & most
    after = jnp.where(before > 0, before + n, 0)
    # Outside of the range, this addition overflows into sign or mantissa, and is not selected.
    shifted = lax.bitcast_convert_type(bits + (n << kind.nmant), x.dtype)
    beyond = jnp.where(after >= most, jnp.where(x < 0, -jnp.inf, jnp.inf), 0.0)
    return jnp.where((after > 0) & (after < most), shifted, beyond.astype(x.dtype))


def _apply_in_turn(
    eqn: JaxprEqn, operand: jax.Array, indices: jax.Array, updates: jax.Array
) -> jax.Array:
    """Applies a scatter to one index after the other, in all examples at once."""
    numbers = eqn.params["dimension_numbers"]
    batching = numbers.scatter_indices_batching_dims
    places = [i for i in range(updates.ndim) if i not in numbers.update_window_dims]
    axes = [i for i in range(indices.ndim - 1) if i not in batching]
    sizes = [indices.shape[i] for i in axes]

    # Axis `axes[n]` of the indices is axis `places[axes[n]]` of the updates.
    def step(i: jax.Array, result: jax.Array) -> jax.Array:
        at, values = indices, updates
        for axis, start in zip(axes, jnp.unravel_index(i, sizes), strict=True):
            at = lax.dynamic_slice_in_dim(at, start, 1, axis)
            values = lax.dynamic_slice_in_dim(values, start, 1, places[axis])
        return bind(eqn, [result, at, values])[0]

    found: jax.Array = lax.fori_loop(0, math.prod(sizes), step, operand)
    return found


def _check_sparse(name: str) -> None:
    """Raises an error if the default device is a GPU."""
    if jax.default_backend() == "gpu":
        raise TypeError(
            f"`loss_fn` must not compute {name} on a GPU, where the order of its additions depends "
            "on other examples, so that clipping would not bound how much one example moves the "
            "sum. Use a dense array, or `jax.ops.segment_sum` of the entries times their rows."
        )


def _no_numbers(eqn: JaxprEqn, *operands: jax.Array) -> Any:
    """Returns results of NaN, or of zero for integers."""
    del operands
    types = [type_of(v) for v in eqn.outvars]
    fill = [jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0 for x in types]
    found = [jnp.full(x.shape, value, x.dtype) for x, value in zip(types, fill, strict=True)]
    return found if eqn.primitive.multiple_results else found[0]


def _scatter(
    scatter: Callable[..., jax.Array],
    eqn: JaxprEqn,
    operand: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
) -> jax.Array:
    """Scatters other updates to the places of a scatter."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    return scatter(operand, indices, updates, numbers, mode=mode)


def _gather(eqn: JaxprEqn, values: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the values at the places of a scatter, shaped like its updates."""
    numbers = eqn.params["dimension_numbers"]
    where = lax.GatherDimensionNumbers(
        offset_dims=numbers.update_window_dims,
        collapsed_slice_dims=numbers.inserted_window_dims,
        start_index_map=numbers.scatter_dims_to_operand_dims,
        operand_batching_dims=numbers.operand_batching_dims,
        start_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
    sizes, mode = _window_sizes(eqn), eqn.params["mode"]
    return lax.gather(values, indices, where, sizes, mode=mode, fill_value=0)
