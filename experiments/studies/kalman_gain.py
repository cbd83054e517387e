"""Simulates the scalar Kalman filter and its convergence (DiSK, Fig. 3)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpoptax.filters._kalman import kalman_gain
from experiments.studies.rows import Findings, Row, over, pick, verdict

DRIFTS = (0.03, 0.1, 0.3, 1.0)
"""σ_v/σ_w."""


class KalmanConvergence(NamedTuple):
    """Results of `kalman_convergence`.

    Attributes:
      gain: k_t of the recursion, (steps,).
      variance: p_t of the recursion, (steps,).
      limits: κ and p_∞ in closed form.
      measured: the mean square error of the filter that uses k_t, on simulated gradients,
        (seeds, steps).
    """

    gain: NDArray[np.float64]
    variance: NDArray[np.float64]
    limits: tuple[float, float]
    measured: NDArray[np.float64]


def kalman_convergence(
    *,
    drift_stddev: float,
    noise_stddev: float = 1.0,
    initial_variance: float = 0.0,
    steps: int = 60,
    coordinates: int = 200,
    seeds: int = 5,
) -> KalmanConvergence:
    """Runs DiSK's recursion of k_t and p_t, and its filter on a random walk.

    Every coordinate of the gradient moves by N(0, σ_v²) per step and is observed with noise N(0,
    σ_w²). The filter does not predict the change (σ_H = 0). The initial estimate has an error of
    N(0, p_{−1}).

    Args:
      drift_stddev: σ_v.
      noise_stddev: σ_w.
      initial_variance: p_{−1}.
      steps: T.
      coordinates: number of coordinates that the mean square error averages.
      seeds: number of simulations.

    Source: DiSK, appendix A.3, step 4, and Fig. 3.

    >>> result = kalman_convergence(drift_stddev=0.5)
    >>> bool(abs(result.gain[-1] - result.limits[0]) < 1e-12)
    True
    """
    variance, gain = kalman_gain(
        noise_stddev=noise_stddev,
        drift_stddev=drift_stddev,
        steps=steps,
        initial_variance=initial_variance,
    )
    kappa = kalman_gain(noise_stddev=noise_stddev, drift_stddev=drift_stddev)
    measured = np.empty((seeds, steps))
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        truth = np.zeros(coordinates)
        estimate = np.sqrt(initial_variance) * rng.normal(size=coordinates)
        for t in range(steps):
            truth = truth + drift_stddev * rng.normal(size=coordinates)
            released = truth + noise_stddev * rng.normal(size=coordinates)
            estimate = estimate + gain[t] * (released - estimate)
            measured[seed, t] = np.mean((estimate - truth) ** 2)
    # In the limit p = (1 − κ)(p + σ_v²), and k = p/σ_w² if the change is not predicted.
    return KalmanConvergence(gain, variance, (kappa, kappa * noise_stddev**2), measured)


def rows(seeds: int) -> list[Row]:
    """Runs the recursion from two starts, and the filter on simulated gradients."""
    found: list[Row] = []
    for drift in DRIFTS:
        for start in (0.0, 1.0):
            result = kalman_convergence(
                drift_stddev=drift, initial_variance=start, steps=120, seeds=seeds
            )
            found += [
                {
                    "drift": drift,
                    "start": start,
                    "step": step,
                    "seed": seed,
                    "gain": result.gain[step],
                    "variance": result.variance[step],
                    "gain_limit": result.limits[0],
                    "variance_limit": result.limits[1],
                    "measured": result.measured[seed, step],
                }
                for step in range(result.gain.size)
                for seed in range(seeds)
            ]
    return found


def findings(rows: list[Row]) -> Findings:
    """Checks that gain and variance converge to their closed forms."""
    needed, close = [], []
    for drift in DRIFTS:
        gain = over(rows, "step", "gain", drift=drift, start=1.0)[1][0]
        limit = pick(rows, "gain_limit", drift=drift)[0]
        away = np.flatnonzero(np.abs(gain / limit - 1) > 0.01)
        needed.append(f"{away.max() + 1 if away.size else 0} (σ_v = {drift:g} σ_w)")
        close.append(abs(gain[-1] / limit - 1) < 0.01)
    ratios = [row["measured"] / row["variance"] for row in rows if row["variance"] > 0]
    return [
        (
            "k_t and p_t converge to κ and p_∞",
            f"within 1 % of κ after {', '.join(needed)} steps, from p = σ_w²",
            verdict(close),
        ),
        (
            "p_t is the error of the estimate",
            f"measured error over p_t: {np.mean(ratios):.3f} on average over steps and seeds",
            verdict(abs(np.mean(ratios) - 1) < 0.03),
        ),
    ]
