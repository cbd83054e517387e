"""What an audit found: its bounds, what each takes for granted, and how sure each is."""

import dataclasses
import functools

import numpy as np

from dpoptax._pricing.trade_off_functions import TradeOff
from dpoptax.auditing._error_curves import CanaryScores, TradeOffCurve
from dpoptax.auditing._families import Family, approximate_family
from dpoptax.auditing._one_run import OneRunGuesses


@dataclasses.dataclass(frozen=True)
class Bound:
    """A lower bound on ε.

    Attributes:
      epsilon: the true ε at the audit's δ is no smaller.
      method: how it was found.
      assumes: what it takes for granted.
      failure_probability: how likely the audit gives a larger one than is true, at most.
    """

    epsilon: float
    method: str
    assumes: str
    failure_probability: float


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """What an audit found.

    Attributes:
      claimed_epsilon: the ε that the ledger and the sampler state at `delta`.
      epsilon_lower_bound: with probability `confidence`, the true ε at `delta` is no smaller. By
        one run on full batches, where no ε is given, it takes for granted that the mechanism is a
        Gaussian one, as `bounds` says: of another kind one may be right as often at a smaller ε.
      delta: δ of both.
      confidence: of the bound.
      trials: training runs with the canary, and as many without; canaries for a one-run audit.
      threat_model: what the attacker saw.
      attack: the score by which the attacker decided.
      seconds: wall time.
      claimed: the trade-off function that is claimed: the ledger's and the sampler's, or that of
        (ε, δ) where ε was given; `None` where nothing but ε is compared.
      evidence: what was seen, and what it refutes: a `TradeOffCurve` by many runs, or the guesses
        about the canaries of one; `None` likewise.
      family: mechanisms like the claimed one, for bounds by the evidence; `None` where ε was given
        and the claimed mechanism is not Gaussian, or where its price is not exact but a bound.
      canaries: the scores of the canaries of one run; `None` by many runs.
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
    evidence: TradeOffCurve | OneRunGuesses | None = dataclasses.field(default=None, repr=False)
    family: Family | None = dataclasses.field(default=None, repr=False)
    canaries: CanaryScores | None = dataclasses.field(default=None, repr=False)

    @property
    def failure_probability(self) -> float:
        """1 − `confidence`: how likely each of the bounds, alone, is larger than is true."""
        return 1 - self.confidence

    @functools.cached_property
    def violated(self) -> bool:
        """Whether the bound exceeds the claim, or what was seen refutes the claimed trade-off.

        Each of the two errs with the failure probability at most.
        """
        if self.epsilon_lower_bound > self.claimed_epsilon:
            return True
        if self.evidence is None or self.claimed is None:
            return False
        return self.evidence.refutes(self.claimed)

    @functools.cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """All bounds that the runs prove, computed when they are asked for, in seconds.

        By many runs: at one threshold, for any mechanism; and by the whole curve, for mechanisms
        like the claimed one, if there is a family of them. By one run: Steinke et al.'s and
        Mahloujifar et al.'s for any (ε, δ)-private mechanism, and the latter's for mechanisms like
        the claimed one.
        """
        found = []
        seen = self.evidence
        if isinstance(seen, OneRunGuesses):
            found.append(self._bound(seen.epsilon(self.delta), "(ε, δ), Steinke et al.", "nothing"))
            found.append(self._by(seen, approximate_family(self.delta), "f-DP of (ε, δ)"))
        else:
            found.append(self._bound(self.epsilon_lower_bound, "one threshold", "nothing"))
        if seen is not None and self.family is not None:
            found.append(self._by(seen, self.family, "f-DP of the claim"))
        return tuple(found)

    def _by(self, seen: TradeOffCurve | OneRunGuesses, family: Family, method: str) -> Bound:
        epsilon = family.epsilon(family.refuted(seen.refutes), self.delta)
        return self._bound(epsilon, method, family.assumes)

    def _bound(self, epsilon: float, method: str, assumes: str) -> Bound:
        return Bound(float(epsilon), method, assumes, self.failure_probability)

    def __str__(self) -> str:
        verdict = "VIOLATED" if self.violated else "not contradicted"
        # To the sides on which they still hold.
        most = np.ceil(1e3 * self.claimed_epsilon) / 1e3
        least = np.floor(1e3 * self.epsilon_lower_bound) / 1e3
        return (
            f"claimed ε = {most:.3f}, audited ε ≥ {least:.3f} "
            f"at δ = {self.delta:g} with {100 * self.confidence:g} % confidence "
            f"({self.threat_model}, {self.attack}, {self.trials} trials): {verdict}"
        )
