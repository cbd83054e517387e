"""Many runs: one after the other or on all cores, and none twice.

A run is a function of its config, seed included. One that was killed is run again from its start:
with the same noise on the same batches it releases what it would have released, and nothing more.
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
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from dpoptax.training.config import TrainConfig
from dpoptax.training.data.dataset import Dataset, load_dataset
from dpoptax.training.data.scattering import Scattering
from dpoptax.training.data.tokens import Tokens
from dpoptax.training.errors import ConfigError
from dpoptax.training.loop import train
from dpoptax.training.run import records
from dpoptax.training.run.privacy import make_plan


@dataclasses.dataclass(frozen=True)
class _Data:
    """What is read, of the fields of a config that decide it; who waits for it does not."""

    dataset: str
    data_dir: Path | None
    tokens: Tokens
    features: Scattering | None
    progress: bool = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=2)
def _loaded(data: _Data) -> Dataset:
    return load_dataset(
        data.dataset, data.data_dir, data.tokens, data.features, progress=data.progress
    )


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of many.

    Attributes:
        config: What is trained; its seed is a number.
        held_out: Whether a fifth of the training split takes the place of the test split.
        keep_params: Whether the final parameters are written next to the record.
    """

    config: TrainConfig
    held_out: bool = False
    keep_params: bool = False


class Runner:
    """Runs trials and keeps their records; use as a context manager.

    Args:
        directory: For a record a trial; made if missing.
        processes: Number of worker processes; 1 trains in this one.
        made_by: What else a record depends on besides its trial: another one is not found again.
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
        """The file of a trial's record; its parameters lie next to it as .msgpack."""
        identity = [trial.config.to_dict(), trial.held_out, trial.keep_params, self._made_by]
        name = hashlib.sha256(records.to_json(identity).encode()).hexdigest()[:16]
        return self._directory / f"{name}.json"

    def run(
        self, trials: Sequence[Trial], done: Callable[[], object] = lambda: None
    ) -> list[dict[str, Any]]:
        """The summary of each trial with its "history", in order; `done` is called after each."""
        paths = [self.path(trial) for trial in trials]
        results: list[Any] = [None] * len(trials)
        missing = []
        for index, path in enumerate(paths):
            if path.is_file():
                results[index] = json.loads(path.read_text(encoding="utf-8"))
                done()
            else:
                missing.append(index)
        for index, result in self._computed([(i, trials[i], paths[i]) for i in missing]):
            results[index] = result
            done()
        return results

    def _computed(
        self, jobs: list[tuple[int, Trial, Path]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        if self._processes == 1:
            yield from ((index, _run(trial, path)) for index, trial, path in jobs)
            return
        if self._pool is None:
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self._processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
            )
        pending = {self._pool.submit(_run, trial, path): index for index, trial, path in jobs}
        for future in concurrent.futures.as_completed(pending):
            yield pending[future], future.result()


def default_processes() -> int:
    """One a core; a single one where an accelerator does the work, for it cannot be shared."""
    return len(os.sched_getaffinity(0)) if jax.default_backend() == "cpu" else 1


def dataset_of(config: TrainConfig, *, held_out: bool, progress: bool = False) -> Dataset:
    """The data set of a config, its test split replaced where a fifth is held out.

    `progress` shows a bar where features have to be computed.
    """
    dataset = _loaded(
        _Data(config.dataset, config.data_dir, config.tokens, config.scattering, progress)
    )
    return dataset.for_selection() if held_out else dataset


def _run(trial: Trial, path: Path) -> dict[str, Any]:
    """Trains one trial and writes its record in one piece."""
    if trial.config.seed is None:
        raise ConfigError("seed=None: a trial needs a seed, to be the same when it is run again")
    dataset = dataset_of(trial.config, held_out=trial.held_out)
    # What was held out has no texts of its own, and their scores select nothing.
    config = dataclasses.replace(trial.config, beams=0) if trial.held_out else trial.config
    result = train(config, dataset, make_plan(config, dataset.train_size))
    # Through JSON: what a later start reads is what the first one saw.
    record = json.loads(records.to_json({**result.summary, "history": result.history}))
    if trial.keep_params:
        records.save_params(path.with_suffix(".msgpack"), result.params)
    records.write_json(path, record)
    return record


def _start_worker() -> None:
    """One thread a worker, and no worker without its parent."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one
    sentinel = parent.sentinel

    def follow() -> None:
        # Killed without notice, a parent leaves its workers waiting for jobs for ever.
        with contextlib.suppress(OSError):
            multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
