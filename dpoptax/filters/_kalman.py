"""Kalman gains, from given variances or estimated from released gradients."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from dpoptax._clipped_sum.clipped_sum import check_released
from dpoptax._support.argument_checks import check_decays, check_stddev
from dpoptax._support.tree import PyTree
from dpoptax.filters._disk import kalman_step


def kalman_gain(*, noise_stddev: float, drift_stddev: float, hessian_stddev: float = 0.0) -> float:
    """Returns the gain κ to which DiSK's scalar Kalman filter converges.

    With s = σ_H² + σ_v², the error variance p and the gain k follow

        k_t = (p_{t−1} + s)/(p_{t−1} + σ_w² + σ_v²),    p_t = (1 − k_t)(p_{t−1} + s),

    and converge to p_∞ = (√(s (s + 4(σ_w² − σ_H²))) − s)/2, κ = (p_∞ + s)/(p_∞ + σ_w² + σ_v²).

    Args:
      noise_stddev: σ_w, the absolute noise of one coordinate of the released gradient.
      drift_stddev: σ_v, the change of one coordinate of the gradient per step beyond the
        prediction.
      hessian_stddev: σ_H, the error of the predicted change.

    Raises:
      ValueError: a standard deviation is negative or not finite, or σ_w is not above σ_H.

    Source: DiSK, appendix A.3, steps 3 and 4.

    >>> round(kalman_gain(noise_stddev=1.0, drift_stddev=0.5), 4)
    0.3904
    """
    values = (noise_stddev, drift_stddev, hessian_stddev)
    names = ("noise_stddev", "drift_stddev", "hessian_stddev")
    for name, value in zip(names, values, strict=True):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"`{name}` must be finite and non-negative, got {value}.")
    if noise_stddev <= hessian_stddev:
        raise ValueError(
            f"`noise_stddev` must be above hessian_stddev={hessian_stddev}, got {noise_stddev}. "
            "Otherwise the released gradient is better than any prediction, and a filter is not "
            "needed."
        )
    w, v, h = (value**2 for value in values)
    s = h + v
    p = (math.sqrt(s * (s + 4.0 * (w - h))) - s) / 2.0
    return (p + s) / (p + w + v)


class AdaptiveKalmanState(NamedTuple):
    """State of `adaptive_kalman`, with scalars, or one per leaf if `per_leaf`.

    Attributes:
      count: the number of updates so far, int32.
      estimate: the filtered gradient, shaped like the parameters.
      drift: a running mean of the estimates of σ_v², before bias correction, float32.
      variance: p_{t−1}, the error variance of a coordinate of `estimate`, float32.
      gain: the last gain k_t, for logs, float32.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count
    estimate: PyTree
    drift: jax.Array
    variance: jax.Array
    gain: jax.Array


def adaptive_kalman(
    stddev: float,
    *,
    decay: float = 0.95,
    per_leaf: bool = False,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Applies a first-order Kalman filter that estimates its gain from releases.

    The noise power of a release is known. Innovation beyond the noise and the filter's error is the
    drift of the signal. With e_t = g_t − g̃_{t−1} in d coordinates,

        r_t = mean over time of ‖e_t‖²/d − stddev² − p_{t−1},
        q_t = E[q | r_t, q ≥ 0] = r_t + s_t φ(r_t/s_t)/Φ(r_t/s_t),
        k_t = (p_{t−1} + q_t)/(p_{t−1} + q_t + stddev²),
        g̃_t = g̃_{t−1} + k_t e_t,    p_t = (1 − k_t)(p_{t−1} + q_t),

    starting from g̃_0 = g_0, p_0 = stddev². r_t is normal about the drift with standard error s_t =
    √(2/(d n_t)) (stddev² + p_{t−1}), n_t the number of steps in the mean over time. q_t is the
    posterior mean of the drift. It stays positive if r_t cannot resolve the drift, so the gain does
    not go to zero. The gain starts as that of the running mean, 1/(t + 1), and converges to that of
    `kalman_gain` for the drift. Sampling noise counts as drift. `disk` has a fixed gain and also
    predicts along the step.

    Input and output: privatized mean gradients. Privacy: post-processing, at no cost. Memory: one
    copy of the parameters.

    Args:
      stddev: the absolute standard deviation of the noise in the released mean, noise multiplier
        times clipping bound over batch size; see `dpoptax.extend.noise_stddev`.
      decay: decay of the mean over time, in [0, 1). 0.95 averages over about 20 steps.
      per_leaf: whether each leaf has its own gain. Leaves with few coordinates cannot resolve it
        and are filtered little, because s_t grows with √(1/d).
      accumulator_dtype: the dtype of the filtered gradient. Defaults to that of the parameters.

    Raises:
      ValueError: `stddev` is not positive and finite, or `decay` is outside [0, 1).

    >>> tx = adaptive_kalman(stddev=1.1 * 1.0 / 256)
    """
    check_stddev(stddev, zero=False)
    check_decays(decay=decay)
    noise = float(stddev) ** 2

    def init_fn(params: PyTree) -> AdaptiveKalmanState:
        groups = len(jax.tree.leaves(params)) if per_leaf else 1
        estimate = optax.tree.zeros_like(params, dtype=accumulator_dtype)
        # Separate buffers: a donated state must not hold the same buffer twice.
        drift, variance, gain = (jnp.zeros(groups, jnp.float32) for _ in range(3))
        return AdaptiveKalmanState(jnp.zeros([], jnp.int32), estimate, drift, variance, gain)

    def update_fn(
        updates: PyTree, state: AdaptiveKalmanState, params: PyTree = None
    ) -> tuple[PyTree, AdaptiveKalmanState]:
        del params
        check_released("adaptive_kalman", updates)
        gradients, treedef = jax.tree.flatten(updates)
        estimates = jax.tree.leaves(state.estimate)
        squares = [
            jnp.sum(jnp.square(g.astype(jnp.float32) - e.astype(jnp.float32)))
            for g, e in zip(gradients, estimates, strict=True)
        ]
        sizes = [max(g.size, 1) for g in gradients]
        if not per_leaf:
            squares, sizes = [jnp.sum(jnp.stack(squares))], [sum(sizes)]
        counts = jnp.asarray(sizes, jnp.float32)
        power = jnp.stack(squares) / counts
        gain, drift, variance = _estimate_gain(state, power, counts, noise, decay)
        gains = gain if per_leaf else jnp.broadcast_to(gain, (len(gradients),))
        estimates = [
            kalman_step(e, g, k) for e, g, k in zip(estimates, gradients, gains, strict=True)
        ]
        out = [e.astype(g.dtype) for e, g in zip(estimates, gradients, strict=True)]
        count = optax.safe_increment(state.count)
        estimate = jax.tree.unflatten(treedef, estimates)
        return jax.tree.unflatten(treedef, out), AdaptiveKalmanState(
            count, estimate, drift, variance, gain
        )

    return optax.GradientTransformation(init_fn, update_fn)


def _estimate_gain(
    state: AdaptiveKalmanState, power: jax.Array, sizes: jax.Array, noise: float, decay: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Estimates gain, mean drift and error variance from the mean square innovation.

    `power` is that of groups of `sizes` entries.
    """
    # The mean square of the innovation is drift + noise + variance.
    drift = decay * state.drift + (1.0 - decay) * (power - noise - state.variance)
    forgotten = jnp.power(decay, jnp.maximum(state.count, 1))
    error = jnp.sqrt(2.0 * _mean_share(decay, forgotten) / sizes) * (noise + state.variance)
    predicted = state.variance + _mean_above_zero(drift / (1.0 - forgotten), error)
    first = state.count == 0
    gain = jnp.where(first, 1.0, predicted / (predicted + noise))
    variance = jnp.where(first, noise, (1.0 - gain) * predicted)
    return gain, jnp.where(first, 0.0, drift), variance


def _mean_share(decay: float, forgotten: jax.Array) -> jax.Array:
    """Returns the variance share of a running mean of n steps with weights w_i ∝ β^i.

        Σ w_i² = (1 − β)/(1 + β) · (1 + β^n)/(1 − β^n)

    The mean multiplies the variance of independent noise by it. `forgotten` is β^n.
    """
    return (1.0 - decay) / (1.0 + decay) * (1.0 + forgotten) / (1.0 - forgotten)


def _mean_above_zero(estimate: jax.Array, error: jax.Array) -> jax.Array:
    """Returns the mean of N(estimate, error²) conditioned on being non-negative."""
    z = estimate / error
    ratio = jnp.exp(jax.scipy.stats.norm.logpdf(z) - jax.scipy.stats.norm.logcdf(z))
    # Far below zero the two terms cancel numerically, and the mean tends to error/|z|.
    return error * jnp.where(z < -10.0, -1.0 / jnp.minimum(z, -10.0), z + ratio)
