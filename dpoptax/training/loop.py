"""The training loop, for private and non-private runs alike: steps, metrics, budget, summary."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from tqdm import tqdm

from dpoptax import accounting, spectrum
from dpoptax.training import devices, models, plots, recording, records, resume, streaming
from dpoptax.training.averaging import averaged
from dpoptax.training.chain import build_optimizer, noise_stddev
from dpoptax.training.checkpoints import CheckpointError, Checkpoints
from dpoptax.training.config import TrainConfig
from dpoptax.training.data import Dataset, load_dataset
from dpoptax.training.errors import ConfigError
from dpoptax.training.evaluation import Evaluation
from dpoptax.training.generation import Generation
from dpoptax.training.privacy import PrivacyPlan, make_plan
from dpoptax.training.step import Loaded, Resident, compile_step

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        summary: What summary.json holds.
        history: The records of metrics.jsonl; the first is from before any step.
        params: The final parameters, or their average if the config asks for one.
        recorded: Coordinates of the released and of the filtered gradients, (steps, coordinates)
            each, if the config asks for a record.
        generated: Each source of the test split with the text that was generated for it and its
            references, if the config asks for beams.
    """

    summary: Record
    history: list[Record]
    params: Any
    recorded: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    generated: list[Record] = dataclasses.field(default_factory=list)


def train_and_evaluate(
    config: TrainConfig, workdir: str | Path, *, progress: bool = True
) -> RunResult:
    """Train as `config` says and write the run to `workdir`, or go on with the run there.

    The files are metrics.jsonl (a line per evaluation, written as it happens), checkpoints/,
    summary.json, params.msgpack and training.png; with `config.record` also recording.npz and
    spectrum.png, with `config.beams` generated.jsonl. A run that was stopped, by whatever, goes on
    from its last checkpoint when called again, and ends as it would have without the stop, bit for
    bit.

    Args:
        config: The run.
        workdir: Directory for its files; made if missing.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A config that cannot be trained, or that is not the one of the run in `workdir`:
            another mechanism, sampler or data. The message names field, value and remedy.
        CheckpointError: A checkpoint cannot be written, or there are some and none can be read.
    """
    place = devices.start(config.parallel)
    dataset = load_dataset(config.dataset, config.data_dir, config.tokens)
    workdir = Path(workdir)
    with Checkpoints(workdir / "checkpoints", config.keep_checkpoints) as checkpoints:
        begun = checkpoints.newest_record()
        metrics_path = workdir / "metrics.jsonl"
        if begun is None and metrics_path.exists():
            raise CheckpointError(
                f"workdir={str(workdir)!r} holds the metrics of a run and no checkpoint of it. A "
                "fresh start would forget what was already released: give another workdir, or "
                "remove these files if they do not matter"
            )
        plan = make_plan(resume.with_seed_of(config, begun), dataset.train_size)
        if begun is not None:
            resume.check_same_run(config, plan, begun, workdir)
        main = jax.process_index() == 0
        if main:
            (workdir / "summary.json").unlink(missing_ok=True)
        with _metrics_file(metrics_path if main else None) as observe:
            result = train(
                config,
                dataset,
                plan,
                observe=observe,
                progress=progress and main,
                checkpoints=checkpoints,
                place=place,
            )
    if main:
        records.save_params(workdir / "params.msgpack", result.params)
        plots.plot_run(result.summary, result.history, workdir / "training.png")
        if result.recorded:
            stddev = noise_stddev(config, plan.noise_multiplier)
            recording.write(workdir / "recording.npz", result.recorded, stddev)
            if len(result.recorded["released"]) > 1:
                spectrum.plot(spectrum.load(workdir / "recording.npz"), workdir / "spectrum.png")
        if result.generated:
            records.write_lines(workdir / "generated.jsonl", result.generated)
        records.write_json(workdir / "summary.json", result.summary)
    return result


@contextlib.contextmanager
def _metrics_file(path: Path | None) -> Iterator[Callable[[Record], object]]:
    """A function that writes records; the file is replaced when the first one comes."""
    with contextlib.ExitStack() as stack:
        file: TextIO | None = None

        def observe(record: Record) -> None:
            nonlocal file
            if path is None:
                return
            if file is None:
                opened = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
                file = stack.enter_context(opened)
            file.write(records.to_json(record) + "\n")

        yield observe


def train(
    config: TrainConfig,
    dataset: Dataset,
    plan: PrivacyPlan,
    *,
    observe: Callable[[Record], object] = lambda record: None,
    progress: bool = False,
    checkpoints: Checkpoints | None = None,
    place: devices.Devices = devices.Devices(),  # noqa: B008
) -> RunResult:
    """Train on `dataset` within `plan`; `observe` gets each record, and nothing else is written.

    Steps past `plan.permitted_steps` are refused: the run ends before them, and its summary says
    `stopped_by_budget`. With `checkpoints`, it goes on from the newest and writes new ones, the
    first before any step: no noise is drawn that a later start would not know of.
    """
    if config.record_training_metrics and not streaming.in_memory(dataset.train):
        raise ConfigError(
            "record_training_metrics=True reads the whole training split, which is streamed from "
            "files; leave it out"
        )
    init_key, noise_key = jax.random.split(jax.random.key(plan.sampler.seed))
    model = models.build_model(config, dataset.num_classes, dataset.kind)
    generate = Generation(config, model, dataset) if config.beams else None
    optimizer = build_optimizer(config, plan.noise_multiplier, noise_key)
    example = jax.tree.map(lambda x: x[0], streaming.read(dataset.train, np.zeros(1, np.int64)))
    params, frozen = place.replicate(
        models.start_variables(config, model, example["inputs"], init_key)
    )
    opt_state = place.replicate(optimizer.init(params))
    feed = _Feed(dataset, plan, place, config)
    begun = checkpoints.restore((params, opt_state)) if checkpoints else None
    start, history, before = 0, [], 0.0
    if begun is not None:
        (params, opt_state), saved = begun
        resume.check_ledger(saved, opt_state)
        start, history = saved["step"], saved["history"]
        before = history[-1]["seconds"] if history else 0.0
        for entry in history:
            observe(entry)

    compiling = time.perf_counter()
    step = compile_step(
        config, plan.noise_multiplier, model, (params, opt_state, *feed(0), frozen), place.mesh
    )
    evaluate = Evaluation(config, model, feed.splits, frozen)
    evaluate(params, "test")
    started = time.perf_counter() - before
    last = max(start, plan.permitted_steps)

    def save(done: int, wait: bool = False) -> None:
        if checkpoints is not None:
            described = resume.describe(config, plan, opt_state)
            checkpoints.save(
                done, (params, opt_state), {**described, "history": history}, wait=wait
            )

    with tqdm(
        total=last, initial=start, desc=config.method.name, unit="step", disable=not progress
    ) as bar:

        def record(done: int) -> None:
            entry = _measure(config, plan, evaluate, averaged(params, opt_state), done)
            entry["seconds"] = round(time.perf_counter() - started, 4)
            history.append(entry)
            observe(entry)
            bar.set_postfix_str(_progress_text(entry))

        if begun is None:
            save(0, wait=True)
        if not history:
            record(0)
        for index, batch in zip(
            range(start, plan.permitted_steps),
            streaming.prefetch(feed, range(start, plan.permitted_steps)),
            strict=True,
        ):
            params, opt_state = step(params, opt_state, *batch, frozen)
            done = index + 1
            bar.update()
            if done % config.eval_every == 0 or done == last:
                record(done)
            if done % config.checkpoint_every == 0 or done == last:
                save(done, wait=done == last)

    final = averaged(params, opt_state)
    scored, generated = generate(final, frozen, progress=progress) if generate else ({}, [])
    summary = {
        **_guarantee(config, plan, opt_state),
        "steps": last,
        "steps_requested": config.steps,
        "stopped_by_budget": last < config.steps,
        "dataset": dataset.name,
        "test_loss": history[-1]["test_loss"],
        "test_accuracy": history[-1]["test_accuracy"],
        **{name: history[-1][name] for name in ("test_perplexity",) if name in history[-1]},
        **scored,
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "params_sha256": records.params_sha256(final),
        "train_seconds": history[-1]["seconds"],
        "compile_seconds": round(started - compiling, 4),
        "config": config.to_dict(),
        "versions": records.versions(),
    }
    return RunResult(summary, history, final, recording.recorded(opt_state), generated)


class _Feed:
    """Batch and mask of each step, from the training split on the device or from where it is.

    Attributes:
        splits: What evaluations read, on the device, or where it is if it is streamed.
    """

    def __init__(
        self, dataset: Dataset, plan: PrivacyPlan, place: devices.Devices, config: TrainConfig
    ) -> None:
        self._sampler, self._source, self._place = plan.sampler, dataset.train, place
        self._resident = place.mesh is None and streaming.in_memory(dataset.train)
        self.splits: dict[str, Any] = {"test": dataset.test}
        if streaming.in_memory(dataset.test):
            self.splits["test"] = place.replicate(dataset.test)
        if self._resident or config.record_training_metrics:
            self.splits["train"] = place.replicate(dataset.train)

    def __call__(self, step: int) -> tuple[Any, Any]:
        sample = self._sampler.sample(step)
        if self._resident:
            return Resident(self.splits["train"], sample.indices.astype(np.int32)), sample.mask
        batch, mask = streaming.load_batch(self._source, sample, self._place.rows)
        return Loaded(batch, streaming.load_indices(sample, self._place.rows)), mask


def _measure(
    config: TrainConfig, plan: PrivacyPlan, evaluate: Evaluation, params: Any, done: int
) -> Record:
    entry: Record = {
        "step": done,
        "epsilon": plan.epsilon(done),
        **evaluate(params, "test"),
    }
    if config.record_training_metrics:
        entry["not_covered_by_epsilon"] = evaluate(params, "train")
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
        "unproven": plan.unproven,
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
