"""Tests that the scripts of the page on several hosts run in two processes, and continue."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpoptax.training import load_params
from tests.training import hosts_test

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "several-hosts.md"
DATA, HEAD, WITH_FIT, BY_HAND = re.findall(
    r'^```py title="\w+\.py.*?\n(.*?)^```', PAGE.read_text("utf-8"), re.DOTALL | re.M
)
SHARDED = """
row_blocks = NamedSharding(mesh, P("data"))
params["hidden"] = jax.device_put(np.asarray(params["hidden"]), row_blocks)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "rest", [WITH_FIT, BY_HAND, SHARDED + WITH_FIT], ids=["fit", "by hand", "sharded"]
)
def test_script_runs_and_continues_in_two_processes(rest, tmp_path):
    subprocess.run([sys.executable, "-c", DATA], cwd=tmp_path, check=True)
    (tmp_path / "train.py").write_text(f"{HEAD}\n{rest}")
    command = [sys.executable, "train.py", str(tmp_path / "data"), str(tmp_path / "run")]

    def run(processes, devices):
        """Returns the parameters of the run, which it has to write anew."""
        (tmp_path / "model.msgpack").unlink(missing_ok=True)
        first, *others = hosts_test.start(command, processes, devices, cwd=tmp_path)
        assert "releases   20 of the Gaussian mechanism" in first
        assert not any("releases" in text for text in others)
        return load_params(tmp_path / "model.msgpack")

    whole = run(2, 2)
    moved = max(float(np.abs(part).max()) for part in whole.values())
    assert 0.01 < moved < 100
    # As after a preemption: the steps after the last checkpoint are lost.
    (newest,) = tmp_path.rglob("20")
    shutil.rmtree(newest)
    again = run(2, 2)
    for key in whole:
        np.testing.assert_array_equal(again[key], whole[key])
    (newest,) = tmp_path.rglob("20")
    shutil.rmtree(newest)
    for key, part in run(1, 4).items():
        np.testing.assert_allclose(part, whole[key], rtol=0, atol=1e-4)
