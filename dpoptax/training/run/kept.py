"""What the accounting found, kept on disk for the next start of the same command.

dp_accounting and SciPy take longer to import than a step takes to compile. So a command that was
begun before starts with the noise that was calibrated then, and accounts for it beside its steps:
see `Confirmation`. A result is kept under a name for all that it depends on: the arguments, every
source file of this package, and the versions of what computes.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

Function = TypeVar("Function", bound=Callable[..., Any])

PATTERN = "accounting-{}.json"
"""Names of files, of a key or "*"."""
_folder: Path | None = None


@contextlib.contextmanager
def kept_in(folder: Path | None) -> Iterator[None]:
    """Keeps results within the context in `folder`, a folder of this user alone; None: nowhere.

    Who can write there decides with how much noise the next run begins.
    """
    global _folder
    before, _folder = _folder, folder
    try:
        yield
    finally:
        _folder = before


def in_use() -> bool:
    """Whether results are kept, so that some may be of an earlier start."""
    return _folder is not None


def keeping(function: Function) -> Function:
    """Decorator: what a function of the accounting returns is kept, if `kept_in` says where.

    It has to be a function of its arguments alone, and to return numbers or a tuple of them. Calls
    with anything but numbers, texts and values of this package's own classes are not kept, nor are
    those of several hosts, which have to agree.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        described = _described([args, kwargs])
        if _folder is None or described is None or jax.process_count() > 1:
            return function(*args, **kwargs)
        file = _folder / PATTERN.format(_key(function, described))
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(file.read_text(encoding="utf-8"))
            return tuple(found) if isinstance(found, list) else found
        found = function(*args, **kwargs)
        with contextlib.suppress(OSError):  # it is computed again next time
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(found), encoding="utf-8")
            partial.replace(file)
        return found

    return cast(Function, call)


class Confirmation:
    """A check that runs beside a run's steps, in a thread; its error is the run's."""

    def __init__(self, check: Callable[[], None]) -> None:
        """Of `check`, which raises where the run must not go on; it does not begin yet."""
        self._check = check

    @functools.cached_property
    def _running(self) -> Future[None]:
        pool = ThreadPoolExecutor(1, thread_name_prefix="confirmation")
        running = pool.submit(self._check)
        pool.shutdown(wait=False)
        return running

    def look(self) -> None:
        """Begins if it has not, and raises what the check raised if it has ended."""
        if self._running.done():
            self._running.result()

    def wait(self) -> None:
        """Returns when the check has ended without an error, and raises its error else."""
        self._running.result()


def _key(function: Callable[..., Any], described: Any) -> str:
    whole = [function.__module__, function.__qualname__, described, _versions()]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


@functools.cache
def _versions() -> list[str]:
    from dpoptax.training.run import records

    packages = ("dp-accounting", "jax-privacy", "numpy", "scipy")
    found = []
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return [records.source_sha256(), platform.python_version(), *found]


def _described(value: Any) -> Any:
    """`value` as JSON that tells it from all others, or None where that cannot be said."""
    if isinstance(value, bool | int | float | str | None):
        return [type(value).__name__, repr(value)]
    if isinstance(value, dict):
        parts = [[_described(name), _described(item)] for name, item in sorted(value.items())]
        return None if any(None in part for part in parts) else ["dict", parts]
    if isinstance(value, list | tuple):
        parts = [_described(item) for item in value]
        return None if None in parts else ["tuple", parts]
    kind = type(value)
    if dataclasses.is_dataclass(value) and kind.__module__.split(".")[0] == "dpoptax":
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        parts = _described(fields)
        return None if parts is None else [f"{kind.__module__}.{kind.__qualname__}", parts]
    return None
