"""Tests that the reproduction report describes runs and contains only computed numbers."""

import dataclasses
import re
from pathlib import Path

import pytest

from dpoptax.training.planning import plan_run
from dpoptax.training.search.results import ComparisonResult, method_result
from experiments.claims import catalog
from experiments.command_line import main
from experiments.config import ExperimentConfig, load_experiments
from experiments.methods import DPSGD, PMLF, Augmented, AugmentedDisk, Disk, Doppler
from experiments.reports import paper_runs, reproduction

ROOT = Path(__file__).parents[2]
DIGITS = """
from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Doppler

def get_configs():
    return {{"{method}": ExperimentConfig(
        method={method}(), model="linear", steps=2, batch_size=64, eval_every=2, accountant="rdp"
    )}}
"""
PAPER = """
from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, PMLF

def get_configs():
    one = ExperimentConfig(dataset="mnist", model="linear", steps=10, batch_size=100)
    return {"a/dp_sgd": one, "a/pmlf": __import__("dataclasses").replace(one, method=PMLF())}
"""


@pytest.fixture
def configs(tmp_path):
    for name, text in (
        ("digits/dp_sgd.py", DIGITS.format(method="DPSGD")),
        ("digits/doppler.py", DIGITS.format(method="Doppler")),
        ("papers/some/table.py", PAPER),
    ):
        path = tmp_path / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "configs"


@pytest.mark.slow
def test_second_report_command_computes_nothing(configs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(catalog, "STUDIES", {"filters": catalog.STUDIES["filters"]})
    output = tmp_path / "docs" / "REPRODUCTION.md"
    arguments = ["report", "--workdir", str(tmp_path / "out"), "--output", str(output)]
    arguments += ["--configs", str(configs), "--seeds", "2"]
    output.parent.mkdir()
    (output.parent / "released-code.md").write_text("Another command writes this page.")
    assert main(arguments) == 0
    text = output.read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (output.parent / link).stat().st_size < 150_000
    assert "LP-DPSGD is better than DP-SGD at equal ε" in text
    assert "\n2 runs of the papers' tables" in text
    monkeypatch.setattr("dpoptax.training.search.trials.run_task", None)
    assert main(arguments) == 0
    assert output.read_text() == text
    assert main([*arguments, "--no-digits"]) == 0
    assert "Left out of this report" in output.read_text()


def test_refuses_missing_configs_directory(tmp_path, capsys):
    assert main(["report", "--workdir", str(tmp_path), "--configs", str(tmp_path)]) == 2
    assert "Pass the folder `configs` of the repository." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "gradients"),
    [
        (DPSGD(), 1),
        (Doppler(), 1),
        (Disk(gamma=0.5), 2),
        (Disk(gamma=None), 1),
        (PMLF(length=3), 3),
        (Augmented(multiplicity=2), 2),
        (AugmentedDisk(multiplicity=3), 6),
    ],
)
def test_counts_gradient_points(method, gradients):
    config = dataclasses.replace(ExperimentConfig(model="cnn"), method=method)
    assert paper_runs.points(config) == gradients
    if gradients == 2:
        changes = {"noise_multiplier": 5.0, "epsilon": None, "accountant": "rdp"}
        one, several = (
            plan_run(dataclasses.replace(config, method=m, **changes).task()).flops
            for m in (DPSGD(), method)
        )
        assert several == pytest.approx(gradients * one, rel=0.25)


def test_every_config_file_has_a_claim():
    files = {
        str(path.relative_to(ROOT / "configs" / "papers").with_suffix(""))
        for path in (ROOT / "configs" / "papers").glob("*/*.py")
        if path.name != "base.py"
    }
    assert set(paper_runs.CLAIMS) == files


def test_lead_within_twice_its_error_is_not_shown():
    def method(name, accuracies):
        run = {"private": True, "unproven": None, "epsilon": 1.0, "train_seconds": 1.0}
        return method_result(name, name, 1.0, [], [{**run, "test_accuracy": a} for a in accuracies])

    base = [0.90, 0.80, 0.85]
    methods = [
        method("DP-SGD", base),
        method("DiSK", [value + 0.01 for value in base]),
        method("DP-PMLF", [0.93, 0.80, 0.84]),
    ]
    results = ComparisonResult("digits", 1.0, 1e-5, [0, 1, 2], [], methods, {}, "")
    found = reproduction.digits_findings(results)
    assert [finding.holds for finding in found] == ["yes", "not shown"]
    assert found[0].found.startswith("+1.00 points")


def test_committed_report_counts_runs_and_names_studies():
    text = (ROOT / "experiments" / "results" / "REPRODUCTION.md").read_text()
    assert all(f"`python -m experiments study {name}`" in text for name in catalog.names_for(None))
    files = (ROOT / "configs" / "papers").glob("*/[!b]*.py")
    configured = sum(len(load_experiments(file)) for file in files)
    assert f"\n{configured} runs of the papers' tables and figures are configured" in text
    for link in re.findall(r"\]\((reproduction/[^)]+)\)", text):
        assert (ROOT / "experiments" / "results" / link).stat().st_size < 150_000
