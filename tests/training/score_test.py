"""Tests of the metric by which comparisons and sweeps choose, and of its sensitivity."""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.metrics import roc_auc_score

from dpoptax import PrivacyPlan
from dpoptax.training import Comparison, ConfigError, Evaluation, Task, compare, config_of
from dpoptax.training.evaluation import Score
from dpoptax.training.search import sweep as sweep_module
from dpoptax.training.search.compare import table
from dpoptax.training.search.price import Price, Sweep, notes
from dpoptax.training.search.sweep import prepare, run_sweep

RNG = np.random.default_rng(0)
X = RNG.normal(size=(500, 4)).astype(np.float32)
Y = (X.sum(axis=1) + RNG.normal(size=500) > 2).astype(np.float32)


def loss_fn(params, example):
    x, label = example
    return optax.sigmoid_binary_cross_entropy(x @ params["w"] + params["b"], label)


def metrics(params, example):
    x, label = example
    logit = x @ params["w"] + params["b"]
    right = jnp.where((logit > 0) == (label == 1), jnp.where(label == 1, 4.0, 0.6), 0.0)
    losses = {"loss": loss_fn(params, example), "clipped_loss": loss_fn(params, example)}
    return {**losses, "balanced": right, "logit": logit, "label": label, "pair": (logit, 1)}


def itself(params, value):
    return {"s": value}


def auc(values):
    return {"auc": roc_auc_score(values["label"], values["logit"])}


SCORES = {
    "loss": ("loss", (math.inf, 0.0)),
    "clipped loss": ("clipped_loss", (0.8, 0.0)),
    "balanced": ("balanced", (0.0, 4.0)),
    "auc": ("auc", (0.0, 1.0)),
    "pair": ("pair", (0.0, 1.0)),
    "nothing": ("accuracy", (0.0, 1.0)),
    "missing": ("f1", (0.0, 1.0)),
}


def scored(
    score: str = "auc", learning_rate: float = 1.0, seed: int | None = 0, held_out: bool = False
) -> Task:
    """Returns the task of a linear classifier, compared by one of `SCORES`."""
    data, test = (X[:300], Y[:300]), (X[300:], Y[300:])
    if held_out:
        data, test = (X[:240], Y[:240]), (X[240:300], Y[240:300])
    name, score_range = SCORES[score]
    plan = PrivacyPlan(
        dataset_size=len(data[0]), batch_size=60, steps=3, noise_multiplier=1.0, accountant="rdp"
    )
    return Task(
        loss_fn=loss_fn,
        params={"w": jnp.zeros(4), "b": jnp.zeros(())},
        data=data,
        plan=plan,
        optimizer=optax.sgd(learning_rate),
        evaluate=Evaluation(
            metrics,
            test,
            score=name,
            score_range=score_range,
            combine=None if score == "nothing" else auc,
        ),
    )


def sweep(workdir, **changes):
    return Sweep(workdir=workdir, grid=("learning_rate=0.01,1",), repetitions="fixed", **changes)


@pytest.mark.parametrize("streamed", [False, True])
def test_combine_gets_the_values_of_all_examples(streamed):
    params = {"w": jnp.arange(4.0), "b": jnp.zeros(())}
    x, y = np.tile(X, (3, 1)), np.tile(Y, 3)
    source = [(a, b) for a, b in zip(x, y, strict=True)] if streamed else (x, y)
    found = Evaluation(metrics, source, combine=auc)(params)
    assert found["test_auc"] == roc_auc_score(y, x @ np.arange(4.0, dtype=np.float32))
    assert found.keys() == Evaluation(metrics, source)(params).keys() | {"test_auc"}


def test_combine_does_not_replace_a_mean():
    evaluate = Evaluation(metrics, (X, Y), combine=lambda values: {"balanced": 7.0})
    with pytest.raises(ValueError, match="`combine` must return other names"):
        evaluate(scored().params)


@pytest.mark.parametrize("score_range", [(0.0, 1.0), (3.0, 0.0), (-2.0, 5.0)])
def test_one_example_changes_the_mean_by_at_most_the_range(score_range):
    values = np.array([*RNG.normal(scale=9, size=20), np.nan, np.inf, -np.inf], np.float32)

    def mean(values):
        evaluate = Evaluation(itself, values, score="s", score_range=score_range)
        assert evaluate.has_score(0.0, mean=True)
        return evaluate(0.0)["test_s"]

    size = abs(score_range[1] - score_range[0])
    whole, number = mean(values), len(values)
    changes = [whole - mean(np.delete(values, i)) for i in range(number)]
    for other in (-100.0, 100.0, np.nan):
        replaced = np.broadcast_to(values, (number, number)).copy()
        np.fill_diagonal(replaced, other)
        changes += [whole - mean(row) for row in replaced]
    assert 0.9 * size < number * np.abs(changes).max() <= size * (1 + 1e-5)


def test_rounding_of_many_examples_does_not_hide_or_add_one():
    values = RNG.uniform(0.0, 3.0, size=400_000).astype(np.float32)

    def total(values):
        evaluate = Evaluation(itself, values, score="s", score_range=(3.0, 0.0))
        return len(values) * evaluate(0.0)["test_s"]

    whole = total(values)
    for other in (0.0, 3.0):
        replaced = np.append(values[1:], np.float32(other))
        assert total(replaced) - whole == pytest.approx(other - values[0], abs=1e-6)


def test_noise_is_relative_to_the_range():
    cost = Price(score_stddev=3.0, held_out_size=100, score=Score("loss", 4.0, 0.0))
    errors = [
        sweep_module._scores([{"test_loss": x}], cost, 7)[0] - x for x in np.linspace(1, 2, 400)
    ]
    assert np.std(errors) == pytest.approx(4.0 * 3.0 / 100, rel=0.15)
    text = notes(sweep("."), Price(1.0, 0.5, 1e-5, 3.0, Score("loss", 4.0, 0.0)))[-1]
    assert "standard deviation 12.00 on the sum of loss" in text
    assert "counts between 0 and 4" in text


@pytest.mark.parametrize("name", ["clipped loss", "balanced"])
def test_sweep_publishes_the_best_bounded_mean(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sweep_module, "_scores", lambda found, cost, seed: [*map(cost.score.of, found)]
    )
    # One descends and one ascends, so that their scores differ for any noise.
    both = dataclasses.replace(sweep(tmp_path), grid=("learning_rate=-1,1",))
    results = run_sweep({"one": config_of(scored).replace(score=name)}, both, progress=False)
    pick = min if name == "clipped loss" else max
    found = [row.score for row in results.trials]
    assert found[0] != found[1]
    assert results.best == found.index(pick(found))
    metric = SCORES[name][0]
    assert f"test_{metric}" in results.result
    first = (tmp_path / "trials.md").read_text().splitlines()
    assert first[0].startswith(f"| held-out {metric.replace('_', ' ')} |")
    assert f"{pick(found):.4f}" in first[2]
    assert json.loads((tmp_path / "sweep.json").read_text())["price"]["score"]["name"] == metric


@pytest.mark.parametrize("name", ["loss", "auc", "pair"])
def test_sweep_refuses_a_score_without_a_sensitivity(name, tmp_path):
    configs = {"one": config_of(scored).replace(score=name)}
    with pytest.raises(ConfigError, match="must be one number for each held-out example"):
        prepare(configs, sweep(tmp_path), 0)


@pytest.mark.parametrize("name", ["loss", "auc"])
def test_comparison_selects_by_the_score(name, tmp_path):
    given = Comparison(tmp_path, seeds=2, factors=(0.01, 1.0))
    results = compare({"one": config_of(scored).replace(score=name)}, given, progress=False)
    (method,) = results.methods
    means = [np.mean(point.validation_scores) for point in method.grid]
    best = np.argmin(means) if name == "loss" else np.argmax(means)
    assert means[0] != means[1]
    assert method.learning_rate == method.grid[best].learning_rate
    assert method.scores == [run[f"test_{name}"] for run in method.runs]
    assert method.test_score_mean == pytest.approx(np.mean(method.scores))
    text = table(results)
    assert ("test auc (%)" if name == "auc" else "test loss  ") in text
    assert (tmp_path / "comparison.png").exists()


@pytest.mark.parametrize(("name", "metric"), [("nothing", "accuracy"), ("missing", "f1")])
def test_comparison_refuses_a_missing_score(name, metric, tmp_path):
    configs = {"one": config_of(scored).replace(score=name)}
    message = f"metric '{metric}'" if name == "nothing" else "`combine` of scored must return"
    with pytest.raises(ConfigError, match=message):
        compare(configs, Comparison(tmp_path, seeds=1, factors=(1.0,)), progress=False)


def test_comparison_refuses_two_scores(tmp_path):
    config = config_of(scored)
    configs = {name: config.replace(score=name) for name in ("auc", "balanced")}
    with pytest.raises(ConfigError, match="`score` and `score_range` must be the same"):
        compare(configs, Comparison(tmp_path, seeds=1), progress=False)


@pytest.mark.parametrize("score_range", [(1.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_refuses_a_range_without_a_best_value(score_range):
    with pytest.raises(ValueError, match="`score_range` must be the worst and the best"):
        Evaluation(metrics, (X, Y), score_range=score_range)
