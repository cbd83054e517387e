"""Configures the tests: collection, compilation and the cache of compiled programs."""

import collections
import gc
import os
import pathlib
import subprocess
import sys
from math import gcd

import pytest

collect_ignore = ["make_reference.py"]

# XLA splits a program to compile the parts in parallel. Each part has a cost, and the other cores
# run other tests.
_IN_ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"
# XLA's older code generator for CPUs compiles small programs in two thirds of the time.
_QUICK_TO_COMPILE = "--xla_cpu_use_fusion_emitters=false"
_FEW_OPTIMIZATIONS = "jax_disable_most_optimizations"


def _xla_knows(flags: str) -> bool:
    """Returns whether the installed XLA has these flags, because unknown flags end the process."""
    program = [sys.executable, "-c", "import jax; jax.devices()"]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(program, env=environment, capture_output=True).returncode == 0


def _quickly(config: pytest.Config) -> bool:
    """Returns whether `-m` selects only tests that are compiled with few optimizations.

    Slow tests marked `optimized` check programs as users compile them. A selection that includes
    these tests is compiled with optimizations.
    """
    return config.option.markexpr in ("not slow", "slow and not optimized")


def pytest_configure(config: pytest.Config) -> None:
    """Stores compiled programs in pytest's cache, for the other tests and for later runs.

    `pytest --cache-clear` deletes them. Environment variables carry the setting, because programs
    started by tests compile the same steps. JAX reads them on import, which happens later.
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
    """Disables garbage collection during import and collection, which create no garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


# Docstring examples that take seconds. Quick tests cover each of these functions as well.
_LONG_EXAMPLES = {
    "accumulate", "augmented", "calibrate", "canary_gradient", "information_flow",
    "searched_canary", "select_rows", "statement",
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-case", action="store_true", help="run every case of tests marked `spread`"
    )


def _spread(cases: list[pytest.Function], count: int) -> list[pytest.Function]:
    """Returns `count` cases of a test in which the values of each parameter are about as frequent.

    Each next case has the rarest values so far. Ties are broken in an order that jumps through the
    grid.
    """
    stride = next(s for s in range(round(0.618 * len(cases)), 0, -1) if gcd(s, len(cases)) == 1)
    left = [cases[i * stride % len(cases)] for i in range(len(cases))]
    kept: list[pytest.Function] = []
    taken: collections.Counter[tuple[str, int]] = collections.Counter()

    def values(case: pytest.Function) -> list[tuple[str, int]]:
        return [(name, id(value)) for name, value in case.callspec.params.items()]

    while left and len(kept) < count:
        case = min(left, key=lambda case: sum(taken[value] for value in values(case)))
        taken.update(values(case))
        left.remove(case)
        kept.append(case)
    return kept


def _select_spread(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Splits tests into those to run and the further slow cases of tests marked `spread(n)`."""
    cases: dict[tuple[object, str], list[pytest.Function]] = {}
    for item in items:
        marked = all(map(item.get_closest_marker, ("slow", "spread")))
        if isinstance(item, pytest.Function) and marked:
            cases.setdefault((item.parent, item.originalname), []).append(item)
    left_out: set[pytest.Item] = set()
    for found in cases.values():
        (count,) = found[0].get_closest_marker("spread").args
        left_out.update(set(found) - set(_spread(found, count)))
    return [i for i in items if i not in left_out], [i for i in items if i in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks slow tests, selects cases, and moves tests marked `optimized` to the front.

    Long examples and tests of experiments are slow. Slow cases of tests marked `spread` are left
    out, unless `--every-case` is given or tests are named.

    Compiled programs are dropped between the two kinds. Workers receive the modules in this order,
    not by their number of tests.
    """
    experiments = pathlib.Path(__file__).parent / "experiments"
    for item in items:
        long = isinstance(item, pytest.DoctestItem) and item.name.split(".")[-1] in _LONG_EXAMPLES
        if long or experiments in item.path.parents:
            item.add_marker("slow")
    if not (config.option.every_case or any("::" in name for name in config.args)):
        items[:], left_out = _select_spread(items)
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: not any(item.getparent(pytest.Module).iter_markers("optimized")))


def pytest_collection_finish() -> None:
    """Freezes the objects imported so far, so that the garbage collector skips them."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(request: pytest.FixtureRequest):
    """Compiles programs with few optimizations in modules that are not marked `optimized`.

    Modules marked `optimized` test the last bits of the programs that users run. Slow tests have
    large programs that few modules share, so these are dropped after each module.
    """
    import jax  # imported here because JAX reads the environment on import

    quick = _quickly(request.config) and not any(request.node.iter_markers("optimized"))
    if quick != jax.config.read(_FEW_OPTIMIZATIONS):
        jax.clear_caches()
        jax.config.update(_FEW_OPTIMIZATIONS, quick)
    yield
    if request.config.option.markexpr != "not slow":
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _nothing_warned_of(monkeypatch):
    """Lets each test see warnings that are shown once in a process."""
    monkeypatch.setattr("dpoptax._pricing.checks._WARNED", set())


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory):
    """Redirects the features of experiments away from the user's cache folder."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture
def no_room():
    """Clips examples to the bound itself; see `helpers.no_room`."""
    from tests import helpers

    with helpers.no_room():
        yield


@pytest.fixture
def coarse_prices(monkeypatch):
    """Prices by a grid of privacy losses ten times as wide, for tests that compare two prices."""
    from dpoptax._pricing import accountants, random_allocation

    interval = 10 * accountants.DISCRETIZATION
    monkeypatch.setattr(accountants, "DISCRETIZATION", interval)
    monkeypatch.setattr(random_allocation, "FINE_INTERVAL", interval)


@pytest.fixture
def no_rounding(monkeypatch):
    """Uses dp_accounting's Rényi divergences without the allowance for rounding."""
    import numpy as np

    from dpoptax._pricing import accountants, renyi

    def forget():
        renyi.sampled_gaussian_rdp.cache_clear()
        accountants._price.cache_clear()

    forget()
    monkeypatch.setattr(renyi, "rounding", lambda orders: np.zeros(np.shape(orders)))
    yield
    forget()
