"""Trains a config, with or without privacy, and writes or returns the result."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from dpoptax.runs import Hidden, RunIdentity, digest_of, draws_of, settings, tree_digest
from dpoptax.sampling import Sampler
from dpoptax.training import config_files
from dpoptax.training.config import TrainConfig
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.data.fingerprints import identity_of
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import devices, records, seeds
from dpoptax.training.run.averaging import averaged
from dpoptax.training.run.chain import check_names
from dpoptax.training.run.context import Context, Record, open_context
from dpoptax.training.run.course import Course, Job, State
from dpoptax.training.run.evaluation import Evaluator
from dpoptax.training.run.phases import Phases, say
from dpoptax.training.run.privacy import plan_on_data
from dpoptax.training.run.records import STATEMENT
from dpoptax.training.run.resolved import ResolvedRun, resolve
from dpoptax.training.run.run_plan import RunPlan
from dpoptax.training.run.step import program_digest

if TYPE_CHECKING:
    from dpoptax.accounting import Guarantee


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a finished run.

    Attributes:
        summary: Content of summary.json.
        history: Records of metrics.jsonl. The first record is from before the first step.
        params: Final parameters, or their average if the config has `parameter_ema`.
        guarantee: The guarantee of the steps taken, or None without one.
    """

    summary: Record
    history: list[Record]
    params: Any
    guarantee: "Guarantee | None"


def train_and_evaluate(
    config: TrainConfig, workdir: str | Path, *, progress: bool = True
) -> RunResult:
    """Trains `config` and writes the run to `workdir`, or resumes the run there.

    The files are metrics.jsonl (a line per evaluation, written at once), checkpoints/,
    summary.json, statement.txt (the guarantee in plain language), params.msgpack and training.png.
    An interrupted run resumes from its last
    checkpoint and ends with the same result bit for bit.

    Args:
        config: The run.
        workdir: Directory for the files of the run. A missing directory is created.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The config cannot be trained, or `workdir` holds a run with another mechanism,
            sampler or data. The message names field, value and remedy.
        CheckpointError: A checkpoint cannot be written or read.
    """
    phases = Phases(say if progress else None)
    with phases("devices"):
        place = devices.start(config.parallel)
    main = jax.process_index() == 0
    if not main:
        phases = Phases()
    progress = progress and main
    workdir = Path(workdir)
    with open_context(
        workdir,
        place,
        phases,
        progress=progress,
        exact=config.fixed_point,
        private=config.method.private,
    ) as context:
        with phases("data"):
            dataset = config.data(progress=progress).load()
        run = _resolve(config, dataset, workdir, context)
        course = Course(*make_job(run, dataset, context), context)
        if main:  # after all checks, so that a refused start keeps the summary of the earlier run
            for name in ("summary.json", STATEMENT):
                (workdir / name).unlink(missing_ok=True)
        result = _result(run, course, dataset.name)
        if main:  # under the lock, so that parameters and summary are from one process
            _write(result, workdir, phases)
    return result


def _resolve(config: TrainConfig, dataset: Dataset, workdir: Path, context: Context) -> ResolvedRun:
    """Resolves a config, with the seed of the run in the folder if there is one.

    Raises:
        ConfigError: The folder holds another run, or that run has spent more than the budget.
    """
    begun, phases, seeded = context.begun, context.phases, config
    # Report unknown names first, because calibration may take long.
    config.build_model(dataset.num_classes)
    check_names(config)
    if begun is not None and config.seed is None:
        seeded = dataclasses.replace(config, seed=begun["seed"])
        if begun.get("seed_given"):
            config = seeded  # the summary then states that ε assumes a secret seed
    with phases("accounting"):
        plan = plan_on_data(seeded, dataset)
    with phases("init"):
        run = resolve(config, plan, num_classes=dataset.num_classes)
    if begun is None:
        return run
    if plan.seed != begun["seed"]:
        raise ConfigError(
            f"`seed` must be the seed of the run in {workdir}, got another one. Otherwise the run "
            "would add other noise to the same data. Pass the original seed, or another workdir "
            "for a new run."
        )
    from dpoptax.training.run.resume import check_continues  # imports orbax

    known = RunIdentity({**settings(), **_fields(run)})
    check_continues(known, begun, workdir, part=True)
    reached = max(begun["step"], context.shown)
    if reached > plan.permitted_steps and config.epsilon is not None:
        with phases("accounting"):
            spent = plan.epsilon(reached)
        if spent is not None and spent > config.epsilon:
            raise ConfigError(
                f"`epsilon` must be at least {spent:.4g}, which the run in {workdir} has spent in "
                f"{reached} steps, got {config.epsilon:g}. A spent budget cannot be recovered."
            )
    return run


def _write(result: RunResult, workdir: Path, phases: Phases) -> None:
    """Writes the files of a finished run."""
    with phases("files"):
        # Imported late: matplotlib is slow to import, and the first step does not need it.
        from dpoptax.training.run import figures

        records.save_params(workdir / "params.msgpack", result.params)
        figures.plot_run(result.summary, result.history, workdir / "training.png")
        if result.guarantee is not None:
            model = records.described_file(workdir / "params.msgpack")
            records.write_text(workdir / STATEMENT, result.guarantee.statement(model=model))
    seeded = result.summary["config"]["seed"] is not None  # the seed reveals the noise
    records.write_json(workdir / "summary.json", result.summary, secret=seeded)


def train(
    config: TrainConfig,
    dataset: Dataset,
    plan: RunPlan,
    *,
    observe: Callable[[Record], object] = lambda record: None,
    progress: bool = False,
    place: devices.Devices = devices.Devices(),  # noqa: B008
) -> RunResult:
    """Trains on `dataset` under `plan` and writes no files.

    The run ends after `plan.permitted_steps` steps. If these are fewer than the config's steps, the
    summary has `stopped_by_budget`.

    Args:
        config: The run.
        dataset: The data.
        plan: The plan of this config, from `plan_on_data`.
        observe: Called with each record.
        progress: Whether to show a progress bar.
        place: The devices.
    """
    context = Context(place, Phases(), observe=observe, progress=progress)
    with context.phases("init"):
        run = resolve(config, plan, num_classes=dataset.num_classes)
    return _result(run, Course(*make_job(run, dataset, context), context), dataset.name)


def make_job(run: ResolvedRun, dataset: Dataset, context: Context) -> tuple[Job, State]:
    """Returns the job of a resolved config and its initial state.

    Raises:
        ConfigError: The config cannot be trained on these data.
    """
    config, plan, place, phases = run.config, run.plan, context.place, context.phases
    with phases("init"):
        first = streaming.read(dataset.train, np.zeros(1, np.int64))["inputs"][0]
        variables = config.initial_variables(run.model, first, run.init_key)
        params, frozen = place.distribute(variables)
        if place.mesh is None:
            opt_state = run.chain.begin(params)
        else:
            opt_state = place.distribute(run.chain.optimizer.init(params))
    with phases("data"):
        source, test = dataset.train, dataset.test
        if streaming.in_memory(test):
            test = place.distribute(test)
        if streaming.in_memory(source) and place.mesh is None:
            source = place.distribute(source)
        users = None
        if config.records_per_user is not None:
            seed = seeds.of_records(plan.seed, config.generator)
            users = dataset.users(config.records_per_user, seed=seed)
    evaluator = Evaluator(config, run.model, test, frozen)

    def identity(sampler: Sampler, args: Any) -> dict[str, Any]:
        return {**_fields(run), **draws_of(sampler, users), **sum_of(run, dataset, frozen, args)}

    job = Job(
        name=config.method.name,
        plan=plan,
        step=run.step,
        frozen=frozen,
        data=source,
        users=users,
        evaluate=evaluator,
        shown=averaged,
        sampler=lambda opt_state: plan.sampler,
        identity=identity,
        kept={"seed": plan.seed, "seed_given": config.seed is not None},
        exact=config.fixed_point,
        eval_every=config.eval_every,
        checkpoint_every=config.checkpoint_every,
    )
    return job, State(0, params, opt_state)


def _fields(run: ResolvedRun) -> dict[str, Any]:
    """Returns the fields of a config that must not change when the run resumes."""
    return {f"`{name}`": value for name, value in run.fields.items()}


def sum_of(run: ResolvedRun, dataset: Dataset, frozen: Any, args: Any) -> dict[str, Any]:
    """Returns the data and the program of a run's steps, for its identity.

    Args:
        run: The resolved config.
        dataset: Its data.
        frozen: Constants of the model.
        args: Arguments of a step on one device.
    """
    code = config_files.code_digests(model=run.config.model, optimizer=run.config.optimizer)
    return {
        **identity_of(dataset),
        "The frozen arrays or published weights": Hidden(
            digest_of([repr(run.model), tree_digest(frozen)] if frozen else None)
        ),
        **{name: Hidden(digest) for name, digest in code.items()},
        "The training step": Hidden(program_digest(run.step, args)),
    }


def _result(run: ResolvedRun, course: Course, dataset: str) -> RunResult:
    """Finishes the run and returns its result."""
    course.finish()
    state, phases = course.state, course.context.phases
    config = run.config
    final = averaged(state.params, state.opt_state)
    with phases("accounting"):
        guarantee = run.guarantee(state.opt_state)
        promised = run.summary(guarantee)
    with phases("files"):
        sha256, versions = records.params_sha256(final), records.versions()
    newest = state.history[-1]
    summary = {
        **promised,
        "steps": course.last,
        "steps_requested": config.steps,
        "stopped_by_budget": course.last < config.steps,
        "dataset": dataset,
        **{name: value for name, value in newest.items() if name.startswith("test_")},
        "num_params": optax.tree.size(state.params),
        "params_sha256": sha256,
        "train_seconds": newest["seconds"],
        "config": config.to_dict(),
        "versions": versions,
    }
    return RunResult(summary, list(state.history), final, guarantee)
