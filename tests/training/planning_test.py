"""Tests that the statements of `dpoptax plan` hold for the run."""

import dataclasses
import re
from pathlib import Path

import pytest
from dpoptax.training.methods import PMLF, Disk, NonPrivate
from dpoptax.training.run.planning import plan_run, text
from dpoptax.training.run.privacy import SAMPLERS

from dpoptax.training import TrainConfig, load_config, load_configs, train_and_evaluate
from dpoptax.training.cli.main import main
from dpoptax.training.run import phases, planning
from dpoptax.training.run.records import epsilon_text
from experiments.methods import GeoDP

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = TrainConfig(model="linear", steps=3, batch_size=64, accountant="rdp")


def _cells(line):
    return [cell.strip() for cell in line.split("|")[1:-1]]


@pytest.fixture
def given_attacks(monkeypatch):
    """States these powers of attacks instead of computing them, which takes seconds."""
    monkeypatch.setattr(planning, "attacks", lambda planned: (0.25, 1.5))


def test_page_of_the_guarantee_names_the_samplings_of_the_command_line():
    page = (CONFIGS.parent / "docs" / "privacy" / "guarantee.md").read_text("utf-8")
    for name in SAMPLERS:
        assert f"`{name}`" in page


def test_plan_matches_run(tmp_path, monkeypatch):
    monkeypatch.setattr("dpoptax.training.run.figures.plot_run", lambda *_: None)
    cost = plan_run(TINY, count_flops=False)
    summary = train_and_evaluate(TINY, tmp_path, progress=False).summary
    assert cost.epsilon == pytest.approx(summary["epsilon"])
    assert cost.noise_multiplier == summary["noise_multiplier"]
    assert (cost.steps, cost.num_params) == (summary["steps"], summary["num_params"])
    assert cost.promise == summary["neighboring_relation"]
    assert cost.sampling_probability == 64 / summary["dataset_size"]


def test_memory_matches_state_sizes():
    count = 64 * 10 + 10
    plain, disk, pmlf = (
        plan_run(dataclasses.replace(TINY, method=method), count_flops=False)
        for method in (NonPrivate(), Disk(), PMLF(length=3, beta=0.5, b=(1.0,)))
    )
    assert plain.params_bytes == 4 * count
    assert plain.state_bytes < 100  # counts and the learning rate
    assert disk.state_bytes == pytest.approx(2 * 4 * count, abs=100)  # filter, last iterate
    assert pmlf.state_bytes == pytest.approx(2 * 4 * count, abs=100)  # two iterates, no filter


@pytest.mark.slow
def test_flops_grow_with_batch_not_microbatch():
    def flops(**changes):
        cost = plan_run(dataclasses.replace(TINY, method=NonPrivate(), **changes))
        return cost.flops / cost.batch_bytes

    assert flops(batch_size=512) == pytest.approx(flops(), rel=0.05)
    assert flops(microbatch_size=8) == pytest.approx(flops(), rel=0.2)
    # Forward pass and weight gradient: four operations per weight and example, plus the softmax.
    per_example = flops() * (64 * 4 + 4)
    assert 4 * 640 < per_example < 8 * 640


@pytest.mark.slow
def test_slow_plan_reports_progress(capsys, monkeypatch, given_attacks):
    monkeypatch.setattr(phases, "PATIENCE", 0.0)
    assert main(["plan", f"{CONFIGS}/digits/dp_sgd.py", "--accountant", "rdp"]) == 0
    told = capsys.readouterr()
    assert told.err == "dpoptax: computing the cost of the run ...\n"
    assert told.out.startswith("dp_sgd\n")
    assert re.search(r"attacks .* at most 25\.0+ %.*μ = 1\.50+", told.out)


@pytest.mark.slow
def test_plans_large_epsilon_by_rdp(capsys, given_attacks):
    # Charging e^12 times the probability of the default truncation used up δ, which raised an
    # error.
    plan = ["plan", f"{CONFIGS}/digits/dp_sgd.py", "--epsilon", "12", "--accountant", "rdp"]
    assert main(plan) == 0
    assert "1.1633 of the clip norm" in capsys.readouterr().out


def test_plan_states_missing_proof():
    unproven = dataclasses.replace(TINY, method=GeoDP(), noise_multiplier=1.0)
    assert "ε           none: GeoDP's noise" in text("geodp", plan_run(unproven))
    open_run = dataclasses.replace(TINY, method=NonPrivate())
    assert "ε" not in text("plain", plan_run(open_run))


@pytest.mark.slow
def test_plan_states_attack_success(coarse_prices):
    cost = plan_run(TINY, count_flops=False, details=True)
    found, mu = cost.attacks
    line = next(x for x in text("tiny", cost).splitlines() if "attacks" in x)
    assert "% over examples at a false-positive rate of 1 %" in line
    rates = re.search(r"at most ([\d.]+) %.*μ = ([\d.]+)", line)
    assert 0 <= float(rates[1]) - 100 * found < 0.1
    assert 0 <= float(rates[2]) - mu < 1e-3
    assert 0.01 < found < 1
    for method in (NonPrivate(), GeoDP()):
        open_run = dataclasses.replace(TINY, method=method, noise_multiplier=1.0)
        assert plan_run(open_run, count_flops=False, details=True).attacks is None


@pytest.mark.slow
def test_plan_names_cheaper_sampling():
    config = dataclasses.replace(TINY, accountant="pld", epsilon=3.0, steps=15, batch_size=256)
    cost = plan_run(config, count_flops=False, details=True)
    sigma, q = cost.balls_in_bins
    assert sigma / q < cost.noise_multiplier / cost.sampling_probability
    assert f"σ = {sigma:.5g} and q = {q:.4g} for the same ε" in text("tiny", cost)
    chosen = plan_run(dataclasses.replace(config, sampling="balls_in_bins"), count_flops=False)
    assert (chosen.noise_multiplier, chosen.sampling_probability) == (sigma, q)
    assert abs(chosen.epsilon - 3) < 0.01
    assert "239.7 expected of 1,438" in text("tiny", chosen)
    large = dataclasses.replace(chosen, expected_batch_size=2.0**20)
    assert "1,048,576 expected of" in text("tiny", large)
    for changes in (
        {"sampling": "balls_in_bins"},
        {"noise_multiplier": 1.0, "epsilon": None},
        {"accountant": "rdp"},
        {"steps": 1},
    ):
        other = dataclasses.replace(config, **changes)
        assert plan_run(other, count_flops=False, details=True).balls_in_bins is None, changes


@pytest.mark.slow
def test_plans_paper_without_its_data(capsys, given_attacks):
    row = f"{CONFIGS}/papers/pmlf/table_1_3.py:mnist/eps-8/cnn/dp_sgd"
    assert main(["plan", row, "--accountant", "rdp", "--delta", "1e-5"]) == 0
    out = capsys.readouterr().out
    assert "1,000 expected of 60,000" in out
    assert "1,500 of 1,500, 25 epochs" in out
    assert "ε           8.000 at" in out or "ε           7.99" in out


@pytest.mark.slow
def test_several_configs_give_a_table(capsys):
    paths = [f"{CONFIGS}/digits/{name}.py" for name in ("non_private", "dp_sgd")]
    assert main(["plan", *paths]) == 0
    assert re.search(r"non_private .*not private.*\n.*dp_sgd .*3\.000", capsys.readouterr().out)
    assert main(["plan", *paths, "--epsilon", "1"]) == 2
    assert "names 2 runs. Pass FILE:NAME before the options." in capsys.readouterr().err
    assert main(["train", *paths, "--workdir", "unused"]) == 2
    assert "`dpoptax train` takes one config, got 2" in capsys.readouterr().err


@pytest.mark.slow
def test_plans_every_row_of_transformer():
    rows = load_configs(CONFIGS / "transformer.py")
    in_order = {name: row for name, row in rows.items() if row.sampling == "in_order"}
    assert sorted(in_order) == [name for name in sorted(rows) if name.startswith("in_order/")]
    for row in rows.values():
        # Given instead of calibrated, because accounting is not tested here.
        noise = {"noise_multiplier": 9.0, "epsilon": None} if row.method.private else {}
        cost = plan_run(dataclasses.replace(row, accountant="rdp", **noise), count_flops=False)
        assert (cost.num_params, cost.dataset_size, cost.steps) == (26_538, 1_438, row.steps)


@pytest.mark.slow
def test_several_runs_give_a_table(tmp_path, capsys, given_attacks):
    config = tmp_path / "two.py"
    config.write_text(
        "from dpoptax.training import TrainConfig\n"
        "from dpoptax.training.methods import DPSGD, NonPrivate\n"
        "def get_configs():\n"
        "    methods = (DPSGD(), NonPrivate())\n"
        "    return {m.name: TrainConfig(method=m, accountant='rdp') for m in methods}\n"
    )
    assert main(["plan", str(config)]) == 0
    header, _, private, plain = capsys.readouterr().out.splitlines()
    assert _cells(header) == ["run", "steps", "q", "σ", "ε", "parameters", "state"]
    assert _cells(private)[:3] == ["DP-SGD", "120", "0.178"]
    assert "not private" in plain
    assert main(["plan", str(config), "--steps", "3"]) == 2
    assert "names 2 runs. Pass FILE:NAME" in capsys.readouterr().err
    assert main(["plan", f"{config}:DP-SGD", "--steps", "3"]) == 0
    assert "3 of 3" in capsys.readouterr().out


@pytest.mark.slow
def test_uses_published_dataset_size():
    config = load_config(f"{CONFIGS}/papers/disk/base.py:cifar100")
    cost = plan_run(dataclasses.replace(config, accountant="rdp"), count_flops=False)
    assert cost.num_params == 2_772_020  # WRN-16-4 with a hundred classes
    assert cost.steps * config.batch_size == 80 * 50_000


def test_table_shares_work_between_rows():
    configs = {
        f"{name}/{steps}": dataclasses.replace(TINY, method=method, steps=steps)
        for name, method in (("plain", NonPrivate()), ("disk", Disk()))
        for steps in (3, 4)
    }
    before = planning.variables.cache_info().misses
    text, refused = planning.table(configs)
    assert not refused
    lines = text.splitlines()
    assert planning.variables.cache_info().misses - before <= 1
    assert [_cells(line)[0] for line in lines[2:]] == list(configs)  # in order
    for line, config in zip(lines[2:], configs.values(), strict=True):
        cost = plan_run(config, count_flops=False)
        assert f"{cost.num_params:,}" in line
        shown = ["", "not private"]
        if cost.epsilon:
            shown = [f"{cost.noise_multiplier:.4g}", epsilon_text(cost.epsilon)]
        assert _cells(line)[3:5] == shown


@pytest.mark.slow
def test_invalid_row_is_reported_with_other_rows(tmp_path, capsys):
    path = tmp_path / "two.py"
    path.write_text(
        "from dpoptax.training import TrainConfig\n"
        "def get_configs():\n"
        "    return {'bad': TrainConfig(batch_size=5000), 'good': TrainConfig(steps=7)}\n"
    )
    assert main(["plan", str(path)]) == 2
    shown = capsys.readouterr()
    rows = [_cells(line)[:2] for line in shown.out.splitlines()[2:]]
    assert rows == [["bad", ""], ["good", "7"]]
    assert "error: bad: `batch_size` must be at most 1438" in shown.err
