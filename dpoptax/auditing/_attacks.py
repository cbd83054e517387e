"""Attacks: scores of observations, learned on a part of the runs."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from jax_privacy.auditing import CanaryScoreAuditor, Explicit
from numpy.typing import NDArray
from scipy import linalg

Array = NDArray[np.float64]

# Relative to each feature's own variance: far above the rounding of float32 features.
_JITTER = 1e-10
_THRESHOLDS = 60
_CURVE = 24


@dataclasses.dataclass(frozen=True)
class Attack:
    """Holds a score of features (runs, steps, F) → (runs,), higher with the canary.

    Attributes:
      name: the name of the score.
      score: the function from features to scores.
      threshold: the threshold that proves the largest ε.
      thresholds: the thresholds of a curve.
    """

    name: str
    score: Callable[[Array], Array]
    threshold: float
    thresholds: Array


def learn(
    inside: Array, outside: Array, *, probability: float, delta: float, significance: float
) -> Attack:
    """Chooses the score and the threshold that prove the largest ε on the given runs.

    The features of all steps are whitened with the mean and covariance of the runs without the
    canary. This inverts a linear filter after the noise, since features are ordered by time, and
    cancels noise that leaves or steps share. The canary moves whitened features z by m if it is
    drawn. The scores are

        likelihood ratio   Σ_t log(1 − q + q exp(Σ_f z_tf m_tf − m_tf²/2)), also with m averaged
                           over the steps
        largest step       max_t Σ_f z_tf m_f, for draws that depend on each other
        largest            max_tf |z_tf|, for movements that average to zero

    Args:
      inside: features of runs with the canary, (runs, steps, F).
      outside: features of runs without the canary.
      probability: q, the probability of the canary in a step.
      delta: δ of the bound.
      significance: 1 − confidence.
    """
    scores = _scores(inside, outside, probability)
    found = [
        (*_best_threshold(score(inside), score(outside), delta, significance), name, score)
        for name, score in scores.items()
    ]
    _, threshold, name, score = max(found, key=lambda entry: entry[0])
    # Equally many thresholds in each tail, which has at least ten runs.
    fractions = np.geomspace(10 / len(outside), 0.5, _CURVE // 2)
    tails = np.quantile(score(outside), 1 - fractions), np.quantile(score(inside), fractions)
    return Attack(name, score, threshold, np.unique(np.concatenate(tails)))


def _scores(
    inside: Array, outside: Array, probability: float
) -> dict[str, Callable[[Array], Array]]:
    shape = outside.shape[1:]
    flat = outside.reshape(len(outside), -1)
    mean = flat.mean(axis=0)
    covariance = np.atleast_2d(np.cov(flat, rowvar=False))
    variances = np.maximum(np.diag(covariance), np.finfo(np.float32).tiny)
    factor = linalg.cholesky(covariance + _JITTER * np.diag(variances), lower=True)

    def whiten(features: Array) -> Array:
        centered = features.reshape(len(features), -1) - mean
        return linalg.solve_triangular(factor, centered.T, lower=True).T.reshape(-1, *shape)

    moved = whiten(inside).mean(axis=0) / probability
    # For few runs and rare draws, for which the estimates of single steps are too noisy.
    pooled = np.broadcast_to(moved.mean(axis=0), shape)

    def likelihood_ratio(moved: Array, features: Array) -> Array:
        exponents = np.sum(whiten(features) * moved - moved**2 / 2, axis=-1)
        if probability == 1.0:
            return exponents.sum(axis=-1)
        return np.logaddexp(np.log1p(-probability), np.log(probability) + exponents).sum(axis=-1)

    def largest_step(features: Array) -> Array:
        return np.sum(whiten(features) * pooled, axis=-1).max(axis=-1)

    def largest(features: Array) -> Array:
        return np.abs(whiten(features)).max(axis=(-1, -2))

    return {
        "likelihood ratio": functools.partial(likelihood_ratio, moved),
        "likelihood ratio, pooled": functools.partial(likelihood_ratio, pooled),
        "largest step": largest_step,
        "largest": largest,
    }


def _best_threshold(
    inside: Array, outside: Array, delta: float, significance: float
) -> tuple[float, float]:
    """Returns the best bound and its threshold, among candidates in two tails."""
    estimator = CanaryScoreAuditor(inside, outside)
    few, most = 1.0 / min(len(inside), len(outside)), 0.9
    fractions = np.geomspace(few, most, _THRESHOLDS)
    candidates = np.concatenate(
        [np.quantile(outside, 1 - fractions), np.quantile(inside, fractions)]
    )
    candidates = np.append(candidates, (outside.max() + inside.min()) / 2)
    bounds = [
        estimator.epsilon_clopper_pearson(
            significance, delta, one_sided=False, threshold_strategy=Explicit(float(threshold))
        )
        for threshold in candidates
    ]
    best = int(np.argmax(bounds))
    return bounds[best], float(candidates[best])
