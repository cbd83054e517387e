"""Options of a sweep, and the price of choosing the best of its trials."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dpoptax
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.training.run import records
from dpoptax.training.run.privacy import RunPlan
from dpoptax.training.search import settings

if TYPE_CHECKING:
    pass

# Functions import the accounting, so that help does not wait for it.


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Options of `dpoptax sweep`.

    Each trial trains on the training split without a fifth, and is scored on that fifth. The best
    one is the result, as trained: nothing is trained again, and only it meets the test split. Its
    ε covers the selection, as --repetitions and --held-out say.
    """

    workdir: Path
    """Directory for best/ (may be published), and trials/, trials.md and sweep.json
    (see trials.md for what may be). The same command goes on with a sweep that was stopped."""
    grid: tuple[str, ...] = ()
    """FIELD=VALUE,VALUE,... for each field: all combinations. method.FIELD reaches the method's."""
    random: tuple[str, ...] = ()
    """FIELD=log:LOW:HIGH, FIELD=uniform:LOW:HIGH, FIELD=int:LOW:HIGH, or FIELD=VALUE,VALUE,..."""
    trials: int | None = None
    """Number of random trials, or its mean where --repetitions is random; with --grid and fixed
    repetitions, all combinations."""
    repetitions: str = "fixed"
    """fixed: ε of all trials together. geometric, poisson or logarithmic: a secret random number of
    trials, of which the best alone is published, at a smaller ε; with --grid each draws a
    combination."""
    held_out: str = "private"
    """private: scores get noise, and ε covers the held-out fifth too. public: its examples are
    nobody's secret, and scores are exact."""
    seed: int | None = None
    """Secret. None: a fresh one, which sweep.json keeps."""
    processes: int | None = None
    """Number of trials at a time; None: one a core."""

    def __post_init__(self) -> None:
        if bool(self.grid) == bool(self.random):
            raise ConfigError(
                "Exactly one of `grid` and `random` must be given. Pass --grid or --random with "
                "the settings to try."
            )
        if self.repetitions not in (known := ("fixed", *dpoptax.accounting.selection.SHAPES)):
            raise unknown_name("repetitions", self.repetitions, known)
        if self.held_out not in ("private", "public"):
            raise unknown_name("held_out", self.held_out, ("private", "public"))
        if self.trials is not None:
            records.check_count("trials", self.trials)
        elif self.random or self.repetitions != "fixed":
            raise ConfigError(
                "`trials` must be given for random settings and random repetitions, got None. "
                "Pass --trials with the (mean) number of trials."
            )


@dataclasses.dataclass(frozen=True)
class Price:
    """Price of publishing the result. Fields are None without a promise.

    Attributes:
        epsilon: Of the result, selection included.
        of_one_trial: The largest ε of a single trial.
        delta: Of both.
        score_stddev: Standard deviation of the noise on the number of right answers.
        held_out_size: Number of examples that trials are scored on.
        reason: Why ε is not stated; None if it is.
    """

    epsilon: float | None = None
    of_one_trial: float | None = None
    delta: float | None = None
    score_stddev: float = 0.0
    held_out_size: int = 0
    reason: str | None = None


def price(
    candidates: list[settings.Candidate],
    plans: list[RunPlan],
    sweep: Sweep,
    chosen: list[int],
) -> Price:
    """Computes the price of the result of a sweep.

    A record is either trained on or held out. The first kind is protected by each trial's noisy
    gradients, the second by the noise on its scores: as little as keeps its ε within the first's.
    """
    from dp_accounting import GaussianDpEvent

    guarantees = []
    for candidate, plan in zip(candidates, plans, strict=True):
        guarantee = plan.guarantee(plan.permitted_steps)
        if guarantee is None:
            why = plan.unproven or f"{candidate.name} trains without privacy"
            return Price(reason=why)
        guarantees.append(guarantee)
    first = guarantees[0]
    delta = first.stated_delta
    relations = sorted({guarantee.neighboring_relation for guarantee in guarantees})
    if len(relations) > 1:
        raise ConfigError(
            f"`sampling` must have one neighboring relation for all trials, got {relations}. Use "
            "one kind of sampling."
        )
    events = [guarantee.event for guarantee in guarantees]
    singles = [guarantee.stated_epsilon for guarantee in guarantees]

    def selected(trials: list[Any], relation: str) -> float:
        if sweep.repetitions == "fixed":
            event = dpoptax.accounting.selection.all_of([trials[which] for which in chosen])
            return dpoptax.accounting.Guarantee(event, relation, first.accountant).epsilon(delta)
        event = dpoptax.accounting.selection.best_of_random(
            trials, mean=sweep.trials or 1, distribution=sweep.repetitions
        )
        try:
            return dpoptax.accounting.Guarantee(event, relation, "rdp").epsilon(delta)
        except ValueError as error:
            raise ConfigError(
                f"`repetitions` has no finite ε for {sweep.repetitions!r} with "
                f"trials={sweep.trials}, because truncated batches alone may exceed δ. Use fewer "
                "trials, a smaller `epsilon`, or another kind of repetitions."
            ) from error

    epsilon, stddev = selected(events, first.neighboring_relation), 0.0
    if sweep.held_out == "private":
        # One record changes the number of right answers by at most 1, added, removed or replaced.
        stddev = dpoptax.accounting.calibrate_noise_multiplier(
            epsilon=min(singles), delta=delta, steps=1, sampling_probability=1.0
        )
        scores = [GaussianDpEvent(stddev)] * len(events)
        while selected(scores, "add-or-remove-one") > epsilon:
            stddev *= 1.02
            scores = [GaussianDpEvent(stddev)] * len(events)
    return Price(epsilon, max(singles), delta, stddev)


def notes(sweep: Sweep, cost: Price) -> list[str]:
    """States the privacy of the result, and which files may be published."""
    if cost.epsilon is None or cost.of_one_trial is None or cost.delta is None:
        return [f"No ε is stated for the result: {cost.reason}."]
    said = [
        f"The result is ({records.epsilon_text(cost.epsilon)}, {records.delta_text(cost.delta)})-"
        "differentially private, its selection included; one trial alone is ε = "
        f"{records.epsilon_text(cost.of_one_trial)}."
    ]
    if sweep.repetitions == "fixed":
        said.append(
            "This holds for all trials together: this table and best/ may be published; trials/ "
            "and sweep.json, with exact scores and the seed, may not."
        )
    else:
        said.append(
            f"This holds for best/ alone, the best of a {sweep.repetitions} number of trials of "
            f"mean {sweep.trials}; all else here, the number of trials and how long they took "
            "must stay secret."
        )
    if sweep.seed is not None:
        said.append(
            "The seed was given: this holds if it stays secret and is no other sweep's. For a "
            "result that is given away leave it out."
        )
    if sweep.held_out == "private":
        said.append(
            f"Scores have noise of standard deviation {cost.score_stddev:.2f} on the number of "
            "right answers, so that ε covers the held-out examples too. Which examples are held "
            "out is taken to be public."
        )
    else:
        said.append(
            "Scores are exact: ε covers the examples that were trained on. The held-out fifth is "
            "taken to be public."
        )
    return said
