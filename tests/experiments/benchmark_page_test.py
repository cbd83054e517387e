"""Tests of the benchmark page: one line per run, and a page built from these lines only."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from dpoptax.training import Comparison, ConfigError, compare, config_of
from experiments.command_line import main
from experiments.config import ExperimentConfig, load_experiments
from experiments.image_benchmark import page, page_figures, page_groups
from experiments.image_benchmark import run_lines as lines
from experiments.image_benchmark.page import write_page
from experiments.methods import DPSGD, CorrelatedNoise, Disk, Doppler, GeoDP, NonPrivate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = ExperimentConfig(model="linear", steps=2, batch_size=64, accountant="rdp", eval_every=2)


def run(name, method, accuracy, *, seed=0, rate=1.0, split="test", **settings):
    private = method.private
    unproven = method.unproven() is not None
    given = {"dataset": "mnist", "features": "scattering", "model": "linear", "steps": 30}
    parameters = ExperimentConfig(method=method).to_dict()["method"]
    return lines.Line(
        name=f"mnist/{name}",
        method=method.name,
        settings={**given, "method": parameters, **settings},
        epsilon=1.0 if private else None,
        spent=0.99 if private and not unproven else None,
        unproven=unproven,
        delta=1e-5 if private and not unproven else None,
        learning_rate=rate,
        seed=seed,
        split=split,
        accuracy=accuracy,
        seconds=1.5,
        versions={"dpoptax": "0.1.0"},
        code="0123456789ab",
    )


def benchmark():
    """Three seeds in which momentum beats DP-SGD by 0.1, 0.2 and 0.3 points."""
    found = []
    for seed in range(3):
        found += [
            run("dp_sgd", DPSGD(), 0.97 + 0.001 * seed, seed=seed),
            run("momentum", DPSGD(), 0.971 + 0.002 * seed, seed=seed, optimizer="momentum"),
            run("disk", Disk(), 0.5, seed=seed),
            run("disk_one_gradient", Disk(0.3, None), 0.97 + 0.001 * seed, seed=seed),
            run("geodp", GeoDP(), 0.1, seed=seed),
        ]
    return [*found, run("non_private", NonPrivate(), 0.99)]


def test_groups_runs_in_order_separately():
    ordered = [
        run("dp_sgd", DPSGD(), 0.9, sampling="in_order"),
        run("correlated", CorrelatedNoise(), 0.95, sampling="in_order"),
    ]
    drawn = [
        run("dp_sgd", DPSGD(), 0.97),
        run("correlated", CorrelatedNoise(), 0.96, sampling="cyclic"),
    ]
    groups = page_groups.grouped([*ordered, *drawn])
    found = {
        setting.title: [entry.mean for entry in entries] for setting, entries in groups.items()
    }
    assert found == {
        "MNIST, scattering, ε = 1, δ = 1e-05, 30 steps": [97.0, 96.0],
        "MNIST, scattering, ε = 1, δ = 1e-05, 30 steps in order": [90.0, 95.0],
    }


def test_groups_runs_by_delta_and_neighboring_relation():
    """Each run is in its own group; previously all shared one row, under the ε of another run."""
    free = run("non_private", NonPrivate(), 0.99)
    found = [
        run("dp_sgd", DPSGD(), 0.97),
        dataclasses.replace(run("dp_sgd", DPSGD(), 0.98), delta=1.661e-5),
        run("dp_sgd", DPSGD(), 0.9, sampling="fixed_size"),
    ]
    groups = page_groups.grouped([*found, free])
    assert {setting.title: [e.mean for e in entries] for setting, entries in groups.items()} == {
        "MNIST, scattering, ε = 1, δ = 1e-05, 30 steps": [97.0],
        "MNIST, scattering, ε = 1, δ = 1.67e-05, 30 steps": [98.0],
        "MNIST, scattering, ε = 1, δ = 1e-05 for one example replaced by another, 30 steps": [90.0],
        "MNIST, scattering, ε = inf, 30 steps": [99.0],
    }
    axes = Figure().subplots()
    page_figures.draw_accuracies(axes, groups, {}, "mnist")
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn["DP-SGD, linear on scattering, 30 steps, δ = 1e-05"] == [97.0]
    assert drawn["DP-SGD, linear on scattering, 30 steps, δ = 1.67e-05"] == [98.0]


def test_unproven_run_joins_group_with_the_only_delta():
    found = [run("dp_sgd", DPSGD(), 0.97), run("geodp", GeoDP(), 0.1)]
    (entries,) = page_groups.grouped(found).values()
    assert [entry.label for entry in entries] == ["DP-SGD", "GeoDP"]
    other = dataclasses.replace(found[0], delta=1e-6)
    groups = page_groups.grouped([*found, other])
    assert [[entry.label for entry in entries] for entries in groups.values()] == [
        ["GeoDP"], ["DP-SGD"], ["DP-SGD"],
    ]  # fmt: skip


def test_marks_rows_with_other_neighboring_relation(tmp_path):
    """One row replaces an example by one that adds nothing; the other removes the example."""
    found = [
        run("dp_sgd", DPSGD(), 0.97),
        run("dp_sgd", DPSGD(), 0.96, sampling="balls_in_bins"),
        run("correlated", CorrelatedNoise(), 0.95, sampling="cyclic"),
    ]
    lines.append(tmp_path / "images" / "x.jsonl", found)
    text = write_page(tmp_path / "images").read_text()
    rows = [row.split("|")[1:3] for row in text.splitlines() if re.search(r"\| 9\d\.00 ", row)]
    assert [[cell.strip() for cell in row] for row in rows[:3]] == [
        ["DP-SGD", "97.00"], ["DP-SGD, balls_in_bins ²", "96.00"], ["Correlated noise ²", "95.00"],
    ]  # fmt: skip
    assert "² ε is for one example that is replaced by one that adds nothing" in text


@pytest.mark.slow
def test_record_adds_each_run_once(tmp_path):
    configs = {
        f"digits/{name}": config_of(SMALL, method=method)
        for name, method in (("dp_sgd", DPSGD()), ("geodp", GeoDP()), ("plain", NonPrivate()))
    }
    path = tmp_path / "records" / "digits.jsonl"
    comparison = Comparison(
        tmp_path / "out", seeds=3, epsilon=4.0, factors=(0.5, 1.0), trial_seeds=1
    )
    results = compare(configs, comparison, progress=False)
    command = ["record", str(tmp_path / "out"), "--output", str(path)]
    assert main(command) == 0
    found = lines.read(path)
    assert len(found) == 3 * (2 * 1 + 3)
    assert [len(method.grid[0].validation_scores) for method in results.methods] == [1] * 3
    first = [line for line in found if line.name == "digits/dp_sgd"]
    assert [line.split for line in first] == ["held-out"] * 2 + ["test"] * 3
    assert [line.learning_rate for line in first[:2]] == [0.5, 1.0]
    assert [line.accuracy for line in first[2:]] == results.methods[0].scores
    assert [line.seed for line in first[2:]] == [0, 1, 2]
    assert first[0].settings["steps"] == 2
    assert first[0].spent is None
    assert 3.9 < first[2].spent <= first[2].epsilon == 4.0
    geodp, plain = found[5], found[-1]
    assert (geodp.unproven, geodp.epsilon, geodp.spent) == (True, 4.0, None)
    assert (plain.unproven, plain.epsilon, plain.spent) == (False, None, None)

    before = path.read_text()
    assert main(command) == 0
    assert path.read_text() == before


def test_refuses_more_trial_seeds_than_seeds(tmp_path):
    with pytest.raises(ConfigError, match="`trial_seeds` must be between 1 and seeds=2, got 3"):
        Comparison(tmp_path, seeds=2, trial_seeds=3)


def test_differences_are_paired_with_student_interval():
    ((_, entries), *_) = page_groups.grouped(benchmark()).items()
    by_label = {entry.label: entry for entry in entries}
    assert list(by_label) == [
        "DP-SGD", "DP-SGD, momentum", "DiSK", "DiSK, one gradient", "GeoDP",
    ]  # fmt: skip
    found = page_groups.difference(by_label["DP-SGD, momentum"], by_label["DP-SGD"])
    values = np.array([0.1, 0.2, 0.3])
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose(found.mean, 0.2)
    np.testing.assert_allclose(found.half, (high - low) / 2)
    assert found.verdict == 0  # the interval over three seeds includes zero
    assert page_groups.difference(by_label["DiSK"], by_label["DP-SGD"]).verdict == -1
    assert [by_label[label].gradients for label in ("DiSK", "DiSK, one gradient")] == [2, 1]


def test_uses_best_trial_rate_and_last_repeated_run():
    tried = [
        run("dp_sgd", DPSGD(), accuracy, rate=rate, split="held-out")
        for rate, accuracy in ((1.0, 0.8), (2.0, 0.9), (4.0, 0.7))
    ]
    tests = [run("dp_sgd", DPSGD(), a, rate=r) for r, a in ((1.0, 0.99), (2.0, 0.5), (2.0, 0.91))]
    ((_, (entry,)),) = page_groups.grouped(tried + tests).items()
    assert (entry.learning_rate, entry.rates, entry.at_edge) == (2.0, (1.0, 2.0, 4.0), False)
    np.testing.assert_allclose(entry.mean, 91)


def test_command_writes_page_with_recorded_numbers(tmp_path, capsys):
    folder = tmp_path / "images"
    assert main(["image-benchmark", str(folder)]) == 2
    assert "Write records with python -m experiments record" in capsys.readouterr().err
    lines.append(folder / "linear.jsonl", benchmark())
    (folder / "verdict.md").write_text("No method is above another.\n")
    assert main(["image-benchmark", str(folder)]) == 0
    text = (tmp_path / "images.md").read_text()
    assert "## In short\n\nNo method is above another." in text
    assert "What was left out" not in text
    (row,) = re.findall(r"\| DP-SGD, momentum +\| 97\.30.*", text)
    assert [cell.strip() for cell in row.split("|")[1:5]] == [
        "DP-SGD, momentum", "97.30 ± 0.20", "+0.20 ± 0.25", "",
    ]  # fmt: skip
    assert "| GeoDP ¹" in text
    assert "¹ No ε is proven" in text
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert 1000 < (tmp_path / link).stat().st_size < 150_000
    published = next(line for line in text.splitlines() if "| 89.01 " in line)
    assert (
        "97.30 at ε = 1, δ = 1e-05 (DP-SGD, momentum)" in published
    )  # but not the one without privacy


@dataclasses.dataclass(frozen=True)
class OwnDisk(Disk):
    """A method defined by a user."""

    name = "Own"


def test_refuses_records_of_user_defined_method(tmp_path):
    lines.append(tmp_path / "images" / "x.jsonl", [run("own", OwnDisk(), 0.9)])
    with pytest.raises(ConfigError, match="mnist/own must be of a method of `experiments.methods`"):
        write_page(tmp_path / "images")


@pytest.mark.parametrize("folder", ["before-and-behind", "on-images"])
def test_records_in_repository_stay_readable(folder):
    """Some are of methods that dpoptax no longer has."""
    paths = sorted((ROOT / "experiments" / "results" / folder).glob("*.jsonl"))
    groups = page_groups.grouped(line for path in paths for line in lines.read(path))
    assert all(entry.gradients >= 1 for entries in groups.values() for entry in entries)


def test_distinguishes_batch_sizes_and_models(tmp_path):
    """Each setting has its own heading and row; previously the last run replaced the others."""
    found = [
        run("dp_sgd", DPSGD(), 0.9),
        run("dp_sgd", DPSGD(), 0.8, batch_size=512),
        run("dp_sgd", DPSGD(), 0.7, model="mlp"),
        run("non_private", NonPrivate(), 0.99),
        run("non_private", NonPrivate(), 0.98, batch_size=512),
    ]
    groups = page_groups.grouped(found)
    compared = {s: e for s, e in groups.items() if np.isfinite(s.epsilon)}
    alone = {s: e for s, e in groups.items() if not np.isfinite(s.epsilon)}
    axes = Figure().subplots()
    page_figures.draw_accuracies(axes, compared, alone, "mnist")
    drawn = {line.get_label(): max(line.get_ydata(), default=0) for line in axes.get_lines()}
    kind, stated = "linear on scattering, 30 steps", "30 steps, δ = 1e-05"
    assert drawn[f"DP-SGD, linear on scattering, {stated}, B = 256"] == 90.0
    assert drawn[f"DP-SGD, linear on scattering, {stated}, B = 512"] == 80.0
    assert drawn[f"DP-SGD, mlp on scattering, {stated}"] == 70.0
    assert drawn[f"not private, {kind}, B = 256"] == 99.0
    assert drawn[f"not private, {kind}, B = 512"] == 98.0
    lines.append(tmp_path / "images" / "x.jsonl", found)
    text = write_page(tmp_path / "images").read_text()
    assert re.findall(r"### MNIST, scattering, ε = 1, δ = 1e-05, 30 steps(.*)", text) == [
        ", model linear, B = 256", ", model linear, B = 512", ", model mlp",
    ]  # fmt: skip


@pytest.mark.parametrize("others", [[], [1e-5, 1e-6]], ids=["alone", "beside several"])
def test_records_without_delta_are_not_compared(tmp_path, others):
    """GeoDP's records have no proven ε, so they cannot be the point of a recipe."""
    found = [dataclasses.replace(run("dp_sgd", DPSGD(), 0.97), delta=delta) for delta in others]
    found.append(run("geodp", GeoDP(), 0.1))
    lines.append(tmp_path / "images" / "x.jsonl", found)
    text = write_page(tmp_path / "images").read_text()
    (row,) = (row for row in text.splitlines() if "| GeoDP" in row)
    cells = [cell.strip() for cell in row.split("|")[3:5]]
    assert cells == ["GeoDP ¹", "1, no δ stated"]
    assert "¹ No ε is proven" in text
    assert "## Differences from DP-SGD" not in text
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (tmp_path / link).is_file()
    groups = page_groups.grouped(found)
    alone = {s: e for s, e in groups.items() if not s.delta}
    axes = Figure().subplots()
    page_figures.draw_accuracies(axes, {}, alone, "mnist")
    assert "recipe, here" not in {line.get_label() for line in axes.get_lines()}


@pytest.mark.parametrize("spent", [1.5, None, float("nan")])
def test_refuses_run_that_overspent_its_epsilon(tmp_path, spent):
    """A run that spent more than the ε of its comparison is refused, because the page states it."""
    path = tmp_path / "x.jsonl"
    lines.append(path, benchmark()[:1])
    good = json.loads(path.read_text())
    path.write_text(json.dumps({**good, "epsilon": 1.0, "spent": spent, "unproven": False}))
    with pytest.raises(ConfigError, match="Line 1 .* has spent ε = .* but it is listed at ε = 1.0"):
        lines.read(path)


def test_benchmark_has_every_method_once_with_same_budget():
    found = load_experiments(ROOT / "configs" / "benchmark" / "scattering_linear.py")
    rows = {name: config for name, config in found.items() if name.startswith("mnist/")}
    assert len(rows) == 14
    assert {(c.steps, c.batch_size, c.epsilon, c.l2_clip_norm) for c in rows.values()} == {
        (120, 1024, 1.0, 0.1)
    }
    for a, b in itertools.combinations(rows.values(), 2):
        assert dataclasses.replace(a, learning_rate=1.0) != dataclasses.replace(
            b, learning_rate=1.0
        )
    assert any(isinstance(c.method, Doppler) for c in rows.values())


def test_links_of_included_texts_are_those_of_the_page(tmp_path):
    path = tmp_path / "images" / "verdict.md"
    path.parent.mkdir()
    path.write_text("[a](../../features.md#x) [b](c.png) [d](https://x.org) [e](#f)\n")
    _, text = page._given(path, "## In short", tmp_path / "images.md")
    assert text == "[a](../features.md#x) [b](images/c.png) [d](https://x.org) [e](#f)"
