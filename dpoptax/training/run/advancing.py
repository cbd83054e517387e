"""A run under way: a state, and what takes it a step further, evaluates it and saves it."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from dpoptax.training.run import resume
from dpoptax.training.run.averaging import averaged
from dpoptax.training.run.checkpoints import Checkpoints
from dpoptax.training.run.devices import Devices
from dpoptax.training.run.evaluation import Evaluation
from dpoptax.training.run.phases import Phases
from dpoptax.training.run.resolved import Run
from dpoptax.training.run.step import Step

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


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What is around a run, and decides nothing of what it releases.

    Attributes:
        place: The devices that it computes on.
        phases: Gets the time of each part.
        checkpoints: Where states are saved; None: nowhere.
        observe: Gets each record.
        progress: Whether to show a progress bar.
    """

    place: Devices
    phases: Phases
    checkpoints: Checkpoints | None
    observe: Callable[[Record], object]
    progress: bool


@dataclasses.dataclass(frozen=True)
class Course:
    """What is the same at each step of a run.

    Attributes:
        run: The config, its budget and its optimizer.
        last: Number of steps after which it ends.
        bounds: What to show of ε after each number of steps that is evaluated.
        step: Compiled; it is given the arrays of a state for good.
        frozen: What the model computes with and does not train.
        evaluate: Metrics of parameters on a split.
        began: When the run would have begun had it not been stopped, in `time.perf_counter`.
        around: Where records, checkpoints and times go.
    """

    run: Run
    last: int
    bounds: Mapping[int, float | None]
    step: Step
    frozen: Any
    evaluate: Evaluation
    began: float
    around: Surroundings

    def advance(self, state: State, batch: tuple[Any, Any]) -> State:
        """The state after one step more, on a batch and its mask; the one before is used up."""
        done = state.done + 1
        phases = self.around.phases
        with phases("steps"):
            params, opt_state = self.step(state.params, state.opt_state, *batch, self.frozen)
            if phases.first_step is None or self.evaluates(done) or self.saves(done):
                jax.block_until_ready(params)  # its time is not that of what waits for it
            phases.stepped()
        return State(done, params, opt_state, state.history)

    def evaluates(self, done: int) -> bool:
        """Whether the run is evaluated after so many steps."""
        return done % self.run.config.eval_every == 0 or done == self.last

    def saves(self, done: int) -> bool:
        """Whether it is saved then."""
        return done % self.run.config.checkpoint_every == 0 or done == self.last

    def evaluated(self, state: State) -> State:
        """The state with a record of its metrics, which `observe` gets too."""
        with self.around.phases("evaluation"):
            params = averaged(state.params, state.opt_state)
            bound = self.bounds[state.done]
            entry: Record = {"step": state.done, "epsilon": bound, **self.evaluate(params, "test")}
            if self.run.config.record_training_metrics:
                entry["not_covered_by_epsilon"] = self.evaluate(params, "train")
        with self.around.phases("telemetry"):
            entry["seconds"] = round(time.perf_counter() - self.began, 4)
            self.around.observe(entry)
        return dataclasses.replace(state, history=(*state.history, entry))

    def save(self, state: State, *, wait: bool = False) -> None:
        """Writes a checkpoint; `wait` returns only when it is complete."""
        checkpoints = self.around.checkpoints
        if checkpoints is None:
            return
        with self.around.phases("checkpoints"):
            described = resume.describe(self.run, state.opt_state)
            checkpoints.save(
                state.done,
                (state.params, state.opt_state),
                {**described, "history": list(state.history)},
                wait=wait,
            )


def progress_text(entry: Record) -> str:
    """A record in short, for a progress bar."""
    epsilon = "not private" if entry["epsilon"] is None else f"ε ≤ {entry['epsilon']:.3f}"
    return f"loss={entry['test_loss']:.3f}, accuracy={entry['test_accuracy']:.3f}, {epsilon}"
