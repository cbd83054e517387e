"""Adds correlated noise in fixed point, using an integer recursion."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax._clipped_sum.clipped_sum import ClippedSum
from dpoptax._random import tree_noise
from dpoptax._random.discrete_gaussian import REACH
from dpoptax._release.fixed_point import grid_of, integers, round_to_grid, stddev_in_steps
from dpoptax._release.ledger import Mechanism
from dpoptax._rounding.integer_sums import LARGEST_GRID_SUM
from dpoptax._support.tree import PyTree
from dpoptax.matrix._strategies import BandedToeplitz

# Coefficients are rounded to multiples of 2⁻¹¹ of the first. Their products with the low 11 bits
# and with the remaining high bits of an integer then fit in an int32.
_BITS = 11
# The number of coefficients of 1/c(z) that are computed to bound their sum.
_HORIZON = 4096


def multiples(strategy: BandedToeplitz) -> tuple[int, ...]:
    """Returns 2¹¹ c_i/c_0 for i = 1, 2, …, rounded."""
    first, *others = strategy.coefficients
    return tuple(round(2**_BITS * c / first) for c in others)


def stddev_of_band(strategy: BandedToeplitz, clipped: ClippedSum, sigma: float, g: float) -> float:
    """Returns the standard deviation, on a sum, of the noise that drives Y.

        σ (‖c‖ (C + √d g) + √((b − 1) d) g),   c = (1, c_1/c_0, …)

    One example changes the rounded sum by at most C + √d g. This changes the noise of b steps in
    proportion to c, and rounding adds up to g for each coordinate in b − 1 of them. The larger
    allowance for rounding, √d g, is used even if the summands were rounded, because the noise has
    the same scale in all steps.
    """
    taps, d = multiples(strategy), optax.tree.size(clipped.sum)
    # ‖c‖ of the rounded coefficients, whose first one is 2¹¹/2¹¹.
    norm = math.hypot(2**_BITS, *taps) / 2**_BITS
    moved = clipped.clip.sensitivity + math.sqrt(d) * g
    return sigma * (norm * moved + math.sqrt(len(taps) * d) * g)


def begin_buffers(strategy: BandedToeplitz, params: PyTree) -> PyTree:
    """Returns int32 zeros as the noise of b − 1 steps before the first step."""
    # Separate arrays: a donated state must not hold the same array twice.
    return tuple(
        jax.tree.map(lambda p: jnp.zeros_like(p, jnp.int32), params) for _ in multiples(strategy)
    )


def add_correlated_noise(
    clipped: ClippedSum,
    strategy: BandedToeplitz,
    mechanism: Mechanism,
    buffers: PyTree,
    key: jax.Array,
) -> tuple[PyTree, PyTree]:
    """Returns the noisy sum and the noise of the last b − 1 steps.

        Y_t = N_t − round(Σ_{0<i<b} c_i Y_{t−i}/c_0),    g · (round(sum/g) + Y_t)

    N_t is a discrete Gaussian. Y is computed exactly in integers, as the privacy proof requires
    (docs/developers/fixed-point.md).

    Args:
      clipped: the sum.
      strategy: c, with b coefficients.
      mechanism: σ and B.
      buffers: Y_{t−1}, …, Y_{t−b+1}, starting from `begin_buffers`.
      key: the key of this step.
    """
    g = grid_of(clipped, mechanism)
    stddev = stddev_of_band(strategy, clipped, mechanism.noise_multiplier, g)
    steps, taps = stddev_in_steps(stddev, g), multiples(strategy)
    _check_range(taps, steps)
    white = tree_noise.each_leaf(clipped.sum, key, integers(steps), lambda leaf, drawn: drawn)

    def correlated(drawn: jax.Array, *past: jax.Array) -> jax.Array:
        return drawn - product(taps, past)

    noise = jax.tree.map(correlated, white, *buffers)
    noisy = jax.tree.map(lambda leaf, noise: round_to_grid(leaf, noise, g), clipped.sum, noise)
    return noisy, (noise, *buffers)[: len(taps)]


def product(taps: Sequence[int], past: Sequence[jax.Array]) -> jax.Array:
    """Returns round(Σ k y/2¹¹), rounding halves up.

    The result is exact if Σ |k| < 2²⁰ and it fits in an int32.
    """
    # Σ k y/2¹¹ = Σ k (y >> 11) + Σ k (y mod 2¹¹)/2¹¹, and the first sum is an integer.
    # Half of 2¹¹, so that the last shift rounds to the nearest integer instead of down.
    whole, rest = jnp.int32(0), jnp.int32(2 ** (_BITS - 1))
    for k, y in zip(taps, past, strict=True):
        whole += k * (y >> _BITS)
        rest += k * (y & (2**_BITS - 1))
    return whole + (rest >> _BITS)


def _check_range(taps: tuple[int, ...], steps: float) -> None:
    """Raises an error if the noise plus the sum may exceed int32."""
    # |Y_t| ≤ Σ|h| (|N_t| + 1), where 1 covers the rounding of a step. The sum needs the other half
    # of an int32.
    most = LARGEST_GRID_SUM / (REACH * steps + 1.0)
    if sum(map(abs, taps)) >= 2 ** (31 - _BITS) or _sum_of_inverse(taps) > most:
        raise ValueError(
            f"`strategy` accumulates the noise of more than {most:.3g} steps, which may exceed "
            "int32 in fixed point. Choose coefficients for which the poles of 1/Σ c_i zⁱ are "
            "further outside the unit circle, or use noise in floating point."
        )


@functools.lru_cache(maxsize=16)
def _sum_of_inverse(taps: tuple[int, ...]) -> float:
    """Bounds Σ_t |h_t|, with h the coefficients of 1/Σ c_i zⁱ; inf without a bound.

    The tail after a horizon T depends only on the last b − 1 coefficients. It equals the response
    to inputs u_j = −Σ_{i≥j} c_i h_{T+j−i−1} in b − 1 steps. Hence Σ_t |h_t| ≤ Σ_{t<T} |h_t| + Σ_j
    |u_j| Σ_t |h_t|.
    """
    c = np.array([1.0, *(k / 2**_BITS for k in taps)])
    h = reciprocal(c.tolist(), _HORIZON)
    bands = len(taps)
    past = np.concatenate([np.zeros(bands), h])[::-1][:bands]  # h_{T−1}, h_{T−2}, …
    share = sum(abs(c[j:] @ past[: len(c) - j]) for j in range(1, bands + 1))
    # Σ_t |h_t| ≤ Σ_{t<T} |h_t| + share · Σ_t |h_t|, solved for the infinite sum.
    return float(np.abs(h).sum() / (1.0 - share)) if share < 1.0 else math.inf


def reciprocal(coefficients: Sequence[float], steps: int) -> np.ndarray:
    """Returns the power series of 1/Σ d_i zⁱ with d_0 = 1."""
    d = np.asarray(coefficients)
    series = np.zeros(steps)
    series[0] = 1.0
    for t in range(1, steps):
        # h_t = −Σ_{i ≥ 1} d_i h_{t−i}.
        past = series[max(0, t + 1 - d.size) : t][::-1]
        series[t] = -d[1 : 1 + past.size] @ past
    return series
