"""The training loop, for private and non-private runs alike: steps, metrics, budget, summary."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from dpoptax import accounting
from dpoptax.training import models, plots, records
from dpoptax.training.config import TrainConfig
from dpoptax.training.data import Dataset, load_dataset
from dpoptax.training.methods import build_optimizer
from dpoptax.training.privacy import PrivacyPlan, make_plan
from dpoptax.training.step import compile_step

Record = dict[str, Any]

_evaluator = functools.lru_cache(models.evaluate_split)


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        summary: What summary.json holds.
        history: The records of metrics.jsonl; the first is from before any step.
        params: The final parameters.
    """

    summary: Record
    history: list[Record]
    params: Any


def train_and_evaluate(
    config: TrainConfig, workdir: str | Path, *, progress: bool = True
) -> RunResult:
    """Train as `config` says and write the run to `workdir`.

    The files are metrics.jsonl (a line per evaluation, written as it happens), summary.json,
    params.msgpack and training.png.

    Args:
        config: The run.
        workdir: Directory for its files; made if missing. Files of an earlier run are replaced.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A config that cannot be trained; the message names field, value and remedy.
    """
    dataset = load_dataset(config.dataset)
    plan = make_plan(config, dataset.train_size)
    workdir = Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "summary.json").unlink(missing_ok=True)
    with open(workdir / "metrics.jsonl", "w", encoding="utf-8", buffering=1) as metrics:
        result = train(
            config,
            dataset,
            plan,
            observe=lambda record: metrics.write(records.to_json(record) + "\n"),
            progress=progress,
        )
    records.save_params(workdir / "params.msgpack", result.params)
    plots.plot_run(result.summary, result.history, workdir / "training.png")
    records.write_json(workdir / "summary.json", result.summary)
    return result


def train(
    config: TrainConfig,
    dataset: Dataset,
    plan: PrivacyPlan,
    *,
    observe: Callable[[Record], object] = lambda record: None,
    progress: bool = False,
) -> RunResult:
    """Train on `dataset` within `plan` without writing any file; `observe` gets each record.

    Steps past `plan.permitted_steps` are refused: the run ends before them, and its summary says
    `stopped_by_budget`.
    """
    init_key, noise_key = jax.random.split(jax.random.key(plan.sampler.seed))
    model = models.build_model(config.model, dataset.num_classes)
    optimizer = build_optimizer(config, plan.noise_multiplier, noise_key)
    params = models.init_params(model, dataset.train["inputs"][0], init_key)
    opt_state = optimizer.init(params)
    splits = jax.device_put({"train": dataset.train, "test": dataset.test})

    compiling = time.perf_counter()
    step = compile_step(
        config,
        plan.noise_multiplier,
        model,
        (params, opt_state, splits["train"], *_draw(plan, 0)),
    )
    evaluate = _evaluator(model)
    jax.block_until_ready(evaluate(params, splits["test"]))
    started = time.perf_counter()

    history: list[Record] = []
    with tqdm(
        total=plan.permitted_steps, desc=config.method.name, unit="step", disable=not progress
    ) as bar:

        def record(done: int) -> None:
            entry = _measure(config, plan, evaluate, params, splits, done)
            entry["seconds"] = round(time.perf_counter() - started, 4)
            history.append(entry)
            observe(entry)
            bar.set_postfix_str(_progress_text(entry))

        record(0)
        for index in range(plan.permitted_steps):
            params, opt_state = step(params, opt_state, splits["train"], *_draw(plan, index))
            bar.update()
            if (index + 1) % config.eval_every == 0 or index + 1 == plan.permitted_steps:
                record(index + 1)

    summary = {
        **_guarantee(config, plan, opt_state),
        "steps": plan.permitted_steps,
        "steps_requested": config.steps,
        "stopped_by_budget": plan.permitted_steps < config.steps,
        "dataset": dataset.name,
        "test_loss": history[-1]["test_loss"],
        "test_accuracy": history[-1]["test_accuracy"],
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "params_sha256": records.params_sha256(params),
        "train_seconds": history[-1]["seconds"],
        "compile_seconds": round(started - compiling, 4),
        "config": config.to_dict(),
        "versions": records.versions(),
    }
    return RunResult(summary, history, params)


def _draw(plan: PrivacyPlan, index: int) -> tuple[np.ndarray, np.ndarray]:
    sample = plan.sampler.sample(index)
    return sample.indices.astype(np.int32), sample.mask


def _measure(
    config: TrainConfig,
    plan: PrivacyPlan,
    evaluate: Callable[[Any, Any], Any],
    params: Any,
    splits: Any,
    done: int,
) -> Record:
    loss, accuracy = map(float, evaluate(params, splits["test"]))
    entry: Record = {
        "step": done,
        "epsilon": plan.epsilon(done),
        "test_loss": loss,
        "test_accuracy": accuracy,
    }
    if config.record_training_metrics:
        loss, accuracy = map(float, evaluate(params, splits["train"]))
        entry["not_covered_by_epsilon"] = {"train_loss": loss, "train_accuracy": accuracy}
    return entry


def _guarantee(config: TrainConfig, plan: PrivacyPlan, opt_state: Any) -> Record:
    """What the run promises, from the ledger that the noise stage kept in the final state."""
    epsilon = None
    if plan.delta is not None and plan.noise_multiplier > 0:
        epsilon = accounting.epsilon_spent(
            opt_state, plan.sampler, plan.delta, accountant=plan.accountant
        )
    recorded = ["training loss and accuracy"] if config.record_training_metrics else []
    return {
        "method": config.method.name,
        "private": epsilon is not None,
        "epsilon": epsilon,
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier if config.method.private else None,
        "l2_clip_norm": config.l2_clip_norm if config.method.private else None,
        "accountant": config.accountant,
        **plan.sampler.describe(),
        "not_covered_by_epsilon": recorded,
        "assumed_secret": [] if epsilon is None or config.seed is None else ["config.seed"],
    }


def _progress_text(entry: Record) -> str:
    epsilon = "not private" if entry["epsilon"] is None else f"ε={entry['epsilon']:.3f}"
    return f"loss={entry['test_loss']:.3f}, accuracy={entry['test_accuracy']:.3f}, {epsilon}"
