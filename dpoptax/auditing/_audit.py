"""Audits a training step by distinguishing many runs."""

import time

import jax

from dpoptax._random.keys import check_key
from dpoptax.auditing._claim import (
    ThreatModel,
    check_options,
    check_seen,
    claim_of,
    state_after,
)
from dpoptax.auditing._error_curves import trade_off_curve
from dpoptax.auditing._game import Game, leaf_projections
from dpoptax.auditing._replay import Runs
from dpoptax.auditing._result import AuditResult

try:
    from jax_privacy.auditing import CanaryScoreAuditor, Explicit

    from dpoptax.auditing import _attacks
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"`dpoptax.auditing` needs {error.name}, which is not installed. Run "
        "`pip install 'dpoptax[audit]'`.",
        name=error.name,
    ) from error


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
    and threshold (`_attacks`). The bound is computed on the other runs with this score and
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
    attack = _attacks.learn(
        *(features[:learning] for features in seen),
        probability=probability,
        delta=delta,
        significance=1 - confidence,
    )
    inside, outside = (attack.score(features[learning:]) for features in seen)
    bound = CanaryScoreAuditor(inside, outside).epsilon_clopper_pearson(
        1 - confidence, delta, one_sided=False, threshold_strategy=Explicit(attack.threshold)
    )
    return AuditResult(
        epsilon_lower_bound=float(bound),
        delta=delta,
        confidence=confidence,
        trials=trials,
        threat_model=threat_model,
        attack=attack.name,
        seconds=time.perf_counter() - start,
        evidence=trade_off_curve(inside, outside, attack.thresholds, confidence=confidence),
        **claim,
    )
