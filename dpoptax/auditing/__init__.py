"""Audits: attacks on a training step, and the lower bounds on ε that they prove.

A privacy claim limits how well an adversary can tell whether an example was in the data. In an
audit the adversary plants a *canary*, observes the outputs of the threat model, and guesses. The
rate of correct guesses gives, with a stated confidence, a lower bound on ε. A bound above the claim
disproves the claim and shows a bug. A bound near the claim shows that the attack is strong and the
claim tight. A bound far below the claim proves nothing about other attacks.

The audit runs the real training step: `dpoptax.clipped_grad` and the optax chain, over thousands of
runs at once, on samples of the claim's sampler. A single canary under a `PoissonSampler` is drawn
by a coin with the sampler's probability, so this case does not test the sampler itself.
`jax_privacy.auditing` computes bounds on ε from one threshold (install `dpoptax[audit]`). This
module computes bounds from whole trade-off functions, and p-values of claims: `TradeOff`,
`trade_off_curve`, `p_value_fdp`.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from dpoptax import accounting
from dpoptax._pricing.trade_off_functions import TradeOff as TradeOff
from dpoptax._pricing.trade_off_functions import approximate_trade_off as approximate_trade_off
from dpoptax._pricing.trade_off_functions import gaussian_trade_off as gaussian_trade_off
from dpoptax._release.ledger import count_releases, is_ledger
from dpoptax._release.random.check_key import check_key
from dpoptax._release.read_ledger import ledgers
from dpoptax._support.tree import PyTree
from dpoptax.auditing._error_curves import CanaryScores as CanaryScores
from dpoptax.auditing._error_curves import TradeOffCurve as TradeOffCurve
from dpoptax.auditing._error_curves import bootstrap_interval as bootstrap_interval
from dpoptax.auditing._error_curves import trade_off_curve as trade_off_curve
from dpoptax.auditing._families import Family as Family
from dpoptax.auditing._families import approximate_family as approximate_family
from dpoptax.auditing._families import claimed_family as claimed_family
from dpoptax.auditing._families import gaussian_family as gaussian_family
from dpoptax.auditing._game import Game as Game
from dpoptax.auditing._game import canary_gradient as canary_gradient
from dpoptax.auditing._game import canary_gradients as canary_gradients
from dpoptax.auditing._game import draws_alone
from dpoptax.auditing._game import leaf_projections as leaf_projections
from dpoptax.auditing._game import linear_loss as linear_loss
from dpoptax.auditing._membership import MembershipReport as MembershipReport
from dpoptax.auditing._membership import membership_report as membership_report
from dpoptax.auditing._one_run import OneRunGuesses as OneRunGuesses
from dpoptax.auditing._one_run import guesses_about as guesses_about
from dpoptax.auditing._one_run import p_value_dp as p_value_dp
from dpoptax.auditing._one_run import p_value_fdp as p_value_fdp
from dpoptax.auditing._replay import Runs, one_run
from dpoptax.auditing._result import AuditResult as AuditResult
from dpoptax.auditing._result import Bound as Bound
from dpoptax.auditing._worst_example import WorstExample as WorstExample
from dpoptax.auditing._worst_example import searched_canary as searched_canary
from dpoptax.auditing._worst_example import worst_example as worst_example
from dpoptax.sampling import Sampler

try:
    from jax_privacy.auditing import CanaryScoreAuditor, Explicit

    from dpoptax.auditing import _attacks
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"`dpoptax.auditing` needs {error.name}, which is not installed. Run "
        "`pip install 'dpoptax[audit]'`.",
        name=error.name,
    ) from error

ThreatModel = Literal["white-box", "last-iterate"]


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
        finite, the canary has no effect to project on, or `accounting.epsilon_spent` raises it.

    Sources: Jagielski, Ullman, Oprea, "Auditing differentially private machine learning", 2020;
    Nasr et al., "Tight auditing of differentially private machine learning", 2023.
    """
    _check(trials, confidence, threat_model)
    start = time.perf_counter()
    runs = Runs(game, threat_model, check_key(key))
    seen = [runs(included, trials) for included in (True, False)]
    _check_seen(*seen, projected=game.observe is leaf_projections)
    claim = _Claim.of(game.sampler, lambda: _after(game, runs.releases), delta, claimed_epsilon)
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
        claimed_epsilon=claim.epsilon,
        epsilon_lower_bound=float(bound),
        delta=delta,
        confidence=confidence,
        trials=trials,
        threat_model=threat_model,
        attack=attack.name,
        seconds=time.perf_counter() - start,
        claimed=claim.trade_off,
        evidence=trade_off_curve(inside, outside, attack.thresholds, confidence=confidence),
        family=claim.family,
    )


def audit_one_run(
    game: Game,
    *,
    key: jax.Array,
    canaries: int | None = None,
    delta: float = 1e-5,
    confidence: float = 0.999,
    threat_model: ThreatModel = "white-box",
    claimed_epsilon: float | None = None,
) -> AuditResult:
    """Bounds ε from below by one training run with many canaries.

    Each canary is included by a coin flip. Its score is the movement of the run along its clipped
    gradient. The attacker guesses "in" for the highest scores and "out" for the lowest, and ε
    follows from the number of correct guesses. This audit is weaker than `audit` and costs one run.
    Use it for models that are trained once.

    If every record is in every step, the ledger claims a Gaussian mechanism, and
    `epsilon_lower_bound` is for its whole trade-off curve (`p_value_fdp`). Otherwise, or with
    `claimed_epsilon`, which does not determine a mechanism, the bound is for (ε, δ) only
    (`p_value_dp`). It is weak unless δ is far below (1 − confidence)/canaries. `AuditResult.bounds`
    also has the bound by the claimed mechanism's trade-off curve if it is priced exactly, as for
    `audit`.

    Args:
      game: the training run under attack, with a row for each record.
      key: the key of the coins and the noise.
      canaries: number of canaries, which are the last rows of the data set; all rows by default.
        The other rows are always included.
      delta: δ of the claim and of the bound.
      confidence: probability that the bound holds. It is shared among six numbers of guesses.
      threat_model: "white-box": all updates; "last-iterate": the final parameters.
      claimed_epsilon: the claim, if it is not that of the ledger and the sampler.

    Raises:
      ValueError: there are fewer than 64 canaries, the threat model is unknown, the run is not
        finite, all canaries add nothing, or `accounting.epsilon_spent` raises it.

    Source: Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", 2023; for
    the trade-off curve, Mahloujifar, Melis, Chaudhuri, "Auditing f-differential privacy in one
    run", 2024.
    """
    canaries = game.rows if canaries is None else canaries
    if not 64 <= canaries <= game.rows:
        raise ValueError(
            f"`canaries` must be between 64 and the {game.rows} rows of the data, got {canaries}."
        )
    _check(canaries, confidence, threat_model)
    start = time.perf_counter()
    run_key, coin_key = jax.random.split(check_key(key))
    included = np.asarray(jax.random.bernoulli(coin_key, 0.5, (canaries,)))
    scores, opt_state = one_run(game, threat_model, run_key, included)
    result = audit_scores(
        scores,
        included,
        opt_state,
        game.sampler,
        delta=delta,
        confidence=confidence,
        threat_model=threat_model,
        claimed_epsilon=claimed_epsilon,
    )
    return dataclasses.replace(result, seconds=time.perf_counter() - start)


def audit_scores(
    scores: np.ndarray,
    included: np.ndarray,
    opt_state: PyTree,
    sampler: Sampler,
    *,
    delta: float = 1e-5,
    confidence: float = 0.999,
    threat_model: ThreatModel = "white-box",
    claimed_epsilon: float | None = None,
) -> AuditResult:
    """Bounds ε from below by scores of canaries in your own training run.

    It is the second half of `audit_one_run`, which explains the bounds. A canary's score is the sum
    over steps of `leaf_projections(update, contribution)`, or any number that is larger if the
    canary is likelier in the data.

    Args:
      scores: (canaries,), computed by the attacker from the outputs of the run.
      included: (canaries,), independent fair coins: whether a canary was in the data.
      opt_state: the final state, whose ledgers state the claim.
      sampler: drew the batches. Canaries that were left out are masked in its draws.
      delta: as for `audit_one_run`.
      confidence: as for `audit_one_run`.
      threat_model: name of the outputs that the scores were computed from.
      claimed_epsilon: as for `audit_one_run`.

    Raises:
      ValueError: as `audit_one_run`.
    """
    _check(len(scores), confidence, threat_model)
    _check_seen(scores, projected=True)
    claim = _Claim.of(sampler, lambda: opt_state, delta, claimed_epsilon)
    guesses = guesses_about(scores, included, confidence)
    bound = guesses.epsilon(delta)
    if sampler.sampling_probability == 1.0 and claimed_epsilon is None:
        family = gaussian_family()
        bound = family.epsilon(family.refuted(guesses.refutes), delta)
    return AuditResult(
        claimed_epsilon=claim.epsilon,
        epsilon_lower_bound=float(bound),
        delta=delta,
        confidence=confidence,
        trials=len(scores),
        threat_model=threat_model,
        attack="one run, highest and lowest projections",
        seconds=0.0,
        claimed=claim.trade_off,
        evidence=guesses,
        family=claim.family,
        canaries=CanaryScores(scores, included),
    )


def _check(trials: int, confidence: float, threat_model: str) -> None:
    if not trials >= 64:
        raise ValueError(
            f"`trials` must be at least 64, got {trials}. A bound above ε needs more than "
            "e^ε trials."
        )
    if not 0.5 < confidence < 1.0:
        raise ValueError(f"`confidence` must be in (0.5, 1), got {confidence}.")
    if threat_model not in ("white-box", "last-iterate"):
        raise ValueError(
            f"`threat_model` must be 'white-box' or 'last-iterate', got {threat_model!r}."
        )


def _check_seen(*seen: np.ndarray, projected: bool) -> None:
    """Raises if features or scores are not finite or do not depend on the noise.

    A custom `observe` may be the same in all runs, because the noise hides the rest. A projection
    on a canary's contribution may not.
    """
    if not all(np.isfinite(values).all() for values in seen):
        raise ValueError(
            "The attacker's observations must be finite, but a release was refused or the training "
            "diverged. Audit a run that stays finite, such as with a smaller learning rate."
        )
    first = seen[0][0]
    if projected and all((values == first).all() for values in seen):
        raise ValueError(
            "The projections on the canaries' contributions do not depend on the noise: "
            "the canaries add nothing to the clipped sum, or all updates are zero. Pass canaries "
            "with finite gradients that are not zero, and a transform with outputs."
        )


class _Claim(NamedTuple):
    """Claim of a run, and the family of mechanisms of the same kind."""

    epsilon: float
    trade_off: TradeOff
    family: Family | None

    @classmethod
    def of(
        cls, sampler: Sampler, opt_state: Callable[[], PyTree], delta: float, epsilon: float | None
    ) -> "_Claim":
        """Returns the claim of the ledger and the sampler after the run, or of `epsilon`."""
        gaussian = gaussian_family() if sampler.sampling_probability == 1.0 else None
        if epsilon is not None:
            return cls(float(epsilon), approximate_trade_off(epsilon, delta), gaussian)
        spent = opt_state()
        epsilon = float(accounting.epsilon_spent(spent, sampler, delta))
        family = claimed_family(spent, sampler)
        # Otherwise the price is only an upper bound on ε, and a refuted value may exceed the true
        # ε. This is the case if a record replaces another, as in batches that are cut or of a fixed
        # size: the price assumes that the two records contribute opposite vectors.
        exact = draws_alone(sampler) and not any(
            ledger.mechanism.strategy for ledger in ledgers(spent)
        )
        return cls(epsilon, family.trade_off(1.0), gaussian or (family if exact else None))


def _after(game: Game, releases: jax.Array) -> PyTree:
    """Returns the optimizer state with the counts of releases and refusals of a run."""
    seen = iter(np.asarray(releases).tolist())

    def spent(leaf: Any) -> Any:
        return count_releases(leaf, *next(seen)) if is_ledger(leaf) else leaf

    return jax.tree.map(spent, game.transform.init(game.params), is_leaf=is_ledger)
