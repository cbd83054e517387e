"""Audits a training step by distinguishing many runs, with a learned score."""

import functools
import time
from collections.abc import Callable

import jax
import numpy as np
from scipy import linalg

from dpoptax._random.keys import check_key
from dpoptax.auditing._error_curves import Array, trade_off_curve
from dpoptax.auditing._game import Game, leaf_projections
from dpoptax.auditing._replay import Runs
from dpoptax.auditing._result import (
    AuditResult,
    ThreatModel,
    check_options,
    check_seen,
    claim_of,
    state_after,
)

try:
    from jax_privacy.auditing import CanaryScoreAuditor, Explicit
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"`dpoptax.auditing` needs {error.name}, which is not installed. Run "
        "`pip install 'dpoptax[audit]'`.",
        name=error.name,
    ) from error


# Relative to each feature's own variance: far above the rounding of float32 features.
_JITTER = 1e-10
_THRESHOLDS = 60
_CURVE = 24


def audit(
    game: Game,
    *,
    key: jax.Array,
    trials: int = 100_000,
    delta: float = 1e-5,
    confidence: float = 0.999,
    threat_model: ThreatModel = "white-box",
    claimed_epsilon: float | None = None,
) -> AuditResult:
    """Bounds ε from below by distinguishing runs with the canary from runs without it.

        ε ≥ log((TPR − δ) / FPR),  TPR and FPR by their Clopper–Pearson bounds

    The same holds with the two kinds of runs exchanged. A quarter of the runs is used to learn the
    correlations of the noise over leaves and steps, the effect of the canary, and the best score
    and threshold (`_learn`). The bound is computed on the other runs with this score and
    threshold, so it is valid for any attack that was learned. The error rates at two dozen learned
    thresholds bound the whole trade-off function. They refute claims, and bound ε for mechanisms
    like the claimed one (`AuditResult.bounds`) if these are priced exactly: independent noise under
    a `PoissonSampler` without `max_batch_size`, or with every record in every step.

    Linear stages after the noise do not hinder the attack, since learning the correlations inverts
    any filter.

    Args:
      game: the training run under attack.
      key: the key of the attack's randomness. Each run replaces the transform's keys by new ones.
      trials: number of training runs with the canary, and of runs without it. A bound above ε needs
        more than e^ε of them; 10⁶ reach most of ε at δ = 10⁻⁵.
      delta: δ of the claim and of the bound.
      confidence: probability that the bound holds, over the audit's randomness.
      threat_model: "white-box": the attacker sees every output of the transform. If the transform
        is only a noise stage, these are all released sums. "last-iterate": the attacker sees only
        the final parameters.
      claimed_epsilon: the claim, if it is not that of the ledger and the sampler.

    Raises:
      ValueError: there are too few trials, the threat model is unknown, outputs of a run are not
        finite, the canary has no effect to project on, or `accounting.guarantee` raises it.

    Sources: Jagielski, Ullman, Oprea, "Auditing differentially private machine learning", 2020;
    Nasr et al., "Tight auditing of differentially private machine learning", 2023.
    """
    check_options(trials, confidence, threat_model)
    start = time.perf_counter()
    runs = Runs(game, threat_model, check_key(key))
    seen = [runs(included, trials) for included in (True, False)]
    check_seen(*seen, projected=game.observe is leaf_projections)
    claim = claim_of(game.sampler, lambda: state_after(game, runs.releases), delta, claimed_epsilon)
    probability = game.sampler.sampling_probability if threat_model == "white-box" else 1.0
    learning = max(trials // 4, 8)
    name, score, threshold, thresholds = _learn(
        *(features[:learning] for features in seen),
        probability=probability,
        delta=delta,
        significance=1 - confidence,
    )
    inside, outside = (score(features[learning:]) for features in seen)
    bound = CanaryScoreAuditor(inside, outside).epsilon_clopper_pearson(
        1 - confidence, delta, one_sided=False, threshold_strategy=Explicit(threshold)
    )
    return AuditResult(
        epsilon_lower_bound=float(bound),
        delta=delta,
        confidence=confidence,
        trials=trials,
        threat_model=threat_model,
        attack=name,
        seconds=time.perf_counter() - start,
        evidence=trade_off_curve(inside, outside, thresholds, confidence=confidence),
        **claim,
    )


def _learn(
    inside: Array, outside: Array, *, probability: float, delta: float, significance: float
) -> tuple[str, Callable[[Array], Array], float, Array]:
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

    Returns:
      The name of the score; the score, (runs, steps, F) → (runs,), higher with the canary; its
      threshold; and the thresholds of a curve.
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
    return name, score, threshold, np.unique(np.concatenate(tails))


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
