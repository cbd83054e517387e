"""Saves and restores atomic checkpoints of a run.

A checkpoint contains parameters, optimizer state with ledger and noise key, the sampler with its
seed, the config and the metrics so far. Anyone with a checkpoint can subtract the noise, so only
the owner can read the directory.

A checkpoint is a folder with one file for each host: the record, and the host's parts of the
arrays. A thread writes it through to the disk. The folder gets its name when it is complete.

A run that resumes from any checkpoint repeats later steps bit for bit, because batches are
functions of (seed, step) and noise of (key, step). A state is shown only after its checkpoint is
complete, so no shown step is repeated.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.runs import differing
from dpoptax.training import cache_folder, hosts
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import records
from dpoptax.training.run.inputs import copied

FORMAT = 9

_KEPT = 3
"""Number of checkpoints to keep, in case a file is damaged."""

_PATIENCE = 600.0
"""Seconds that the first host waits for the files of the others."""

_Parts = list[tuple[str, Mapping[str, np.ndarray]]]
"""The parts of an array: their names, and the files that hold them."""


class CheckpointError(OSError):
    """Raised when a checkpoint cannot be written or read, with the remedy."""


class Checkpoints:
    """Manages the checkpoints in one directory; a context manager.

    Attributes:
        directory: The directory, with a subdirectory for each checkpoint, named by its step.
    """

    def __init__(self, directory: Path) -> None:
        """Opens `directory`, or creates it, and removes unfinished files of a killed run.

        Raises:
            CheckpointError: The directory cannot be created, or it belongs to another user.
        """
        self.directory = directory.absolute()
        try:
            cache_folder.make_private(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint directory {self.directory} cannot be created: {error}"
            ) from None
        with ExitStack() as stack:
            let_no_other_in(self.directory, stack)
            if jax.process_index() == 0:
                for partial in self.directory.glob("*.partial"):
                    shutil.rmtree(partial)
            self._writer = stack.enter_context(ThreadPoolExecutor(1))
            self._open = stack.pop_all()
        self._saving: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for the last save. Its failure does not replace an error of the run."""
        try:
            with self._open:
                self._wait()
        except CheckpointError:
            if error is None:
                raise

    def steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, newest first."""
        names = (path.name for path in self.directory.iterdir())
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    def save(self, step: int, state: Any, record: dict[str, Any], *, wait: bool = False) -> None:
        """Writes a checkpoint in the background.

        Args:
            step: Number of finished steps.
            state: A tree of arrays and random keys. It may be donated after the call.
            record: JSON values, stored in the same checkpoint.
            wait: Whether to return only after the checkpoint is complete.

        Raises:
            CheckpointError: This checkpoint, or with `wait=False` the previous one, could not be
                written.
        """
        self.finish()  # the previous one must be on the disk before an older one is removed
        count = jax.process_count()
        known = {"format": FORMAT, "step": step, "hosts": count, "leaves": _names(state)}
        text = records.to_json({**known, **record}).encode()
        arrays = {**_parts_of(state), "record": np.frombuffer(text, np.uint8)}
        self._saving = self._writer.submit(self._write, step, arrays, jax.process_index(), count)
        if wait:
            self.finish()

    def _write(self, step: int, arrays: Mapping[str, np.ndarray], host: int, count: int) -> None:
        """Writes the file of a host. The first host waits for the others and names the folder."""
        partial = self.directory / f"{step}.partial"
        partial.mkdir(exist_ok=True)
        with open(partial / f"{host}.partial", "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        (partial / f"{host}.partial").rename(partial / f"{host}.npz")
        if host:
            return
        deadline = time.monotonic() + _PATIENCE
        while len(list(partial.glob("*.npz"))) < count:
            if time.monotonic() > deadline:
                raise OSError(f"The files of some of {count} hosts are missing in {partial}.")
            time.sleep(0.01)
        _write_through(partial)
        partial.rename(self.directory / str(step))
        _write_through(self.directory)
        for old in self.steps()[_KEPT:]:
            shutil.rmtree(self.directory / str(old))

    def saving(self) -> bool:
        """Returns whether a checkpoint is being written."""
        return self._saving is not None and not self._saving.done()

    def finish(self) -> None:
        """Waits until the last checkpoint is complete, also after a failure of power.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._wait():
            differing({})  # waits for the first host, which has waited for the others

    def _wait(self) -> bool:
        """Waits until this host has written its part of a checkpoint; returns whether it has."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._clear_errors():
                saving.result()
        return saving is not None

    def newest_record(self) -> dict[str, Any] | None:
        """Returns the record of the newest checkpoint, or None without one.

        Raises:
            CheckpointError: The newest checkpoint cannot be read.
        """

        def read(step: int) -> dict[str, Any]:
            with self._opened(step) as (record, _):
                return record

        found: dict[str, Any] | None = self._newest(read)
        return found

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Returns state and record of the newest checkpoint, or None without one.

        Args:
            like: A state of the same structure. The result has its shapes, types and shardings, on
                any devices.

        Raises:
            CheckpointError: The newest checkpoint cannot be read.
            ConfigError: It holds arrays of another model or method.
        """

        def read(step: int) -> tuple[Any, dict[str, Any]]:
            with self._opened(step) as (record, parts):
                if record["leaves"] != _names(like):
                    raise ConfigError(
                        f"The checkpoints in {self.directory} hold arrays of another model or "
                        "method. Use another workdir for a new run."
                    )
                leaves, structure = jax.tree.flatten(like)
                found = [_read_array(parts[str(i)], leaf) for i, leaf in enumerate(leaves)]
                # Copies, because the next step donates them.
                return copied(jax.tree.unflatten(structure, found)), record

        found: tuple[Any, dict[str, Any]] | None = self._newest(read)
        return found

    @contextmanager
    def _opened(self, step: int) -> Iterator[tuple[dict[str, Any], dict[str, _Parts]]]:
        """Yields the record of a checkpoint, and the parts of each array by its number."""
        paths = sorted((self.directory / str(step)).glob("*.npz"))
        with ExitStack() as stack:
            files = [stack.enter_context(np.load(path)) for path in paths]
            record: dict[str, Any] = {}
            parts: dict[str, _Parts] = {}
            for file in files:
                record = json.loads(file["record"].tobytes())
                if record["format"] != FORMAT or record["step"] != step:
                    raise ValueError(
                        f"It has format {record['format']} and step {record['step']}, not format "
                        f"{FORMAT} and step {step}. Continue a run with the version that started "
                        "it."
                    )
                for name in file.files:
                    parts.setdefault(name.partition(" ")[0], []).append((name, file))
            if len(files) != record.get("hosts"):
                raise ValueError("It lacks files.")
            yield record, parts

    def _newest(self, read: Callable[[int], Any]) -> Any:
        """Reads the newest checkpoint. A damaged one is not skipped without the user's consent."""
        steps = self.steps()
        if differing({"steps": repr(steps)}):
            # Hosts would read batches and add noise of different steps.
            raise CheckpointError(
                f"All hosts must see the same checkpoints in {self.directory}. Use a workdir on a "
                "disk that they share."
            )
        if not steps:
            return None
        try:
            return read(steps[0])
        except ConfigError:
            raise
        except Exception as error:  # damaged files can raise any error
            remedy = "Restore it from a backup, or use another workdir and account for both runs."
            if steps[1:]:
                remedy = f"Remove it to continue from step {steps[1]}."
            raise CheckpointError(
                f"The checkpoint {self.directory / str(steps[0])} cannot be read "
                f"({_first_line(error)}). {remedy}"
            ) from error

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            kept = self.steps()
            last = f"step {kept[0]}" if kept else "the start, which was not saved either"
            raise CheckpointError(
                f"A checkpoint cannot be written to {self.directory}: {_first_line(error)}. Free "
                "space or repair the directory, then run the same command again. It continues "
                f"from {last}."
            ) from error


def let_no_other_in(directory: Path, stack: ExitStack) -> None:
    """Locks `directory` for this process until `stack` is closed or the process ends.

    Otherwise two simultaneous starts would draw two seeds and log the steps of two runs as one.

    Raises:
        CheckpointError: Another process holds the lock.
    """
    if sys.platform == "win32" or jax.process_count() > 1:
        return  # Windows lacks flock, and hosts of a run share the directory
    import fcntl

    handle = os.open(directory, os.O_RDONLY)
    stack.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stack.close()
        raise CheckpointError(
            f"The workdir {str(directory.parent)!r} is in use by another process. Wait until it "
            "ends, or use another workdir."
        ) from None
    except OSError:
        pass  # a file system without locks


def _write_through(folder: Path) -> None:
    """Writes the names in a folder from the cache of the system to the disk."""
    if sys.platform == "win32":
        return  # Windows cannot synchronize a folder
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _numbers(array: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _names(state: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [f"{jax.tree_util.keystr(path)}: {x.dtype}{list(x.shape)}" for path, x in leaves]


def _parts_of(state: Any) -> dict[str, np.ndarray]:
    """Returns copies of the parts that this host writes, and the hosts together write each once.

    A name is the number of an array, and the bounds of the part along each axis. Parts are bytes,
    because NumPy's format lacks some types.
    """
    leaves = list(map(_numbers, jax.tree.leaves(state)))
    for leaf in leaves:
        leaf.copy_to_host_async()
    parts = {}
    for number, leaf in enumerate(leaves):
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                axes = zip(shard.index, leaf.shape, strict=True)
                bounds = ["{}:{}".format(*part.indices(size)) for part, size in axes]
                copy = np.array(shard.data)  # the next step may overwrite the array
                parts[" ".join([str(number), *bounds])] = copy.view(f"V{copy.itemsize}")
    return parts


def _read_array(parts: _Parts, like: jax.Array) -> jax.Array:
    """Returns an array from its parts, with the shape, type and sharding of `like`."""
    numbers: Any = _numbers(like)
    found = np.empty(numbers.shape, f"V{numbers.dtype.itemsize}")
    for name, file in parts:
        bounds = (bound.split(":") for bound in name.split(" ")[1:])
        found[tuple(slice(int(first), int(end)) for first, end in bounds)] = file[name]
    array: Any = found.view(numbers.dtype)
    if numbers is not like:
        array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))
    return hosts.place(array, like.sharding)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
