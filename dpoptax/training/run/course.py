"""A run under way: builds, restores and compiles it, and takes it step by step to its end."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpoptax.training.bars import SHORT, Bar
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.data.fingerprints import fingerprint
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import records, resume
from dpoptax.training.run.averaging import averaged
from dpoptax.training.run.checkpoints import Checkpoints
from dpoptax.training.run.devices import Devices
from dpoptax.training.run.evaluation import Evaluator, evaluated_steps
from dpoptax.training.run.feeding import Feed
from dpoptax.training.run.phases import Phases
from dpoptax.training.run.resolved import ResolvedRun
from dpoptax.training.run.step import compile_step

Record = dict[str, Any]

_AHEAD = 0.25
"""Seconds of steps that are queued at once: each holds its batch, and none counts as done."""


@dataclasses.dataclass(frozen=True)
class State:
    """State of a run, as a checkpoint holds it.

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
class Context:
    """Runtime context of a run. It does not affect what the run releases.

    Attributes:
        place: The devices that it computes on.
        phases: Measures the time of each part.
        checkpoints: Where states are saved. None: they are not saved.
        observe: Called with each record.
        progress: Whether to show a progress bar.
        shown: The last step whose records an earlier start has shown.
    """

    place: Devices
    phases: Phases
    checkpoints: Checkpoints | None = None
    observe: Callable[[Record], object] = lambda record: None
    progress: bool = False
    shown: int = 0


class Course:
    """A run with its current state.

    Attributes:
        run: The config, its budget and its optimizer.
        context: Where records, checkpoints and times go.
        dataset: Name of the data set.
        frozen: Constants of the model, which are not trained.
        state: The current state.
        last: Number of steps after which the run ends.
        compile_seconds: How long compiling the step took.
    """

    def __init__(self, run: ResolvedRun, dataset: Dataset, context: Context) -> None:
        """Builds, restores and compiles the run. A new run is saved before any step.

        Raises:
            ConfigError: A config that cannot be trained on these data.
        """
        if run.config.record_training_metrics and not streaming.in_memory(dataset.train):
            raise ConfigError(
                "record_training_metrics=True reads the whole training split, which is streamed "
                "from files; leave it out"
            )
        self.run, self.context, self.dataset = run, context, dataset.name
        phases, place = context.phases, context.place
        with phases("init"):
            first = streaming.read(dataset.train, np.zeros(1, np.int64))["inputs"][0]
            variables = run.config.initial_variables(run.model, first, run.init_key)
            params, self.frozen = place.replicate(variables)
            self.state = State(0, params, self._first_opt_state(params))
        with phases("data"):
            self._feed = Feed(run, dataset, place)
            self._fingerprint = ""  # not needed without checkpoints
            if context.checkpoints is not None or jax.process_count() > 1:
                self._fingerprint = fingerprint(
                    dataset, run.plan.seed, model=run.model, frozen=self.frozen
                )
                resume.check_same_on_hosts(run, self._fingerprint, place)
        with phases("checkpoints"):
            restored = self._restore()
        self.last = max(self.state.done, run.plan.permitted_steps)
        self._evaluation = Evaluator(run.config, run.model, self._feed.splits, self.frozen)
        compiling = time.perf_counter()
        with phases("compile"):
            arrays = self.state.params, self.state.opt_state
            example = (arrays, *self._feed(0), self.frozen)
            self._step = compile_step(run.chain, run.model, example, place.mesh)
        self.compile_seconds = time.perf_counter() - compiling
        with phases("telemetry"):
            self._bounds = run.plan.bounds(evaluated_steps(run.config, self.last))
        # When the run would have begun if it had not been stopped.
        spent = self.state.history[-1]["seconds"] if self.state.history else 0.0
        self._began = time.perf_counter() - spent
        if not restored:
            self.save(wait=True)

    def _first_opt_state(self, params: Any) -> Any:
        if self.context.place.mesh is None:
            return self.run.chain.begin(params)
        return self.context.place.replicate(self.run.chain.optimizer.init(params))

    def _restore(self) -> bool:
        """Restores the newest checkpoint and observes its records again, if there is one."""
        checkpoints, place, shown = (
            self.context.checkpoints,
            self.context.place,
            self.context.shown,
        )
        begun = None
        if checkpoints is not None:
            begun = checkpoints.restore((self.state.params, self.state.opt_state))
        if begun is None:
            return False
        (params, opt_state), saved = begun
        resume.check_ledger(saved, opt_state)
        resume.check_same_data(saved, self._fingerprint)
        # The restored checkpoint is an older one if the newest is damaged.
        resume.check_same_sums(self.run, saved, place, shown)
        resume.check_end(self.run, saved, shown)
        for entry in saved["history"]:
            self.context.observe(entry)
        self.state = State(saved["step"], params, opt_state, tuple(saved["history"]))
        return True

    def finish(self) -> None:
        """Takes the run to its end."""
        phases, pace = self.context.phases, Pace()
        with Bar(
            total=self.last,
            initial=self.state.done,
            desc=self.run.config.method.name,
            unit="step",
            bar_format=SHORT,
            leave=None,  # a bar below another one goes with its run
            disable=not self.context.progress,
        ) as bar:
            if not self.state.history:
                self.evaluate()
            bar.set_postfix_str(self.progress())
            steps = range(self.state.done, self.run.plan.permitted_steps)
            for batch in streaming.prefetch(self._feed, steps):
                self.advance(batch)
                pace.keep(self.state.params)
                with phases("telemetry"):
                    bar.update()
                if self._evaluates():
                    self.evaluate()
                    with phases("telemetry"):
                        bar.set_postfix_str(self.progress())
                if self._saves():
                    self.save(wait=self.state.done == self.last)

    def advance(self, batch: tuple[Any, Any]) -> None:
        """Takes one step on a batch and its mask. The arrays of the state are given to it."""
        phases, before = self.context.phases, self.state
        with phases("steps"):
            arrays = self._step((before.params, before.opt_state), *batch, self.frozen)
            self.state = State(before.done + 1, *arrays, before.history)
            if phases.first_step is None or self._evaluates() or self._saves():
                jax.block_until_ready(arrays)  # evaluations and saves are timed without it
            phases.stepped()

    def _evaluates(self) -> bool:
        done = self.state.done
        return done % self.run.config.eval_every == 0 or done == self.last

    def _saves(self) -> bool:
        done = self.state.done
        return done % self.run.config.checkpoint_every == 0 or done == self.last

    def evaluate(self) -> None:
        """Adds a record of the current metrics to the history, and shows it to `observe`."""
        state = self.state
        with self.context.phases("evaluation"):
            params = averaged(state.params, state.opt_state)
            entry: Record = {
                "step": state.done,
                "epsilon": self._bounds[state.done],
                **self._evaluation(params, "test"),
            }
            if self.run.config.record_training_metrics:
                entry["not_covered_by_epsilon"] = self._evaluation(params, "train")
        with self.context.phases("telemetry"):
            entry["seconds"] = round(time.perf_counter() - self._began, 4)
            self.context.observe(entry)
        self.state = dataclasses.replace(state, history=(*state.history, entry))

    def progress(self) -> str:
        """Returns the newest record in short, for a bar that is not redrawn at each step.

        Metrics are named with their step. The bound on ε is that of the next evaluation. It holds
        for every step until then, so the bar never shows less than was spent.
        """
        done, entry = self.state.done, self.state.history[-1]
        until = min((step for step in self._bounds if step > done), default=done)
        bound = self._bounds[until]
        spent = "not private"
        if bound is not None:
            spent = f"ε ≤ {records.epsilon_text(bound)} to step {until}"
        loss, accuracy = entry["test_loss"], entry["test_accuracy"]
        # The most important part comes first: 80 columns may not show the rest.
        return f"{spent}; at {entry['step']}: accuracy={accuracy:.3f}, loss={loss:.3f}"

    def save(self, *, wait: bool = False) -> None:
        """Writes a checkpoint, if there is a place for it.

        Args:
            wait: Whether to return only when it is complete.
        """
        state, checkpoints = self.state, self.context.checkpoints
        if checkpoints is None:
            return
        with self.context.phases("checkpoints"):
            described = resume.describe(
                self.run, state.opt_state, self._fingerprint, self.context.place
            )
            checkpoints.save(
                state.done,
                (state.params, state.opt_state),
                {**described, "history": list(state.history)},
                wait=wait,
            )


class Pace:
    """Waits for the device now and then, so that only few steps are queued before one is done."""

    def __init__(self) -> None:
        self._steps, self._queued, self._since = 1, 0, time.monotonic()

    def keep(self, params: Any) -> None:
        """Counts a step that leads to `params`, and waits for them if enough are queued."""
        self._queued += 1
        if self._queued < self._steps:
            return
        jax.block_until_ready(params)
        now = time.monotonic()
        each = max(now - self._since, 1e-6) / self._queued
        self._steps, self._queued, self._since = max(1, int(_AHEAD / each)), 0, now
