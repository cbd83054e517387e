"""Implements the training loop, which compiles, restores and finishes a run."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from dpoptax import extend
from dpoptax.runs import Hidden, RunIdentity, settings, to_decimals, tree_digest, words_of
from dpoptax.training.bars import SHORT, Bar
from dpoptax.training.run import files, resume, seeds
from dpoptax.training.run.announcer import PATIENCE
from dpoptax.training.run.arguments import copied
from dpoptax.training.run.context import Context, Record
from dpoptax.training.run.program import RunProgram, bounds
from dpoptax.training.run.step import compiled_step, on_one_device
from dpoptax.training.run.step_inputs import Inputs
from dpoptax.training.task import PlainPlan

_AHEAD = 0.25
"""Seconds of queued steps. Each queued step keeps its batch in memory."""


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
    """Runs a program.

    Attributes:
        program: The program, of whose parameters only shapes and shardings are used.
        context: Runtime context: checkpoints, logs and timing.
        state: The current state.
        last: Number of steps at the end of the run.
    """

    def __init__(
        self,
        program: RunProgram,
        first: State,
        context: Context,
        *,
        steps: int,
        key_was_given: bool,
    ) -> None:
        """Compiles and restores the run. A new run starts at `first` and saves it.

        `steps` is the number within the budget. `key_was_given` is False for a drawn noise key.
        """
        self.program, self.context, self.state = program, context, first
        self._steps, phases = steps, context.phases
        # Secret values that a resumed run needs.
        words = np.frombuffer(words_of(program.key), np.uint32)
        self._kept = {"key": words.tolist(), "given": key_was_given}
        self._feed = program.feed(first.opt_state)
        self._waiting: tuple[int, Any] | None = None
        self._identity: RunIdentity | None = None
        if context.checkpoints is not None or jax.process_count() > 1:
            with phases("loading data"):
                self._identity = self._identify()
        with phases("waiting for a checkpoint"):
            restored = self._restore()
        self.last = max(self.state.done, steps)
        with phases("compiling the training step"):
            self._step = compiled_step(program.step(), self._arguments(), program.mesh)
        if restored and context.checkpoints is not None:
            folder = context.checkpoints.directory.parent
            done = f"after step {self.state.done} of {self.last}"
            phases.announce(f"continues the run in {folder} {done}")
        task = program.task
        evaluated = (*range(0, self.last, task.evaluation_interval), self.last)
        self._bounds = bounds(task.plan, evaluated)
        # The start time of the run if it had not been interrupted.
        spent = self.state.history[-1]["seconds"] if self.state.history else 0.0
        self._began = time.perf_counter() - spent
        if not restored:
            self._begin(first)
            self.save(wait=True)
        self._feed = program.feed(self.state.opt_state)

    def _arguments(self) -> Any:
        """Returns the arguments of a step."""
        return (self.state.params, self.state.opt_state), self._feed(0), self.program.task.frozen

    def _identify(self) -> RunIdentity:
        """Returns everything that decides the releases. Several hosts compare it here."""
        program, sampler = self.program, self.program.sampler(self.state.opt_state)
        args = on_one_device(self._arguments(), sampler.padded_size)
        identity = RunIdentity(
            {**settings(), **program.identity(sampler, args)},
            resume.rounding(sampler, program.mesh, exact=program.task.plan.fixed_point),
        )
        if (record := self.context.run_record) is not None and self.context.checkpoints is not None:
            workdir = self.context.checkpoints.directory.parent
            resume.check_continues(identity, record, workdir)
        if jax.process_count() > 1:
            identity.check_same_on_hosts(program.task.data, kept=self._kept, steps=self._steps)
        return identity

    def _begin(self, first: State) -> None:
        """Makes the noise key of a run with a folder depend on its program and its data."""
        program, plan = self.program, self.program.task.plan
        if self.context.checkpoints is None or isinstance(plan, PlainPlan):
            return
        assert self._identity is not None
        values = {**self._identity.values, "params": Hidden(tree_digest(first.params))}
        if plan.fixed_point:  # devices and versions change sums by rounding at most
            values |= self._identity.rounding
        key = seeds.derived_key(program.key, RunIdentity(values).digest())
        self.state = State(0, first.params, program.first_state(first.params, key))

    def _restore(self) -> bool:
        """Restores the newest checkpoint, if any, and logs its records again."""
        checkpoints, restored = self.context.checkpoints, None
        if checkpoints is not None:
            restored = checkpoints.restore((self.state.params, self.state.opt_state))
        if restored is None:
            return False
        (params, opt_state), record = restored
        # If a damaged checkpoint was removed, this one is older than the last shown step.
        assert self._identity is not None
        resume.check_restored(
            self._identity,
            record,
            opt_state,
            steps=self._steps,
            shown=max(self.context.earlier, default=0) if self.program.task.is_private else 0,
            exact=self.program.task.plan.fixed_point,
        )
        earlier = self.context.earlier.items()
        history = tuple(entry for step, entry in earlier if step <= record["step"])
        for entry in history:
            self.context.observe(entry)
        self.state = State(record["step"], params, opt_state, history)
        return True

    def take_remaining_steps(self) -> None:
        """Takes the remaining steps."""
        pace, history = Pace(), self.state.history
        # Before the bar starts its clock: the first evaluation compiles and would count as a step.
        if self._evaluates() and (not history or history[-1]["step"] < self.state.done):
            self._keep_shown()
            self._show(wait=True)
        with Bar(
            total=self.last,
            initial=self.state.done,
            desc="training",
            unit="step",
            bar_format=SHORT,
            delay=PATIENCE,
            leave=None,  # a nested bar disappears at its end
            disable=not self.context.progress,
        ) as bar:
            self._report(bar)
            steps = range(self.state.done, self._steps)
            for inputs in extend.read_ahead(self._feed, steps):
                self.advance(inputs)
                pace.keep(self.state.params)
                bar.update()
                if self._save_before_showing():
                    self._report(bar)

    def _report(self, bar: Bar) -> None:
        """Shows the newest record next to the progress bar, if there is one."""
        if self.context.progress and self.state.history:
            bar.set_postfix_str(self.progress())

    def advance(self, inputs: Inputs) -> None:
        """Takes one step, and donates the arrays of the state."""
        before = self.state
        arrays = self._step((before.params, before.opt_state), inputs, self.program.task.frozen)
        self.state = State(before.done + 1, *arrays, before.history)

    def _evaluates(self) -> bool:
        done = self.state.done
        return done % self.program.task.evaluation_interval == 0 or done == self.last

    def _save_before_showing(self) -> bool:
        """Saves and evaluates after a step if it is time, and returns whether a record was added.

        An evaluated state is saved first, in the background. Its record follows when the checkpoint
        is complete, while later steps run. So no step that anyone has seen is ever repeated.
        """
        done, last, shown = self.state.done, self.state.done == self.last, False
        evaluates = self._evaluates()
        if evaluates or done % self.program.task.checkpoint_every == 0:
            shown = self._show(wait=True)
            self.save(wait=last)
        if evaluates:
            self._keep_shown()
        return self._show(wait=last) or shown

    def _keep_shown(self) -> None:
        """Keeps a copy of the parameters to show, because the next step donates them."""
        state = self.state
        self._waiting = state.done, copied(self.program.shown(state.params, state.opt_state))

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
            with self.context.phases("waiting for a checkpoint"):
                checkpoints.wait_until_saved()
        (step, params), self._waiting = self._waiting, None
        jax.block_until_ready(params)  # so that `seconds` includes all steps
        with self.context.phases("evaluating"):
            entry: Record = {
                "step": step,
                "epsilon": self._bounds[step],
                **self.program.metrics(params),
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
            spent = f"ε ≤ {to_decimals(bound)} to step {until}"
        # The most important part comes first, because 80 columns may cut the rest.
        metrics = ", ".join(
            f"{name.removeprefix('test_')}={value:.3f}"
            for name, value in reversed(entry.items())
            if isinstance(value, float) and name not in files.FIELDS
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
        with self.context.phases("waiting for a checkpoint"):
            assert self._identity is not None
            record = {**self._kept, "identity": self._identity.record()}
            checkpoints.save(state.done, (state.params, state.opt_state), record, wait=wait)


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
