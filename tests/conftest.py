"""How the tests are run: what is no test, and where compiled programs are kept."""

import importlib.util
import mmap
import os
from pathlib import Path

import pytest

collect_ignore = ["make_reference.py"]

# XLA's older code generator for CPUs compiles small programs in two thirds of the time.
_QUICK_TO_COMPILE = "xla_cpu_use_fusion_emitters"


def _xla_knows(flag: str) -> bool:
    """Whether the installed jaxlib has a flag: it ends the process at one that it has not."""
    spec = importlib.util.find_spec("jaxlib")
    for library in Path(spec.origin).parent.glob("*.so") if spec else ():
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            if data.find(flag.encode()) >= 0:
                return True
    return False


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs in pytest's cache, for this run's other tests and for later runs.

    `pytest --cache-clear` forgets them. Through the environment, as the programs that tests start
    compile the same steps; JAX reads it when it is imported, which is later.
    """
    if hasattr(config, "cache"):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        flags = os.environ.get("XLA_FLAGS", "")
        # The slow tests are of programs as users compile them.
        quick = config.option.markexpr == "not slow"
        if quick and _QUICK_TO_COMPILE not in flags and _xla_knows(_QUICK_TO_COMPILE):
            os.environ["XLA_FLAGS"] = f"{flags} --{_QUICK_TO_COMPILE}=false".strip()


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory):
    """Commands that tests run keep what they compile here, and not in the user's cache folder."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
