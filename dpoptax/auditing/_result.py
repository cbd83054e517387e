"""The result of an audit: its claim, its bounds with their assumptions, and refuted mechanisms."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import dp_accounting
import jax
import numpy as np

from dpoptax._pricing.trade_off_functions import TradeOff, approximate_trade_off, gaussian_trade_off
from dpoptax._release.ledger import count_releases, is_noise_state
from dpoptax._release.read_ledger import ledgers, read_ledgers
from dpoptax._support.rounded import to_decimals
from dpoptax._support.tree import PyTree
from dpoptax.accounting import Guarantee, guarantee
from dpoptax.accounting._run_event import matching_sampler, spent_event
from dpoptax.auditing._error_curves import TradeOffCurve
from dpoptax.auditing._game import Game, draws_alone
from dpoptax.sampling import Sampler

ThreatModel = Literal["white-box", "last-iterate"]


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower bound on ε.

    Attributes:
      epsilon: the bound on the true ε at the audit's δ.
      method: the method that found it.
      assumes: its assumption.
    """

    epsilon: float
    method: str
    assumes: str


@dataclasses.dataclass(frozen=True)
class Family:
    """Mechanisms of one kind, by a parameter that increases as privacy decreases.

    A bound by a family is a lower bound on the parameter if the mechanism is of this kind.

    Attributes:
      assumes: the assumption of a bound by this family, in words.
      trade_off: the claim of each parameter, decreasing in the parameter.
      epsilon: ε of the parameter at δ, `epsilon(parameter, delta)`.
      tolerance: relative precision of the search for the parameter.
      most: the parameter at which a search ends.
    """

    assumes: str
    trade_off: Callable[[float], TradeOff]
    epsilon: Callable[[float, float], float]
    tolerance: float = 1e-6
    most: float = 1e3

    def refuted(self, refutes: Callable[[TradeOff], bool]) -> float:
        """Returns the largest refuted parameter, or 0, by doubling and bisection.

        All parameters below a refuted one must be refuted. The result is itself refuted, so the
        search can only make a bound weaker. It begins at 2⁻⁶, since smaller bounds are of no use.
        """
        low, high = 0.0, 1.0
        while low == 0.0 and high >= 2.0**-6:
            if refutes(self.trade_off(high)):
                low, high = high, 2 * high
            else:
                high /= 2
        if low == 0.0:
            return 0.0
        while low < self.most and refutes(self.trade_off(high)):
            low, high = high, 2 * high
        while low < self.most and high / low > 1 + self.tolerance:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if refutes(self.trade_off(middle)) else (low, middle)
        return low


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """Holds the results of an audit.

    Attributes:
      claimed_epsilon: ε that the ledger and the sampler state at `delta`.
      epsilon_lower_bound: a lower bound on the true ε at `delta`, with probability `confidence`.
        For one run on full batches without a given ε, it assumes a Gaussian mechanism, as `bounds`
        states. Another mechanism may allow as many correct guesses at a smaller ε.
      delta: δ of the claim and of the bound.
      confidence: the confidence of the bound.
      trials: number of training runs with the canary, and of runs without it; number of canaries
        for one run.
      threat_model: the observations of the attacker.
      attack: the score with which the attacker decided.
      seconds: wall time.
      claimed: the claimed trade-off function: that of the ledger and the sampler, or of (ε, δ) if ε
        was given; `None` if only ε is compared.
      evidence: the error rates of many runs; `None` if only ε is compared.
      family: mechanisms like the claimed one, for bounds by the evidence; `None` if ε was given
        and the claimed mechanism is not Gaussian, or if its price is only a bound.
      by_guesses: the bounds by the guesses about the canaries of one run; none for many runs.
    """

    claimed_epsilon: float
    epsilon_lower_bound: float
    delta: float
    confidence: float
    trials: int
    threat_model: str
    attack: str
    seconds: float
    claimed: TradeOff | None = dataclasses.field(default=None, repr=False)
    evidence: TradeOffCurve | None = dataclasses.field(default=None, repr=False)
    family: Family | None = dataclasses.field(default=None, repr=False)
    by_guesses: tuple[Bound, ...] = dataclasses.field(default=(), repr=False)

    @functools.cached_property
    def violated(self) -> bool:
        """True if the bound exceeds the claim, or the evidence refutes the trade-off.

        Each of the two is wrong with probability at most 1 − `confidence`.
        """
        if self.epsilon_lower_bound > self.claimed_epsilon:
            return True
        if self.evidence is None or self.claimed is None:
            return False
        return self.evidence.refutes(self.claimed)

    @functools.cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """All bounds that the runs prove, each with `confidence`; computed on first use in seconds.

        Many runs prove a bound by one threshold, for any mechanism. The whole curve proves a bound
        for mechanisms like the claimed one, if there is a family of them. One run proves a bound
        for any (ε, δ)-private mechanism, and one for mechanisms like the claimed one.
        """
        if self.by_guesses:
            return self.by_guesses
        found = [Bound(self.epsilon_lower_bound, "one threshold", "nothing")]
        if self.evidence is not None and self.family is not None:
            refuted = self.family.refuted(self.evidence.refutes)
            bound = float(self.family.epsilon(refuted, self.delta))
            found.append(Bound(bound, "f-DP of the claim", self.family.assumes))
        return tuple(found)

    def __str__(self) -> str:
        verdict = "VIOLATED" if self.violated else "not contradicted"
        claimed = to_decimals(self.claimed_epsilon)
        proved = to_decimals(self.epsilon_lower_bound, lower=True)
        return (
            f"claimed ε = {claimed}, audited ε ≥ {proved} "
            f"at δ = {self.delta:g} with {100 * self.confidence:g} % confidence "
            f"({self.threat_model}, {self.attack}, {self.trials} trials): {verdict}"
        )


def gaussian_family() -> Family:
    """Returns the family of Gaussian mechanisms, by μ."""

    def epsilon(mu: float, delta: float) -> float:
        return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta)) if mu else 0.0

    return Family("a Gaussian mechanism", gaussian_trade_off, epsilon)


def claimed_family(opt_state: PyTree, sampler: Sampler) -> Family:
    """Returns the family of the claimed mechanism of a run, with other noise.

    The parameter is the factor by which the noise is *smaller* than the ledgers state; 1 is the
    claim. Its trade-off function is that of `accounting.Guarantee`, a lower bound on the exact one.
    So a refutation is valid. The ε of a parameter is an upper bound. It bounds the true ε from
    below only if the price is exact: independent noise, under a `PoissonSampler` without
    `max_batch_size`. Batches of a fixed size are priced by a dominating pair, and correlated noise
    over randomly drawn examples as a Gaussian.
    """
    readings = read_ledgers(opt_state)
    sampler = matching_sampler(sampler, readings)
    spent_event(readings, sampler, same_batches=True)  # raises before the first trial

    def with_noise(less: float) -> Guarantee:
        event = spent_event(readings, sampler, same_batches=True, noise=1 / less)
        return Guarantee(event, sampler.neighboring_relation)

    @functools.cache
    def priced(less: float) -> TradeOff:
        return with_noise(less).trade_off

    def trade_off(less: float) -> TradeOff:
        # Priced on request, since it takes a second for many steps.
        name = "the claim" if less == 1 else f"the claim with noise / {less:.3g}"
        return TradeOff(name, lambda rates: priced(less).curve(rates))

    def epsilon(less: float, delta: float) -> float:
        return with_noise(less).epsilon(delta) if less else 0.0

    return Family("the claimed mechanism, with other noise", trade_off, epsilon, 1e-2, 16.0)


def check_options(
    trials: int, confidence: float, threat_model: str, name: str = "`trials`"
) -> None:
    """Raises if an option of an audit is out of range."""
    if not trials >= 64:
        raise ValueError(
            f"{name} must be at least 64, got {trials}. A bound above ε needs more than e^ε trials."
        )
    if not 0.5 < confidence < 1.0:
        raise ValueError(f"`confidence` must be in (0.5, 1), got {confidence}.")
    if threat_model not in ("white-box", "last-iterate"):
        raise ValueError(
            f"`threat_model` must be 'white-box' or 'last-iterate', got {threat_model!r}."
        )


def check_seen(*seen: np.ndarray, projected: bool) -> None:
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


def claim_of(
    sampler: Sampler, opt_state: Callable[[], PyTree], delta: float, epsilon: float | None
) -> dict[str, Any]:
    """Returns `claimed_epsilon`, `claimed` and `family` of an `AuditResult`.

    The claim is that of the ledger and the sampler after the run, or of `epsilon`.
    """
    gaussian = gaussian_family() if sampler.sampling_probability == 1.0 else None
    if epsilon is not None:
        claimed = approximate_trade_off(epsilon, delta)
        return {"claimed_epsilon": float(epsilon), "claimed": claimed, "family": gaussian}
    spent = opt_state()
    family = claimed_family(spent, sampler)
    # Otherwise the price is only an upper bound on ε, and a refuted value may exceed the true ε.
    # This is the case if a record replaces another, as in batches that are cut or of a fixed size:
    # the price assumes that the two records contribute opposite vectors.
    exact = draws_alone(sampler) and not any(x.mechanism.strategy for x in ledgers(spent))
    return {
        "claimed_epsilon": float(guarantee(spent, sampler).epsilon(delta)),
        "claimed": family.trade_off(1.0),
        "family": gaussian or (family if exact else None),
    }


def state_after(game: Game, releases: jax.Array) -> PyTree:
    """Returns the optimizer state with the counts of releases and refusals of a run."""
    seen = iter(np.asarray(releases).tolist())

    def spent(leaf: Any) -> Any:
        return count_releases(leaf, *next(seen)) if is_noise_state(leaf) else leaf

    return jax.tree.map(spent, game.transform.init(game.params), is_leaf=is_noise_state)
