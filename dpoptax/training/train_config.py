"""Trains a config and writes the files of its result."""

import math
from pathlib import Path
from typing import Any

import jax
import optax

from dpoptax.accounting import Guarantee
from dpoptax.training.config import Config
from dpoptax.training.parameters import save_params
from dpoptax.training.run import files, seeds
from dpoptax.training.run.announcer import Announcer, say
from dpoptax.training.run.averaging import averaged
from dpoptax.training.run.context import Record
from dpoptax.training.run.run_task import FitResult, run_task
from dpoptax.training.task import PlainPlan, Task


def train_and_evaluate(
    config: Config, workdir: str | Path, *, progress: bool = True, **options: Any
) -> Record:
    """Trains a config by `fit` in a folder, or resumes the run there, and returns its summary.

    Besides the files of `fit`, the folder gets summary.json, params.msgpack and training.png.

    Args:
        config: The config. Its argument `seed`, if any, also determines the noise.
        workdir: Directory for the files of the run. A missing directory is created.
        progress: Whether to show a progress bar.
        **options: `mesh` and `generator` of `fit`.

    Raises:
        ValueError: As for `fit`.
        CheckpointError: A checkpoint cannot be written or read.
    """
    workdir, seed = Path(workdir), seed_of(config)
    phases = Announcer(say if progress else None)
    with phases("loading data"):
        task = config.task()
    key = None if seed is None else seeds.key_of(seed, options.get("generator") or "threefry")
    summary: Record = {}

    def write_files(result: FitResult, key_was_given: bool) -> None:
        summary.update(
            summarize(task, result),
            assumed_secret=["seed"] if key_was_given and result.guarantee is not None else [],
            config=config.described() | ({} if seed is None else {"seed": seed}),
            versions=files.versions(),
        )
        if jax.process_index() == 0:
            with phases("writing parameters and figures"):
                _write(summary, result, workdir, secret=seed is not None)

    run_task(task, workdir=workdir, key=key, progress=progress, on_result=write_files, **options)
    return summary


def seed_of(config: Config) -> int | None:
    """Returns the seed of a config, or None without one."""
    flag = config.flags.get("seed")
    return None if flag is None else flag.default


def _write(summary: Record, result: FitResult, workdir: Path, *, secret: bool) -> None:
    """Writes the files of a finished run. The seed in a `secret` summary reveals the noise."""
    # Imported late: matplotlib is slow to import, and the first step does not need it.
    from dpoptax.training.run import figures

    save_params(workdir / "params.msgpack", averaged(result.params, result.opt_state))
    figures.plot_run(summary, result.history, workdir / "training.png")
    if result.guarantee is not None:
        model = files.described_file(workdir / "params.msgpack")
        files.write_text(workdir / files.STATEMENT, result.guarantee.statement(model=model))
    files.write_json(workdir / "summary.json", summary, secret=secret)


def summarize(task: Task, result: FitResult) -> Record:
    """Returns the summary of a run."""
    newest = result.history[-1]
    return {
        "method": task.name,
        **_privacy(task, result.guarantee),
        "steps": result.steps,
        "steps_requested": task.plan.steps,
        "stopped_by_budget": result.steps < task.plan.steps,
        "dataset": task.dataset,
        **{name: x for name, x in newest.items() if name not in files.FIELDS},
        "num_params": optax.tree.size(result.params),
        "params_sha256": files.params_sha256(averaged(result.params, result.opt_state)),
        "train_seconds": newest["seconds"],
    }


def _privacy(task: Task, guarantee: Guarantee | None) -> Record:
    """Returns the part of a summary on privacy."""
    plan, epsilon = task.plan, None
    if guarantee is not None and task.is_private:
        epsilon = guarantee.stated_epsilon
    clip = task.applied_clip
    found = {
        "private": epsilon is not None and math.isfinite(epsilon),
        "unproven": None,
        "epsilon": epsilon,
        "clip": clip if clip is None or isinstance(clip, int | float) else repr(clip),
        "budget": task.budget,
        "unit": plan.sampler.unit,
        **(plan.sampler.describe() if guarantee is None else guarantee.sampling),
    }
    if isinstance(plan, PlainPlan):
        return {**found, "unproven": None if plan.noise is None else plan.reason, "delta": None}
    return {
        **found,
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "noise_strategy": None if plan.strategy is None else repr(plan.strategy),
        "accountant": plan.accountant,
    }
