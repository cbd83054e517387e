"""Checks GeoDP's claims about logistic regression on MNIST (Fig. 5)."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np

from dpoptax.training import Config, Evaluation, load_configs
from dpoptax.training.run import seeds
from dpoptax.training.run.run_task import run_task
from experiments.studies.rows import Findings, Row, over, verdict

CURVES = Path(__file__).parents[2] / "configs" / "papers" / "geodp" / "figure_5.py"
# Two losses that differ by at most this much are called almost equal.
_ALMOST = 1.1


def rows(seeds: int, data_dir: Path) -> list[Row]:
    """Trains the curves of GeoDP Fig. 5, all with the same seeds."""
    return [
        row
        for seed in range(seeds)
        for name, config in load_configs(CURVES).items()
        for row in curve_rows(name, config.replace(seed=seed, data_dir=data_dir), seed)
    ]


def curve_rows(name: str, config: Config, seed: int) -> list[Row]:
    """Trains a curve, and returns a row for each evaluation."""
    panel, _, curve = name.split("/")
    method, _, size = curve.rpartition("-")
    task, noise_multiplier = config.task(), config.flags["noise_multiplier"].default
    tested = cast(Evaluation, task.evaluate)
    on_training_data = Evaluation(tested.metrics, task.data)

    def evaluate(params: Any) -> dict[str, Any]:
        return {**tested(params), "training_loss": on_training_data(params)["test_loss"]}

    task = dataclasses.replace(task, evaluate=evaluate)
    result = run_task(task, key=seeds.key_of(seed, "threefry"), progress=False)
    return [
        {
            "panel": panel,
            "noise_multiplier": noise_multiplier,
            "method": method if noise_multiplier else "none",
            "batch_size": int(size),
            "seed": seed,
            "step": entry["step"],
            "training_loss": entry["training_loss"],
            "test_accuracy": 100 * entry["test_accuracy"],
        }
        for entry in result.history
    ]


def findings(rows: list[Row]) -> Findings:
    """Checks the observations of GeoDP's section on logistic regression."""

    def last(panel: str, method: str, sigma: float, size: int, y: str = "training_loss") -> float:
        where = {"panel": panel, "method": method, "noise_multiplier": sigma, "batch_size": size}
        return float(over(rows, "step", y, **where)[1].mean(0)[-1])

    a = {
        (name, size): last("a", name, 1.0, size)
        for name in ("dp", "geodp_1")
        for size in (2048, 4096)
    }
    free = {
        panel: last(panel, "none", 0.0, size)
        for panel, size in (("a", 4096), ("b", 2048), ("c", 256))
    }
    b = {name: last("b", name, 10.0, 2048) for name in ("dp", "geodp_1", "geodp_0.5")}
    c = {
        (name, sigma): last("c", name, sigma, 256)
        for name in ("dp", "geodp_1")
        for sigma in (0.1, 0.01)
    }
    dp, geodp = (last("a", name, 1.0, 4096, "test_accuracy") for name in ("dp", "geodp_1"))
    return [
        (
            "σ = 1, B = 4096: GeoDP is far below DP, and almost at the loss without noise "
            "(panel a)",
            f"GeoDP ends at {a['geodp_1', 4096]:.3g}, DP at {a['dp', 4096]:.3g}, no noise at "
            f"{free['a']:.3g}; test accuracy {geodp:.1f} % and {dp:.1f} %",
            verdict(a["geodp_1", 4096] < a["dp", 4096], a["geodp_1", 4096] < _ALMOST * free["a"]),
        ),
        (
            "the batch changes GeoDP's loss, and hardly DP's (panel a)",
            f"from B = 2048 to 4096 GeoDP's goes from {a['geodp_1', 2048]:.3g} to "
            f"{a['geodp_1', 4096]:.3g}, DP's from {a['dp', 2048]:.3g} to {a['dp', 4096]:.3g}",
            verdict(
                a["geodp_1", 4096] < a["geodp_1", 2048] / _ALMOST,
                a["dp", 4096] > a["dp", 2048] / _ALMOST,
            ),
        ),
        (
            "σ = 10: GeoDP with β = 0.5 leaves DP behind; with β = 1 it is worse (panel b)",
            f"β = 0.5 ends at {b['geodp_0.5']:.3g}, β = 1 at {b['geodp_1']:.3g}, DP at "
            f"{b['dp']:.3g}",
            verdict(b["geodp_0.5"] < b["dp"], b["geodp_1"] > b["dp"]),
        ),
        (
            "less noise, σ = 0.01 for 0.1, does not help DP, and brings GeoDP almost to the loss "
            "without (panel c)",
            f"DP goes from {c['dp', 0.1]:.3g} to {c['dp', 0.01]:.3g}, GeoDP from "
            f"{c['geodp_1', 0.1]:.3g} to {c['geodp_1', 0.01]:.3g}; no noise {free['c']:.3g}",
            verdict(
                np.isclose(c["dp", 0.01], c["dp", 0.1], rtol=_ALMOST - 1)
                and c["dp", 0.1] > _ALMOST * free["c"],
                c["geodp_1", 0.01] < _ALMOST * free["c"],
            ),
        ),
    ]
