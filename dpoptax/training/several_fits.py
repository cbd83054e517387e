"""Trains several times with `fit`, and states spread and guarantees."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dpoptax
from dpoptax.accounting import Guarantee, PrivacyEvent, selection
from dpoptax.training.data import streaming
from dpoptax.training.fitting import fit
from dpoptax.training.run.files import FIELDS
from dpoptax.training.run.run_task import FitResult


@dataclasses.dataclass(frozen=True)
class FitRuns:
    """Results of `fit_runs`. `print` shows the spread of metrics and both guarantees.

    Attributes:
      results: the result of each run.
      plan: the plan of all runs.
    """

    results: tuple[FitResult, ...]
    plan: dpoptax.PrivacyPlan = dataclasses.field(repr=False)

    @property
    def metrics(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation over runs of each metric after the last step."""
        last = [result.history[-1] for result in self.results]
        names = [name for name in last[0] if name not in FIELDS]
        values = {name: np.array([record[name] for record in last], float) for name in names}
        return {name: (float(x.mean()), float(x.std(ddof=1))) for name, x in values.items()}

    @property
    def guarantee_of_one(self) -> Guarantee:
        """The guarantee if everything about the other runs stays secret."""
        guarantee = self.results[0].guarantee
        assert guarantee is not None  # the plan is a `PrivacyPlan`
        return guarantee

    @functools.cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee of all runs together."""
        alone = dataclasses.replace(self.plan, also=())
        states = [result.opt_state for result in self.results]
        runs = [alone.continue_run(state).guarantee(state).event for state in states]
        return _together(self.plan, runs)

    def __str__(self) -> str:
        rows = [f"  {name} {mean:.4g} ± {std:.2g}" for name, (mean, std) in self.metrics.items()]
        one, every = (str(g).splitlines()[0] for g in (self.guarantee_of_one, self.guarantee))
        return "\n".join(
            [
                f"{len(self.results)} runs, mean ± standard deviation after the last step",
                *rows,
                f"One run, if nothing about the others is published: {one}",
                f"All runs, also for means over runs and for the best run: {every}",
            ]
        )


def _together(plan: dpoptax.PrivacyPlan, runs: Sequence[PrivacyEvent]) -> Guarantee:
    """Returns the guarantee of all runs and of the other events of their plan, once."""
    return Guarantee(
        selection.all_of([*runs, *plan.also]),
        accountant=plan.accountant,
        unit=plan.sampler.unit,
        stated_delta=plan.delta,
    )


def fit_runs(
    loss_fn: Callable[..., Any] | None,
    init: Callable[[int], Any],
    data: streaming.Source,
    plan: dpoptax.PrivacyPlan,
    *,
    runs: int,
    workdir: str | Path | None = None,
    **options: Any,
) -> FitRuns:
    """Calls `fit` several times, to measure the spread over batches, noise and initializations.

    Each run draws its own noise key from the operating system. The step is
    compiled once. Events in the plan's `also` count once for all runs. If all runs together have no
    price, an error is raised before training.

    Privacy: publishing one run that was chosen without looking at the others has the ε of the
    plan. Means over runs, and a run chosen by its results, have the ε of all runs together.

    Args:
      loss_fn: as for `fit`.
      init: `init(i)` returns the initial parameters of run i = 0, …, `runs` − 1. They must not
        depend on private data.
      data: as for `fit`.
      plan: the plan of each run.
      runs: number of runs, at least 2.
      workdir: folder for the folders run_0, run_1, … of the runs, or None. The same call resumes
        them.
      **options: further arguments of `fit`, other than `key` and `log`.

    Raises:
      TypeError: an argument has the wrong type, or `key` or `log` is given.
      ValueError: `runs` is below 2, all runs together have no price, or as for `fit`.
    """
    if runs < 2:
        raise ValueError(f"`runs` must be at least 2, got {runs}. Use `fit` for one run.")
    if refused := sorted({"key", "log"} & options.keys()):
        raise TypeError(
            f"`{refused[0]}` must not be given to `fit_runs`, because the runs would share it. "
            "Each result has its own key and history."
        )
    planned = dataclasses.replace(plan, also=()).guarantee().event
    _ = _together(plan, [planned] * runs).stated_epsilon  # raises now, if ever
    folders = [None if workdir is None else Path(workdir) / f"run_{i}" for i in range(runs)]
    return FitRuns(
        tuple(
            fit(loss_fn, init(i), data, plan, workdir=folder, **options)
            for i, folder in enumerate(folders)
        ),
        plan,
    )
