"""Saves and restores atomic checkpoints of a run.

A checkpoint contains parameters, optimizer state with ledger and noise key, the key that was given
to the run or drawn, and the identity of the run. Anyone with it can subtract the noise, so only the
owner can read the directory. It appears under its name when it is complete.

Small arrays are stored as text in the JSON record, STEP.json: orbax would take ten times as long,
and a second to import. It stores other arrays, and those of several hosts, in the folder STEP.

A run that resumes from any checkpoint repeats later steps bit for bit, because batches are
functions of (seed, step) and noise of (key, step). A state is shown only after its checkpoint is
complete, so no shown step is repeated.
"""

import base64
import functools
import hashlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
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
from dpoptax.training.run import files
from dpoptax.training.run.arguments import copied, shapes_of

FORMAT = 9

_KEPT = 3
"""Number of checkpoints to keep, in case a file is damaged."""

_SMALL = 2**20
"""Largest size of arrays in bytes that are stored as text. Above, text takes more time."""

_RACE = "Failed to json parse Metadata file"
"""Message of orbax when it reads the names of its handlers while it writes them. Both threads do
this in `AsyncCheckpointer.save`, which then goes on without the old names."""


def _is_failure_or_of_others(record: logging.LogRecord) -> bool:
    if "orbax" not in Path(record.pathname).parts:
        return True
    return record.levelno >= logging.ERROR and not str(record.msg).startswith(_RACE)


# Orbax's warnings advise callers of its API. Its failures are errors, which are raised.
logging.getLogger("absl").addFilter(_is_failure_or_of_others)
warnings.filterwarnings("ignore", module=r"orbax\.")


class CheckpointError(OSError):
    """Raised when a checkpoint cannot be written or read, with the remedy."""


class Checkpoints:
    """Manages the checkpoints in one directory; a context manager.

    Attributes:
        directory: The directory, with a file or folder for each checkpoint, named by its step.
    """

    def __init__(self, directory: Path) -> None:
        """Opens `directory`, or creates it.

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
        self._open = ExitStack()
        let_no_other_in(self.directory, self._open)
        for left in self.directory.glob("*.partial"):
            left.unlink(missing_ok=True)  # by a killed run
        self._unfinished: int | None = None

    @functools.cached_property
    def _manager(self) -> Any:
        """The manager of checkpoints with arrays."""
        import orbax.checkpoint as ocp

        policies = ocp.checkpoint_managers.preservation_policy
        return ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.LatestN(_KEPT),
                # Removes unfinished files of a killed run. Orbax does this in a thread that only a
                # save waits for, so a command that fails early would print the traceback of that
                # thread. It is skipped without any, except with several hosts, which must agree.
                cleanup_tmp_directories=self._has_folders(),
            ),
        )

    def _has_folders(self) -> bool:
        return jax.process_count() > 1 or any(path.is_dir() for path in self.directory.iterdir())

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
            with self._open, self._clear_errors():
                if "_manager" in vars(self):
                    self._manager.close()
        except CheckpointError:
            if error is None:
                raise

    def steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, newest first."""
        folders = self._manager.all_steps() if self._has_folders() else []
        return sorted([*self._files(), *folders], reverse=True)

    def _files(self) -> dict[int, Path]:
        return {int(path.stem): path for path in self.directory.glob("*.json")}

    def save(self, step: int, state: Any, record: dict[str, Any], *, wait: bool = False) -> None:
        """Writes a checkpoint, in the background if it has a folder.

        Args:
            step: Number of finished steps.
            state: A tree of arrays and random keys. It may be donated after the call.
            record: JSON values, stored in the same checkpoint.
            wait: Whether to return only after the checkpoint is complete.

        Raises:
            CheckpointError: This checkpoint, or with `wait=False` the previous one, could not be
                written.
        """
        self.wait_until_saved()  # it must be on the disk before an older one is removed
        arrays = _arrays(state)
        whole = {"format": FORMAT, "step": step, "leaves": _names(state), **record}
        with self._clear_errors():
            if jax.process_count() == 1 and sum(x.nbytes for x in arrays.values()) <= _SMALL:
                self._save_file(step, {**whole, "arrays": _texts(arrays)})
            else:
                self._save_folder(step, whole, arrays)
        if wait:
            self.wait_until_saved()

    def _save_file(self, step: int, record: dict[str, Any]) -> None:
        """Writes a checkpoint with small arrays through to the disk."""
        path = self.directory / f"{step}.json"
        files.write_json(path, _with_digest(record), secret=True)
        _write_through([path, self.directory])
        for _, old in sorted(self._files().items())[:-_KEPT]:
            old.unlink()

    def _save_folder(self, step: int, record: dict[str, Any], arrays: dict[str, jax.Array]) -> None:
        """Writes a checkpoint with large arrays in the background."""
        import orbax.checkpoint as ocp

        if jax.default_backend() == "cpu":
            # On the CPU, the transfer to the host does not copy, and the next step may overwrite
            # the arrays.
            arrays = copied(arrays)
        stored = ocp.args.JsonSave(_with_digest(record)), ocp.args.StandardSave(arrays)
        args = ocp.args.Composite(record=stored[0], state=stored[1])
        self._manager.save(step, args=args, force=True)
        self._unfinished = step

    def saving(self) -> bool:
        """Returns whether a checkpoint is being written."""
        return self._unfinished is not None and bool(self._manager.is_saving_in_progress())

    def wait_until_saved(self) -> None:
        """Waits until the last checkpoint is complete, also after a failure of power.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._unfinished is None:
            return
        with self._clear_errors():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            if jax.process_index() == 0:
                folder = self.directory / str(self._unfinished)
                _write_through([*folder.rglob("*"), folder, self.directory])
        self._unfinished = None

    def newest_record(self) -> dict[str, Any] | None:
        """Returns the record of the newest checkpoint, or None without one.

        Raises:
            CheckpointError: The newest checkpoint cannot be read.
        """
        found = self._newest(self._read_record)
        return None if found is None else found[0]

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
            record, texts = self._read_record(step)
            if record["leaves"] != _names(like):
                raise ConfigError(
                    f"The checkpoints in {self.directory} hold arrays of another model or method. "
                    "Use another workdir for a new run."
                )
            if texts is None:
                arrays = self._read_arrays(step, _arrays(like))
            else:
                arrays = {name: _from_text(texts[name], x) for name, x in _arrays(like).items()}
            leaves, structure = jax.tree.flatten(like)
            found = [arrays.get(f"{index:05d}", leaf) for index, leaf in enumerate(leaves)]
            state = jax.tree.unflatten(structure, found)
            if _names(state) != record["leaves"]:  # without some metadata, keys become numbers
                raise ValueError("It has lost the types of its arrays.")
            return state, record

        return self._newest(read)

    def _read_record(self, step: int) -> tuple[dict[str, Any], dict[str, str] | None]:
        """Returns the record, and the arrays as text if they are stored in it."""
        record = self._read_json(step)
        if record["format"] != FORMAT or record["step"] != step:
            raise ValueError(
                f"It has format {record['format']} and step {record['step']}, not format {FORMAT} "
                f"and step {step}. Continue a run with the version that started it."
            )
        digest = record.pop("digest")
        if _with_digest(record)["digest"] != digest:
            raise ValueError("It has changed.")
        return record, record.pop("arrays", None)

    def _read_json(self, step: int) -> dict[str, Any]:
        if (path := self._files().get(step)) is not None:
            return dict(json.loads(path.read_text()))
        import orbax.checkpoint as ocp

        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        return dict(self._manager.restore(step, args=args)["record"])

    def _read_arrays(self, step: int, like: dict[str, jax.Array]) -> dict[str, jax.Array]:
        import orbax.checkpoint as ocp

        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes_of(like)))
        arrays: dict[str, jax.Array] = self._manager.restore(step, args=args)["state"]
        return arrays

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
            path = self._files().get(steps[0], self.directory / str(steps[0]))
            raise CheckpointError(
                f"The checkpoint {path} cannot be read ({_first_line(error)}). {remedy}"
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


def _write_through(paths: Iterable[Path]) -> None:
    """Writes files and folders from the cache of the system to the disk."""
    if sys.platform == "win32":
        return  # Windows cannot synchronize a folder

    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _arrays(state: Any) -> dict[str, jax.Array]:
    """Returns the leaves by number, without empty arrays, which orbax rejects."""
    leaves = enumerate(jax.tree.leaves(state))
    return {f"{index:05d}": leaf for index, leaf in leaves if leaf.size}


def _numbers(array: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _texts(arrays: dict[str, jax.Array]) -> dict[str, str]:
    """Returns the bytes of each array as text."""
    found = jax.device_get(jax.tree.map(_numbers, arrays))
    return {name: base64.b64encode(x.tobytes()).decode() for name, x in found.items()}


def _with_digest(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON values of a record, with the SHA-256 of their text."""
    values = files.plain(record)
    return {**values, "digest": hashlib.sha256(files.to_json(values).encode()).hexdigest()}


def _from_text(text: str, like: jax.Array) -> jax.Array:
    """Returns the array of a text, with the shape, type and sharding of `like`."""
    numbers = _numbers(like)
    found = np.frombuffer(base64.b64decode(text, validate=True), numbers.dtype)
    array = jnp.array(found.reshape(numbers.shape))  # a copy, because the next step donates it
    if numbers is not like:  # a key
        array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))
    return hosts.place(array, like.sharding)


def _names(state: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [f"{jax.tree_util.keystr(path)}: {x.dtype}{list(x.shape)}" for path, x in leaves]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
