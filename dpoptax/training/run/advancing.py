"""A run under way: its state, and what takes it a step further, evaluates it and saves it."""

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
    """What is the same at each step of a run.

    Attributes:
        run: The config, its budget and its optimizer.
        last: Number of steps after which it ends.
        bounds: What to show of ε after each number of steps that is evaluated.
        step: Compiled; it is given the arrays of the state for good.
        frozen: What the model computes with and does not train.
        evaluate: Metrics of parameters on a split.
        began: When the run would have begun had it not been stopped, in `time.perf_counter`.
        around: Where records, checkpoints and times go.
        fingerprint: What checkpoints keep of the data.
    """

    run: Run
    last: int
    bounds: Mapping[int, float | None]
    step: Step
    frozen: Any
    evaluate: Evaluation
    began: float
    around: Surroundings
    fingerprint: str

    def advance(self, state: State, batch: tuple[Any, Any]) -> State:
        """The state after one step more, on a batch and its mask; the one before is used up."""
        done = state.done + 1
        phases = self.around.phases
        with phases("steps"):
            arrays = self.step((state.params, state.opt_state), *batch, self.frozen)
            if phases.first_step is None or self.evaluates(done) or self.saves(done):
                jax.block_until_ready(arrays)  # its time is not that of what waits for it
            phases.stepped()
        return State(done, *arrays, state.history)

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
            entry: Record = {
                "step": state.done,
                "epsilon": self.bounds[state.done],
                **self.evaluate(params, "test"),
            }
            if self.run.config.record_training_metrics:
                entry["not_covered_by_epsilon"] = self.evaluate(params, "train")
        with self.around.phases("telemetry"):
            entry["seconds"] = round(time.perf_counter() - self.began, 4)
            self.around.observe(entry)
        return dataclasses.replace(state, history=(*state.history, entry))

    def progress(self, state: State) -> str:
        """The newest record in short, for a bar that moves on until there is another.

        Its metrics are named with their step. The bound on ε is that of the next evaluation, and so
        of every step until then: a bar that was not drawn anew shows no less than has been spent.
        """
        done, entry = state.done, state.history[-1]
        until = min((step for step in self.bounds if step > done), default=done)
        bound = self.bounds[until]
        spent = "not private"
        if bound is not None:
            spent = f"ε ≤ {records.epsilon_text(bound)} to step {until}"
        loss, accuracy = entry["test_loss"], entry["test_accuracy"]
        # What has to be seen in 80 columns comes first.
        return f"{spent}; at {entry['step']}: accuracy={accuracy:.3f}, loss={loss:.3f}"

    def save(self, state: State, *, wait: bool = False) -> None:
        """Writes a checkpoint; `wait` returns only when it is complete."""
        checkpoints = self.around.checkpoints
        if checkpoints is None:
            return
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
