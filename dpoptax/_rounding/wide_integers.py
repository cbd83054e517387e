"""Adds and multiplies integers below 2¹²⁸ exactly, in limbs of 16 bits.

A wide integer is an array (8, …) of uint32, each limb below 2¹⁶, the least significant first. All
operations are sums and products of 32-bit integers that do not overflow. So the results do not
depend on rounding or on the order of sums.
"""

import jax
import jax.numpy as jnp

_LIMBS = 8
_BITS = 16
_LOW = 2**_BITS - 1
# So many limbs below 2¹⁸ have a sum below 2³¹.
_BLOCK = 2**13


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Returns Σ x² along the last axis, (8, …), of fewer than 2³³ numbers in int32."""
    magnitude = _magnitude(x)
    return _sum_of_products(magnitude, magnitude)


def inner_products(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns wide integers whose difference is Σ a b along the last axis, for int32.

    The first is the sum of positive products, the second of the others' magnitudes.
    """
    signs = (a < 0) != (b < 0)
    magnitude = _magnitude(a)
    parts = jnp.stack([jnp.where(signs, 0, magnitude), jnp.where(signs, magnitude, 0)])
    found = _sum_of_products(parts, jnp.broadcast_to(_magnitude(b), parts.shape))
    return found[:, 0], found[:, 1]


def _magnitude(x: jax.Array) -> jax.Array:
    # The magnitude of −2³¹ wraps around to itself, which is 2³¹ as an unsigned integer.
    return jnp.abs(x.astype(jnp.int32)).astype(jnp.uint32)


def _sum_of_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns Σ a b along the last axis, for uint32."""
    (a_low, a_high), (b_low, b_high) = ((x & _LOW, x >> _BITS) for x in (a, b))
    low, high = a_low * b_low, a_high * b_high
    crossed = (a_low * b_high, a_high * b_low)
    # Each is below 2¹⁸.
    limbs = [
        low & _LOW,
        (low >> _BITS) + sum(x & _LOW for x in crossed),
        sum(x >> _BITS for x in crossed) + (high & _LOW),
        high >> _BITS,
    ]
    sums = [_block_sums(limb) for limb in limbs]
    zero = jnp.zeros_like(sums[0])
    return total(_carry([*sums, *[zero] * (_LIMBS - len(sums))]))


def total(x: jax.Array) -> jax.Array:
    """Returns the sum along the last axis of wide integers (8, …, N)."""
    while x.shape[-1] > 1:
        x = _carry(list(_block_sums(x)))
    return x[..., 0]


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the products of wide integers, which must be below 2¹²⁸."""
    columns = [jnp.zeros_like(a[0]) for _ in range(_LIMBS)]
    for i in range(_LIMBS):
        for j in range(_LIMBS - i):
            product = a[i] * b[j]
            columns[i + j] += product & _LOW
            if i + j + 1 < _LIMBS:
                columns[i + j + 1] += product >> _BITS
    return _carry(columns)


def constant(value: int) -> jax.Array:
    """Returns a number as a wide integer, (8,)."""
    return jnp.array([value >> (_BITS * i) & _LOW for i in range(_LIMBS)], jnp.uint32)


def at_most(x: jax.Array, bound: jax.Array) -> jax.Array:
    """Returns whether wide integers (8, …) are at most others of the same shape."""
    below, equal = jnp.zeros(x.shape[1:], bool), jnp.ones(x.shape[1:], bool)
    for i in reversed(range(_LIMBS)):
        below |= equal & (x[i] < bound[i])
        equal &= x[i] == bound[i]
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
