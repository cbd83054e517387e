"""Checks claims of our own: filtered correlated noise, and directions of releases."""

import functools

import jax
import numpy as np

from experiments import studies
from experiments.claims.study_rows import Findings, Parts, Row, pick, verdict

CORRELATED_ARMS = tuple(
    kind + behind
    for kind in ("poisson", "banded 4", "banded 16", "fixed", "fixed, banded 22")
    for behind in ("", " + filter")
)
"""The arms of `studies.digits_arms` that are trained."""


def correlated_noise(seeds: int) -> Parts:
    """Trains on digits at ε = 1 with every arm."""
    return [functools.partial(_correlated_noise, name, seeds) for name in CORRELATED_ARMS]


def _correlated_noise(name: str, seeds: int) -> list[Row]:
    (result,) = studies.compare_correlated_noise({name: _arms()[name]}, seeds=seeds).values()
    return [
        {
            "noise": name.removesuffix(" + filter"),
            "filtered": "yes" if name.endswith(" + filter") else "no",
            "noise_multiplier": result.noise_multiplier,
            "learning_rate": result.learning_rate,
            "seed": seed,
            "accuracy": float(result.accuracy[seed]),
            "training_loss": float(result.training_loss[seed]),
        }
        for seed in range(seeds)
    ]


@functools.cache
def _arms() -> dict[str, studies.Arm]:
    return studies.digits_arms(bands=(4, 16))


def correlated_noise_findings(rows: list[Row]) -> Findings:
    """Checks whether correlated noise with a filter is better than either of them."""

    def accuracy(noise: str, filtered: str) -> str:
        values = pick(rows, "accuracy", noise=noise, filtered=filtered)
        spread = f" ± {values.std(ddof=1):.1f}" if values.size > 1 else ""
        return f"{values.mean():.1f}{spread} %"

    def gain(noise: str, filtered: str) -> float:
        arm = pick(rows, "accuracy", noise=noise, filtered=filtered).mean()
        return arm - pick(rows, "accuracy", noise="poisson", filtered="no").mean()

    fixed = "fixed, banded 22"
    return [
        (
            "without amplification, correlated noise and a filter beat each alone",
            f"{accuracy('fixed', 'no')} with neither, {accuracy('fixed', 'yes')} with the filter, "
            f"{accuracy(fixed, 'no')} with 22 bands, {accuracy(fixed, 'yes')} with both",
            verdict(gain(fixed, "yes") > np.array([gain("fixed", "yes"), gain(fixed, "no")])),
        ),
        (
            "with Poisson sampling too",
            f"{accuracy('poisson', 'no')} for DP-SGD, {accuracy('banded 4', 'yes')} for 4 bands "
            "and the filter",
            verdict(gain("banded 4", "yes") > 1),
        ),
    ]


def release_cosines(seeds: int) -> Parts:
    """Computes the cosine between release and true gradient per geometry and noise."""
    return [functools.partial(_release_cosines, seed) for seed in range(seeds)]


def _release_cosines(seed: int) -> list[Row]:
    clips = studies.direction_clips()
    gradients, truth = studies.heterogeneous_gradients(seed)
    rows = []
    for multiplier in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        cosines = studies.release_cosines(
            gradients, truth, clips, noise_multiplier=multiplier, key=jax.random.key(seed)
        )
        rows += [
            {"geometry": name, "noise_multiplier": multiplier, "seed": seed, "cosine": cosine}
            for name, cosine in cosines.items()
        ]
    return rows


def release_cosines_findings(rows: list[Row]) -> Findings:
    """Checks whether bounded angles keep directions better than bounded norms."""
    names = sorted(set(pick(rows, "geometry")))
    found: Findings = []
    for multiplier in (0.0, 1.0, 4.0):
        means = {
            name: pick(rows, "cosine", geometry=name, noise_multiplier=multiplier).mean()
            for name in names
        }
        best = max((name for name in names if name != "l2"), key=lambda name: means[name])
        found.append(
            (
                f"bounded angles keep the direction better, at noise multiplier {multiplier:g}",
                f"cosine {means['l2']:.2f} with the l2 clip, at most {means[best]:.2f} with angles "
                f"({best})",
                verdict(means[best] > means["l2"]),
            )
        )
    return found
