"""What JAX compiled, kept on disk for the next start of a command; of this user alone."""

import contextlib
import hashlib
import os
import platform
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax

LARGEST = 2 * 2**30
"""Bytes that stay in the folder; beyond, what was written first goes."""

_FOLDER = "jax_compilation_cache_dir"
_SETTINGS = {
    _FOLDER: None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def default_folder() -> Path:
    """Where the platform keeps what can be made again: XDG_CACHE_HOME or what stands for it."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given and Path(given).is_absolute():
        base = Path(given)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ".cache"
    return base / "dpoptax" / "compiled"


@contextlib.contextmanager
def kept_in(folder: Path | None) -> Iterator[None]:
    """Keeps what is compiled within the context in `folder`; None: nothing is kept.

    Whoever can write there can run code as this user: the folder is made for its owner alone, and
    one that others may write to or that is not this user's is not used. What is wrong with a
    folder is a warning: everything is then compiled as without it. Where JAX was told of a folder
    of its own, by JAX_COMPILATION_CACHE_DIR, that one is used.
    """
    if folder is None or getattr(jax.config, _FOLDER) is not None:
        yield
        return
    try:
        place = _prepared(folder / _machine())
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"nothing compiled is kept for the next start: {error}; give another folder with "
            "--compilation-cache, or --no-compilation-cache",
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
    """The folder, made if missing, without what is too much; raises OSError where it is no use."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if sys.platform != "win32":
        _check_others_keep_out(folder)
    with open(folder / ".writable", "wb"):
        pass
    files = sorted((f.stat().st_mtime, f.stat().st_size, f) for f in folder.glob("*-cache"))
    excess = sum(size for _, size, _ in files) - LARGEST
    for _, size, file in files:
        if excess <= 0:
            break
        file.unlink(missing_ok=True)
        excess -= size
    return folder


def _check_others_keep_out(folder: Path) -> None:
    found, around = folder.stat(), folder.parent.stat()
    others = stat.S_IWGRP | stat.S_IWOTH
    if found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if found.st_mode & others or (around.st_mode & others and not around.st_mode & stat.S_ISVTX):
        raise PermissionError(f"others may write to {folder}, and what is there would be run")
    folder.chmod(0o700)


def _machine() -> str:
    """A name for what compiled code runs on: a home folder may be shared by several machines."""
    described = [jax.__version__, platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        described += next(([line] for line in lines if line.startswith(("flags", "Features"))), [])
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
