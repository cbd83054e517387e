"""Simulates the scalar Kalman filter and its convergence (DiSK Fig. 3)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpoptax.filters._kalman import kalman_gain


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
