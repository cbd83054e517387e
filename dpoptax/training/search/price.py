"""Defines the options of a sweep and prices the choice of its best trial."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dpoptax
from dpoptax.runs import to_decimals, to_digits
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.training.evaluation import Score
from dpoptax.training.run import files
from dpoptax.training.task import PlainPlan, Task

# Functions import the accounting, so that help stays fast.
if TYPE_CHECKING:
    from dpoptax.accounting import Guarantee


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Options of `dpoptax sweep`.

    Each trial trains on four fifths of the training split and is scored on the other fifth. The
    best trial is the result. It is not retrained, and only it is evaluated on the test split. Its ε
    covers the selection (see --repetitions) and the held-out fifth.
    """

    workdir: Path
    """Directory for best/, which may be published, and for trials/, trials.md and sweep.json;
    trials.md lists which of them may be published. The same command resumes a sweep. sweep.json
    holds its seed."""
    grid: tuple[str, ...] = ()
    """NAME=VALUE,VALUE,... for each argument of the configs: all combinations."""
    random: tuple[str, ...] = ()
    """NAME=log:LOW:HIGH, NAME=uniform:LOW:HIGH, NAME=int:LOW:HIGH, or NAME=VALUE,VALUE,..."""
    trials: int | None = None
    """Mean number of trials. With --repetitions fixed, their number; with --grid, then all
    combinations by default."""
    repetitions: str = "geometric"
    """geometric, poisson or logarithmic: the number of trials is random and secret, and only the
    best is published. With --grid, each trial draws a combination. fixed: ε covers all trials
    together and is larger, and all may be published."""

    def __post_init__(self) -> None:
        if bool(self.grid) == bool(self.random):
            raise ConfigError(
                "Exactly one of `grid` and `random` must be given. Pass --grid or --random with "
                "the settings to try."
            )
        if self.repetitions not in (known := ("fixed", *dpoptax.accounting.selection.SHAPES)):
            raise unknown_name("repetitions", self.repetitions, known)
        if self.trials is not None:
            files.check_count("trials", self.trials)
        elif self.random or self.repetitions != "fixed":
            raise ConfigError(
                "`trials` must be given for random settings and random repetitions, got None. "
                "Pass --trials with the (mean) number of trials, or try every combination of a "
                "--grid with --repetitions fixed."
            )


@dataclasses.dataclass(frozen=True)
class Price:
    """Privacy cost of publishing the result. ε and δ are None without a guarantee.

    Attributes:
        epsilon: ε of the result, including the selection.
        of_one_trial: Largest ε of a single trial.
        delta: δ of both.
        score_stddev: Standard deviation of the noise on the sum of the scores of held-out examples,
            relative to the size of their range.
        score: The metric that has this noise.
        held_out_size: Number of held-out examples.
        noise: Noise multiplier, strategy, steps and number of examples of each priced setting.
        reason: Reason why no ε is stated, or None.
    """

    epsilon: float | None = None
    of_one_trial: float | None = None
    delta: float | None = None
    score_stddev: float = 0.0
    score: Score = Score()
    held_out_size: int = 0
    noise: tuple[tuple[str, str, int, int], ...] = ()
    reason: str | None = None


def price(tasks: list[Task], sweep: Sweep, chosen: list[int]) -> "tuple[Price, Guarantee | None]":
    """Computes the privacy cost of the result of a sweep, and returns its guarantee.

    A record is either trained on or held out. The noisy gradients of each trial protect training
    records. The noise on scores protects held-out records; it is the least noise whose ε does not
    exceed that of training records.
    """
    from dp_accounting import GaussianDpEvent

    guarantees = []
    for task in tasks:
        guarantee = task.guarantee()
        if guarantee is None:
            reason = task.plan.reason if isinstance(task.plan, PlainPlan) else "there is no noise"
            return Price(reason=f"{task.name}: {reason}"), None
        guarantees.append(guarantee)
    first = guarantees[0]
    delta = first.stated_delta
    singles = [guarantee.stated_epsilon for guarantee in guarantees]

    def selected(trials: list[Any]) -> "Guarantee":
        """Raises if two trials have different units or neighboring relations."""
        if sweep.repetitions == "fixed":
            event = dpoptax.accounting.selection.all_of([trials[which] for which in chosen])
            accountant = first.accountant
        else:
            event = dpoptax.accounting.selection.best_of_random(
                trials, mean=sweep.trials or 1, distribution=sweep.repetitions
            )
            accountant = "pld"
        return dpoptax.accounting.Guarantee(event, accountant=accountant, stated_delta=delta)

    def price_of(guarantee: "Guarantee") -> float:
        try:
            return guarantee.stated_epsilon
        except ValueError as error:
            if sweep.repetitions == "fixed":
                raise
            raise ConfigError(
                f"`repetitions` has no finite ε for {sweep.repetitions!r} with "
                f"trials={sweep.trials}, because truncated batches alone may exceed δ. Use fewer "
                "trials, a smaller `epsilon`, or another kind of repetitions."
            ) from error

    # Plans have no seed and no key, and neither have their events: each trial draws its own.
    whole = selected([guarantee.event for guarantee in guarantees])
    epsilon = price_of(whole)
    # A record that is added, removed or replaced changes the mean score by at most the size of its
    # range over the number of held-out records.
    stddev = dpoptax.accounting.calibrate(
        epsilon=min(singles), delta=delta, steps=1, sampling_probability=1.0
    )
    while price_of(selected([GaussianDpEvent(stddev)] * len(tasks))) > epsilon:
        stddev *= 1.02
    noise = tuple(
        (repr(p.noise_multiplier), repr(p.strategy), task.steps, p.sampler.dataset_size)
        for task in tasks
        if not isinstance(p := task.plan, PlainPlan)
    )
    return Price(epsilon, max(singles), delta, stddev, noise=noise), whole


def describe_choice(sweep: Sweep) -> str:
    """Returns how the published trial was selected."""
    if sweep.repetitions == "fixed":
        return "the best of a fixed number of trials"
    return f"the best of a {sweep.repetitions} number of trials with mean {sweep.trials}"


def likely_number(sweep: Sweep) -> str:
    """Returns the mean and a likely maximum of a random number of trials."""
    assert sweep.trials is not None  # random repetitions need it
    most = dpoptax.accounting.selection.likely_number(sweep.trials, sweep.repetitions)
    return f"{sweep.trials} on average, and at most {most} with a probability of 95 %"


def notes(sweep: Sweep, cost: Price) -> list[str]:
    """Returns statements on privacy and on the files that may be published."""
    if cost.epsilon is None or cost.of_one_trial is None or cost.delta is None:
        return [f"No ε is stated for the result: {cost.reason}."]
    said = [
        f"The result is ({to_decimals(cost.epsilon)}, {to_digits(cost.delta)})-"
        "differentially private, including its selection. One trial alone has ε = "
        f"{to_decimals(cost.of_one_trial)}."
    ]
    if sweep.repetitions == "fixed":
        said.append(
            "This holds for all trials together. This table and best/ may be published. trials/ "
            "and sweep.json contain exact scores and the seed and must stay secret."
        )
    else:
        said.append(
            f"This holds for best/ alone, {describe_choice(sweep)}. All other files, the number of "
            "trials and their duration must stay secret."
        )
    score = cost.score
    said.append(
        f"Scores have noise of standard deviation {score.size * cost.score_stddev:.2f} on the sum "
        f"of {score.name} over the held-out examples, where each counts between "
        f"{min(score.worst, score.best):g} and {max(score.worst, score.best):g}, so that ε also "
        "covers these examples. The choice of held-out examples is assumed to be public."
    )
    return said
