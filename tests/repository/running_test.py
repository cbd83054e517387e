"""Tests of the test configuration: selection of tests, and the cache of compiled programs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

def test_quick():
    pass

@pytest.mark.slow
def test_slow():
    pass
"""


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
