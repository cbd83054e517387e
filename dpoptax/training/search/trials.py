"""Trains many runs, sequentially or in parallel, and reuses finished ones.

A run is a function of its config, including the seed. A killed run starts again. With the same
noise on the same batches, it repeats its releases and adds none.
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

import jax

from dpoptax.training import config_files
from dpoptax.training.bars import Bar
from dpoptax.training.config import TrainConfig
from dpoptax.training.data.dataset import Dataset, DatasetSpec
from dpoptax.training.errors import ConfigError
from dpoptax.training.loop import train
from dpoptax.training.run import devices, records
from dpoptax.training.run.privacy import make_plan


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


class Runner:
    """Runs trials and stores their records; use as a context manager.

    Args:
        directory: Directory for the records. A missing directory is created.
        processes: Number of worker processes. 1: trains in this process.
        made_by: Code and versions. Records of others are not reused.
    """

    def __init__(self, directory: Path, *, processes: int = 1, made_by: str = "") -> None:
        records.check_count("processes", processes)
        self._directory, self._processes, self._made_by = directory, processes, made_by
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> "Runner":
        self._directory.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def path(self, trial: Trial) -> Path:
        """Returns the file of a trial's record; its parameters are next to it as .msgpack."""
        identity = [trial.config.to_dict(), trial.held_out, trial.keep_params, self._made_by]
        name = hashlib.sha256(records.to_json(identity).encode()).hexdigest()[:16]
        return self._directory / f"{name}.json"

    def run(self, trials: Sequence[Trial], bar: Bar | None = None) -> list[dict[str, Any]]:
        """Returns the summary of each trial with its "history", in order.

        `bar` counts found and finished trials. A nested bar shows the steps of a trial that trains
        in this process.
        """
        bar = Bar(disable=True) if bar is None else bar
        paths = [self.path(trial) for trial in trials]
        results: list[Any] = [None] * len(trials)
        missing = []
        for index, path in enumerate(paths):
            if path.is_file():
                results[index] = json.loads(path.read_text(encoding="utf-8"))
                bar.update()
            else:
                missing.append(index)
        for index, found in self._computed(missing, trials, paths, bar):
            results[index] = found
            bar.update()
        return results

    def _computed(
        self, missing: list[int], trials: Sequence[Trial], paths: Sequence[Path], bar: Bar
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        if self._processes == 1:
            for index in missing:
                yield index, _run(trials[index], paths[index], progress=not bar.disable)
            return
        pickled = [_pickled((trials[index], paths[index])) for index in missing]
        if self._pool is None:
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
            )
        files = tuple(config_files.LOADED.values())
        try:
            pending = {
                self._pool.submit(_run_in_worker, files, job): index
                for index, job in zip(missing, pickled, strict=True)
            }
            while pending:
                bar.refresh()
                for future in concurrent.futures.wait(pending, 1, FIRST_COMPLETED).done:
                    yield pending.pop(future), future.result()
        except BrokenProcessPool as error:
            raise ConfigError(
                f"One of {self._processes} worker processes died, probably because it ran out of "
                "memory. Use fewer `processes`, and run the same command again to train the "
                "missing runs."
            ) from error


def default_processes() -> int:
    """Returns the number of cores, or 1 for an accelerator, which is not shared."""
    return len(os.sched_getaffinity(0)) if jax.default_backend() == "cpu" else 1


def dataset_of(config: TrainConfig, *, held_out: bool, progress: bool = False) -> Dataset:
    """Returns the data set of a config, or its training split with a fifth held out.

    `progress` shows a bar while features are computed.
    """
    dataset = _loaded(config.data(progress=progress))
    return dataset.for_selection() if held_out else dataset


def _run(trial: Trial, path: Path, *, progress: bool = False) -> dict[str, Any]:
    """Trains a trial, writes its record atomically, and returns it."""
    config = trial.config
    dataset = dataset_of(config, held_out=trial.held_out)
    plan = make_plan(config, dataset.units(config.unit))
    place = devices.start(config.parallel)
    result = train(config, dataset, plan, observe=_check_accuracy, progress=progress, place=place)
    # Equal to the record that a later start reads.
    record = records.plain({**result.summary, "history": result.history})
    if trial.keep_params:
        records.save_params(path.with_suffix(".msgpack"), result.params)
    records.write_json(path, record)
    return record


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
        raise ConfigError(
            "The classes and functions of a config must be importable by worker processes, got "
            f"{error}. Define them at the top level of the config file, or set processes=1."
        ) from error


def _run_in_worker(files: Sequence[config_files.ConfigFile], work: bytes) -> dict[str, Any]:
    """Runs a job after the config files, which define classes and register names."""
    for file in files:
        if file.module not in config_files.LOADED:
            config_files.run(file)
    try:
        job = pickle.loads(work)
    except (AttributeError, ImportError) as error:  # such as a class of a notebook
        raise ConfigError(
            "The classes and functions of a config must be importable by worker processes, got "
            f"{error}. Define them in the config file or in a module, or set processes=1."
        ) from error
    return _run(*job)


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
