"""Responses and design of low-pass filters."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpoptax.filters._coefficients import Filter, impulse_response, validate

# Functions import SciPy when they need it, because it takes longer to import than the package.


def zeros(filt: Filter) -> NDArray[np.complex128]:
    """Returns the finite zeros in z, the roots of Σ b_τ z^{nb-τ}; shape (nb,) or less."""
    return np.roots(np.array(filt.b)).astype(np.complex128)


def step_response(filt: Filter, length: int) -> NDArray[np.float64]:
    """Returns c_0 … c_{length-1}, the output for the constant input 1.

    The bias correction divides by it.
    """
    return np.cumsum(impulse_response(filt, length))


def frequency_response(filt: Filter, omega: ArrayLike) -> NDArray[np.complex128]:
    """Returns H(e^{iω}) = Σ_τ κ_τ e^{-iωτ} at ω = `omega` in radians per step."""
    z = np.exp(-1j * np.asarray(omega, np.float64))
    response = np.polyval(filt.b[::-1], z) / np.polyval((1.0, *filt.a)[::-1], z)
    return np.asarray(response, np.complex128)


def group_delay(filt: Filter) -> float:
    """Returns the delay in steps of a slowly varying input, Σ τκ_τ / Σ κ_τ.

    This is the mean age of the gradients in the output. The gain of the filter must not be 0.
    """
    b, a = np.array(filt.b), np.array((1.0, *filt.a))
    return float(b @ np.arange(b.size) / b.sum() - a @ np.arange(a.size) / a.sum())


def noise_gain(filt: Filter) -> float:
    """Returns Σ_τ κ_τ², the settled output variance for white input of variance 1.

    It is exact, by the discrete Lyapunov equation, and requires a stable filter.

    >>> from dpoptax.filters import preset
    >>> round(noise_gain(preset("momentum")), 6)  # 0.01 / (1 - 0.81)
    0.052632
    """
    from scipy import linalg

    n = filt.order
    b = np.pad(filt.b, (0, n + 1 - len(filt.b)))
    if not filt.a:
        return float(b @ b)
    a = np.pad(filt.a, (0, n - len(filt.a)))
    transition = np.eye(n, k=1)
    transition[:, 0] = -a
    drive = b[1:] - a * b[0]
    covariance = linalg.solve_discrete_lyapunov(transition, np.outer(drive, drive))
    return float(covariance[0, 0] + b[0] ** 2)


def snr(filt: Filter, autocorrelation: ArrayLike, steps: int | None = None) -> float:
    """Returns the normalized signal-to-noise ratio of DOPPLER eq. (5).

        SNR = Σ_{t<T} Σ_{τ≤t} c_τκ_τ / Σ_{t<T} Σ_{τ≤t} κ_τ²

    Without a filter it is c_0 = 1/2. For uncorrelated gradients (c_τ = 0 beyond c_0) it can exceed
    1/2. Under unit gain its maximum is not at κ ∝ c, as the paper states, because it ignores that a
    smaller Σ c_τκ_τ also slows the descent. `effective_snr` accounts for both.

    Args:
      filt: a stable filter.
      autocorrelation: c_0, c_1, … of DOPPLER eq. (3); later lags count as 0.
      steps: the horizon T, or `None` for the limit of many steps.
    """
    numerator, denominator = _correlated_sums(filt, autocorrelation, steps)
    return numerator / denominator


def effective_snr(filt: Filter, autocorrelation: ArrayLike, steps: int | None = None) -> float:
    """Returns (Σ c_τκ_τ)² / Σ κ_τ², the merit of a filter at its best step size.

    With S = Σ c_τκ_τ (averaged over steps, like the denominator), DOPPLER's bound (7) is (F_0 -
    F*)/(ηST) + ηLσ²·Σκ²/(2S), with σ² the variance of the noise. Its minimum over η is √(2LF_0σ²/T)
    / √(S²/Σκ²). Unlike eq. (5), this ratio does not change with the gain of the filter, and its
    maximum is at κ ∝ c. Without a filter it is c_0² = 1/4. The arguments are those of `snr`.
    """
    numerator, denominator = _correlated_sums(filt, autocorrelation, steps)
    return numerator**2 / denominator


def _correlated_sums(
    filt: Filter, autocorrelation: ArrayLike, steps: int | None
) -> tuple[float, float]:
    c = np.asarray(autocorrelation, np.float64)
    if c.ndim != 1 or not c.size:
        raise ValueError(
            f"`autocorrelation` must have shape (lags,) with at least 1 lag, got {c.shape}."
        )
    if steps is None:
        return float(c @ impulse_response(filt, c.size)), noise_gain(filt)
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, or None for the limit, got {steps}.")
    kappa = impulse_response(filt, steps)
    share = 1.0 - np.arange(steps) / steps
    lags = min(steps, c.size)
    return float((share * kappa)[:lags] @ c[:lags]), float(share @ kappa**2)


def butterworth(order: int, cutoff: float) -> Filter:
    """Designs a Butterworth low-pass filter, maximally flat and of unit gain.

    Args:
      order: the number of poles and of buffers, at least 1.
      cutoff: the half-power frequency relative to the highest one; cutoff·π radians per step.

    Raises:
      ValueError: `order` is below 1, `cutoff` is outside (0, 1), or float64 cannot represent a
        filter this narrow at this order.

    >>> [round(x, 3) for x in butterworth(1, 0.0635).b]  # DOPPLER's first filter, 1/11
    [0.091, 0.091]
    """
    from scipy import signal

    _check_design(order, cutoff)
    return _normalized(*signal.butter(order, cutoff))


def chebyshev(order: int, cutoff: float, ripple: float) -> Filter:
    """Designs a Chebyshev low-pass filter of type I, steeper than Butterworth.

    Its gain is 1 at frequency 0. For even orders, scipy's design has gain 1 at the crest of the
    ripple instead; here the pass band reaches up to `ripple` dB above 1.

    Args:
      order: the number of poles and of buffers, at least 1.
      cutoff: the edge of the pass band relative to the highest frequency, in (0, 1).
      ripple: the height of the ripple in the pass band in decibels, positive.

    Raises:
      ValueError: as in `butterworth`, or `ripple` is not positive.
    """
    from scipy import signal

    _check_design(order, cutoff)
    if not 0.0 < ripple < np.inf:
        raise ValueError(f"`ripple` must be a positive number of decibels, got {ripple}.")
    return _normalized(*signal.cheby1(order, ripple, cutoff))


def _check_design(order: int, cutoff: float) -> None:
    if not isinstance(order, int | np.integer) or order < 1:
        raise ValueError(f"`order` must be an integer of at least 1, got {order!r}.")
    if not 0.0 < cutoff < 1.0:
        raise ValueError(
            f"`cutoff` must be in (0, 1), relative to the highest frequency π, got {cutoff}."
        )


def _normalized(b: NDArray[np.float64], a: NDArray[np.float64]) -> Filter:
    # The gain of the rounded coefficients differs from that of the design.
    if not (np.all(np.isfinite(b)) and b.sum() > 0.0 and a.sum() > 0.0):
        raise ValueError(
            "The filter is too narrow for its order: its coefficients cancel in float64. Increase "
            "`cutoff` or decrease `order`."
        )
    return validate(b * (a.sum() / b.sum()), a[1:], correctable=False)


def optimal_fir(autocorrelation: ArrayLike) -> Filter:
    """Returns the best finite filter for known correlations, b_τ = c_τ / Σ c_τ.

    It maximizes `effective_snr` over all filters of this length (DOPPLER 5.3, eq. (8); see `snr`).
    Negative estimates are set to 0, because negative weights from noisy estimates raise the noise.

    Args:
      autocorrelation: c_0 … c_nb of DOPPLER eq. (3), in any unit, with c_0 > 0.

    Raises:
      ValueError: an entry is not finite, or c_0 is not positive.

    >>> optimal_fir([2.0, 1.0, -0.5, 1.0]).b
    (0.5, 0.25, 0.0, 0.25)
    """
    c = np.asarray(autocorrelation, np.float64)
    if c.ndim != 1 or not c.size or not np.all(np.isfinite(c)) or c[0] <= 0.0:
        raise ValueError(
            "`autocorrelation` must be a flat sequence of finite numbers that starts with c_0 > 0, "
            f"got {autocorrelation!r}."
        )
    weights = np.maximum(c, 0.0)
    return validate(weights / weights.sum())
