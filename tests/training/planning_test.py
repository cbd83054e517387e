"""Tests that the statements of `dpoptax plan` hold for the run."""

import re
from pathlib import Path

import pytest

from dpoptax.training import config_of, load_configs, train_and_evaluate
from dpoptax.training.cli.main import main
from dpoptax.training.planning import plan_run, table, text
from dpoptax.training.run import announcer
from experiments.config import ExperimentConfig
from experiments.methods import PMLF, Disk, GeoDP, NonPrivate

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = config_of(ExperimentConfig(model="linear", steps=3, batch_size=64, accountant="rdp"))


def _cost(**changes):
    return plan_run(TINY.task(**changes), count_flops=False)


def _cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_plan_matches_run(tmp_path, monkeypatch):
    monkeypatch.setattr("dpoptax.training.run.figures.plot_run", lambda *_: None)
    cost = _cost()
    summary = train_and_evaluate(TINY, tmp_path, progress=False)
    assert cost.task.plan.epsilon == pytest.approx(summary["epsilon"])
    assert cost.task.plan.noise_multiplier == summary["noise_multiplier"]
    assert (cost.task.plan.steps, cost.num_params) == (summary["steps"], summary["num_params"])


def test_memory_matches_state_sizes():
    count = 64 * 10 + 10
    methods = NonPrivate(), Disk(), PMLF(length=3, beta=0.5, b=(1.0,))
    plain, disk, pmlf = (_cost(method=method) for method in methods)
    assert plain.params_bytes == 4 * count
    assert plain.state_bytes < 100  # counts and the learning rate
    assert disk.state_bytes == pytest.approx(2 * 4 * count, abs=200)  # filter, last iterate
    assert pmlf.state_bytes == pytest.approx(2 * 4 * count, abs=200)  # two iterates, no filter


@pytest.mark.slow
def test_flops_grow_with_batch_not_microbatch():
    def flops(**changes):
        cost = plan_run(TINY.task(method=NonPrivate(), **changes))
        return cost.flops / cost.batch_bytes

    assert flops(batch_size=512) == pytest.approx(flops(), rel=0.05)
    assert flops(microbatch_size=8) == pytest.approx(flops(), rel=0.2)
    # Forward pass and weight gradient: four operations per weight and example, plus the softmax.
    per_example = flops() * (64 * 4 + 4)
    assert 4 * 640 < per_example < 8 * 640


@pytest.mark.slow
def test_slow_plan_reports_progress(capsys, monkeypatch):
    monkeypatch.setattr(announcer, "PATIENCE", 0.0)
    assert main(["plan", f"{CONFIGS}/digits/dp_sgd.py"]) == 0
    told = capsys.readouterr()
    assert told.err == "dpoptax: computing the cost of the run ...\n"
    assert told.out.startswith("dp_sgd\n  data     N = 1,438 examples\n")
    assert re.search(r"attacks .* at most [\d.]+ %.*μ = [\d.]+", told.out)


def test_plan_states_missing_proof():
    assert "none: GeoDP's noise" in text("geodp", _cost(method=GeoDP(), noise_multiplier=1.0))
    assert "none: trained without privacy" in text("plain", _cost(method=NonPrivate()))


@pytest.mark.slow
def test_plan_names_cheaper_sampling():
    changes = {"accountant": "pld", "epsilon": 3.0, "steps": 15, "batch_size": 256}
    found = text("tiny", _cost(**changes))
    chosen = _cost(**changes, sampling="balls_in_bins").task.plan
    sigma, q = map(
        float, re.search(r"σ = ([\d.]+) and q = ([\d.]+) for the same ε", found).groups()
    )
    assert sigma == pytest.approx(chosen.noise_multiplier, rel=1e-3)
    assert q == pytest.approx(chosen.sampler.sampling_probability, rel=1e-3)
    assert abs(chosen.epsilon - 3) < 0.01
    for other in (
        {"sampling": "balls_in_bins"},
        {"accountant": "rdp"},
        {"steps": 1},
    ):
        assert "for the same ε" not in text("tiny", _cost(**{**changes, **other})), other


@pytest.mark.slow
def test_plans_paper_without_its_data(capsys):
    row = f"{CONFIGS}/papers/pmlf/table_1_3.py:mnist/eps-8/cnn/dp_sgd"
    assert main(["plan", row, "--accountant", "rdp", "--delta", "1e-5"]) == 0
    out = capsys.readouterr().out
    assert "N = 60,000 examples" in out
    assert "B = 1,000 expected" in out
    assert "T = 1,500, 25 expected epochs" in out
    assert "(8, 1e-05)-differentially private" in out
    assert main(["train", row, "--workdir", "unused"]) == 2
    assert "`data` must hold the examples to train on them" in capsys.readouterr().err


@pytest.mark.slow
def test_several_configs_give_a_table(capsys):
    paths = [f"{CONFIGS}/digits/{name}.py" for name in ("non_private", "dp_sgd")]
    assert main(["plan", *paths]) == 0
    header, _, plain, private = capsys.readouterr().out.splitlines()
    assert _cells(header) == ["run", "steps", "q", "σ", "ε", "parameters", "state"]
    assert _cells(plain)[:5] == ["non_private", "120", "", "", "not private"]
    assert _cells(private)[:3] == ["dp_sgd", "120", "0.178"]
    assert _cells(private)[4] == "3.000"
    assert main(["plan", *paths, "--epsilon", "1"]) == 2
    assert "names 2 runs. Pass FILE:NAME before the options." in capsys.readouterr().err
    assert main(["train", *paths, "--workdir", "unused"]) == 2
    assert "`dpoptax train` takes one config, got 2" in capsys.readouterr().err


@pytest.mark.slow
def test_plans_every_row_of_transformer():
    rows = load_configs(CONFIGS / "transformer.py")
    for name, row in rows.items():
        flags = row.flags
        assert name.startswith("in_order/") == (flags["sampling"].default == "in_order")
        # Given instead of calibrated, because accounting is not tested here.
        private = flags["method"].default.private
        noise = {"noise_multiplier": 9.0, "epsilon": None} if private else {}
        cost = plan_run(row.task(accountant="rdp", **noise), count_flops=False)
        assert (cost.num_params, cost.task.plan.steps) == (26_538, flags["steps"].default)


def test_invalid_row_is_reported_with_other_rows():
    rows, refused = table({"bad": TINY.replace(batch_size=5000), "good": TINY.replace(steps=7)})
    assert [_cells(line)[:2] for line in rows.splitlines()[2:]] == [["bad", ""], ["good", "7"]]
    (error,) = map(str, refused)
    assert error.startswith("bad: `batch_size` must be at most 1438")
