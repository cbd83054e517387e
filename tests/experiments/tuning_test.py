"""Tests of the comparison of normalized steps with tuned optimizers."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.released import tuning
from experiments.released.linear_model import Data
from experiments.released.problems import PROBLEMS
from experiments.released.tuned_tables import tuned_section, tuned_table
from experiments.released.tuning import METHODS, SCHEDULES, Run

RECORDS = Path(__file__).parents[2] / "experiments" / "results" / "released-code"


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("dp_sgd", optax.sgd(1.0)),
        ("momentum", optax.sgd(1.0, momentum=0.9)),
        ("adam", optax.adam(1.0)),
        ("normalized", optax.chain(optax.normalize_by_update_norm(), optax.sgd(1.0))),
        (
            "normalized_mean",
            optax.chain(optax.ema(0.9), optax.normalize_by_update_norm(), optax.sgd(1.0)),
        ),
    ],
)
def test_steps_match_optax(name, optimizer):
    rule, state = METHODS[name][1], optimizer.init(jnp.zeros(6))
    filtered = rule.new_filter()
    for gradient in np.random.default_rng(0).normal(size=(10, 6)):
        found = filtered(gradient)
        if rule.normalize:
            found = found / np.linalg.norm(found)
        wanted, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state)
        np.testing.assert_allclose(-found, wanted, rtol=2e-4)


def test_cosine_schedule_matches_optax():
    wanted = optax.cosine_decay_schedule(1.0, tuning.STEPS)
    schedule = SCHEDULES["_cosine"]
    assert [schedule(t) for t in (0, 7, 60, 119)] == pytest.approx(
        [float(wanted(t)) for t in (0, 7, 60, 119)], abs=1e-6
    )


def _data():
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=1200)
    inputs = (np.eye(10)[labels] + 0.3 * rng.normal(size=(1200, 10))).astype(np.float32)
    return Data(inputs[:1000], labels[:1000], inputs[1000:], labels[1000:])


def test_methods_repeat_their_best_of_equally_many_rates(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "load", lambda spec: _data())
    monkeypatch.setattr(tuning, "calibrate", lambda *args: 0.1)
    monkeypatch.setattr(tuning, "STEPS", 5)
    monkeypatch.setattr(tuning, "BATCH_SIZE", 50)
    monkeypatch.setattr(tuning, "RATES", 3)
    problem = PROBLEMS["linear-mnist"]._replace(epsilons=(1.0,))
    path = tmp_path / "runs.jsonl"
    runs = tuning.tune(problem, tmp_path, path, seeds=2)
    assert len(runs) == len(METHODS) * len(SCHEDULES) * (3 + 2)
    for name in [method + end for method in METHODS for end in SCHEDULES]:
        trials = [run for run in runs if run.name == name and run.split == "held-out"]
        finals = [run for run in runs if run.name == name and run.split == "test"]
        best = max(trials, key=lambda run: run.accuracy)
        assert {run.learning_rate for run in finals} == {tuning.best_rate(runs, name)}
        assert best.accuracy == max(
            run.accuracy for run in trials if run.learning_rate == finals[0].learning_rate
        )
    assert tuning.tune(problem, tmp_path, path, seeds=2) == runs == tuning.read(path)


def test_trials_use_no_test_examples():
    data = _data()
    parts = tuning._held_out(data)
    assert (len(parts.labels), len(parts.test_labels)) == (800, 200)
    together = np.concatenate([parts.inputs, parts.test_inputs])
    np.testing.assert_array_equal(np.sort(together, axis=0), np.sort(data.inputs, axis=0))


def _runs(accuracies):
    return [
        run
        for method in METHODS
        for end in SCHEDULES
        for run in (
            Run(method + end, 1.0, 0.1, 0, "held-out", 0.1),
            Run(method + end, 1.0, 0.2, 0, "held-out", accuracies.get(method + end, 0.5)),
            Run(method + end, 1.0, 0.4, 0, "held-out", 0.2),
            *(
                Run(method + end, 1.0, 0.2, seed, "test", accuracies.get(method + end, 0.5))
                for seed in range(3)
            ),
        )
    ]


def test_differences_compare_runs_with_same_schedule():
    accuracies = {"dp_sgd": 0.6, "dp_sgd_cosine": 0.7, "normalized": 0.65, "normalized_cosine": 0.8}
    rows = [line.split("|")[1:] for line in tuned_table(_runs(accuracies)).splitlines()]
    cells = {row[0].strip(): [cell.strip() for cell in row[2:6]] for row in rows}
    same = ["+5.00 ± 0.00", "+15.00 ± 0.00", "+15.00 ± 0.00"]
    assert cells["normalized steps"] == ["65.00 ± 0.00", *same]
    assert cells["normalized steps, cosine"][1:3] == ["+10.00 ± 0.00", "+30.00 ± 0.00"]
    assert cells["DP-SGD, cosine"][1] == ""
    overview = tuned_section({"digits": _runs(accuracies)}).split("###")[0]
    assert ["normalized steps, cosine", "80.00 ± 0.00"] in [
        [cell.strip() for cell in line.split("|")[1:3]] for line in overview.splitlines()
    ]


def test_marks_rate_at_edge_of_its_grid():
    runs = _runs({})
    assert "edge" not in tuned_table(runs)
    assert tuned_table(_runs({"adam": 0.15})).count("edge of the grid") == 1


@pytest.mark.parametrize("data", ["mnist", "cifar10", "digits"])
def test_no_recorded_rate_is_at_edge_of_its_grid(data):
    runs = tuning.read(RECORDS / f"normalized-{data}.jsonl")
    assert runs
    assert "edge of the grid" not in tuned_section({data: runs})
