"""Draws normal noise with the Box–Muller transform, two numbers per 64-bit hash."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpoptax._random.keys import check_noise_key, words_at
from dpoptax._support.xla import materialize, places

# Up to this many numbers are stored as pairs. Tuned by hand on one x86 CPU.
_MAX_PAIRED_SIZE = 2**20
_VECTOR = 64  # pairs are hashed in multiples of this
_STREAM = 1  # a stream of hashes that `jax.random` does not use
_SIGN = 0x80000000
# Odd. The quotients of the continued fraction of this number over 2³² are at most 3, so its
# multiples are spread evenly.
_SPREAD = 0x9E3778C1
_ONE, _SQRT_HALF = 0x3F800000, 0x3F3504F3  # the bits of float32
# ln(1 + m) = m − m²/2 + m³ P(m); sin b = b + b³ S(b²); cos b = 1 − b²/2 + b⁴ C(b²).
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def normal(
    key: jax.Array,
    shape: Sequence[int] = (),
    *,
    leaf: ArrayLike = 0,
    out_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Draws standard normal float32 values, two from each hash.

        x = √(−2 ln U) cos θ,  y = √(−2 ln U) sin θ,  U uniform in (0, 1), θ in [0, 2π)

    The two words of threefry-2x32 (20 rounds) at counter 2³² (8 l + 1) + i, l = `leaf`, give pair
    i: U from the first word and θ from the second. x goes to the first half of the array along one
    axis, and y to the second half. Values are independent and normal, up to √(112 ln 2) = 8.8. The
    words depend only on key, leaf, shape and place, and no draw of `jax.random` uses them. The last
    bits of values may depend on the compiler.

    A multiple of the second word extends the bits of U, so that the 2⁶⁴ pairs are spread evenly
    over the plane. Otherwise they would lie on 2³² circles, far apart in the tails, and could
    reveal the sum (docs/privacy/floating-point.md).

    Each element computes its own pair. So nothing is stored, the noise fuses with its uses, and
    each device draws its own part in any layout.

    Args:
      key: a key of threefry or ChaCha20.
      shape: the shape of the result.
      leaf: the number of the result among those that are drawn with the same key.
      out_sharding: the sharding of the result, for explicit axes.

    Raises:
      TypeError: the key belongs to another generator.
      ValueError: the shape has more than 2³² elements.

    Source: G. Box and M. Muller, "A note on the generation of random normal deviates", 1958; for
    two words of one hash, `boxmuller` in J. Salmon et al.'s library Random123; for the polynomials,
    the Cephes library's `logf`, `sinf` and `cosf` (S. Moshier, 1992).

    >>> normal(jax.random.key(0), (3,)).dtype
    dtype('float32')

    """
    number = lax.convert_element_type(leaf, np.uint32)
    return _normal(check_noise_key(key), number, tuple(shape), out_sharding)


@functools.partial(jax.jit, static_argnums=(2, 3))  # leaves of a shape share a trace
def _normal(
    key: jax.Array,
    leaf: jax.Array,
    shape: tuple[int, ...],
    out_sharding: jax.sharding.NamedSharding | None,
) -> jax.Array:
    if not shape:
        return _normal(key, leaf, (1,), out_sharding)[0]
    axis, half = _halves(shape)
    halved = (*shape[:axis], half, *shape[axis + 1 :])
    strides = [math.prod(halved[i + 1 :]) for i in range(len(halved))]
    along = lax.broadcasted_iota(np.uint32, shape, axis, out_sharding=out_sharding)
    second = along >= half
    place = places(shape, strides, out_sharding)
    place = jnp.where(second, place - np.uint32(half * strides[axis]), place)
    radius, low, high, signs = _polar(*words_at(key, leaf, place, (_STREAM,)))
    signs = jnp.where(second, signs << 1, signs)
    return _signed(radius * jnp.where(second, high, low), signs)


def normal_vector(key: jax.Array, size: int, leaf: int = 0) -> jax.Array:
    """Returns `normal(key, (size,), leaf=leaf)`, for a vector that is stored.

    XLA's CPU kernels have a single result. On CPU, each pair is therefore hashed once and stored as
    one complex number, which both halves read. For large vectors this costs more than it saves,
    because allocations above 32 MB request new pages from the operating system in every step.
    """
    half = -(-size // 2)

    def by_pairs() -> jax.Array:
        # XLA's CPU loops over an odd number of elements take five times as long.
        words = words_at(key, leaf, places((half + -half % _VECTOR,)), (_STREAM,))
        radius, low, high, signs = _polar(*words)
        x, y = _signed(radius * low, signs), _signed(radius * high, signs << 1)
        pairs = materialize(lax.complex(x, y))[:half]
        return jnp.concatenate([pairs.real, pairs.imag])[:size]

    # A large vector of odd length costs more in one loop over its numbers than in pairs.
    by_numbers = size > _MAX_PAIRED_SIZE and size % 2 == 0
    if by_numbers or not isinstance(key, jax.core.Tracer):
        return normal(key, (size,), leaf=leaf)
    return lax.platform_dependent(cpu=by_pairs, default=lambda: normal(key, (size,), leaf=leaf))


def _halves(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the axis along which numbers are paired, and its first half's length.

    It is the first axis that splits into two nearly equal parts.
    """
    fit = [i for i, size in enumerate(shape) if size % 2 == 0 or size > 8]
    axis = fit[0] if fit else int(np.argmax(shape))
    return axis, -(-shape[axis] // 2)


def _polar(first: jax.Array, last: jax.Array) -> tuple[jax.Array, ...]:
    """Returns √(−ln U), √2 |cos θ|, √2 |sin θ|, and signs in the top bits of `last`.

    For θ = π/4 + b in the first quadrant, √2 cos θ and √2 sin θ are cos b ∓ sin b.
    """
    radius = jnp.sqrt(_minus_log_uniform(first, last))
    # The two top bits of `last` are signs, which choose the quadrant. The other 30, shifted to the
    # top and read as a signed integer, are b in [−π/4, π/4).
    b = _integral(last << 2) * np.float32(math.pi / 4 * 2.0**-31)
    square = b * b
    sine = b + b * (square * _polynomial(_SIN, square))
    cosine = (
        np.float32(1) - np.float32(0.5) * square + square * (square * _polynomial(_COS, square))
    )
    return radius, cosine - sine, cosine + sine, last


def _minus_log_uniform(first: jax.Array, last: jax.Array) -> jax.Array:
    """Returns −ln U with the relative precision of float32.

    U is u or 1 − u, depending on the top bit of `first`. u = (w + d)/2³², with w the other 31 bits
    of `first`, and d in (0, 1) from the spread bits of `last`.
    """
    # The bits below those of `first` are from a multiple of `last`. Adding 1/2 keeps d in (0, 1).
    spread = (_integral((last * np.uint32(_SPREAD)) >> 9) + np.float32(0.5)) * np.float32(2.0**-23)
    # Near zero, u has full relative precision. It is at most 1/2, so U near 1 comes from 1 − u, and
    # its logarithm from the exact difference below.
    u = (_integral(first & np.uint32(0x7FFFFFFF)) + spread) * np.float32(2.0**-32)
    end = _integral(first >> 31)  # 0 for U = u, 1 for U = 1 − u
    uniform = jnp.abs(end - u)
    lost = u - jnp.abs(end - uniform)  # the rounding error of 1 − u
    # As in Cephes' logf: uniform = 2^exponent (1 + m) with 1 + m in [√½, √2).
    shifted = _bits(uniform) + np.uint32(_ONE - _SQRT_HALF)
    exponent = _integral(shifted >> 23) - np.float32(127)
    m = _float((shifted & np.uint32(0x7FFFFF)) + np.uint32(_SQRT_HALF)) - np.float32(1)
    square = m * m
    log = m + (m * square * _polynomial(_LOG, m) - np.float32(0.5) * square)
    return np.float32(-math.log(2)) * exponent - log + lost


def _integral(words: jax.Array) -> jax.Array:
    """Converts words, as signed integers, to float32."""
    return words.astype(jnp.int32).astype(jnp.float32)


def _polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    value = x * np.float32(coefficients[0]) + np.float32(coefficients[1])
    for coefficient in coefficients[2:]:
        value = value * x + np.float32(coefficient)
    return value


def _signed(x: jax.Array, signs: jax.Array) -> jax.Array:
    return _float(_bits(x) ^ (signs & np.uint32(_SIGN)))


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _float(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.float32)
