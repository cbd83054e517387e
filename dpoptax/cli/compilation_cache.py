"""Caches compiled programs of commands on disk, for the current user only."""

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
"""Maximum bytes in the cache folder. The oldest files are removed."""

_FOLDER = "jax_compilation_cache_dir"
_SETTINGS = {
    _FOLDER: None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextlib.contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Caches programs that are compiled within the context in `folder`.

    A cache that other users can write to would let them run code as this user. A folder that
    belongs to another user or that others can write to is therefore not used, and a warning is
    shown. JAX_COMPILATION_CACHE_DIR sets another folder, and JAX_ENABLE_COMPILATION_CACHE=false
    disables the cache.
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
    # Worker processes read these settings from the environment.
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
        compilation_cache.reset_cache()  # JAX fixes the folder at first use


def _prepared(folder: Path) -> Path:
    """Creates the folder and removes excess files, or raises OSError."""
    cache_folder.prepare(folder)
    cache_folder.keep_newest(folder, "*-cache", LARGEST)
    return folder


def _machine() -> str:
    """Returns a name of this kind of machine, because several may share a home folder."""
    described = [jax.__version__, platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        described += next(([line] for line in lines if line.startswith(("flags", "Features"))), [])
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
