"""Checks a claim of our own: directions of releases."""

import functools

import jax

from experiments import studies
from experiments.claims.study_rows import Findings, Parts, Row, pick, verdict


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
