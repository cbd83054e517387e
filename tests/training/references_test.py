"""Tests of configs that name models, losses and optimizers of the user's own."""

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from dpoptax.training.methods import DPSGD, NonPrivate
from flax import serialization

from dpoptax.training import ConfigError, audit, train_and_evaluate
from dpoptax.training.bars import Bar
from dpoptax.training.data import Dataset, dataset
from dpoptax.training.run import figures, planning
from dpoptax.training.search import trials
from tests.games import skip_games
from tests.runs import CONFIG

CODE = """
import jax, jax.numpy as jnp, optax
from dpoptax.training import FunctionModel

def initial(key, inputs):
    return {"w": jnp.zeros((inputs.size, 10)), "b": jnp.zeros(10)}

def logits(params, inputs):
    return inputs.reshape(-1) @ params["w"] + params["b"]

def cross_entropy(params, example):
    found = logits(params, example["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(found, example["labels"])

def plain(num_classes):
    return FunctionModel(initial, logits)

def lossy(num_classes):
    return FunctionModel(initial, logits, cross_entropy)

def halved(num_classes):
    return FunctionModel(initial, logits, lambda *args: 1e-3 * cross_entropy(*args))

def broken(num_classes):
    return FunctionModel(initial, lambda params, inputs: inputs @ params["b"])

def momentum():
    return optax.trace(decay=0.9)

def regression(num_classes):
    assert num_classes is None

    def error(params, example):
        return jnp.sum((logits(params, example["inputs"]) - example["targets"]) ** 2)

    def metrics(params, example):
        found = error(params, example)
        return {"error": found, "accuracy": 10 * (found < 50)}

    return FunctionModel(initial, loss=error, metrics=metrics)

def dropping(num_classes):
    def loss(params, example, key):
        kept = jax.random.bernoulli(key, 0.5, example["inputs"].shape)
        return cross_entropy(params, {**example, "inputs": 2 * kept * example["inputs"]})

    return FunctionModel(initial, logits, loss)

def only_loss(num_classes):
    return FunctionModel(initial, loss=cross_entropy)

def neither(num_classes):
    return FunctionModel(initial)

number = 3
wrong = lambda: 3
"""
PLOT_RUN = figures.plot_run
NAMES = (f"own_code_{i}" for i in itertools.count())


@pytest.fixture
def own(tmp_path, monkeypatch):
    name = next(NAMES)
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(figures, "plot_run", lambda *_: None)
    yield name
    sys.modules.pop(name, None)


def trained(workdir, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return train_and_evaluate(config, workdir, progress=False).summary


@pytest.mark.slow
def test_user_functions_train_like_built_in_ones(own, tmp_path):
    plain = trained(tmp_path / "a", model=f"{own}:plain", optimizer="momentum")
    lossy = trained(tmp_path / "b", model=f"{own}:lossy", optimizer=f"{own}:momentum")
    assert plain["params_sha256"] == lossy["params_sha256"]
    assert plain["epsilon"] == lossy["epsilon"]
    assert 0 < plain["test_accuracy"] < 1
    other = trained(tmp_path / "c", model=f"{own}:halved", optimizer="momentum")
    assert other["params_sha256"] != plain["params_sha256"]


@pytest.mark.slow
def test_loss_may_take_a_key(own, tmp_path):
    found = trained(tmp_path / "a", model=f"{own}:dropping", steps=3, method=DPSGD())
    same = trained(tmp_path / "b", model=f"{own}:dropping", steps=3, method=DPSGD())
    other = trained(tmp_path / "c", model=f"{own}:lossy", steps=3, method=DPSGD())
    assert found["params_sha256"] == same["params_sha256"] != other["params_sha256"]
    with pytest.raises(ConfigError, match="must have a loss without a key"):
        trained(tmp_path / "d", model=f"{own}:dropping", method=NonPrivate())


@pytest.mark.slow
def test_audits_user_functions(own, monkeypatch):
    skip_games(monkeypatch)
    config = dataclasses.replace(CONFIG, model=f"{own}:lossy", optimizer=f"{own}:momentum", steps=2)
    rows = audit.audit_config(config)
    assert len(rows) > 1
    assert not any(row.violated for row in rows)


@pytest.mark.slow
def test_reports_user_defined_metrics(own, tmp_path, monkeypatch):
    """Any columns train, and the accuracy of an example is at most one."""
    inputs = np.linspace(0, 1, 180, dtype=np.float32).reshape(60, 3)
    split = {"inputs": inputs, "targets": inputs[:, :1] - 3}
    columns = Dataset("columns", split, split, None)
    monkeypatch.setitem(dataset.DATASETS, "columns", lambda: columns)
    given = {"dataset": "columns", "batch_size": 20, "method": DPSGD(), "steps": 2}
    monkeypatch.setattr(figures, "plot_run", PLOT_RUN)
    found = trained(tmp_path / "run", model=f"{own}:regression", **given)
    assert (tmp_path / "run" / "training.png").is_file()
    params = serialization.msgpack_restore((tmp_path / "run" / "params.msgpack").read_bytes())
    errors = (inputs @ params["w"] + params["b"] - split["targets"]) ** 2
    assert found["test_error"] == pytest.approx(errors.sum(axis=1).mean(), rel=1e-5)
    assert found["test_accuracy"] == np.mean(errors.sum(axis=1) < 50) > 0
    lossy = trained(tmp_path / "lossy", model=f"{own}:only_loss", steps=1)
    assert [name for name in lossy if name.startswith("test_")] == ["test_loss"]


@pytest.mark.slow
def test_comparison_requires_accuracy(own):
    config = dataclasses.replace(CONFIG, model=f"{own}:only_loss", seed=0)
    with pytest.raises(ConfigError, match="Return 'accuracy'"):
        trials.Runner(Path("runs")).run([trials.Trial(config)], Bar(disable=True))


@pytest.mark.slow
def test_plan_counts_parameters_of_user_models(own):
    cost = planning.plan_run(dataclasses.replace(CONFIG, model=f"{own}:lossy"))
    assert cost.num_params == 650
    assert cost.flops > 0


def test_changed_code_does_not_repeat_shown_steps(own, tmp_path):
    changes = {"model": f"{own}:lossy", "method": DPSGD(), "steps": 2, "eval_every": 1}
    changes["checkpoint_every"] = 4
    stopped = dataclasses.replace(CONFIG, **changes)
    train_and_evaluate(stopped, tmp_path / "run", progress=False)
    newest = max((tmp_path / "run" / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    for part in sorted(newest.rglob("*"), reverse=True):
        part.rmdir() if part.is_dir() else part.unlink()
    newest.rmdir()
    path = tmp_path / f"{own}.py"
    path.write_text(path.read_text() + "\n# another version\n")
    sys.modules.pop(own)
    with pytest.raises(ValueError, match="code of the model must be the same"):
        train_and_evaluate(stopped, tmp_path / "run", progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "no_such_module:build"},
            "`model` must be .* got 'no_such_module:build', whose import fails",
        ),
        ({"model": "{own}:nothing"}, "whose import fails with AttributeError"),
        ({"model": "{own}:number"}, "`model` must name a function"),
        ({"model": "{own}:broken"}, "must take one example without a batch axis"),
        ({"model": "{own}:neither"}, "must have `logits` or `loss`"),
        ({"optimizer": "{own}:wrong"}, "which returned 3"),
        ({"optimizer": "sdg"}, "`optimizer` must be .*Did you mean 'sgd'"),
    ],
)
def test_errors(own, tmp_path, changes, message):
    changes = {name: value.format(own=own) for name, value in changes.items()}
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path / "run", **changes)
