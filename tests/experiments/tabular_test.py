"""Tests that the seeds change the code of the notebook on a table of customers."""

import json
import re

import numpy as np
import pytest

from experiments import tabular

CODE = (
    "%pip install dpoptax",
    "import numpy as np\nseed = 0\npublic = None, np.array([0.0, seed])",
    'scores = {"one": (seed / 10, 0.5, 0.06, 0.01)}',
    'raise AssertionError("it stops at the scores")',
)


def _write(path, code):
    cells = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in code]
    text = [{"cell_type": "markdown", "source": ["# A title"]}]
    path.write_text(json.dumps({"cells": text + cells}), "utf-8")


def test_page_has_the_mean_over_seeds(tmp_path, monkeypatch):
    path = tmp_path / "notebook.ipynb"
    _write(path, CODE)
    monkeypatch.setattr(tabular, "NOTEBOOK", path)
    found = tabular.tabular_page(seeds=3)
    spread = np.std([0.0, 0.1, 0.2], ddof=1)
    row = f"| one | 0.100 ± {spread:.3f} | 0.5000 ± 0.0000 | 6.00 ± 0.00 | 1.00 ± 0.00 |"
    assert row in re.sub(" +", " ", found)
    assert "Of the test rows, 50.00 ± 50.00 % are positive." in found
    _write(path, CODE[:2])
    with pytest.raises(ValueError, match="must compute `scores`"):
        tabular.run_notebook(0)


def test_notebook_has_one_seed():
    cells = json.loads(tabular.NOTEBOOK.read_text("utf-8"))["cells"]
    assert sum(cell["source"].count("seed = 0\n") for cell in cells) == 1
