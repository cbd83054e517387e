"""Implements the training loop, which compiles, restores and finishes a run."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from dpoptax.training.bars import SHORT, Bar
from dpoptax.training.data import streaming
from dpoptax.training.run import records, resume
from dpoptax.training.run.context import Context, Record
from dpoptax.training.run.feeding import Feed
from dpoptax.training.run.phases import PATIENCE
from dpoptax.training.run.privacy import RunPlan
from dpoptax.training.run.step import Program, Step, make_program
from dpoptax.users import UserTable

_AHEAD = 0.25
"""Seconds of queued steps. Each queued step keeps its batch in memory."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Describes a run of `fit` or of a config.

    Attributes:
        name: Title of the progress bar.
        plan: Sampler, permitted steps and privacy cost.
        step: The training step.
        frozen: Arrays that the loss uses and that are not trained, or None.
        data: The examples, indexed by the sampler.
        users: The owners of the examples, if the sampler draws users.
        evaluate: Returns the metrics of parameters and optimizer state.
        fields: Values that must not change when the run resumes.
        secrets: The seed, and other secret values that a resumed run needs.
        fingerprint: Returns a keyed hash of the examples and the frozen arrays.
        exact: Whether the guarantee holds for every bit, so that rounding must not change.
        code: Hashes of the user's code by name. None: the hash of the compiled step.
        eval_every: Steps between evaluations.
        checkpoint_every: Steps between checkpoints.
    """

    name: str
    plan: RunPlan
    step: Step
    frozen: Any
    data: streaming.Source
    evaluate: Callable[[Any, Any], Record]
    fields: dict[str, Any]
    secrets: dict[str, Any]
    fingerprint: Callable[[], str]
    eval_every: int
    checkpoint_every: int
    users: UserTable | None = None
    exact: bool = False
    code: dict[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class State:
    """State of a run, as stored in checkpoints.

    Attributes:
        done: Number of finished steps.
        params: The parameters.
        opt_state: The optimizer state, with noise key and ledger.
        history: The records of the evaluations so far.
    """

    done: int
    params: Any
    opt_state: Any
    history: tuple[Record, ...] = ()


class Course:
    """Runs a job.

    Attributes:
        job: The job.
        context: Runtime context: devices, checkpoints, logs and timing.
        state: The current state.
        last: Number of steps at the end of the run.
    """

    def __init__(self, job: Job, first: State, context: Context) -> None:
        """Compiles and restores the run. A new run starts at `first` and saves it."""
        self.job, self.context, self.state = job, context, first
        phases, place = context.phases, context.place
        self._feed = Feed(job.plan.sampler, job.data, place, users=job.users)
        with phases("compile"):
            arguments = (first.params, first.opt_state), *self._feed(0), job.frozen
            program = make_program(job.step, arguments, place.mesh)
        with phases("data"):
            self._identity = self._identify(program)
            resume.check_same_on_hosts(self._identity, job.data, job.users)
        with phases("checkpoints"):
            restored = self._restore()
        self.last = max(self.state.done, job.plan.permitted_steps)
        with phases("compile"):
            self._step = program.compiled
        self._bounds = job.plan.bounds(evaluated_steps(job.eval_every, self.last))
        # The start time of the run if it had not been interrupted.
        spent = self.state.history[-1]["seconds"] if self.state.history else 0.0
        self._began = time.perf_counter() - spent
        if not restored:
            self.save(wait=True)

    def _identify(self, program: Program) -> dict[str, Any]:
        """Returns all values that a resumed run must share, with its data if they are compared."""
        job, checkpoints = self.job, self.context.checkpoints
        arithmetic = resume.arithmetic(job.plan.sampler, self.context.place, exact=job.exact)
        hashed = ""
        if checkpoints is not None:
            arithmetic |= {"training step": program.digest} if job.code is None else job.code
        if checkpoints is not None or jax.process_count() > 1:
            hashed = job.fingerprint()
        return {"run": job.fields, "data": hashed, "arithmetic": arithmetic, **job.secrets}

    def _restore(self) -> bool:
        """Restores the newest checkpoint, if any, and logs its records again."""
        checkpoints, begun = self.context.checkpoints, None
        if checkpoints is not None:
            begun = checkpoints.restore((self.state.params, self.state.opt_state))
        if begun is None:
            return False
        (params, opt_state), saved = begun
        # If a damaged checkpoint was removed, this one is older than the last shown step.
        resume.check_restored(
            self._identity,
            saved,
            opt_state,
            steps=self.job.plan.permitted_steps,
            shown=self.context.shown,
        )
        for entry in saved["history"]:
            self.context.observe(entry)
        self.state = State(saved["step"], params, opt_state, tuple(saved["history"]))
        return True

    def finish(self) -> None:
        """Takes the remaining steps."""
        pace = Pace()
        with Bar(
            total=self.last,
            initial=self.state.done,
            desc=self.job.name,
            unit="step",
            bar_format=SHORT,
            delay=PATIENCE,
            leave=None,  # a nested bar disappears at its end
            disable=not self.context.progress,
        ) as bar:
            if not self.state.history:
                self.evaluate()
            bar.set_postfix_str(self.progress())
            steps = range(self.state.done, self.job.plan.permitted_steps)
            for batch in streaming.prefetch(self._feed, steps):
                self.advance(batch)
                pace.keep(self.state.params)
                bar.update()
                if self._evaluates():
                    self.evaluate()
                    bar.set_postfix_str(self.progress())
                if self._saves():
                    self.save(wait=self.state.done == self.last)

    def advance(self, batch: tuple[Any, Any]) -> None:
        """Takes one step on a batch and its mask, and donates the arrays of the state."""
        before = self.state
        arrays = self._step((before.params, before.opt_state), *batch, self.job.frozen)
        self.state = State(before.done + 1, *arrays, before.history)

    def _evaluates(self) -> bool:
        done = self.state.done
        return done % self.job.eval_every == 0 or done == self.last

    def _saves(self) -> bool:
        done = self.state.done
        return done % self.job.checkpoint_every == 0 or done == self.last

    def evaluate(self) -> None:
        """Adds a record of the current metrics to the history and the logs."""
        state = self.state
        jax.block_until_ready(state.params)  # so that `seconds` includes all steps
        with self.context.phases("evaluation"):
            entry: Record = {
                "step": state.done,
                "epsilon": self._bounds[state.done],
                **self.job.evaluate(state.params, state.opt_state),
            }
        entry["seconds"] = round(time.perf_counter() - self._began, 4)
        self.context.observe(entry)
        self.state = dataclasses.replace(state, history=(*state.history, entry))

    def progress(self) -> str:
        """Returns a summary of the newest record for the progress bar.

        The bar is not redrawn at each step. It shows the bound on ε at the next evaluation, which
        holds for all steps until then.
        """
        done, entry = self.state.done, self.state.history[-1]
        until = min((step for step in self._bounds if step > done), default=done)
        bound = self._bounds[until]
        spent = "not private"
        if bound is not None:
            spent = f"ε ≤ {records.epsilon_text(bound)} to step {until}"
        # The most important part comes first, because 80 columns may cut the rest.
        metrics = ", ".join(
            f"{name.removeprefix('test_')}={value:.3f}"
            for name, value in reversed(entry.items())
            if isinstance(value, float) and name not in ("epsilon", "seconds")
        )
        return f"{spent}; at {entry['step']}: {metrics}" if metrics else spent

    def save(self, *, wait: bool = False) -> None:
        """Writes a checkpoint if the run has a folder.

        Args:
            wait: Whether to return only after the checkpoint is complete.
        """
        state, checkpoints = self.state, self.context.checkpoints
        if checkpoints is None:
            return
        with self.context.phases("checkpoints"):
            ledgers, history = resume.ledgers(state.opt_state), list(state.history)
            checkpoints.save(
                state.done,
                (state.params, state.opt_state),
                {**self._identity, "ledgers": ledgers, "history": history},
                wait=wait,
            )


def evaluated_steps(every: int, last: int) -> tuple[int, ...]:
    """Returns the step counts at which a run of `last` steps is evaluated."""
    return (*range(0, last, every), last)


class Pace:
    """Waits for the device regularly, to limit the number of queued steps."""

    def __init__(self) -> None:
        self._steps, self._queued, self._since = 1, 0, time.monotonic()

    def keep(self, params: Any) -> None:
        """Counts a step with result `params`, and waits for it if enough steps are queued."""
        self._queued += 1
        if self._queued < self._steps:
            return
        jax.block_until_ready(params)
        now = time.monotonic()
        each = max(now - self._since, 1e-6) / self._queued
        self._steps, self._queued, self._since = max(1, int(_AHEAD / each)), 0, now
