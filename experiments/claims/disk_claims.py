"""Checks DiSK's claims about its filter's gain and a noisy regression."""

import functools

import numpy as np

from experiments import studies
from experiments.claims.study_rows import Findings, Parts, Row, over, pick, verdict

DRIFTS = (0.03, 0.1, 0.3, 1.0)
"""σ_v/σ_w of the Kalman study."""


def kalman_gain(seeds: int) -> Parts:
    """Runs the recursion from two starts, and the filter on simulated gradients."""
    return [functools.partial(_kalman_gain, seeds)]


def _kalman_gain(seeds: int) -> list[Row]:
    rows = []
    for drift in DRIFTS:
        for start in (0.0, 1.0):
            result = studies.kalman_convergence(
                drift_stddev=drift, initial_variance=start, steps=120, seeds=seeds
            )
            rows += [
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
    return rows


def kalman_gain_findings(rows: list[Row]) -> Findings:
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


def noisy_regression(seeds: int) -> Parts:
    """Computes DiSK Fig. 6(a) at several learning rates, with 4 · `seeds` seeds."""
    return [functools.partial(_noisy_regression, seeds)]


def _noisy_regression(seeds: int) -> list[Row]:
    result = studies.noisy_regression(seeds=4 * seeds)
    return [
        {
            "method": method,
            "noise": level,
            "learning_rate": rate,
            "seed": seed,
            "excess_loss": result.excess_loss[i, j, k, seed],
        }
        for i, method in enumerate(result.methods)
        for j, level in enumerate(np.round(result.noise_levels.astype(float), 6))
        for k, rate in enumerate(np.round(result.learning_rates.astype(float), 6))
        for seed in range(result.excess_loss.shape[-1])
    ]


def noisy_regression_findings(rows: list[Row]) -> Findings:
    """Checks that the Kalman filter has the lowest loss at every noise level."""
    levels, names = np.unique(pick(rows, "noise")), ("Kalman", "noisy GD", "low-pass")
    found: Findings = []
    largest = pick(rows, "learning_rate").max()
    for label, loss in (
        (
            f"at one learning rate, {largest:g}",
            lambda method, noise: pick(
                rows, "excess_loss", method=method, noise=noise, learning_rate=largest
            ).mean(),
        ),
        (
            "at each one's own best learning rate",
            lambda method, noise: (
                over(rows, "learning_rate", "excess_loss", method=method, noise=noise)[1]
                .mean(0)
                .min()
            ),
        ),
    ):
        losses = np.array([[loss(name, noise) for noise in levels] for name in names])
        ratios = losses[1:] / losses[0]
        found.append(
            (
                f"DiSK has the lowest loss at every noise, {label}",
                "; ".join(
                    f"{name}'s is {_between(ratio)} times as high"
                    for name, ratio in zip(names[1:], ratios, strict=True)
                ),
                verdict(ratios > 1),
            )
        )
    return found


def _between(values: np.ndarray) -> str:
    ends = [f"{end:.2f}" for end in (values.min(), values.max())]
    return " to ".join(dict.fromkeys(ends))
