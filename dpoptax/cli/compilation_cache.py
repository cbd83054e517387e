"""Keeps compiled programs on disk for the next start of a command, for this user only."""

import contextlib
import hashlib
import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from dpoptax.training import cache_folder

LARGEST = 2 * 2**30
"""Bytes of programs that stay in the folder; beyond, what was written first goes."""

_FOLDER = "jax_compilation_cache_dir"
_SETTINGS = {
    _FOLDER: None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextlib.contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Keeps programs that are compiled within the context in `folder`.

    A cache that others can write to would let them run code as this user, so only its owner can
    write to the folder.
    A folder that others may write to, or that is not this user's, is not used: a warning says so,
    and everything is compiled as without it. JAX_COMPILATION_CACHE_DIR names
    another folder, and JAX_ENABLE_COMPILATION_CACHE=false turns the cache off.
    """
    settings: Any = jax.config
    if not settings.jax_enable_compilation_cache or getattr(settings, _FOLDER) is not None:
        yield
        return
    try:
        place = _prepared(folder / _machine())
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"Compiled programs are not kept for the next start ({error}). Set the environment "
            "variable JAX_COMPILATION_CACHE_DIR to another folder.",
            stacklevel=2,
        )
        yield
        return
    before = {name: getattr(jax.config, name) for name in _SETTINGS}
    # Worker processes read the environment.
    environment = {name.upper(): os.environ.get(name.upper()) for name in _SETTINGS}
    for name, value in (_SETTINGS | {_FOLDER: str(place)}).items():
        _set(name, value)
        os.environ[name.upper()] = str(value)
    try:
        yield
    finally:
        for name, value in before.items():
            _set(name, value)
        for name, text in environment.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def _set(name: str, value: object) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update(name, value)
    if name == _FOLDER:
        compilation_cache.reset_cache()  # which folder is used is decided at first use


def _prepared(folder: Path) -> Path:
    """Makes the folder and removes excess files; raises OSError if it cannot be used."""
    cache_folder.prepare(folder)
    cache_folder.keep_newest(folder, "*-cache", LARGEST)
    return folder


def _machine() -> str:
    """A name for what compiled code runs on: a home folder may be shared by several machines."""
    described = [jax.__version__, platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        described += next(([line] for line in lines if line.startswith(("flags", "Features"))), [])
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
