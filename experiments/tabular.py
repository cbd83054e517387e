"""Measures the classifiers of the page on a table of customers, by the code of the page itself."""

import contextlib
import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from dpoptax.training.bars import Bar
from dpoptax.training.run.records import markdown_table
from experiments.spreads import mean_and_deviation

PAGE = Path(__file__).parents[1] / "docs" / "examples" / "tabular.md"
_ABOUT = (
    "# A table of customers\n\n"
    "The code of `docs/examples/tabular.md` for several seeds, which change the customers, the "
    "start, the noise and the batches: means and standard deviations. δ = 1e-6; ε includes the "
    "statistics. *Mean prediction* and *calibration error* are in percent: the error is the mean "
    "difference from the frequency of positive rows, in ten bins of equally many rows.\n\n"
)
_HEADS = ("classifier", "AUC", "log loss", "mean prediction", "calibration error")
_DECIMALS, _FACTORS = (3, 4, 2, 2), np.array([1, 1, 100, 100])


def run_page(seed: int) -> dict[str, Any]:
    """Runs the code of the page down to its comparison, and returns its variables."""
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {"__name__": "tabular"}
    for block in code:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(block.replace("seed = 0\n", f"seed = {seed}\n"), found)
        if "scores" in found:
            return found
    raise ValueError(f"{PAGE} must compute `scores`.")


def tabular_page(*, seeds: int = 5) -> str:
    """Measures the classifiers of the page on a table of customers.

    Args:
        seeds: Number of runs.
    """
    runs = [run_page(seed) for seed in Bar(range(seeds), "tabular", leave=False)]
    rows = []
    for name in runs[0]["scores"]:
        columns = np.transpose([run["scores"][name] * _FACTORS for run in runs])
        rows.append((name, *map(mean_and_deviation, columns, _DECIMALS)))
    rates = [100 * run["public"][1].mean() for run in runs]
    return (
        f"{_ABOUT}{markdown_table(_HEADS, rows)}\n\n"
        f"Of the test rows, {mean_and_deviation(rates)} % are positive.\n"
    )
