"""The result of an audit: bounds with their assumptions and confidence."""

import dataclasses
import functools

from dpoptax._pricing.trade_off_functions import TradeOff
from dpoptax._support.rounded import epsilon_text
from dpoptax.auditing._error_curves import Array, TradeOffCurve
from dpoptax.auditing._families import Family


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
      canaries: the scores of the canaries of one run that were in, and of those that were out;
        `None` for many runs.
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
    canaries: tuple[Array, Array] | None = dataclasses.field(default=None, repr=False)

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
        claimed = epsilon_text(self.claimed_epsilon)
        proved = epsilon_text(self.epsilon_lower_bound, lower=True)
        return (
            f"claimed ε = {claimed}, audited ε ≥ {proved} "
            f"at δ = {self.delta:g} with {100 * self.confidence:g} % confidence "
            f"({self.threat_model}, {self.attack}, {self.trials} trials): {verdict}"
        )
