"""DOPPLER's optimal finite filter, estimated from released gradients."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from dpoptax._clipped_sum.clipped_sum import check_released
from dpoptax._support.tree import PyTree, check_decays, check_known, check_stddev


class AdaptiveFirState(NamedTuple):
    """State of `adaptive_fir`.

    Attributes:
      count: the number of updates so far, int32.
      past: g_{t−1}, …, g_{t−length+1}, each shaped like the parameters.
      power: a running mean of ‖g_t‖² − d · stddev², float32.
      products: running means of ⟨g_t, g_{t−τ}⟩ for τ = 1, 2, …, float32 of shape (length − 1,).
      b: the last coefficients, for logs, float32 of shape (length,).
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count
    past: tuple[PyTree, ...]
    power: jax.Array
    products: jax.Array
    b: jax.Array


def adaptive_fir(
    length: int, stddev: float, *, decay: float = 0.95, accumulator_dtype: DTypeLike | None = None
) -> optax.GradientTransformation:
    """Applies a finite low-pass filter that follows the correlation of gradients.

        P_t = mean over time of ‖g_t‖² − d · stddev²,    A_τ = mean over time of ⟨g_t, g_{t−τ}⟩,
        c_0 = 1/2,   c_τ = A_τ/P_t − 1/2 clipped to [0, 1/2],  b_τ = c_τ/Σ c,  m_t = Σ_τ b_τ g_{t−τ}

    over the available gradients, so b sums to 1 from the first step. The noise of different steps
    is independent, so A_τ is free of it. Its known power d · stddev² is subtracted from P, and P is
    floored at the standard deviation of its own noise. Constant gradients give a moving average.
    Gradients that reverse at every step give b = (1, 0, …), which does not filter.

    Input and output: privatized mean gradients. Privacy: post-processing, at no cost. Memory:
    length − 1 copies of the parameters. Time: length − 1 inner products per step.

    Args:
      length: the number of coefficients, at least 2.
      stddev: the absolute standard deviation of the noise in the released mean; see
        `dpoptax.extend.noise_stddev`.
      decay: decay of the means over time, in [0, 1).
      accumulator_dtype: the dtype of the stored gradients. Defaults to that of the parameters.

    Raises:
      ValueError: `length` is below 2, `stddev` is not positive and finite, or `decay` is outside
        [0, 1).

    Source: DOPPLER, section 5.3, "Optimal FIR filter". There, P is floored step by step, which
    biases it upward if noise is large; here its mean is floored. c_τ ≤ 1/2 by the Cauchy–Schwarz
    inequality.

    >>> tx = adaptive_fir(length=4, stddev=1.1 * 1.0 / 256)
    """
    check_known(length=length)
    if not (isinstance(length, int) and length >= 2):
        raise ValueError(f"`length` must be an integer of at least 2, got {length}.")
    check_stddev(stddev, zero=False)
    check_decays(decay=decay)
    noise = float(stddev) ** 2
    # A running mean multiplies the variance of one step by this factor.
    share = (1.0 - decay) / (1.0 + decay)

    def coefficients(
        power: jax.Array, products: jax.Array, count: jax.Array, size: int
    ) -> jax.Array:
        """Returns b from the means of steps 0 … count; lags without a gradient get 0."""
        lags = jnp.arange(1, length)
        seen = jnp.maximum(count + 1 - lags, 0)
        power = power / (1.0 - jnp.power(decay, count + 1))
        products = products / jnp.maximum(1.0 - jnp.power(decay, seen), 1e-6)
        power = jnp.maximum(power, noise * math.sqrt(2.0 * size * share))
        c = jnp.where(seen > 0, jnp.clip(products / power - 0.5, 0.0, 0.5), 0.0)
        c = jnp.concatenate([jnp.full(1, 0.5), c])
        return c / jnp.sum(c)

    def init_fn(params: PyTree) -> AdaptiveFirState:
        past = [optax.tree.zeros_like(params, dtype=accumulator_dtype) for _ in range(length - 1)]
        zero = jnp.zeros([], jnp.float32)
        products, b = jnp.zeros(length - 1, jnp.float32), jnp.zeros(length, jnp.float32)
        return AdaptiveFirState(jnp.zeros([], jnp.int32), tuple(past), zero, products, b)

    def update_fn(
        updates: PyTree, state: AdaptiveFirState, params: PyTree = None
    ) -> tuple[PyTree, AdaptiveFirState]:
        del params
        check_released("adaptive_fir", updates)
        size = optax.tree.size(updates)
        square = _inner(updates, updates) - size * noise
        inner = jnp.stack([_inner(updates, g) for g in state.past])
        # The mean of a lag starts at the first step that has a gradient at this lag.
        seen = state.count >= jnp.arange(1, length)
        power = decay * state.power + (1.0 - decay) * square
        products = jnp.where(seen, decay * state.products + (1.0 - decay) * inner, 0.0)
        b = coefficients(power, products, state.count, size)

        def mix(g: jax.Array, *past: jax.Array) -> jax.Array:
            return sum(c * x.astype(jnp.float32) for c, x in zip(b, (g, *past), strict=True))

        out = jax.tree.map(lambda g, *past: mix(g, *past).astype(g.dtype), updates, *state.past)
        past = (optax.tree.cast_like(updates, state.past[0]), *state.past[:-1])
        count = optax.safe_increment(state.count)
        return out, AdaptiveFirState(count, past, power, products, b)

    return optax.GradientTransformation(init_fn, update_fn)


def _inner(x: PyTree, y: PyTree) -> jax.Array:
    """Returns ⟨x, y⟩ over all leaves, in float32."""
    products = jax.tree.map(
        lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), x, y
    )
    return jnp.asarray(sum(jax.tree.leaves(products)), jnp.float32)
