"""Implements the training loop, which compiles, restores and finishes a run."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dpoptax import extend
from dpoptax.runs import Hidden, RunIdentity, settings, tree_digest
from dpoptax.sampling import Sampler
from dpoptax.training.bars import SHORT, Bar
from dpoptax.training.data import streaming
from dpoptax.training.run import records, resume
from dpoptax.training.run.announcer import PATIENCE
from dpoptax.training.run.context import Context, Record
from dpoptax.training.run.feeding import Feed
from dpoptax.training.run.inputs import copied
from dpoptax.training.run.step import TrainingStep, compiled_step, on_one_device
from dpoptax.users import UserTable

_AHEAD = 0.25
"""Seconds of queued steps. Each queued step keeps its batch in memory."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Describes a run for the loop.

    Attributes:
        name: Title of the progress bar.
        steps: Number of steps within the budget.
        bounds: Returns a bound on ε at each of several step counts.
        sampler: Returns the sampler of the run with this optimizer state, with its seed.
        step: The training step.
        frozen: Arrays that the loss uses and that are not trained, or None.
        data: The examples, indexed by the sampler.
        users: The owners of the examples, if the sampler draws users.
        evaluate: Returns the metrics of what `shown` returned.
        identity: Returns everything that the releases rest on, except JAX's settings, given the
            sampler and the arguments of a step on one device.
        kept: Secret values that a resumed run needs.
        exact: Whether the guarantee holds for every bit, so that rounding must not change.
        begin: Returns the initial optimizer state of a run with a folder, whose noise key depends
            on the given hash of its identity. None: that of the first state.
        shown: Returns the arrays that are shown, given parameters and optimizer state.
        eval_every: Steps between evaluations.
        checkpoint_every: Steps between checkpoints.
    """

    name: str
    steps: int
    bounds: Callable[[Sequence[int]], dict[int, float | None]]
    sampler: Callable[[Any], Sampler]
    step: TrainingStep
    frozen: Any
    data: streaming.Source
    evaluate: Callable[[Any], Record]
    identity: Callable[[Sampler, Any], dict[str, Any]]
    kept: dict[str, Any]
    eval_every: int
    checkpoint_every: int
    users: UserTable | None = None
    exact: bool = False
    begin: Callable[[str, Any], Any] | None = None
    shown: Callable[[Any, Any], Any] = lambda params, opt_state: params


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


class TrainingLoop:
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
        self._feed = self._feed_of(first.opt_state)
        self._waiting: tuple[int, Any] | None = None
        self._identity: RunIdentity | None = None
        if context.checkpoints is not None or jax.process_count() > 1:
            with phases("data"):
                self._identity = self._identify()
        with phases("checkpoints"):
            restored = self._restore()
        self.last = max(self.state.done, job.steps)
        with phases("compile"):
            self._step = compiled_step(job.step, self._arguments(), place.mesh)
        if restored:
            self._announce()
        self._bounds = job.bounds(evaluated_steps(job.eval_every, self.last))
        # The start time of the run if it had not been interrupted.
        spent = self.state.history[-1]["seconds"] if self.state.history else 0.0
        self._began = time.perf_counter() - spent
        if not restored:
            self._begin(first)
            self.save(wait=True)
        self._feed = self._feed_of(self.state.opt_state)

    def _feed_of(self, opt_state: Any) -> Feed:
        """Returns the batches of the run with this optimizer state."""
        job = self.job
        return Feed(job.sampler(opt_state), job.data, self.context.place, users=job.users)

    def _arguments(self) -> Any:
        """Returns the arguments of a step."""
        return (self.state.params, self.state.opt_state), *self._feed(0), self.job.frozen

    def _identify(self) -> RunIdentity:
        """Returns everything that decides the releases. Several hosts compare it here."""
        job, sampler = self.job, self.job.sampler(self.state.opt_state)
        args = on_one_device(self._arguments(), sampler.padded_size)
        identity = RunIdentity(
            {**settings(), **job.identity(sampler, args)},
            resume.rounding(sampler, self.context.place, exact=job.exact),
        )
        if (begun := self.context.begun) is not None and self.context.checkpoints is not None:
            workdir = self.context.checkpoints.directory.parent
            resume.check_continues(identity, begun, workdir)
        if jax.process_count() > 1:
            identity.check_same_on_hosts(job.data, kept=job.kept, steps=job.steps)
        return identity

    def _begin(self, first: State) -> None:
        """Makes the noise key of a run with a folder depend on its program and its data."""
        if self.context.checkpoints is None or self.job.begin is None:
            return
        assert self._identity is not None
        values = {**self._identity.values, "params": Hidden(tree_digest(first.params))}
        if self.job.exact:  # devices and versions change sums by rounding at most
            values |= self._identity.rounding
        hashed = RunIdentity(values).digest()
        self.state = State(0, first.params, self.job.begin(hashed, first.params))

    def _restore(self) -> bool:
        """Restores the newest checkpoint, if any, and logs its records again."""
        checkpoints, begun = self.context.checkpoints, None
        if checkpoints is not None:
            begun = checkpoints.restore((self.state.params, self.state.opt_state))
        if begun is None:
            return False
        (params, opt_state), saved = begun
        # If a damaged checkpoint was removed, this one is older than the last shown step.
        assert self._identity is not None
        resume.check_restored(
            self._identity,
            saved,
            opt_state,
            steps=self.job.steps,
            shown=self.context.shown,
            exact=self.job.exact,
        )
        history = resume.with_shown(saved["history"], saved["step"], self.context.earlier)
        for entry in history:
            self.context.observe(entry)
        self.state = State(saved["step"], params, opt_state, history)
        return True

    def _announce(self) -> None:
        """Says from which step the run continues."""
        done, checkpoints = self.state.done, self.context.checkpoints
        assert checkpoints is not None
        text = f"continues the run in {checkpoints.directory.parent} after step {done}"
        if done == self.last:
            text = f"the run in {checkpoints.directory.parent} has taken all {done} steps"
        self.context.phases.announce(text)

    def finish(self) -> None:
        """Takes the remaining steps."""
        pace, history = Pace(), self.state.history
        # Before the bar starts its clock: the first evaluation compiles and would count as a step.
        if self._evaluates() and (not history or history[-1]["step"] < self.state.done):
            self._keep_shown()
            self._show(wait=True)
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
            self._report(bar)
            steps = range(self.state.done, self.job.steps)
            for batch in extend.read_ahead(self._feed, steps):
                self.advance(batch)
                pace.keep(self.state.params)
                bar.update()
                if self._save_before_showing():
                    self._report(bar)

    def _report(self, bar: Bar) -> None:
        """Shows the newest record next to the progress bar, if there is one."""
        if self.context.progress:
            bar.set_postfix_str(self.progress())

    def advance(self, batch: tuple[Any, Any]) -> None:
        """Takes one step on a batch and its mask, and donates the arrays of the state."""
        before = self.state
        arrays = self._step((before.params, before.opt_state), *batch, self.job.frozen)
        self.state = State(before.done + 1, *arrays, before.history)

    def _evaluates(self) -> bool:
        done = self.state.done
        return done % self.job.eval_every == 0 or done == self.last

    def _save_before_showing(self) -> bool:
        """Saves and evaluates after a step if it is time, and returns whether a record was added.

        An evaluated state is saved first, in the background. Its record follows when the checkpoint
        is complete, while later steps run. So no step that anyone has seen is ever repeated.
        """
        done, last, shown = self.state.done, self.state.done == self.last, False
        evaluates = self._evaluates()
        if evaluates or done % self.job.checkpoint_every == 0:
            shown = self._show(wait=True)
            self.save(wait=last)
        if evaluates:
            self._keep_shown()
        return self._show(wait=last) or shown

    def _keep_shown(self) -> None:
        """Keeps a copy of the parameters to show, because the next step donates them."""
        state = self.state
        self._waiting = state.done, copied(self.job.shown(state.params, state.opt_state))

    def _show(self, *, wait: bool) -> bool:
        """Evaluates the waiting parameters if their checkpoint is complete.

        Args:
            wait: Whether to wait for the checkpoint.

        Returns:
            Whether there is a new record.
        """
        if self._waiting is None:
            return False
        checkpoints = self.context.checkpoints
        if checkpoints is not None:
            # Several hosts must evaluate at the same step.
            if not wait and jax.process_count() == 1 and checkpoints.saving():
                return False
            with self.context.phases("checkpoints"):
                checkpoints.finish()
        (step, params), self._waiting = self._waiting, None
        jax.block_until_ready(params)  # so that `seconds` includes all steps
        with self.context.phases("evaluation"):
            entry: Record = {
                "step": step,
                "epsilon": self._bounds[step],
                **self.job.evaluate(params),
            }
        entry["seconds"] = round(time.perf_counter() - self._began, 4)
        self.context.observe(entry)
        self.state = dataclasses.replace(self.state, history=(*self.state.history, entry))
        return True

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
            assert self._identity is not None
            record = {
                **self.job.kept,
                "identity": self._identity.record(),
                "ledgers": resume.ledgers(state.opt_state),
                "history": list(state.history),
            }
            checkpoints.save(state.done, (state.params, state.opt_state), record, wait=wait)


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
