"""Tests of `python -m experiments study`: files of numbers, and claims read from them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpoptax.training import load_configs
from experiments.command_line import COMMANDS, main
from experiments.studies import catalog, geodp_mnist
from experiments.studies import rows as study_rows
from tests.published_data import write_mnist

README = Path(__file__).parents[2] / "experiments" / "README.md"
CHEAP = ("filters", "kalman-gain", "noisy-regression")


@pytest.mark.slow
def test_studies_write_numbers_and_findings(tmp_path):
    found = catalog.run_studies(CHEAP, tmp_path, seeds=2, progress=False)
    for name in CHEAP:
        assert len((tmp_path / f"{name}.jsonl").read_text().splitlines()) > 100
        text = (tmp_path / f"{name}.md").read_text()
        assert all(claim in text for claim, _, _ in found[name])
    assert [holds for _, _, holds in found["noisy-regression"]] in (["yes", "in part"], ["yes"] * 2)
    assert {holds for _, _, holds in found["kalman-gain"]} == {"yes"}


def test_verdict_follows_from_numbers():
    assert study_rows.verdict(True, [True, True]) == "yes"
    assert study_rows.verdict(np.array([True, False])) == "in part"
    assert study_rows.verdict([False]) == "no"


def test_readme_lists_every_study():
    text = README.read_text(encoding="utf-8")
    assert all(f"python -m experiments study {name}" in text for name in catalog.STUDIES)


def test_command_line_starts_without_slow_imports():
    code = (
        "import sys\nfrom experiments.command_line import main\n"
        "try:\n    main(['study', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "slow = {'matplotlib', 'experiments.studies', 'dpoptax.training.train_config'}\n"
        "assert not slow & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_lists_commands_and_rejects_unknown_one(capsys):
    for arguments, code in ((["--help"], 0), ([], 2)):
        assert main(arguments) == code
        shown = capsys.readouterr().out.splitlines()
        assert shown[0] == "usage: python -m experiments COMMAND ..."
        assert max(map(len, shown)) <= 80
        assert {f"  {name}" for name in COMMANDS} <= set(shown)
    assert main(["stduy"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("python -m experiments: error: `command` must be ")
    assert "Did you mean 'study'?" in message


def test_command_prints_findings(tmp_path, capsys):
    assert main(["study", "filters", "--workdir", str(tmp_path)]) == 0
    assert "damped" in capsys.readouterr().out
    assert main(["study", "filtres", "--workdir", str(tmp_path)]) == 2
    assert "`study` must be one of filters" in capsys.readouterr().err
    assert main(["study", "filters", "--seeds", "0", "--workdir", str(tmp_path)]) == 2
    assert "`seeds` must be at least 1, got 0." in capsys.readouterr().err


CURVES = {
    ("a", "none", 0.0, 4096): 0.3,
    ("a", "dp", 1.0, 4096): 0.6,
    ("a", "dp", 1.0, 2048): 0.61,
    ("a", "geodp_1", 1.0, 4096): 0.31,
    ("a", "geodp_1", 1.0, 2048): 0.4,
    ("b", "none", 0.0, 2048): 0.3,
    ("b", "dp", 10.0, 2048): 2.0,
    ("b", "geodp_1", 10.0, 2048): 2.2,
    ("b", "geodp_0.5", 10.0, 2048): 1.0,
    ("c", "none", 0.0, 256): 0.3,
    ("c", "dp", 0.1, 256): 0.6,
    ("c", "dp", 0.01, 256): 0.6,
    ("c", "geodp_1", 0.1, 256): 0.5,
    ("c", "geodp_1", 0.01, 256): 0.31,
}
"""Final losses in GeoDP's Figure 5 for which all of its claims hold."""


def _rows_of(curves):
    return [
        {
            "panel": panel,
            "method": method,
            "noise_multiplier": sigma,
            "batch_size": size,
            "seed": seed,
            "step": step,
            "training_loss": loss if step else 2.3,
            "test_accuracy": 90.0,
        }
        for (panel, method, sigma, size), loss in curves.items()
        for seed in range(2)
        for step in (0, 10)
    ]


@pytest.mark.parametrize(
    ("curve", "loss", "claim"),
    [
        (("a", "geodp_1", 1.0, 4096), 0.59, 0),
        (("a", "dp", 1.0, 4096), 0.5, 1),
        (("b", "geodp_0.5", 10.0, 2048), 2.1, 2),
        (("c", "dp", 0.01, 256), 0.3, 3),
        (("c", "geodp_1", 0.01, 256), 0.4, 3),
    ],
)
def test_logistic_regression_claims_follow_from_last_losses(curve, loss, claim):
    holds = [found[2] for found in geodp_mnist.findings(_rows_of(CURVES))]
    assert holds == ["yes"] * 4
    changed = geodp_mnist.findings(_rows_of({**CURVES, curve: loss}))
    assert changed[claim][2] != "yes"


def test_study_that_trains_requires_data_dir(tmp_path, capsys):
    assert main(["study", "geodp-mnist", "--workdir", str(tmp_path)]) == 2
    assert "Pass --data-dir" in capsys.readouterr().err
    assert "geodp-mnist" not in catalog.names_for(None)
    assert "geodp-mnist" in catalog.names_for(tmp_path)


@pytest.mark.slow
def test_logistic_regression_curves_run_their_configs(tmp_path):
    write_mnist(tmp_path)
    configs = load_configs(geodp_mnist.CURVES)
    short = {"steps": 2, "batch_size": 8, "microbatch_size": None, "data_dir": tmp_path}
    for name, method in (("c/sigma-0/dp-256", "none"), ("c/sigma-0.1/geodp_1-256", "geodp_1")):
        rows = geodp_mnist.curve_rows(name, configs[name].replace(**short), 0)
        assert [row["step"] for row in rows] == [0, 2]
        assert {(row["method"], row["panel"], row["batch_size"]) for row in rows} == {
            (method, "c", 256)
        }
        assert all(np.isfinite(row["training_loss"]) for row in rows)
