"""The privacy guarantee of releases, at every ε, δ and false-positive rate."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import dp_accounting as dpa
import numpy as np
from dp_accounting import dp_event

from dpoptax import _pricing
from dpoptax._pricing import accountants
from dpoptax._pricing.checks import (
    ADD_OR_REMOVE,
    Accountant,
    Unit,
    check_accountant,
    check_delta,
    relation_named,
)
from dpoptax._pricing.events import SHAPES
from dpoptax._pricing.privacy_event import (
    Composable,
    PrivacyEvent,
    composed,
    other_events,
    privacy_event,
)
from dpoptax._pricing.trade_off_functions import TradeOff, approximate_trade_off, least_mu
from dpoptax._support.argument_checks import integer, number
from dpoptax.accounting import _statement
from dpoptax.accounting._statement import BLANK

if TYPE_CHECKING:
    from dpoptax._pricing.noise_schedule import Phases

# In `epsilon_curve`: the number of priced step counts, and the coarseness of all except the last.
_CURVE_COUNTS, _CURVE_COARSENESS = 50, 50
# The grid of the privacy loss for a whole curve is ten times as coarse as for a stated ε. It is
# rounded in the same direction, so the curve claims less privacy.
_CURVE_INTERVAL = 10 * accountants.DISCRETIZATION


class NoisyReleases(NamedTuple):
    """Releases of one noise stage.

    Attributes:
      number: the number of releases.
      phases: the first release and the noise multiplier of each phase.
      strategy: the strategy of correlated noise, as text; None for independent noise.
      fixed_point: whether the noise is integer; None in a planned run.
      generator: the noise generator, "threefry" or "chacha20"; None in a planned run.
    """

    number: int
    phases: "Phases"
    strategy: str | None = None
    fixed_point: bool | None = None
    generator: str | None = None


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """States the privacy of releases at every δ, ε and false-positive rate.

        P[M(D) ∈ S] ≤ e^ε P[M(D') ∈ S] + δ   for all S and all neighboring D, D'

    `guarantee` computes it from an optimizer state, `planned_guarantee` from the parameters of a
    run, and the constructor from any event. `print(guarantee)` shows ε at
    `stated_delta` and all terms of the guarantee, with ε and δ rounded up and noise multipliers
    rounded down. `statement` says the same to readers without mathematics. It does not include
    settings chosen by looking at private results, or other publications.

    Privacy: all numbers are upper bounds on the leakage of the releases. The trade-off function is
    a lower bound on the error rates of any attack.

    Attributes:
      event: the releases, a `PrivacyEvent`. The constructor also takes an event of dp_accounting,
        or a list of events and guarantees, which it composes: a guarantee of statistics only.
        Noise multipliers are relative to C under every neighboring relation.
      neighboring_relation: "add-or-remove-one", "replace-one", or "replace-special" (a record is
        replaced by one that contributes zero). By default that of the event's runs, or
        "add-or-remove-one" for events priced by hand.
      accountant: "pld" or "rdp".
      unit: "example" or "user". By default that of the event, or "example" for events priced by
        hand.
      sampling: the sampling of batches, `sampler.describe()`.
      releases: the `NoisyReleases` of each noise stage.
      other_events: number of events besides the run that are part of `event`.
      stated_delta: δ of the statement.
      drawn: whether dpoptax drew the batches and checked the number of rows, as `fit` and
        `run.batches` do. Otherwise the program's author is responsible.
      records: number of examples or users by which neighbors differ; see `for_records`.
      event_after: the event of the first t releases, as a function of t; None if it is unknown.

    Raises (every method):
      ValueError: an argument is out of range, or the accountant cannot price the event.

    >>> import dp_accounting
    >>> event = PrivacyEvent(dp_accounting.GaussianDpEvent(noise_multiplier=4.0))
    >>> one_release = Guarantee(event)
    >>> round(one_release.epsilon(1e-5), 3), f"{one_release.delta(0.926):.2g}"
    (0.926, '1e-05')
    >>> statistics = [event, dp_accounting.GaussianDpEvent(20.0)]
    >>> print(str(Guarantee(statistics, stated_delta=1e-6)).splitlines()[0])
    (1.09, 1e-06)-differentially private for one example more or less
    """

    event: PrivacyEvent
    neighboring_relation: str = ""
    accountant: Accountant = "pld"
    unit: Unit = None  # type: ignore[assignment]  # set below
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    releases: tuple[NoisyReleases, ...] = ()
    other_events: int = 0
    stated_delta: float = 1e-5
    drawn: bool = False
    records: int = 1
    event_after: Callable[[int], PrivacyEvent] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_accountant(self.accountant)
        object.__setattr__(self, "event", _one_event(self.event))
        for name, default in (("unit", "example"), ("neighboring_relation", ADD_OR_REMOVE)):
            known, stated = getattr(self.event, name), getattr(self, name)
            # The event decides an attribute that is left open, and must agree with a stated one.
            if not stated:
                object.__setattr__(self, name, known or default)
            elif known not in (None, stated):
                raise ValueError(f"`{name}` must be the event's, {known!r}, got {stated!r}.")

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields for a pickle or a copy, which cannot hold `event_after`."""
        return {**self.__dict__, "event_after": None}

    def epsilon(self, delta: float) -> float:
        """Returns ε at a δ in (0, 1); warns if δ is 1/N or more."""
        self._check_delta(delta)
        return self._price(self.event, delta)

    @property
    def stated_epsilon(self) -> float:
        """ε at `stated_delta`."""
        return self._price(self.event, self.stated_delta)

    def delta(self, epsilon: float) -> float:
        """Returns δ at an ε of at least 0."""
        if not number("epsilon", epsilon) >= 0:
            raise ValueError(f"`epsilon` must be at least 0, got {epsilon}.")
        return accountants.delta_of(self.event.dp_event, epsilon, self.accountant, self._relation)

    @property
    def trade_off(self) -> TradeOff:
        """The trade-off function f, to be called with false-positive rates α.

            f(α) ≤ least false-negative rate of any test for the presence of a record

        At a false-positive rate of α, any attack has a true-positive rate of at most 1 − f(α).
        "pld" computes f from 80 pairs of ε and δ down to δ = 1e-10, which takes up to a second.

        Source: Dong, Roth, Su, "Gaussian differential privacy", 2019; Doroshenko et al., "Connect
        the dots", 2022, for the pairs.

        >>> import dp_accounting
        >>> event = PrivacyEvent(dp_accounting.GaussianDpEvent(2.0))
        >>> Guarantee(event).trade_off([0.01, 0.1]).round(3)
        array([0.966, 0.783])
        """
        return approximate_trade_off(*self._profile(accountants.LEAST_DELTA))

    def gdp_mu(self, delta: float) -> float:
        """Returns the least μ for which the releases are μ-Gaussian DP, except for δ.

            f(α) ≥ Φ(Φ⁻¹(1 − α) − μ) − δ   for all α, f the trade-off function

        Up to δ, an attack is at least as hard as telling N(μ, 1) from N(0, 1) by one draw. μ
        summarizes ε at all δ: (ε, Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) + δ) holds for every ε ≥ 0. T
        sums over full batches have μ = √T/σ. "pld" computes μ; the result is infinite if it would
        exceed 1000, or if no ε holds at `delta`.

        Source: Dong, Roth, Su, "Gaussian differential privacy", 2019; for reporting μ, Gomez et
        al., "(ε, δ) considered harmful: better privacy guarantees by reporting GDP", 2025.

        >>> import dp_accounting
        >>> round(Guarantee(PrivacyEvent(dp_accounting.GaussianDpEvent(0.5))).gdp_mu(1e-6), 2)
        2.0
        """
        self._check_delta(delta)
        # A profile down to δ/2 has pairs below δ, which `least_mu` needs.
        return least_mu(*self._profile(delta / 2), delta)

    def for_records(self, records: int) -> "Guarantee":
        """Returns the guarantee for a person with k records.

        Neighbors differ in any k examples (or users): all are added, removed or replaced. If the
        owners of records are known, `dpoptax.users` protects all of them with less noise.

        Poisson samples hold Binomial(k, q) of the records, full batches all. Other samplers, and
        runs with `also`, are priced by group privacy, which is valid for any mechanism. The
        accountant is "pld". An event that was priced by hand is assumed to have independent draws.

        Args:
          records: k, at least 1.

        Raises:
          ValueError: `records` is below 1, this guarantee is already for several records, or the
            privacy losses are too large for a useful ε.

        Source: Charles et al., "Fine-tuning large language models with user-level differential
        privacy", 2024, for Poisson samples; Dong, Roth, Su, "Gaussian differential privacy", 2019,
        for groups; proofs in docs/developers/pricing.md.

        >>> import dpoptax
        >>> run = {"noise_multiplier": 1.1, "sampling_probability": 0.01, "steps": 1000}
        >>> person = dpoptax.accounting.planned_guarantee(**run).for_records(4)
        >>> round(person.epsilon(1e-5), 2)
        7.35
        """
        k = integer("records", records, 1, "count the records of one person")
        if self.records > 1:
            raise ValueError(
                "`for_records` must be called on the guarantee for one record, got one for "
                f"{self.records}."
            )
        literal = not self.other_events  # the draws of other runs are unknown

        def several(event: PrivacyEvent) -> PrivacyEvent:
            found = _pricing.several_records.event_of_records(
                event.dp_event, k, self._relation, literal=literal
            )
            return dataclasses.replace(event, dp_event=found)

        after = self.event_after
        return dataclasses.replace(
            self,
            event=several(self.event),
            accountant="pld",
            records=k,
            event_after=None if after is None else lambda t: several(after(t)),
        )

    def epsilon_curve(self, steps: Sequence[int], delta: float) -> np.ndarray:
        """Returns upper bounds on ε after each of `steps`, (counts,), computed fast.

        They are for plots of ε during a run. Use `epsilon` to check the budget of a run. With
        "rdp", both agree. With "pld" only the greatest number of steps is priced as by `epsilon`.
        Up to 49 others are priced on a grid that is 50 times as coarse. Counts between them get the
        bound of the next priced count. Bounds exceed `epsilon` by about a percent for up to 50
        counts. For more counts, up to a fiftieth of the last bound is added.

        Args:
          steps: numbers of releases in any order, at most those of the run.
          delta: in (0, 1).
        """
        remedy = "count the noisy releases"
        wanted = np.array([integer("steps", s, 0, remedy) for s in steps], int)
        self._check_delta(delta)
        if self.event_after is None:
            raise ValueError(
                "This guarantee has no sequence of steps: it is that of an event, of noise stages "
                "that took turns, or of a pickle."
            )
        most = max((release.number for release in self.releases), default=0)
        if wanted.max(initial=0) > most:
            raise ValueError(
                f"`steps` must be at most the {most} steps of the run, got {wanted.max()}."
            )
        if not wanted.size:
            return np.zeros(0)
        counts = np.unique(wanted)
        if self.accountant == "pld" and len(counts) > _CURVE_COUNTS:
            # ε grows about like the root of the steps, so the chosen counts are even in ε.
            parts = np.arange(1, _CURVE_COUNTS + 1) / _CURVE_COUNTS
            counts = counts[np.unique(np.ceil(parts**2 * len(counts)).astype(int) - 1)]
        *events, last = (self.event_after(int(count)) for count in counts)
        bounds = [self._price(event, delta, _CURVE_COARSENESS) for event in events]
        bounds.append(self._price(last, delta))
        # A part of the releases reveals at most as much as all of them, so bounds can be lowered.
        least = np.minimum.accumulate(bounds[::-1])[::-1]
        found = least[np.searchsorted(counts, wanted)]
        # Without steps and other events, nothing is released.
        return found if self.other_events else np.where(wanted == 0, 0.0, found)

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers of the statement as JSON values.

        `attack_success` is the greatest true-positive rate of an attack with a false-positive rate
        of 1 %. `selections` has the mean number of trials and its distribution for each use of
        `selection.best_of_random`.
        """
        return {
            "epsilon": self.stated_epsilon,
            "delta": self.stated_delta,
            "unit": self.unit,
            "neighboring_relation": self.neighboring_relation,
            "records": self.records,
            "accountant": self.accountant,
            "sampling": dict(self.sampling),
            "releases": [release._asdict() for release in self.releases],
            "attack_success": 1.0 - float(self.trade_off(_statement.FALSE_POSITIVE_RATE)),
            "gdp_mu": self.gdp_mu(self.stated_delta),
            "other_events": self.other_events,
            "drawn": self.drawn,
            "selections": _selections(self.event.dp_event),
        }

    def statement(
        self,
        *,
        owners: str = BLANK,
        public_data: str = BLANK,
        settings: str = BLANK,
        publications: str = BLANK,
        batches: str = BLANK,
        model: str = BLANK,
        signature: str = BLANK,
    ) -> str:
        """Returns sections for readers without mathematics, and the table for experts.

        The sections name the subject of the statement, the unit of protection, its strength with an
        example of an attack, and all assumptions. The arguments fill blanks that dpoptax cannot
        fill. `fit` with a `workdir`, `dpoptax train` and `dpoptax sweep` write the text to
        statement.txt.

        Args:
          owners: the largest number of examples of one person; for users, the meaning of a user.
          public_data: the data that counted as public.
          settings: how the settings of the training were chosen.
          publications: all other results from the same data that somebody has seen.
          batches: who confirms that the sampler drew the batches. Unused if `drawn`.
          model: name, file and checksum of the published model.
          signature: date, name and signature of the person who filled in the blanks.

        >>> import dp_accounting
        >>> event = PrivacyEvent(dp_accounting.GaussianDpEvent(4.0))
        >>> print(Guarantee(event).statement(owners="1").splitlines()[0])
        What this statement is about
        """
        from dpoptax.accounting._plain_statement import plain_statement  # few programs need it

        values = self.to_dict()
        plain = plain_statement(
            values,
            owners=owners,
            public_data=public_data,
            settings=settings,
            publications=publications,
            batches=batches,
            model=model,
            signature=signature,
        )
        return f"{plain}\n\nFor experts:\n\n{_statement.statement_text(values)}\n"

    def __str__(self) -> str:
        return _statement.statement_text(self.to_dict())

    def _price(self, event: PrivacyEvent, delta: float, coarseness: int = 1) -> float:
        interval = coarseness * accountants.DISCRETIZATION
        return accountants.epsilon_of(
            event.dp_event, delta, self.accountant, self._relation, interval
        )

    def _profile(self, least_delta: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns pairs of ε and δ, by a grid of the privacy loss for whole curves."""
        event, interval = self.event.dp_event, _CURVE_INTERVAL
        epsilons, deltas = accountants.curves_of(
            event, self._relation, interval, least_delta=least_delta
        )
        return epsilons, deltas.max(0)

    def _check_delta(self, delta: float) -> None:
        check_delta(delta, self.sampling.get("dataset_size"))

    @property
    def _relation(self) -> dpa.NeighboringRelation:
        return relation_named(self.neighboring_relation)


def _one_event(event: Composable | Sequence[Composable]) -> PrivacyEvent:
    """Returns an event, or the composition of several."""
    if not isinstance(event, Sequence):
        return privacy_event(event)
    if not event:
        raise ValueError("`event` must not be an empty list. Pass the event of each release.")
    first, *others = other_events(event)
    return composed(first, others)


def _selections(event: Any) -> list[dict[str, Any]]:
    """Returns the random numbers of trials whose best one is a part of an event."""
    if not isinstance(event, dp_event.RepeatAndSelectDpEvent):
        # A composition has `events`, and a wrapper of one event has `event`.
        parts = getattr(event, "events", None) or [getattr(event, "event", None)]
        return [found for part in parts if part is not None for found in _selections(part)]
    names = {shape: name for name, shape in SHAPES.items()}
    return [{"mean": event.mean, "distribution": names.get(event.shape, "negative binomial")}]
