"""Measures the classifiers of the notebook on a table of customers, by its own code."""

import contextlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from dpoptax.training.bars import Bar
from dpoptax.training.run.files import markdown_table
from experiments.spreads import mean_and_deviation

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "table_of_customers.ipynb"
_ABOUT = (
    "# A table of customers\n\n"
    "The code of `notebooks/table_of_customers.ipynb` for several seeds, which change the "
    "customers, the start, the noise and the batches: means and standard deviations. δ = 1e-6; ε "
    "includes the "
    "statistics. *Mean prediction* and *calibration error* are in percent: the error is the mean "
    "difference from the frequency of positive rows, in ten bins of equally many rows.\n\n"
)
_HEADS = ("classifier", "AUC", "log loss", "mean prediction", "calibration error")
_DECIMALS, _FACTORS = (3, 4, 2, 2), np.array([1, 1, 100, 100])


def run_notebook(seed: int) -> dict[str, Any]:
    """Runs the code of the notebook down to its comparison, and returns its variables."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found: dict[str, Any] = {"__name__": "tabular"}
    for cell in code[1:]:  # the first one installs dpoptax
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(cell.replace("seed = 0\n", f"seed = {seed}\n"), found)
        if "scores" in found:
            return found
    raise ValueError(f"{NOTEBOOK} must compute `scores`.")


def tabular_page(*, seeds: int = 5) -> str:
    """Measures the classifiers of the notebook on a table of customers.

    Args:
        seeds: Number of runs.
    """
    runs = [run_notebook(seed) for seed in Bar(range(seeds), "tabular", leave=False)]
    rows = []
    for name in runs[0]["scores"]:
        columns = np.transpose([run["scores"][name] * _FACTORS for run in runs])
        rows.append((name, *map(mean_and_deviation, columns, _DECIMALS)))
    rates = [100 * run["public"][1].mean() for run in runs]
    return (
        f"{_ABOUT}{markdown_table(_HEADS, rows)}\n\n"
        f"Of the test rows, {mean_and_deviation(rates)} % are positive.\n"
    )
