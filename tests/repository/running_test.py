"""Tests of the test configuration: selection of tests, and the cache of compiled programs."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import jax

hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
print(jax.jit(lambda x: x * float(sys.argv[1]))(2.0))
print(hits.count("/jax/compilation_cache/cache_hits"))
"""
TESTS = """
import pytest

def test_quick():
    pass

@pytest.mark.slow
def test_slow():
    pass
"""


@pytest.mark.slow
@pytest.mark.skipif("JAX_COMPILATION_CACHE_DIR" not in os.environ, reason="run without a cache")
def test_processes_share_compiled_programs():
    assert jax.config.jax_compilation_cache_dir == os.environ["JAX_COMPILATION_CACHE_DIR"]
    number = int.from_bytes(os.urandom(2)) + 0.25  # a number that no earlier run of this test used
    command = [sys.executable, "-c", PROGRAM, str(number)]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    )
    assert float(first[0]) == float(second[0]) == 2 * number
    assert int(first[1]) < int(second[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "chosen"), [([], "test_quick"), (["-m", "slow"], "test_slow")], ids=str
)
def test_slow_tests_run_only_on_request(options, chosen, tmp_path):
    (tmp_path / "some_test.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-n0", "--collect-only", "-q", *options, "."],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert found == [f"some_test.py::{chosen}"], done.stdout + done.stderr
