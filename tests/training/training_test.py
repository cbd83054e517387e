"""Tests of real, short trainer runs: guarantees, outputs and reproducibility."""

import dataclasses
import hashlib
import io
import json
import math
import re
import types

import flax.linen as nn
import jax
import numpy as np
import pytest

from dpoptax import accounting, sampling
from dpoptax.runs import to_decimals, to_digits
from dpoptax.training import bars as training_bars
from dpoptax.training import classification, config_of, load_params, train_and_evaluate
from dpoptax.training.data import dataset as data
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.training.run import figures, seeds, step, training_loop
from dpoptax.training.run.figures import scientific
from dpoptax.training.run.files import params_sha256, to_json
from dpoptax.training.run.run_task import run_task
from dpoptax.training.train_config import seed_of, summarize
from experiments.config import ExperimentConfig
from experiments.methods import Doppler, NonPrivate

TINY = config_of(
    ExperimentConfig(model="linear", steps=4, eval_every=2, batch_size=64, accountant="rdp", seed=0)
)
SUMMARY_FIELDS = {
    "epsilon",
    "delta",
    "noise_multiplier",
    "steps",
    "sampling",
    "neighboring_relation",
    "test_accuracy",
    "params_sha256",
    "config",
    "versions",
}


def tiny(**changes):
    return TINY.replace(**changes)


def run(config, **options):
    """Returns the result of a run without a folder, with its summary."""
    task, seed = config.task(), seed_of(config)
    key = None if seed is None else seeds.key_of(seed, "threefry")
    result = run_task(task, key=key, **{"progress": False, **options})
    return types.SimpleNamespace(summary=summarize(task, result), **vars(result))


def strict_json(text):
    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    return json.loads(text, parse_constant=refuse)


def assert_trees_close(left, right, atol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), left, right)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    return train_and_evaluate(TINY, workdir, progress=False), workdir


def test_summary_has_every_field_as_strict_json(finished):
    result, workdir = finished
    summary = strict_json((workdir / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_FIELDS
    assert summary["sampling"] == "PoissonSampler"
    assert summary["steps"] == 4
    assert 0 < summary["epsilon"] <= 3.0
    assert summary == json.loads(to_json(result))
    assert summary["config"]["method"] == {"name": "DP-SGD"}


def test_writes_statement_in_plain_language(finished):
    _, workdir = finished
    text = (workdir / "statement.txt").read_text("utf-8")
    digest = hashlib.sha256((workdir / "params.msgpack").read_bytes()).hexdigest()
    assert f"params.msgpack, SHA-256 of the file: {digest}" in text
    assert "chose them itself" in text


def test_run_without_a_guarantee_leaves_no_statement(tmp_path):
    (tmp_path / "statement.txt").write_text("of an earlier run")
    config = tiny(method=NonPrivate(), epsilon=None)
    train_and_evaluate(config, tmp_path, progress=False)
    assert not (tmp_path / "statement.txt").exists()


def test_epsilon_matches_accounting_of_written_numbers(finished):
    summary = finished[0]
    expected = accounting.planned_guarantee(
        noise_multiplier=summary["noise_multiplier"],
        sampling_probability=summary["batch_size"] / summary["dataset_size"],
        steps=summary["steps"],
        accountant="rdp",
    ).epsilon(summary["delta"])
    assert summary["epsilon"] == pytest.approx(expected, rel=1e-3)
    assert summary["epsilon"] > 0.99 * 3.0  # the calibration uses nearly the whole budget


def test_metrics_file_has_a_line_for_each_evaluation(finished):
    result, workdir = finished
    lines = [strict_json(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert lines[0]["epsilon"] == 0
    assert 0 < lines[1]["epsilon"] < lines[2]["epsilon"]
    assert lines[2]["epsilon"] == pytest.approx(result["epsilon"])
    assert lines[2].keys() == {"step", "epsilon", "test_loss", "test_accuracy", "seconds"}


@pytest.fixture
def bars(monkeypatch):
    """Records the progress bar after each step: the count and the text next to it."""
    shown = []

    class Bar(training_bars.Bar):
        def update(self, n=1):
            super().update(n)
            shown.append((self.n, getattr(self, "postfix", None)))

    monkeypatch.setattr(training_loop, "Bar", Bar)
    return shown


def test_progress_bar_never_shows_less_than_spent_epsilon(bars):
    config = tiny(steps=5, eval_every=3)
    plan = config.task().plan

    def epsilon(done):
        return dataclasses.replace(plan, steps=done).epsilon

    run(config, progress=True)
    assert [done for done, _ in bars] == [1, 2, 3, 4, 5]
    for done, text in bars:
        bound, until, step = re.fullmatch(
            r"ε ≤ (\S+) to step (\d+); at (\d+): accuracy=\S+, loss=\S+", text
        ).groups()
        assert int(step) < done <= int(until)
        assert epsilon(done) <= float(bound) <= epsilon(int(until)) + 1e-3
        assert float(bound) >= epsilon(int(until))


@pytest.mark.slow
def test_progress_bar_shows_metrics_of_resumed_run(bars, tmp_path):
    config = tiny(method=NonPrivate(), steps=2, eval_every=5)
    train_and_evaluate(config, tmp_path, progress=False)
    train_and_evaluate(config.replace(steps=4), tmp_path)
    shown = [text for done, text in bars if done]
    assert len(shown) == 2
    assert all(re.fullmatch(r"not private; at 2: .*", text) for text in shown)


def test_unknown_name_suggests_nearest_known_name():
    names = [f"mnist/eps-{e}/cnn/{m}" for e in range(1, 50) for m in ("pmlf", "disk")]
    near = str(unknown_name("config", "mnist/eps-1/cnn/pml", names))
    assert near.endswith("got 'mnist/eps-1/cnn/pml'. Did you mean 'mnist/eps-1/cnn/pmlf'?")
    far = str(unknown_name("config", "x", names))
    assert "one of 98 names such as mnist/eps-1/cnn/disk, " in far
    assert len(far) < 150
    # A list that fits on a line is shown next to the suggestion.
    few = str(unknown_name("optimizer", "adm", ["adam", "sgd"]))
    assert few == "`optimizer` must be one of adam, sgd, got 'adm'. Did you mean 'adam'?"


def test_without_terminal_bars_are_plain_lines(monkeypatch):
    monkeypatch.setattr(training_bars, "PAUSE", 0.0)
    file = io.StringIO()
    with training_bars.Bar(total=2, desc="runs", unit="run", file=file, mininterval=0) as outer:
        for _ in range(2):
            with training_bars.Bar(total=9, desc="steps", file=file, mininterval=0) as inner:
                inner.update()
            outer.set_description("more")
            outer.update()
            training_bars.Bar.write("something else", file=file)
    lines = file.getvalue().splitlines()
    assert not set(file.getvalue()) & {"\r", "\x1b"}
    assert re.fullmatch(r"runs: 0/2 runs \[.*\]", lines[0])
    assert re.fullmatch(r"more: 2/2 runs \[.*\]", lines[-1])
    assert "something else" in lines
    # A nested bar shows activity and does not leave a final line.
    assert [line[:10] for line in lines if "steps" in line] == ["steps: 0/9", "steps: 1/9"] * 2


def test_without_terminal_bars_print_few_lines():
    file = io.StringIO()
    with training_bars.Bar(total=1000, desc="runs", unit="run", file=file, mininterval=0) as bar:
        for _ in range(1000):
            bar.update()
    assert re.fullmatch(r"runs: 1000/1000 runs \[.*\]\n", file.getvalue())


def test_shown_epsilon_is_rounded_up():
    assert [to_decimals(e) for e in (2.7281, 2.728, 3.0, 0.0)] == [
        "2.729",
        "2.728",
        "3.000",
        "0.000",
    ]
    assert to_decimals(2.7201, 2) == "2.73"
    assert [to_digits(d) for d in (1e-5, 1.6601e-5, 0.01)] == ["1e-05", "1.67e-05", "0.01"]
    assert scientific(9.9999e-6) == scientific(1e-5) == "$10^{-5}$"


def test_refuses_model_with_a_list():
    with pytest.raises(ConfigError, match="Pass tuples instead of lists"):
        classification(nn.Sequential([nn.Dense(10)]), data.load_digits(), TINY.task().plan)


def test_saved_parameters_match_hash(finished):
    result, workdir = finished
    restored = load_params(workdir / "params.msgpack")
    assert params_sha256(restored) == result["params_sha256"]


def test_writes_figure(finished):
    assert (finished[1] / "training.png").read_bytes().startswith(b"\x89PNG")


def test_same_seed_gives_same_parameters(finished, tmp_path):
    again = train_and_evaluate(TINY, tmp_path, progress=False)
    assert again["params_sha256"] == finished[0]["params_sha256"]


@pytest.mark.parametrize("seed", [None, 3])
def test_only_the_owner_can_read_a_summary_with_a_seed(tmp_path, seed, monkeypatch):
    """The summary is readable by the owner only, because its seed reproduces the noise."""
    monkeypatch.setattr(figures, "plot_run", lambda *_: None)
    train_and_evaluate(tiny(seed=seed), tmp_path, progress=False)
    others = (tmp_path / "summary.json").stat().st_mode & 0o077
    assert (others == 0) == (seed is not None)


def test_seeds_and_learning_rates_share_one_executable():
    run(TINY)
    before = set(step._COMPILED)
    for seed, rate in ((0, 1.0), (1, 1.0), (1, 0.5)):
        run(tiny(seed=seed, learning_rate=rate))
    assert set(step._COMPILED) == before


def test_run_with_infinite_epsilon_is_not_private():
    summary = run(tiny(noise_multiplier=5e-4, epsilon=None)).summary
    assert (summary["private"], summary["epsilon"]) == (False, math.inf)


def test_non_private_run_claims_nothing():
    result = run(tiny(method=NonPrivate()))
    assert result.summary["private"] is False
    assert (result.summary["epsilon"], result.summary["delta"]) == (None, None)
    assert not result.summary.keys() & {"noise_multiplier", "accountant"}
    assert {record["epsilon"] for record in result.history} == {None}


@pytest.mark.slow
def test_private_loop_without_noise_and_clipping_is_plain_loop():
    private = run(tiny(noise_multiplier=0.0, epsilon=None, l2_clip_norm=1e4))
    assert_trees_close(private.params, run(tiny(method=NonPrivate())).params)
    assert private.summary["private"] is False  # without noise nothing is claimed
    assert private.summary["epsilon"] is None
    assert {record["epsilon"] for record in private.history} == {None}


@pytest.mark.slow
def test_given_coefficients_replace_preset():
    assert_trees_close(run(tiny(method=Doppler(b=(1.0,)))).params, run(TINY).params)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "schedule"), [("momentum", "linear"), ("adam", "cosine")])
def test_optimizers_and_schedules_train(optimizer, schedule):
    config = tiny(optimizer=optimizer, schedule=schedule, learning_rate=0.01, method=NonPrivate())
    losses = [record["test_loss"] for record in run(config).history]
    assert losses == sorted(losses, reverse=True)


def test_prices_fixed_size_sampling():
    given = {"noise_multiplier": 3.0, "epsilon": None}
    poisson, fixed = (
        tiny(sampling=name, **given).task().plan for name in ("poisson", "fixed_size")
    )
    assert fixed.sampler.neighboring_relation == "replace-one"
    assert fixed.epsilon > poisson.epsilon
    run = {"noise_multiplier": 3.0, "steps": 4, "delta": 1e-5, "accountant": "rdp"}
    sampler = sampling.FixedSizeSampler(1438, 64, seed=0)
    expected = accounting.planned_guarantee(sampler=sampler, **run).stated_epsilon
    assert fixed.epsilon == expected


def test_shuffled_batches_train_only_without_privacy():
    assert run(tiny(method=NonPrivate(), sampling="shuffled")).summary["epsilon"] is None
    with pytest.raises(ValueError, match=r"(?i)shuffl"):
        run(tiny(sampling="shuffled"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "step"}, r"`schedule` must be one of constant, cosine, linear"),
        ({"sampling": "all"}, r"`sampling` must be .*poisson.*got 'all'"),
        ({"method": Doppler(preset="lowpass")}, r"doppler-first-order-1.*'lowpass'"),
        ({"method": Doppler(b=(1.0,), a=(-1.5,))}, r"must be stable"),
        ({"epsilon": 1e-9, "delta": 1e-11}, r"`epsilon` must .*noise_multiplier.*got 1e-09"),
    ],
)
def test_refuses_bad_config_before_training(changes, message):
    with pytest.raises(ValueError, match=message):
        run(tiny(**changes))


INPUTS, LABELS = np.ones((20, 4, 4, 1), np.float32), np.arange(20, dtype=np.int32) % 2


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"inputs": INPUTS}, "must have columns 'inputs' and 'labels', got 'inputs'."),
        ({"inputs": INPUTS, "labels": LABELS.tolist()}, "got a list of length 20 for 'labels'."),
        ({"inputs": INPUTS, "labels": LABELS[:19]}, "got a ndarray of length 19 for 'labels'."),
        ({"inputs": INPUTS, "labels": np.eye(2)[LABELS]}, "got float64 of shape (20, 2)."),
        ({"inputs": INPUTS, "labels": LABELS + 1}, "must have labels from 0 to 1, got 1 to 2."),
    ],
)
def test_refuses_malformed_data_sets(made, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        data.Dataset("mine", made, made, 2)


class OfBatches(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, images):
        return nn.Dense(self.num_classes)(images.reshape(len(images), -1))


class Dropping(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, image):
        return nn.Dense(self.num_classes)(nn.Dropout(0.1, deterministic=False)(image.reshape(-1)))


class Normalizing(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, image):
        hidden = nn.BatchNorm(use_running_average=False)(image.reshape(-1))
        return nn.Dense(self.num_classes)(hidden)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (OfBatches, r"got an array of shape \(8, 10\) from OfBatches for inputs of shape \(8, 8"),
        (Dropping, r"Dropping, which fails .*InvalidRngError"),
        (Normalizing, "keep parameters only, got Normalizing with batch_stats"),
    ],
)
def test_refuses_model_that_does_not_return_logits(model, message):
    with pytest.raises(ConfigError, match=message):
        classification(model(10), data.load_digits(), TINY.task().plan)


def test_splits_are_disjoint_and_complete():
    digits = data.load_digits()
    selection = digits.for_selection()

    def images(*splits):
        return sorted(image.tobytes() for split in splits for image in split["inputs"])

    assert (digits.train_size, len(digits.test["labels"])) == (1438, 359)
    assert images(selection.train, selection.test) == images(digits.train)
    assert set(np.unique(digits.test["labels"])) == set(range(10))


def test_held_out_examples_depend_only_on_position():
    def held_out(size, **fields):
        examples = {"inputs": np.arange(size), "labels": np.arange(size, dtype=np.int32) % 10}
        return data.Dataset("turns", examples, examples, 10, **fields).for_selection().test

    _, counts = np.unique(held_out(10_000)["labels"], return_counts=True)
    assert counts.tolist() == pytest.approx([200] * 10, abs=40)
    # An added example does not move any other.
    first, second = held_out(999)["inputs"], held_out(1000)["inputs"]
    assert len(first) == 199
    assert second[:-1].tolist() == first.tolist()
    assert held_out(12, mixed=True)["inputs"].tolist() == [4, 9]


def test_json_is_standard_conforming():
    values = {"a": [math.nan, math.inf, 1.5], "b": np.float32(2)}
    assert to_json(values) == '{"a": [null, null, 1.5], "b": 2.0}'
