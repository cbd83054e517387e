"""Caches compiled programs of commands on disk, for the current user only."""

import contextlib
import hashlib
import platform
import warnings
from typing import Any

import jax

from dpoptax.training.cache_folder import cache_folder, keep_newest, prepare

LARGEST = 2 * 2**30
"""Maximum bytes in the cache folder. The oldest files are removed."""

_FOLDER = "jax_compilation_cache_dir"


def keep_programs() -> None:
    """Caches programs that compile for a second or longer, unless JAX has a cache already.

    A cache that other users can write to would let them run code as this user. A folder that
    belongs to another user or that others can write to is therefore not used, and a warning is
    shown. JAX_COMPILATION_CACHE_DIR sets another folder, and JAX_ENABLE_COMPILATION_CACHE=false
    disables the cache.
    """
    settings: Any = jax.config
    if not settings.jax_enable_compilation_cache or getattr(settings, _FOLDER) is not None:
        return
    try:
        folder = cache_folder("compiled") / _machine()
        prepare(folder)
        keep_newest(folder, "*-cache", LARGEST)
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"Compiled programs are not kept for the next start ({error}). Set the environment "
            "variable JAX_COMPILATION_CACHE_DIR to another folder.",
            stacklevel=2,
        )
        return
    settings.update(_FOLDER, str(folder))


def _machine() -> str:
    """Returns a name of this kind of machine, because several may share a home folder.

    JAX's own key of a program does not contain the features of the processor.
    """
    described = [jax.__version__, platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        described += next(([line] for line in lines if line.startswith(("flags", "Features"))), [])
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
