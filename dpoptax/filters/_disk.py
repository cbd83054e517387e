"""DiSK, a simplified Kalman filter with look-ahead gradients."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from dpoptax._clipped_sum.clipped_sum import check_released
from dpoptax._points.points import track_iterates
from dpoptax._support.argument_checks import check_known
from dpoptax._support.tree import PyTree


def disk(
    kappa: float = 0.7,
    gamma: float | None = 0.5,
    *,
    filter_gain: float | None = None,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Adds DiSK's prediction and filter to a chain, after the noise stage.

    It clips the per-example quantity

        c ∇ℓ(x_t + γ d; ξ) + (1 − c) ∇ℓ(x_t; ξ),    c = (1 − κ)/(κγ),    d = x_t − x_{t−1},

    and filters the privatized mean g_t by g̃_t = (1 − κ) g̃_{t−1} + κ g_t, with g̃_{−1} = g_0.
    Together these are Kalman's prediction g̃_{t−1} + H d and its correction with gain κ.
    `dpoptax.gradient_points` passes the points to `dpoptax.clipped_grad`. Any optax optimizer
    follows.

    Each example needs two gradients, or one if γ = (1 − κ)/κ (then c = 1) or κ = 1 (DP-SGD). For γ
    near 0, such as 0.01, the finite difference is close to its limit, ∇ℓ(x_t; ξ) + ((1 − κ)/κ)
    ∇²ℓ(x_t; ξ) d. γ = −1 is STORM. Without noise and clipping, and followed by SGD of step η, γ =
    (1 − κ)/κ is Nesterov's momentum μ = 1 − κ with step ηκ. Its look-ahead is μ/(1 − μ) instead of
    μ (the paper's appendix A.4 has μ).

    Privacy: the combination is clipped as one vector, so its sensitivity is the clipping bound and
    the cost is that of DP-SGD. The filter is post-processing. Memory: two copies of the parameters.

    Args:
      kappa: κ in (0, 1], the gain. `kalman_gain` computes it from variances. κ = 0.7 and γ = 0.5
        are the values of the paper's experiments.
      gamma: γ, the length of the look-ahead in units of the last step. Negative values look back,
        and `None` means (1 − κ)/κ.
      filter_gain: the gain of the filter, if it differs from κ. The implementation published with
        Opacus filters with 1 − κ; to reproduce its numbers, pass `filter_gain=1 - kappa`. It also
        divides the noise by √(c² + (1 − c)²), so it misses a target ε. This is not offered here.
      accumulator_dtype: the dtype of the filter's buffer. Defaults to that of the parameters.

    Returns:
      An `optax.GradientTransformation`; `update` needs `params`.

    Raises:
      ValueError: κ or the filter's gain is outside (0, 1], or γ is 0 or not finite.

    Source: Zhang et al., "DiSK: Differentially Private Optimizer with Simplified Kalman Filter for
    Noise Reduction", 2024, Algorithm 3; for the limit γ → 0, its Section 3.

    >>> tx = disk()  # kappa=0.7, gamma=0.5
    """
    gain = kappa if filter_gain is None else filter_gain
    check_known(kappa=kappa, gamma=1.0 if gamma is None else gamma, filter_gain=gain)
    for name, value in (("kappa", kappa), ("filter_gain", gain)):
        if not 0.0 < value <= 1.0:
            raise ValueError(f"`{name}` must be in (0, 1], got {value}.")
    if gamma is not None and not (math.isfinite(gamma) and gamma):
        raise ValueError(
            f"`gamma` must be finite and not 0, or None for (1 − κ)/κ, got {gamma}. A small number "
            "such as 0.01 approximates the Hessian-vector product."
        )
    return optax.chain(_tracker(kappa, gamma), _filter(gain, accumulator_dtype))


def _tracker(kappa: float, gamma: float | None) -> optax.GradientTransformation:
    """Returns the points, without gradients of weight zero."""
    ratio = (1.0 - kappa) / kappa
    gamma = ratio if gamma is None else gamma
    if ratio == 0.0:
        return track_iterates([(1.0, 0.0)], [1.0])
    c = ratio / gamma
    if math.isclose(c, 1.0, rel_tol=1e-12):
        return track_iterates([(1.0 + gamma, -gamma)], [1.0])
    return track_iterates([(1.0, 0.0), (1.0 + gamma, -gamma)], [1.0 - c, c])


class DiskFilterState(NamedTuple):
    """State of the filter of `disk`.

    Attributes:
      count: the number of updates so far, int32.
      estimate: g̃_{t−1}, shaped like the parameters.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count
    estimate: PyTree


def _filter(gain: float, accumulator_dtype: DTypeLike | None) -> optax.GradientTransformation:
    """Filters by g̃_t = (1 − κ) g̃_{t−1} + κ g_t, starting at g_0.

    It keeps its output, so the buffer is updated in place. `low_pass` would keep the output times
    its pole.
    """

    def init_fn(params: PyTree) -> DiskFilterState:
        estimate = optax.tree.zeros_like(params, dtype=accumulator_dtype)
        return DiskFilterState(jnp.zeros([], jnp.int32), estimate)

    def update_fn(
        updates: PyTree, state: DiskFilterState, params: PyTree = None
    ) -> tuple[PyTree, DiskFilterState]:
        del params
        check_released("disk", updates)
        kappa = jnp.where(state.count == 0, 1.0, gain)
        estimate = jax.tree.map(lambda e, g: kalman_step(e, g, kappa), state.estimate, updates)
        out = optax.tree.cast_like(estimate, updates)
        return out, DiskFilterState(optax.safe_increment(state.count), estimate)

    return optax.GradientTransformation(init_fn, update_fn)


def kalman_step(estimate: jax.Array, gradient: jax.Array, gain: float | jax.Array) -> jax.Array:
    """Returns Kalman's correction (1 − k) e + k g of the estimate e, in e's dtype."""
    return ((1.0 - gain) * estimate + gain * gradient.astype(estimate.dtype)).astype(estimate.dtype)
