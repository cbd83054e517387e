"""Measures the classifiers of the notebook on a table of customers, by its own code."""

import contextlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from dpoptax.training.bars import Bar
from dpoptax.training.run.records import markdown_table

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
_FORMATS = ((3, 1), (4, 1), (2, 100), (2, 100))  # digits and factor


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
    rows = [
        (name, *map(_cell, np.transpose([run["scores"][name] for run in runs]), _FORMATS))
        for name in runs[0]["scores"]
    ]
    rates = [run["public"][1].mean() for run in runs]
    return (
        f"{_ABOUT}{markdown_table(_HEADS, rows)}\n\n"
        f"Of the test rows, {_cell(rates, (2, 100))} % are positive.\n"
    )


def _cell(values: Any, form: tuple[int, int]) -> str:
    digits, factor = form
    spread = np.std(values, ddof=1) if len(values) > 1 else np.nan
    return f"{factor * np.mean(values):.{digits}f} ± {factor * spread:.{digits}f}"
