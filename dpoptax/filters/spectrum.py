"""Spectra, correlations and signal-to-noise ratio of recorded private gradients.

A recording is what a run released anyway, so whatever is computed here costs no privacy. Arrays of
gradients have shape (T, K): T steps, K coordinates of the noisy mean gradient. Frequencies are
radians per step, in [0, π]. Only NumPy and SciPy are imported; `plot` needs Matplotlib.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpoptax.filters._coefficients import Filter
from dpoptax.filters._responses import optimal_fir


class Recording(NamedTuple):
    """What `dpoptax train --record K` writes to recording.npz.

    Attributes:
      released: the noisy mean gradient g_t at K random coordinates, shape (T, K).
      filtered: what the method's filter made of it, shape (T, K).
      stddev: the standard deviation of the noise in each coordinate of `released`; NaN where the
        mechanism has no single one.
    """

    released: NDArray[np.float64]
    filtered: NDArray[np.float64]
    stddev: float


def load(path: str | Path) -> Recording:
    """Returns the recording in the file at `path`.

    Raises:
      OSError: no such file.
      ValueError: a file of another kind.
    """
    with np.load(path) as file:
        missing = [name for name in Recording._fields if name not in file]
        if missing:
            raise ValueError(f"{path} is no recording: {', '.join(missing)} missing")
        released, filtered = (np.asarray(file[name], np.float64) for name in Recording._fields[:2])
        return Recording(released, filtered, float(file["stddev"]))


def power_spectrum(
    gradients: ArrayLike, *, segment: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns frequencies and power density, averaged over the coordinates by Welch's method.

    (1/π) ∫_0^π P(ω) dω is the mean square of a coordinate, so white noise of standard deviation s
    has P = s² at every frequency. The mean is not removed: a constant gradient is signal.

    Args:
      gradients: shape (T, K).
      segment: number of steps of the overlapping segments; None: a quarter of T, at least 16. More
        resolve lower frequencies, fewer average better.

    Returns:
      ω and P(ω), each of shape (segment // 2 + 1,).

    Raises:
      ValueError: another shape, values that are not finite, or a segment outside [2, T].

    Source: DOPPLER (Zhang et al. 2024), Figure 2.
    """
    from scipy import signal  # here, as it takes longer to import than the rest

    series = _series(gradients)
    steps = len(series)
    size = min(steps, max(16, steps // 4)) if segment is None else segment
    if not 2 <= size <= steps:
        raise ValueError(f"segment={size} must lie between 2 and the {steps} recorded steps")
    _, power = signal.welch(
        series, fs=1.0, nperseg=size, detrend=False, return_onesided=False, axis=0
    )
    kept = size // 2 + 1
    omega = 2 * np.pi * np.arange(kept) / size
    return omega, np.asarray(power[:kept], np.float64).mean(axis=1)


def autocorrelation(
    gradients: ArrayLike, max_lag: int, *, stddev: float = 0.0
) -> NDArray[np.float64]:
    """Returns c_0 … c_max_lag, c_τ = the mean of g_t g_{t-τ} over steps and coordinates.

    Noise is independent from step to step: it enters c_0 alone, from which stddev² is taken. Each
    lag is the mean over its own T - τ pairs, so no lag is biased towards 0.

    Args:
      gradients: shape (T, K).
      max_lag: the largest τ, less than T.
      stddev: of the noise in each coordinate.

    Raises:
      ValueError: another shape, a lag outside [0, T), a negative or non-finite stddev.
    """
    series = _series(gradients)
    if not 0 <= max_lag < len(series):
        raise ValueError(f"max_lag={max_lag} must lie in [0, {len(series)}), below the steps")
    lags = [np.mean(series[lag:] * series[: len(series) - lag]) for lag in range(max_lag + 1)]
    lags[0] -= _stddev(stddev) ** 2
    return np.array(lags)


def running_snr(gradients: ArrayLike, stddev: float, *, window: int = 50) -> NDArray[np.float64]:
    """Returns the signal-to-noise ratio of each window of steps: max(0, mean g² - s²) / s².

    The signal is all that is not the added noise: true gradient and sampling together.

    Args:
      gradients: shape (T, K), as released.
      stddev: s, of the noise in each coordinate; positive.
      window: number of steps that are averaged over, in [1, T].

    Returns:
      Shape (T - window + 1,); entry i is of steps i … i + window - 1.

    Raises:
      ValueError: a value outside its range.
    """
    series = _series(gradients)
    if not 1 <= window <= len(series):
        raise ValueError(f"window={window} must lie in [1, {len(series)}], the recorded steps")
    if _stddev(stddev) == 0.0:
        raise ValueError("stddev=0: without noise there is no ratio to it")
    power = np.convolve(np.mean(series**2, axis=1), np.full(window, 1 / window), "valid")
    return np.maximum(power / stddev**2 - 1.0, 0.0)


def propose_filter(gradients: ArrayLike, stddev: float, *, length: int = 10) -> Filter:
    """Proposes the finite filter that fits the recorded gradients' correlations.

    b_τ = c_τ / Σ c_τ with the estimates of `autocorrelation`, negative ones clipped at 0. No signal
    has |c_τ| > c_0, so c_0, whose estimate is the difference of two large numbers, is raised to the
    largest of the others. The proposal is for runs like the recorded one; it is no worse than its
    estimates, whose error is about s²/√(TK).

    Args:
      gradients: shape (T, K), as released, T > length.
      stddev: s, of the noise in each coordinate.
      length: number of coefficients, at least 1.

    Raises:
      ValueError: a value outside its range, or no correlation above 0: the recording is all noise.

    Source: DOPPLER (Zhang et al. 2024), section 5.3.

    >>> propose_filter(np.ones((100, 4)), 0.0, length=2).b
    (0.5, 0.5)
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    correlations = autocorrelation(gradients, length - 1, stddev=stddev)
    correlations[0] = correlations.max()
    if correlations[0] <= 0.0:
        raise ValueError(
            f"no correlation of up to {length - 1} steps is above 0: the recording is all noise at "
            f"stddev={stddev:g}; record more steps or coordinates"
        )
    return optimal_fir(correlations)


def plot(recording: Recording, path: str | Path, *, window: int = 50) -> None:
    """Writes a figure: power spectra, autocorrelation and running signal-to-noise ratio.

    The last panel is left out where the mechanism has no single standard deviation.

    Raises:
      ImportError: matplotlib, which `dpoptax[train]` has, is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            f"plot needs {error.name}, which is not installed; pip install 'dpoptax[train]'"
        ) from error

    steps = len(recording.released)
    known = np.isfinite(recording.stddev) and recording.stddev > 0
    figure = Figure(figsize=(10.5 if known else 7.2, 3.2), layout="constrained")
    spectra, correlations, *rest = figure.subplots(1, 3 if known else 2)
    for label, series, colour in (
        ("released", recording.released, "#0072B2"),
        ("filtered", recording.filtered, "#D55E00"),
    ):
        omega, power = power_spectrum(series)
        spectra.semilogy(omega / np.pi, power, color=colour, label=label)
        lags = autocorrelation(series, min(40, steps - 1))
        correlations.plot(lags / lags[0], color=colour, label=label, marker=".", markersize=3)
    if known:
        spectra.axhline(
            recording.stddev**2, color="#666666", linestyle="--", linewidth=1, label="noise added"
        )
        width = min(window, steps)
        ratio = running_snr(recording.released, recording.stddev, window=width)
        rest[0].plot(np.arange(width, steps + 1), ratio, color="#009E73")
        rest[0].set(xlabel="step", ylabel=f"signal / noise power, {width} steps", ylim=(0, None))
    spectra.set(xlabel="frequency (π radians per step)", ylabel="power density per coordinate")
    correlations.set(xlabel="lag (steps)", ylabel="autocorrelation (lag 0 = 1)")
    for panel in (spectra, correlations):
        panel.legend(frameon=False, fontsize="small")
    for panel in (spectra, correlations, *rest):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200)


def _series(gradients: ArrayLike) -> NDArray[np.float64]:
    series = np.asarray(gradients, np.float64)
    if series.ndim != 2 or not series.size or not np.all(np.isfinite(series)):
        raise ValueError(
            f"gradients of shape {series.shape} must be finite numbers, (steps, coordinates)"
        )
    return series


def _stddev(stddev: float) -> float:
    if not 0.0 <= stddev < np.inf:
        raise ValueError(f"stddev={stddev} must be a finite number that is not negative")
    return stddev
