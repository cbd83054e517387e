"""Runs under way: a state, and what takes it a step further, evaluates it and saves it."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from dpoptax.training.run import records, resume
from dpoptax.training.run.averaging import averaged
from dpoptax.training.run.checkpoints import Checkpoints, Interim
from dpoptax.training.run.devices import Devices
from dpoptax.training.run.evaluation import Evaluation
from dpoptax.training.run.kept import Confirmation
from dpoptax.training.run.phases import Phases
from dpoptax.training.run.resolved import Run
from dpoptax.training.run.step import Steps

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class State:
    """Where a run is; what a checkpoint holds.

    Attributes:
        done: Number of finished steps.
        params: The parameters.
        opt_state: The optimizer's state, with noise key and ledger.
        history: The records of the evaluations so far.
    """

    done: int
    params: Any
    opt_state: Any
    history: tuple[Record, ...] = ()


States = tuple[State, ...]
"""Where the runs of a group are, all after the same number of steps; of a run alone, just one."""


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What is around a run, and decides nothing of what it releases.

    Attributes:
        place: The devices that it computes on.
        phases: Gets the time of each part.
        checkpoints: Where states are saved; None: nowhere.
        observe: Gets each record.
        progress: Whether to show a progress bar.
        shown: The last step whose records an earlier start has shown.
    """

    place: Devices
    phases: Phases
    checkpoints: Checkpoints | Interim | None = None
    observe: Callable[[Record], object] = lambda record: None
    progress: bool = False
    shown: int = 0


@dataclasses.dataclass(frozen=True)
class Course:
    """What is the same at each step of a run, or of a group of runs that advance together.

    Attributes:
        runs: The config, its budget and its optimizer, of each run. But for the learning rate they
            are the same.
        last: Number of steps after which it ends.
        bounds: What to show of ε after each number of steps that is evaluated.
        steps: Compiled; it is given the arrays of the states for good.
        frozen: What the model computes with and does not train.
        evaluate: Metrics of each run's parameters on a split.
        began: When the run would have begun had it not been stopped, in `time.perf_counter`.
        around: Where records, checkpoints and times go.
        fingerprint: What checkpoints keep of the data.
        confirmation: What has to hold of the runs and is found out beside the steps; None: nothing.
    """

    runs: tuple[Run, ...]
    last: int
    bounds: Mapping[int, float | None]
    steps: Steps
    frozen: Any
    evaluate: Evaluation
    began: float
    around: Surroundings
    fingerprint: str
    confirmation: Confirmation | None

    @property
    def run(self) -> Run:
        """A run, for all that does not depend on the learning rate."""
        return self.runs[0]

    def advance(self, states: States, batch: tuple[Any, Any]) -> States:
        """The states after one step more, on a batch and its mask; those before are used up."""
        done = states[0].done + 1
        phases = self.around.phases
        with phases("steps"):
            arrays = tuple((state.params, state.opt_state) for state in states)
            arrays = self.steps(arrays, *batch, self.frozen)
            if phases.first_step is None or self.evaluates(done) or self.saves(done):
                jax.block_until_ready(arrays)  # its time is not that of what waits for it
            phases.stepped()
        histories = [state.history for state in states]
        return tuple(State(done, *new, old) for new, old in zip(arrays, histories, strict=True))

    def evaluates(self, done: int) -> bool:
        """Whether the run is evaluated after so many steps."""
        return done % self.run.config.eval_every == 0 or done == self.last

    def saves(self, done: int) -> bool:
        """Whether it is saved then."""
        return done % self.run.config.checkpoint_every == 0 or done == self.last

    def evaluated(self, states: States) -> States:
        """The states with a record of the metrics of each, which `observe` gets too."""
        done = states[0].done
        with self.around.phases("evaluation"):
            group = tuple(averaged(state.params, state.opt_state) for state in states)
            entries: list[Record] = [
                {"step": done, "epsilon": self.bounds[done], **metrics}
                for metrics in self.evaluate(group, "test")
            ]
            if self.run.config.record_training_metrics:
                for entry, metrics in zip(entries, self.evaluate(group, "train"), strict=True):
                    entry["not_covered_by_epsilon"] = metrics
        with self.around.phases("telemetry"):
            for entry in entries:
                entry["seconds"] = round(time.perf_counter() - self.began, 4)
                self.around.observe(entry)
        return tuple(
            dataclasses.replace(state, history=(*state.history, entry))
            for state, entry in zip(states, entries, strict=True)
        )

    def progress(self, states: States) -> str:
        """The newest record in short, for a bar that moves on until there is another.

        Its metrics are named with their step. The bound on ε is that of the next evaluation, and so
        of every step until then: a bar that was not drawn anew shows no less than has been spent.
        """
        done, entry = states[0].done, states[0].history[-1]
        until = min((step for step in self.bounds if step > done), default=done)
        bound = self.bounds[until]
        spent = "not private"
        if bound is not None:
            spent = f"ε ≤ {records.epsilon_text(bound)} to step {until}"
        loss, accuracy = entry["test_loss"], entry["test_accuracy"]
        # What has to be seen in 80 columns comes first.
        return f"{spent}; at {entry['step']}: accuracy={accuracy:.3f}, loss={loss:.3f}"

    def save(self, states: States, *, wait: bool = False) -> None:
        """Writes a checkpoint, of a run alone; `wait` returns only when it is complete."""
        checkpoints = self.around.checkpoints
        if checkpoints is None:
            return
        (state,) = states
        with self.around.phases("checkpoints"):
            described = resume.describe(
                self.run, state.opt_state, self.fingerprint, self.around.place
            )
            checkpoints.save(
                state.done,
                (state.params, state.opt_state),
                {**described, "history": list(state.history)},
                wait=wait,
            )
