"""DOPPLER, a low-pass filter for privatized gradients."""

from collections.abc import Sequence

import optax
from jax.typing import DTypeLike

from dpoptax.filters._coefficients import resolve_preset
from dpoptax.filters._low_pass import low_pass


def doppler(
    b: Sequence[float] | None = None,
    a: Sequence[float] = (),
    *,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Applies DOPPLER's bias-corrected low-pass filter to privatized gradients.

        m_t = −Σ_{τ≥1} a_τ m_{t−τ} + Σ_{τ≥0} b_τ g_{t−τ},    update_t = m_t / c_t

    c_t is the filter's response to the constant 1. Gradients change slowly and the noise is white,
    so the filter keeps low frequencies. Place it between `dpoptax.gaussian_noise` and any optax
    optimizer. `dpoptax.filters.preset(name)` returns the papers' coefficients b and a.

    Input and output: privatized mean gradients of the same shape and units. Privacy:
    post-processing, at no cost. Memory: max(len(a), len(b) − 1) copies of the parameters.

    Args:
      b: feed-forward coefficients b_0, b_1, … `None` means b and a of the first filter of order 1
        in the paper's Table 2, `dpoptax.filters.preset("doppler-first-order-1")`.
      a: feedback coefficients a_1, a_2, …, without the leading 1.
      accumulator_dtype: the dtype of the buffers. Defaults to that of the parameters.

    Raises:
      ValueError: the filter is unstable or its gain is not 1, as in `dpoptax.low_pass`; or `a` is
        given without `b`.

    Source: Zhang et al., "DOPPLER: Differentially Private Optimizers with Low-pass Filter for
    Privacy Noise Reduction", 2024, Algorithm 2. Its stability condition (A.2) has the roots on the
    wrong side of the unit circle; this function checks the poles.

    >>> tx = doppler()  # b=[1 / 11, 1 / 11], a=[-9 / 11]
    """
    b, a = resolve_preset(b, a, "doppler-first-order-1")
    return low_pass(b, a, start="corrected", accumulator_dtype=accumulator_dtype)
