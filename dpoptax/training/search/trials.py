"""Trains many runs, sequentially or in parallel, and reuses finished ones.

A run is a function of its config with the seed, its program and its data. A killed run starts
again. With the same noise on the same batches, it repeats its releases and adds none.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from dpoptax.runs import RunIdentity, settings
from dpoptax.training import config_files
from dpoptax.training.bars import Bar
from dpoptax.training.config import TrainConfig
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset, DatasetSpec
from dpoptax.training.errors import ConfigError
from dpoptax.training.loop import sum_of, train
from dpoptax.training.run import devices, records
from dpoptax.training.run.planning import step_arguments
from dpoptax.training.run.privacy import plan_on_data
from dpoptax.training.run.resolved import resolve


@functools.lru_cache(maxsize=2)
def _loaded(data: DatasetSpec) -> Dataset:
    return data.load()


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run of a comparison or sweep.

    Attributes:
        config: Config of the run, with a seed.
        held_out: Whether a fifth of the training split replaces the test split.
        keep_params: Whether to write the final parameters next to the record.
    """

    config: TrainConfig
    held_out: bool = False
    keep_params: bool = False

    def __post_init__(self) -> None:
        if self.config.parallel == "hosts":
            raise ConfigError(
                "`parallel` must not be 'hosts' for trials, which one process trains. Use "
                "'devices', or train each config by `dpoptax train`."
            )


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs trials and stores their records.

    Attributes:
        directory: Directory for the records. A missing directory is created.
        processes: Number of worker processes. 1: trains in this process.
        made_by: Code and versions. Records of others are not reused.
    """

    directory: Path
    processes: int = 1
    made_by: str = ""

    def __post_init__(self) -> None:
        records.check_count("processes", self.processes)

    def path(self, trial: Trial) -> Path:
        """Returns the file of a trial's record; its parameters are next to it as .msgpack."""
        released = sum_identity(trial.config, held_out=trial.held_out).digest()
        identity = [trial.config.to_dict(), trial.keep_params, released, self.made_by]
        name = hashlib.sha256(records.to_json(identity).encode()).hexdigest()[:16]
        return self.directory / f"{name}.json"

    def run(self, trials: Sequence[Trial], bar: Bar) -> list[dict[str, Any]]:
        """Returns the summary of each trial with its "history", in order.

        `bar` counts found and finished trials. A nested bar shows the steps of a trial that trains
        in this process.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        paths = [self.path(trial) for trial in trials]
        missing = {path: t for path, t in zip(paths, trials, strict=True) if not path.is_file()}
        bar.update(len(paths) - len(missing))
        for _ in self._trained(missing, bar):
            bar.update()
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def _trained(self, missing: dict[Path, Trial], bar: Bar) -> Iterator[None]:
        """Trains trials and writes their records. Yields after each."""
        if self.processes == 1:
            for path, trial in missing.items():
                _run(trial, path, progress=not bar.disable)
                yield
            return
        pickled = [_pickled((trial, path)) for path, trial in missing.items()]
        files = dict(config_files.LOADED)
        pool = concurrent.futures.ProcessPoolExecutor(
            self.processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
        )
        try:
            pending = {pool.submit(_run_in_worker, files, job) for job in pickled}
            while pending:
                bar.refresh()
                done, pending = concurrent.futures.wait(pending, 1, FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise ConfigError(
                f"One of {self.processes} worker processes died, probably because it ran out of "
                "memory. Use fewer `processes`, and run the same command again to train the "
                "missing runs."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def dataset_of(config: TrainConfig, *, held_out: bool, progress: bool = False) -> Dataset:
    """Returns the data set of a config, or its training split with a fifth held out.

    `progress` shows a bar while features are computed.
    """
    dataset = _loaded(config.data(progress=progress))
    return dataset.for_selection() if held_out else dataset


def sum_identity(config: TrainConfig, *, held_out: bool) -> RunIdentity:
    """Returns the data and the program of a config's steps.

    Configs that differ in seed and learning rate share them: the optimizer's state holds both.
    """
    return _sum_identity(dataclasses.replace(config, seed=0, learning_rate=1.0), held_out)


@functools.lru_cache(maxsize=64)
def _sum_identity(config: TrainConfig, held_out: bool) -> RunIdentity:
    dataset = dataset_of(config, held_out=held_out)
    plan = plan_on_data(config, dataset)
    run = resolve(config, plan, num_classes=dataset.num_classes)
    first = streaming.read(dataset.train, np.zeros(1, np.int64))["inputs"][0]
    _, frozen = config.initial_variables(run.model, first, run.init_key)
    params, state, *rest = step_arguments(run, dataset.shapes(config.unit))
    return RunIdentity({**settings(), **sum_of(run, dataset, frozen, ((params, state), *rest))})


def _run(trial: Trial, path: Path, *, progress: bool = False) -> None:
    """Trains a trial and writes its record atomically."""
    config = trial.config
    dataset = dataset_of(config, held_out=trial.held_out)
    plan = plan_on_data(config, dataset)
    place = devices.start(config.parallel)
    result = train(config, dataset, plan, observe=_check_accuracy, progress=progress, place=place)
    if trial.keep_params:
        records.save_params(path.with_suffix(".msgpack"), result.params)
    records.write_json(path, {**result.summary, "history": result.history})


def _check_accuracy(record: dict[str, Any]) -> None:
    """Raises a `ConfigError` before the first step if a run has no accuracy."""
    if "test_accuracy" not in record:
        raise ConfigError(
            "The metrics of the model must include 'accuracy', by which runs are compared. Return "
            "'accuracy', a number in [0, 1], from its `metrics`."
        )


def _pickled(work: Any) -> bytes:
    """Pickles a job, because a pool may hang if its thread fails to pickle one."""
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_importable(error) from error


def _not_importable(error: Exception) -> ConfigError:
    return ConfigError(
        "The classes and functions of a config must be importable by worker processes, got "
        f"{error}. Define them at the top level of the config file or in a module, or set "
        "processes=1."
    )


def _run_in_worker(files: dict[str, tuple[str, bytes]], work: bytes) -> None:
    """Runs a job after the config files, which define classes and register names."""
    for name, file in files.items():
        if name not in config_files.LOADED:
            config_files.run(name, *file)
    try:
        job = pickle.loads(work)
    except (AttributeError, ImportError) as error:  # such as a class of a notebook
        raise _not_importable(error) from error
    _run(*job)


def _start_worker() -> None:
    """Limits a worker to one thread and ends it with its parent."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one
    sentinel = parent.sentinel

    def follow() -> None:
        # Workers of a killed parent would wait for jobs forever.
        with contextlib.suppress(OSError):
            multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
