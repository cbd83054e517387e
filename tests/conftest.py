"""How the tests are run: what is no test, and where compiled programs are kept."""

import os

import pytest

collect_ignore = ["make_reference.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs in pytest's cache, for this run's other tests and for later runs.

    `pytest --cache-clear` forgets them. Through the environment, as the programs that tests start
    compile the same steps; JAX reads it when it is imported, which is later.
    """
    if hasattr(config, "cache"):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


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
