"""Spectra, correlations and signal-to-noise ratio of recorded private gradients.

A recording contains only released values, so all functions here are post-processing. Arrays of
gradients have shape (T, K): T steps, K coordinates of the noisy mean gradient. Frequencies are in
radians per step, in [0, π].
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpoptax.filters._coefficients import Filter, validate

__all__ = ["autocorrelation", "power_spectrum", "propose_filter", "running_snr"]


def __dir__() -> list[str]:
    return __all__


def power_spectrum(
    gradients: ArrayLike, *, segment: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns frequencies and power density, by Welch's method.

    The density is averaged over the coordinates. (1/π) ∫_0^π P(ω) dω is the mean square of a
    coordinate, so white noise of standard deviation s has P = s² at every frequency. The mean is
    not removed: a constant gradient is signal.

    Args:
      gradients: shape (T, K).
      segment: the number of steps of the overlapping segments. `None` means T/4, but at least 16.
        Longer segments resolve lower frequencies, shorter ones average better.

    Returns:
      ω and P(ω), each of shape (segment // 2 + 1,).

    Raises:
      ValueError: the shape is wrong, a value is not finite, or `segment` is outside [2, T].

    Source: DOPPLER (Zhang et al. 2024), Figure 2.
    """
    from scipy import signal  # imported here because it takes longer than the package

    series = _series(gradients)
    steps = len(series)
    size = min(steps, max(16, steps // 4)) if segment is None else segment
    if not 2 <= size <= steps:
        raise ValueError(f"`segment` must be between 2 and the {steps} recorded steps, got {size}.")
    _, power = signal.welch(
        series, fs=1.0, nperseg=size, detrend=False, return_onesided=False, axis=0
    )
    kept = size // 2 + 1
    omega = 2 * np.pi * np.arange(kept) / size
    return omega, np.asarray(power[:kept], np.float64).mean(axis=1)


def autocorrelation(
    gradients: ArrayLike, max_lag: int, *, stddev: float = 0.0
) -> NDArray[np.float64]:
    """Returns the autocorrelations c_0 … c_max_lag.

    c_τ is the mean of g_t g_{t-τ} over steps and coordinates.

    Noise is independent across steps, so it affects only c_0, from which stddev² is subtracted.
    Each lag is the mean over its T - τ pairs, so lags are not biased toward 0.

    Args:
      gradients: shape (T, K).
      max_lag: the largest τ, less than T.
      stddev: the standard deviation of the noise in each coordinate.

    Raises:
      ValueError: the shape is wrong, `max_lag` is outside [0, T), or `stddev` is negative or not
        finite.
    """
    series = _series(gradients)
    if not 0 <= max_lag < len(series):
        raise ValueError(
            f"`max_lag` must be in [0, {len(series)}), below the number of steps, got {max_lag}."
        )
    lags = [np.mean(series[lag:] * series[: len(series) - lag]) for lag in range(max_lag + 1)]
    lags[0] -= _stddev(stddev) ** 2
    return np.array(lags)


def running_snr(gradients: ArrayLike, stddev: float, *, window: int = 50) -> NDArray[np.float64]:
    """Returns the signal-to-noise ratio of each window, max(0, mean g² - s²) / s².

    The signal is everything except the added noise: the true gradient plus sampling noise.

    Args:
      gradients: shape (T, K), as released.
      stddev: s, the standard deviation of the noise in each coordinate, positive.
      window: the number of steps per window, in [1, T].

    Returns:
      Shape (T - window + 1,); entry i covers steps i … i + window - 1.

    Raises:
      ValueError: a value is out of range.
    """
    series = _series(gradients)
    if not 1 <= window <= len(series):
        raise ValueError(
            f"`window` must be between 1 and the {len(series)} recorded steps, got {window}."
        )
    if _stddev(stddev) == 0.0:
        raise ValueError("`stddev` must be positive, got 0. Without noise the ratio is undefined.")
    power = np.convolve(np.mean(series**2, axis=1), np.full(window, 1 / window), "valid")
    return np.maximum(power / stddev**2 - 1.0, 0.0)


def propose_filter(gradients: ArrayLike, stddev: float, *, length: int = 10) -> Filter:
    """Proposes the finite filter that fits the correlations of recorded gradients.

    b_τ = c_τ / Σ c_τ with the estimates of `autocorrelation`, negative ones set to 0. Every signal
    has |c_τ| ≤ c_0, and the estimate of c_0 is the difference of two large numbers, so it is raised
    to the largest of the others. The filter suits runs like the recorded one. It is as accurate as
    the estimates, whose error is about s²/√(TK).

    Args:
      gradients: shape (T, K), as released, T > length.
      stddev: s, the standard deviation of the noise in each coordinate.
      length: the number of coefficients, at least 1.

    Raises:
      ValueError: a value is out of range, or no correlation is above 0, because the recording is
        nearly all noise.

    Source: DOPPLER (Zhang et al. 2024), section 5.3.

    >>> propose_filter(np.ones((100, 4)), 0.0, length=2).b
    (0.5, 0.5)
    """
    if length < 1:
        raise ValueError(f"`length` must be at least 1, got {length}.")
    correlations = autocorrelation(gradients, length - 1, stddev=stddev)
    correlations[0] = correlations.max()
    if correlations[0] <= 0.0:
        raise ValueError(
            f"At least one correlation of up to {length - 1} steps must be above 0. At "
            f"stddev={stddev:g} the recording is nearly all noise. Record more steps or "
            "coordinates."
        )
    weights = np.maximum(correlations, 0.0)  # negative weights from noisy estimates raise the noise
    return validate(weights / weights.sum())


def _series(gradients: ArrayLike) -> NDArray[np.float64]:
    series = np.asarray(gradients, np.float64)
    if series.ndim != 2 or not series.size or not np.all(np.isfinite(series)):
        raise ValueError(
            "`gradients` must be finite numbers of shape (steps, coordinates), got shape "
            f"{series.shape}."
        )
    return series


def _stddev(stddev: float) -> float:
    if not 0.0 <= stddev < np.inf:
        raise ValueError(f"`stddev` must be finite and non-negative, got {stddev}.")
    return stddev
