"""How the tests are run: what is no test, and where compiled programs are kept."""

import gc
import os
import subprocess
import sys

import pytest

collect_ignore = ["make_reference.py"]

# XLA cuts a program into parts to compile them at once. Each has a price, and the other cores have
# tests of their own.
_IN_ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"
# XLA's older code generator for CPUs compiles small programs in two thirds of the time.
_QUICK_TO_COMPILE = "--xla_cpu_use_fusion_emitters=false"
_FEW_OPTIMIZATIONS = "jax_disable_most_optimizations"


def _xla_knows(flags: str) -> bool:
    """Whether the installed XLA has these flags: it ends the process at one that it has not."""
    program = [sys.executable, "-c", "import jax; jax.devices()"]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(program, env=environment, capture_output=True).returncode == 0


def _quickly(config: pytest.Config) -> bool:
    """Whether compiling is to be quick: not for the slow tests of programs as users compile them.

    Those are marked `optimized`. Asked for together, all slow tests are compiled so.
    """
    return config.option.markexpr in ("not slow", "slow and not optimized")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs in pytest's cache, for this run's other tests and for later runs.

    `pytest --cache-clear` forgets them. Through the environment, as the programs that tests start
    compile the same steps; JAX reads it when it is imported, which is later.
    """
    if hasattr(config, "cache"):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        given = os.environ.get("XLA_FLAGS", "")
        flags = [_IN_ONE_PART, *([_QUICK_TO_COMPILE] if _quickly(config) else [])]
        flags = " ".join(flag for flag in flags if flag.split("=")[0] not in given)
        if flags and _xla_knows(flags):
            os.environ["XLA_FLAGS"] = f"{given} {flags}".strip()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing of what is imported and collected is garbage to look for meanwhile."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


# Examples of docstrings that take seconds, each of something that quick tests are of, too.
_LONG_EXAMPLES = {
    "accumulate", "augmented", "calibrate_batch_size", "calibrate_noise_multiplier",
    "calibrate_steps", "canary_gradient", "information_flow", "kronecker_factors", "linear_map",
    "scale_by_shrunk_muon", "searched_canary", "select_rows", "selected_grad", "statement",
    "tune_microbatch_size",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks long examples as slow, and sorts modules that are marked `optimized` to the front.

    What is compiled is dropped between the two kinds. In this order modules are given to the
    workers, and not by their numbers of tests.
    """
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name.split(".")[-1] in _LONG_EXAMPLES:
            item.add_marker("slow")
    items.sort(key=lambda item: not any(item.getparent(pytest.Module).iter_markers("optimized")))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not look at it again and again."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(request: pytest.FixtureRequest):
    """Compiles programs with few optimizations where compiling is to be quick.

    Not in modules that are marked `optimized`: they are about the last bits of what users run.
    The slow tests' programs are large, and few serve two modules: they are dropped after each.
    """
    import jax  # not before what it reads from the environment is there

    quick = _quickly(request.config) and not any(request.node.iter_markers("optimized"))
    if quick != jax.config.read(_FEW_OPTIMIZATIONS):
        jax.clear_caches()
        jax.config.update(_FEW_OPTIMIZATIONS, quick)
    yield
    if request.config.option.markexpr != "not slow":
        jax.clear_caches()


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


@pytest.fixture
def no_room():
    """Examples are clipped at the bound itself: `helpers.no_room`."""
    from tests import helpers

    with helpers.no_room():
        yield


@pytest.fixture
def no_rounding(monkeypatch):
    """Rényi divergences are dp_accounting's own, without what is added for their rounding."""
    import numpy as np

    from dpoptax._pricing import accountants, renyi

    def forget():
        renyi.sampled_gaussian_rdp.cache_clear()
        accountants._priced.cache_clear()

    forget()
    monkeypatch.setattr(renyi, "rounding", lambda orders: np.zeros(np.shape(orders)))
    yield
    forget()
