"""Audits one training run with many canaries."""

import dataclasses
import functools
import time

import jax
import numpy as np
from jax_privacy.auditing import CanaryScoreAuditor, Explicit

from dpoptax._random.keys import check_key
from dpoptax._support.tree import PyTree
from dpoptax.auditing._game import Game
from dpoptax.auditing._replay import one_run
from dpoptax.auditing._result import (
    AuditResult,
    Bound,
    ThreatModel,
    check_options,
    check_seen,
    claim_of,
)
from dpoptax.sampling import Sampler

# The least number of guesses.
_FEWEST = 16


def audit_one_run(
    game: Game,
    *,
    key: jax.Array,
    delta: float = 1e-5,
    confidence: float = 0.999,
    threat_model: ThreatModel = "white-box",
    claimed_epsilon: float | None = None,
) -> AuditResult:
    """Bounds ε from below by one training run with many canaries.

    All rows are canaries, and each is included by a coin flip. Its score is the movement of the run
    along its clipped gradient. The attacker guesses "in" for the highest scores and "out" for the
    lowest, and ε follows from the number of correct guesses. This audit is weaker than `audit` and
    costs one run. Use it for models that are trained once. In your own loop, `audit_scores` takes
    the scores of a few canaries among other examples.

    If every record is in every step, the ledger claims a Gaussian mechanism, and
    `epsilon_lower_bound` is for its whole trade-off curve. Otherwise, or with `claimed_epsilon`,
    which does not determine a mechanism, the bound is for (ε, δ) only. It is weak unless δ is far
    below (1 − confidence)/canaries.

    Args:
      game: the training run under attack, with a row for each record.
      key: the key of the coins and the noise.
      delta: δ of the claim and of the bound.
      confidence: probability that the bound holds. It is shared among six numbers of guesses.
      threat_model: "white-box": all updates; "last-iterate": the final parameters.
      claimed_epsilon: the claim, if it is not that of the ledger and the sampler.

    Raises:
      ValueError: there are fewer than 64 rows, the threat model is unknown, the run is not finite,
        all canaries add nothing, or `accounting.guarantee` raises it.

    Source: Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", 2023; for
    the trade-off curve, Mahloujifar, Melis, Chaudhuri, "Auditing f-differential privacy in one
    run", 2024.
    """
    check_options(game.rows, confidence, threat_model, "the number of canaries")
    start = time.perf_counter()
    run_key, coin_key = jax.random.split(check_key(key))
    included = np.asarray(jax.random.bernoulli(coin_key, 0.5, (game.rows,)))
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
    canary is likelier in the data. Equal scores are ordered at random, anew in each call.

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
    scores, included = np.asarray(scores), np.asarray(included, bool)
    check_options(len(scores), confidence, threat_model, "the number of canaries")
    check_seen(scores, projected=True)
    claim = claim_of(sampler, lambda: opt_state, delta, claimed_epsilon)
    bound = functools.partial(one_run_bound, scores, included, delta=delta, confidence=confidence)
    bounds = [Bound(bound(), "(ε, δ), Steinke et al.", "nothing")]
    if sampler.sampling_probability == 1.0 and claimed_epsilon is None:
        bounds.append(Bound(bound(gaussian=True), "f-DP of the claim", "a Gaussian mechanism"))
    return AuditResult(
        epsilon_lower_bound=bounds[-1].epsilon,
        delta=delta,
        confidence=confidence,
        trials=len(scores),
        threat_model=threat_model,
        attack="one run, highest and lowest projections",
        seconds=0.0,
        by_guesses=tuple(bounds),
        **claim,
    )


def one_run_bound(
    scores: np.ndarray,
    included: np.ndarray,
    *,
    delta: float,
    confidence: float,
    gaussian: bool = False,
) -> float:
    """Returns the largest ε that the guesses about the canaries of one run refute.

    The attacker guesses "in" for the highest scores and "out" for as many of the lowest. Six
    numbers of guesses share the failure probability, from half of the canaries down to a 64th of
    them, and at least 16.

    Args:
      scores: (canaries,), high for canaries that the attacker guesses to be in.
      included: (canaries,), True for canaries that were in.
      delta: δ of the bound.
      confidence: the confidence of the bound.
      gaussian: whether to assume a Gaussian mechanism.

    Source: Steinke, Nasr, Jagielski, 2023, algorithm 1, with k₊ = k₋; for a Gaussian mechanism,
    Mahloujifar, Melis, Chaudhuri, 2024. Both as implemented in jax_privacy.
    """
    size = len(scores)
    # An order of equal scores by position could depend on the coins, and so could a fixed shuffle.
    # A random order is the attacker's own randomness.
    order = np.lexsort((np.random.default_rng().random(size), scores))
    places = np.empty(size)
    # From the lowest to the highest score, with sizes that all differ.
    places[order] = np.arange(size) - size / 2 + 0.25
    right, sizes = included == (places > 0), np.abs(places)
    if right.all() or not right.any():
        right[np.argmin(sizes)] ^= True  # jax_privacy needs both; this one is never guessed about
    auditor = CanaryScoreAuditor(sizes[right], sizes[~right])
    bound = auditor.epsilon_one_run_fdp if gaussian else auditor.epsilon_one_run
    numbers = sorted({max(_FEWEST, size // 2**i) for i in range(1, 7)})
    least = np.sort(sizes)[[-number for number in numbers]]
    significance = (1 - confidence) / len(numbers)
    return max(
        float(bound(significance, delta, threshold_strategy=Explicit(float(each))))
        for each in least
    )
