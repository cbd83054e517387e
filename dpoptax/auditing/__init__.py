"""Audits: attacks on a live training step, and the lower bounds on epsilon that they prove.

A privacy claim says that no one can tell well whether an example was in the data. An audit tries:
the attacker plants a *canary*, sees what the threat model lets out, and guesses. From how often the
guesses are right follows, with a stated confidence, an ε that the mechanism cannot be below. A
bound above the claim disproves the claim: a bug. A bound near it says that the attack can see, and
that the claim is no larger than it has to be. A bound below proves nothing about other attacks.

What runs is the step that is trained with: `dpoptax.clipped_grad` and the optax chain, over
thousands of runs at once, on samples of the sampler that the claim is made for. A canary alone
under a `PoissonSampler` is in a step by a coin of the sampler's probability: whether that sampler
draws so is not seen. Bounds of ε by one threshold are `jax_privacy.auditing`'s (install
`dpoptax[audit]`); those by whole trade-off functions, and p-values of claims, are here: `TradeOff`,
`trade_off_curve`, `p_value_fdp`.
"""

import time
from typing import Literal, NamedTuple

import jax
import numpy as np

from dpoptax import accounting
from dpoptax._noise.ledger import after_releases, is_ledger
from dpoptax._noise.read_ledger import ledgers
from dpoptax._pricing.trade_off_functions import TradeOff as TradeOff
from dpoptax._pricing.trade_off_functions import approximate_trade_off as approximate_trade_off
from dpoptax._pricing.trade_off_functions import gaussian_trade_off as gaussian_trade_off
from dpoptax._random.check_key import check_key
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
from dpoptax.auditing._game import leaf_projections as leaf_projections
from dpoptax.auditing._game import linear_loss as linear_loss
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

try:
    from jax_privacy.auditing import CanaryScoreAuditor, Explicit

    from dpoptax.auditing import _attacks
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"auditing needs {error.name}, which is not installed; pip install 'dpoptax[audit]'",
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
    """Bounds ε from below by telling runs with the canary from runs without.

        ε ≥ log((TPR − δ) / FPR),  TPR and FPR by their Clopper–Pearson bounds

    and the same with the two kinds of run exchanged. On a quarter of the runs the attacker learns:
    how the noise on what it sees is correlated over leaves and steps, where the canary moves it to,
    and which score and threshold tell most (`_attacks`). On the others the bound is
    computed, for that one score and threshold; so it is valid whatever was learned. So is the curve
    of errors at two dozen learned thresholds, which bounds the whole trade-off function: it refutes
    claims, and bounds ε for mechanisms like the claimed one (`AuditResult.bounds`), where these are
    priced exactly: independent noise under a `PoissonSampler` without `max_batch_size`, or with
    every record in every step.

    The chain's stages behind the noise are no obstacle as long as they are linear: learning the
    correlations inverts any filter.

    Args:
      game: what is attacked.
      key: of the attack's randomness. The transform's own keys are replaced, a new one each run.
      trials: training runs with the canary, and as many without. A bound above ε needs more than
        e^ε of them; 10⁶ see most of ε at δ = 10⁻⁵.
      delta: δ of the claim and of the bound.
      confidence: that the bound holds, over the audit's randomness.
      threat_model: "white-box": the attacker sees every update that the transform lets out, or
        all released sums if the transform is the noise stage alone. "last-iterate": only the
        parameters at the end.
      claimed_epsilon: the claim, where it is not the ledger's and the sampler's.

    Raises:
      ValueError: too few trials, a bad threat model, or as `accounting.epsilon_spent`; runs in
        which the attacker saw something that is not finite, or a canary that adds nothing to
        project on: a bound of 0 would say that something was tested.

    Sources: Jagielski, Ullman, Oprea, "Auditing differentially private machine learning", 2020;
    Nasr et al., "Tight auditing of differentially private machine learning", 2023.
    """
    _check(trials, confidence, threat_model)
    start = time.perf_counter()
    runs = Runs(game, threat_model, check_key(key))
    seen = [runs(included, trials) for included in (True, False)]
    _check_seen(*seen, projected=game.observe is leaf_projections)
    claim = _Claim.of(game, lambda: _after(game, runs.releases), delta, claimed_epsilon)
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
    """Bounds ε from below by a single training run with many canaries, each in or out by a coin.

    A canary's score is how far the run went along its clipped gradient. The attacker calls those
    with the highest scores in, those with the lowest out, and ε follows from how often that is
    right. Weaker than `audit`, and as cheap as a run: the audit for models that are trained once.

    Where every record is in every step, what a ledger claims is a Gaussian mechanism, and
    `epsilon_lower_bound` is for its whole trade-off curve (`p_value_fdp`). Otherwise, and with
    `claimed_epsilon`, which says nothing of the mechanism, it is for (ε, δ) alone (`p_value_dp`),
    which sees little unless δ is far below (1 − confidence)/canaries; `AuditResult.bounds` has that
    of the claimed mechanism's trade-off curve, too, where it is priced exactly, as for `audit`.

    Args:
      game: what is attacked, with a row for each record.
      key: of the coins and the noise.
      canaries: how many of the dataset's last rows are canaries; all by default. The other rows
        are always in.
      delta: δ of the claim and of the bound.
      confidence: that the bound holds. It is shared among six numbers of guesses.
      threat_model: "white-box": all updates; "last-iterate": the parameters at the end.
      claimed_epsilon: the claim, where it is not the ledger's and the sampler's.

    Raises:
      ValueError: fewer than 64 canaries, a bad threat model, or as `accounting.epsilon_spent`; a
        run that is not finite, or canaries that all add nothing, as for `audit`.

    Source: Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", 2023; for
    the trade-off curve, Mahloujifar, Melis, Chaudhuri, "Auditing f-differential privacy in one
    run", 2024.
    """
    canaries = game.rows if canaries is None else canaries
    if not 64 <= canaries <= game.rows:
        raise ValueError(f"canaries={canaries}: want between 64 and the {game.rows} rows")
    _check(canaries, confidence, threat_model)
    start = time.perf_counter()
    run_key, coin_key = jax.random.split(check_key(key))
    included = np.asarray(jax.random.bernoulli(coin_key, 0.5, (canaries,)))
    scores, opt_state = one_run(game, threat_model, run_key, included)
    _check_seen(scores, projected=True)
    claim = _Claim.of(game, lambda: opt_state, delta, claimed_epsilon)
    guesses = guesses_about(scores, included, confidence)
    bound = guesses.epsilon(delta)
    if game.sampler.sampling_probability == 1.0 and claimed_epsilon is None:
        family = gaussian_family()
        bound = family.epsilon(family.refuted(guesses.refutes), delta)
    return AuditResult(
        claimed_epsilon=claim.epsilon,
        epsilon_lower_bound=float(bound),
        delta=delta,
        confidence=confidence,
        trials=canaries,
        threat_model=threat_model,
        attack="one run, highest and lowest projections",
        seconds=time.perf_counter() - start,
        claimed=claim.trade_off,
        evidence=guesses,
        family=claim.family,
        canaries=CanaryScores(scores, included),
    )


def _check(trials, confidence, threat_model):
    if not trials >= 64:
        raise ValueError(f"trials={trials}: want at least 64; a bound above ε needs over e^ε")
    if not 0.5 < confidence < 1.0:
        raise ValueError(f"confidence={confidence}: want a number in (0.5, 1)")
    if threat_model not in ("white-box", "last-iterate"):
        raise ValueError(f"threat_model={threat_model!r}: want 'white-box' or 'last-iterate'")


def _check_seen(*seen: np.ndarray, projected: bool) -> None:
    """Raises where features or scores tell nothing, whatever the noise.

    An `observe` of a game's own may see the same in all runs because the noise hides the rest; a
    projection on what a canary adds may not.
    """
    if not all(np.isfinite(values).all() for values in seen):
        raise ValueError(
            "what the attacker saw is not finite: a release was refused, or the training diverged. "
            "Nothing is tested so; audit a run that stays finite, such as with less learning rate"
        )
    first = seen[0][0]
    if projected and all((values == first).all() for values in seen):
        raise ValueError(
            "the projections on what canaries add are the same whatever the noise, which tests "
            "nothing: they add nothing to the clipped sum, or all updates are zero. Give canaries "
            "with finite gradients that are not zero, and a transform that lets something out"
        )


class _Claim(NamedTuple):
    """What is claimed, and mechanisms of the same kind."""

    epsilon: float
    trade_off: TradeOff
    family: Family | None

    @classmethod
    def of(cls, game, opt_state, delta, epsilon):
        """The ledger's and the sampler's claim, `opt_state()` being after the run, or `epsilon`."""
        gaussian = gaussian_family() if game.sampler.sampling_probability == 1.0 else None
        if epsilon is not None:
            return cls(float(epsilon), approximate_trade_off(epsilon, delta), gaussian)
        spent = opt_state()
        epsilon = float(accounting.epsilon_spent(spent, game.sampler, delta))
        family = claimed_family(spent, game.sampler)
        # Elsewhere the price is a bound, and no mechanism need have the ε that its noise is priced
        # at: what is refuted of it may be above the true one. So it is where a record takes the
        # place of another, as in batches of a fixed size or that are cut: both are priced as if
        # they were as far from a third one as from each other, on opposite sides of it.
        exact = game.alone and not any(ledger.mechanism.strategy for ledger in ledgers(spent))
        return cls(epsilon, family.trade_off(1.0), gaussian or (family if exact else None))


def _after(game, releases):
    """The optimizer's state after as many releases as a run was seen to make, refused or not."""
    seen = iter(np.asarray(releases).tolist())

    def spent(leaf):
        return after_releases(leaf, *next(seen)) if is_ledger(leaf) else leaf

    return jax.tree.map(spent, game.transform.init(game.params), is_leaf=is_ledger)
