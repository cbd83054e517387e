"""DOPPLER's optimal finite filter, its coefficients estimated from the released gradients."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from dpoptax._clip.clipped_sum import check_released
from dpoptax._tree import PyTree, check_decays, check_known, check_stddev


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
    """A finite low-pass filter whose coefficients follow the correlation of the gradients.

        P_t = mean over time of ‖g_t‖² − d · stddev²,    A_τ = mean over time of ⟨g_t, g_{t−τ}⟩,
        c_0 = 1/2,   c_τ = A_τ/P_t − 1/2, kept in [0, 1/2],   b_τ = c_τ/Σ c,   m_t = Σ_τ b_τ g_{t−τ}

    over the gradients that there are: b sums to 1 from the first step. The noise of different steps
    is independent, so A_τ is free of it, and its known power d · stddev² is taken off P; P is at
    least the standard deviation that the noise leaves in it. Gradients that stand still make a
    moving average, gradients that turn at every step b = (1, 0, …), which is no filter.

    Input and output: privatized mean gradients. Privacy: post-processing, no cost: only released
    values and the public noise level are read. Memory: length − 1 copies of the parameters; as many
    inner products a step.

    Args:
      length: the number of coefficients, at least 2.
      stddev: the noise's standard deviation in the released mean, absolute; see
        `dpoptax.extend.noise_stddev`.
      decay: of the means over time, in [0, 1).
      accumulator_dtype: the dtype of the kept gradients; by default the parameters'.

    Returns:
      An `optax.GradientTransformation`.

    Raises:
      ValueError: `length` below 2, `stddev` not positive and finite, or `decay` outside [0, 1).

    Source: DOPPLER, section 5.3, "Optimal FIR filter". There P is floored step by step, which
    biases it upwards under much noise; here its mean is floored. c_τ ≤ 1/2 is Cauchy and Schwarz's.

    >>> tx = adaptive_fir(length=4, stddev=1.1 * 1.0 / 256)
    """
    check_known(length=length)
    if not (isinstance(length, int) and length >= 2):
        raise ValueError(f"length={length}: want an integer, at least 2")
    check_stddev(stddev, zero=False)
    check_decays(decay=decay)
    noise = float(stddev) ** 2
    # The variance that a running mean has left of one step's.
    share = (1.0 - decay) / (1.0 + decay)

    def coefficients(
        power: jax.Array, products: jax.Array, count: jax.Array, size: int
    ) -> jax.Array:
        """b from the means of the steps 0 … count; lags that have no gradient yet get 0."""
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
        # A lag's mean starts with the first step that has a gradient at this lag.
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
    """⟨x, y⟩ over all leaves, in float32."""
    products = jax.tree.map(
        lambda a, b: jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32)), x, y
    )
    return jnp.asarray(sum(jax.tree.leaves(products)), jnp.float32)
