"""Adds and multiplies integers below 2⁹⁶ exactly, in limbs of 16 bits.

A wide integer is an array (6, …) of uint32, each limb below 2¹⁶, the least significant first. All
operations are sums and products of 32-bit integers that do not overflow. So the results do not
depend on rounding or on the order of sums.
"""

import jax
import jax.numpy as jnp

_LIMBS = 6
_BITS = 16
_LOW = 2**_BITS - 1
# So many limbs below 2¹⁸ have a sum below 2³¹.
_BLOCK = 2**13


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Returns Σ x² along the last axis, (6, …), of fewer than 2³³ numbers in int32."""
    # The magnitude of −2³¹ wraps around to itself, which is 2³¹ as an unsigned integer.
    magnitude = jnp.abs(x.astype(jnp.int32)).astype(jnp.uint32)
    low, high = magnitude & _LOW, magnitude >> _BITS
    # x² = low² + 2 low high 2¹⁶ + high² 2³²
    square, cross, top = low * low, low * high, high * high
    limbs = [
        square & _LOW,
        (square >> _BITS) + 2 * (cross & _LOW),
        2 * (cross >> _BITS) + (top & _LOW),
        top >> _BITS,
    ]
    sums = [_block_sums(limb) for limb in limbs]
    zero = jnp.zeros_like(sums[0])
    return total(_carry([*sums, *[zero] * (_LIMBS - len(sums))]))


def total(x: jax.Array) -> jax.Array:
    """Returns the sum along the last axis of wide integers (6, …, N)."""
    while x.shape[-1] > 1:
        x = _carry(list(_block_sums(x)))
    return x[..., 0]


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the products of wide integers, which must be below 2⁹⁶."""
    columns = [jnp.zeros_like(a[0]) for _ in range(_LIMBS)]
    for i in range(_LIMBS):
        for j in range(_LIMBS - i):
            product = a[i] * b[j]
            columns[i + j] += product & _LOW
            if i + j + 1 < _LIMBS:
                columns[i + j + 1] += product >> _BITS
    return _carry(columns)


def at_most(x: jax.Array, bound: int) -> jax.Array:
    """Returns whether wide integers (6, …) are at most `bound`, which is below 2⁹⁶."""
    below, equal = jnp.zeros(x.shape[1:], bool), jnp.ones(x.shape[1:], bool)
    for i in reversed(range(_LIMBS)):
        limit = bound >> (_BITS * i) & _LOW
        below |= equal & (x[i] < limit)
        equal &= x[i] == limit
    return below | equal


def _block_sums(limbs: jax.Array) -> jax.Array:
    """Returns sums of blocks along the last axis, (…, blocks)."""
    count = max(1, -(-limbs.shape[-1] // _BLOCK))
    missing = count * _BLOCK - limbs.shape[-1] if count > 1 else 0
    padded = jnp.pad(limbs, [(0, 0)] * (limbs.ndim - 1) + [(0, missing)])
    return jnp.sum(padded.reshape(*limbs.shape[:-1], count, -1), axis=-1, dtype=jnp.uint32)


def _carry(columns: list[jax.Array]) -> jax.Array:
    """Returns the wide integer Σ_i columns[i] 2^(16 i), for columns below 2³¹."""
    limbs, carry = [], jnp.zeros_like(columns[0])
    for column in columns:
        value = column + carry
        limbs.append(value & _LOW)
        carry = value >> _BITS
    return jnp.stack(limbs)
