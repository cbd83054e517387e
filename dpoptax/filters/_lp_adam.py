"""Adam for privatized gradients, with a low-pass filter and noise correction."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from dpoptax._support.argument_checks import check_decays, check_known, check_stddev
from dpoptax._support.tree import PyTree, float32_at_least
from dpoptax.filters._low_pass import LowPassState, low_pass


class ScaleByLpAdamState(NamedTuple):
    """State of `scale_by_lp_adam`.

    Attributes:
      count: the number of updates so far, int32.
      filtered: the state of the low-pass filter.
      nu: the second moment, shaped like the parameters, in float32 or wider.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count
    filtered: LowPassState
    nu: PyTree


def scale_by_lp_adam(
    b: Sequence[float],
    a: Sequence[float] = (),
    *,
    b2: float = 0.999,
    eps: float | None = None,
    stddev: float = 0.0,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Rescales updates by Adam with a low-pass first moment and a denoised second one.

        m_t = low_pass(b, a)(g)_t,    v_t = b2 v_{t−1} + (1 − b2) g_t²,    v̂_t = v_t/(1 − b2^{t+1}),
        update_t = m_t / max(√max(v̂_t − stddev², 0), eps)

    t starts at 0 and m_t is bias-corrected. The second moment is that of the *unfiltered*
    privatized gradient, whose noise is white. v̂ therefore estimates g² + stddev², and the known
    stddev² is subtracted. b = (1 − β₁,), a = (−β₁,) is Adam's own momentum, and with `stddev` it is
    DP-AdamBC; see `dpoptax.contrib.adam_bc`.

    For low-rank projection, use it with optax's GaLore: `optax.contrib.scale_by_galore(rank,
    base_optimizer=scale_by_lp_adam(b, a))`. The projector is post-processing, but aligns with the
    noise of the step that computes it, which `stddev` does not account for.

    Input: privatized mean gradients. Output: directions of order 1. Privacy: post-processing, at no
    cost. Memory: max(len(a), len(b) − 1) + 1 copies of the parameters.

    Args:
      b: feed-forward coefficients of the filter, b_0, b_1, …
      a: feedback coefficients a_1, a_2, …, without the leading 1.
      b2: decay of the second moment, in [0, 1).
      eps: the smallest denominator, in the units of the gradient. Defaults to 1e-8 if `stddev` is
        0. Otherwise defaults to stddev (2(1 − b2)/(1 + b2))^(1/4), the fourth root of the variance
        of v̂ due to noise.
      stddev: the absolute standard deviation of the noise in the released mean; see
        `dpoptax.extend.noise_stddev`. 0 subtracts nothing.
      accumulator_dtype: the dtype of the filter's buffers. Defaults to that of the parameters.

    Raises:
      ValueError: a number is out of range, or `dpoptax.low_pass` does not accept the filter.

    Source: Zhang et al., "DOPPLER", 2024, Algorithm 3, whose bias correction v_t/(1 − β^t) belongs
    to another convention of β and is Adam's here; Tang et al., "DP-AdamBC", 2024, for stddev².

    >>> tx = scale_by_lp_adam(b=[1 / 11, 1 / 11], a=[-9 / 11])
    """
    check_decays(b2=b2)
    check_stddev(stddev)
    if eps is None:
        eps = stddev * (2.0 * (1.0 - b2) / (1.0 + b2)) ** 0.25 if stddev else 1e-8
    check_known(eps=eps)
    if not (math.isfinite(eps) and eps > 0.0):
        raise ValueError(f"`eps` must be finite and positive, got {eps}.")
    noise, floor = float(stddev) ** 2, float(eps)
    filtering = low_pass(b, a, accumulator_dtype=accumulator_dtype)

    def init_fn(params: PyTree) -> ScaleByLpAdamState:
        # In bfloat16, decaying by 0.999 rounds to no change.
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=float32_at_least(p)), params)
        return ScaleByLpAdamState(jnp.zeros([], jnp.int32), filtering.init(params), zeros)

    def update_fn(
        updates: PyTree, state: ScaleByLpAdamState, params: PyTree = None
    ) -> tuple[PyTree, ScaleByLpAdamState]:
        del params
        count = optax.safe_increment(state.count)
        mean, filtered = filtering.update(updates, state.filtered)
        nu = jax.tree.map(
            lambda g, v: b2 * v + (1.0 - b2) * jnp.square(g.astype(v.dtype)), updates, state.nu
        )
        corrected = optax.tree.bias_correction(nu, b2, count)

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            root = jnp.sqrt(jnp.maximum(v - noise, 0.0))
            return (m.astype(v.dtype) / jnp.maximum(root, floor)).astype(m.dtype)

        return jax.tree.map(direction, mean, corrected), ScaleByLpAdamState(count, filtered, nu)

    return optax.GradientTransformation(init_fn, update_fn)


def lp_adam(
    learning_rate: optax.ScalarOrSchedule,
    b: Sequence[float],
    a: Sequence[float] = (),
    *,
    b2: float = 0.999,
    eps: float | None = None,
    stddev: float = 0.0,
) -> optax.GradientTransformation:
    """Applies the LP-Adam optimizer, `scale_by_lp_adam` times −learning_rate.

    Place it after the noise stage. Units, defaults, privacy, errors and sources are those of
    `scale_by_lp_adam`.

    Args:
      learning_rate: a number or a schedule.
      b: feed-forward coefficients of the filter.
      a: feedback coefficients of the filter, without the leading 1.
      b2: decay of the second moment.
      eps: the smallest denominator.
      stddev: the absolute standard deviation of the noise, subtracted in the second moment. 0
        subtracts nothing.

    >>> import dpoptax
    >>> tx = lp_adam(1e-3, *dpoptax.filters.preset("doppler-second-order"))
    """
    return optax.chain(
        scale_by_lp_adam(b, a, b2=b2, eps=eps, stddev=stddev),
        optax.scale_by_learning_rate(learning_rate),
    )
