"""Runs that differ in the learning rate alone, as one program: each is what it is alone."""

import dataclasses
import json
import math
import sys

import jax
import numpy as np
import pytest
from tqdm import tqdm

from dpoptax.training import methods
from dpoptax.training.config import TrainConfig
from dpoptax.training.loop import train, train_together
from dpoptax.training.run.advancing import Surroundings
from dpoptax.training.run.devices import Devices
from dpoptax.training.run.phases import Phases
from dpoptax.training.run.privacy import make_plan
from dpoptax.training.run.resolved import resolve
from dpoptax.training.run.seeds import Keys
from dpoptax.training.run.setup import set_up
from dpoptax.training.run.shapes import shapes_of, step_arguments
from dpoptax.training.run.step import build_steps
from dpoptax.training.search import groups, trials
from dpoptax.training.search.compare import Comparison, compare
from dpoptax.training.search.trials import Runner, Trial, dataset_of
from tests.helpers import equations

CONFIG = TrainConfig(
    method=methods.Disk(),
    optimizer="momentum",
    parameter_ema=0.9,
    model="linear",
    steps=2,
    batch_size=64,
    eval_every=1,
    noise_multiplier=1.0,
    epsilon=None,
    accountant="rdp",
    seed=0,
)
RATES = (0.1, 2.0)
OF_THE_CLOCK = ("train_seconds", "compile_seconds", "first_step_seconds", "phases")


@pytest.fixture(scope="module")
def digits():
    return dataset_of(CONFIG, held_out=False)


def at(config, rates=RATES):
    return [dataclasses.replace(config, learning_rate=rate) for rate in rates]


def together(config, dataset, rates=RATES, **options):
    plan = make_plan(config, dataset.train_size)
    return list(train_together(at(config, rates), dataset, plan, **options))


def alone(config, dataset, rates=RATES):
    plan = make_plan(config, dataset.train_size)
    return [train(each, dataset, plan) for each in at(config, rates)]


def check_equal(found, expected, rtol):
    """All of a run, but for what a clock says and the rounding of its parameters."""
    for got, want in zip(found, expected, strict=True):
        exact, rounded = dict(want.summary), {}
        for name in ("test_loss", "test_accuracy"):
            rounded[name] = exact.pop(name)
        for name in (*OF_THE_CLOCK, "params_sha256"):
            del exact[name]
        assert list(got.summary) == list(want.summary)
        assert {name: got.summary[name] for name in exact} == exact
        assert {name: got.summary[name] for name in rounded} == pytest.approx(rounded, rel=1e-2)
        assert [entry["step"] for entry in got.history] == [e["step"] for e in want.history]
        assert [entry["epsilon"] for entry in got.history] == [e["epsilon"] for e in want.history]
        for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def test_a_group_is_its_runs_alone_but_for_rounding(digits):
    """Two gradient points, whose difference is weighted; a state of the optimizer; an average."""
    found = together(CONFIG, digits)
    check_equal(found, alone(CONFIG, digits), 1e-5)
    assert len({result.summary["params_sha256"] for result in found}) == len(RATES)
    assert found[0].summary["epsilon"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "rtol"),
    [
        ({"method": methods.DPSGD(), "optimizer": "sgd", "parameter_ema": None}, 1e-5),
        ({"method": methods.DPSGD(), "model": "mlp"}, 1e-5),
        ({"method": methods.DPSGD(), "microbatch_size": 16, "schedule": "cosine"}, 1e-5),
        ({"method": methods.PMLF(), "record": 5}, 1e-5),
        ({"method": methods.CorrelatedNoise(), "sampling": "cyclic"}, 1e-5),
        ({"method": methods.AdaptiveKalman()}, 1e-5),
        ({"method": methods.AdaptiveClip()}, 1e-5),
        ({"method": methods.HypersphericalClip()}, 1e-4),
        ({"method": methods.Augmented(multiplicity=2)}, 1e-5),
        ({"method": methods.NonPrivate()}, 1e-5),
        # Adam divides by the root of what is almost zero, and makes more of a rounding.
        ({"method": methods.DPSGD(), "optimizer": "adam"}, 1e-3),
        ({"method": methods.AdamBC()}, 1e-3),
        ({"method": methods.LPAdam()}, 1e-3),
    ],
    ids=lambda value: value["method"].name if isinstance(value, dict) else "",
)
def test_every_method_in_a_group_is_what_it_is_alone(digits, changes, rtol):
    config = dataclasses.replace(CONFIG, **changes)
    found, expected = together(config, digits), alone(config, digits)
    check_equal(found, expected, rtol)
    for got, want in zip(found, expected, strict=True):
        assert list(got.recorded) == list(want.recorded)
        for name, values in want.recorded.items():
            np.testing.assert_allclose(got.recorded[name], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [methods.DPSGD(), methods.Disk()], ids=lambda m: m.name)
def test_the_batch_is_read_and_the_noise_drawn_once_for_all(digits, method):
    config = dataclasses.replace(CONFIG, method=method)
    plan = make_plan(config, digits.train_size)
    run = resolve(config, plan, num_classes=10, kind=digits.kind)
    params, state, *common = step_arguments(run, shapes_of(digits), resident=True)
    jaxpr = jax.make_jaxpr(build_steps(run.chain, run.model))(((params, state),) * 3, *common)
    made = [
        (equation.primitive.name, variable.aval.shape)
        for equation in equations(jaxpr.jaxpr)
        for variable in equation.outvars
        if hasattr(variable.aval, "shape")
    ]
    rows = plan.sampler.padded_size
    assert max(math.prod(shape) for _, shape in made) == rows * 64
    noise = {shape for name, shape in made if name == "shift_left" and shape[-1:] == (128,)}
    halves = [leaf.size // 2 for leaf in jax.tree.leaves(params)]
    rows = sum(-(-size // 128) for size in halves)
    assert noise == {(rows, 128), (2 * rows, 128)}  # of all parameters, in pairs or one by one


def test_a_group_that_does_not_fit_is_halved_down_to_runs_alone(digits):
    found = together(CONFIG, digits, memory=0)
    for got, want in zip(found, alone(CONFIG, digits), strict=True):
        assert got.summary["params_sha256"] == want.summary["params_sha256"]
        assert got.summary["config"] == want.summary["config"]


@pytest.mark.parametrize("change", [{"seed": 1}, {"l2_clip_norm": 0.5}, {"eval_every": 2}])
def test_runs_that_differ_in_more_are_refused(digits, change):
    other = dataclasses.replace(CONFIG, **change)
    plans = [make_plan(config, digits.train_size) for config in (CONFIG, other)]
    runs = tuple(
        resolve(config, plan, num_classes=10, kind=digits.kind)
        for config, plan in zip((CONFIG, other), plans, strict=True)
    )
    with pytest.raises(ValueError, match="differ in the learning rate alone"):
        set_up(runs, digits, Surroundings(Devices(), Phases()))


def test_runs_of_other_noise_are_refused(digits):
    """The configs are equal; the keys are not, and would be shared."""
    plan = make_plan(CONFIG, digits.train_size)
    runs = tuple(
        resolve(CONFIG, plan, num_classes=10, kind=digits.kind, keys=Keys.of(jax.random.key(seed)))
        for seed in (0, 1)
    )
    with pytest.raises(ValueError, match=r"key differs between runs that were to advance together"):
        set_up(runs, digits, Surroundings(Devices(), Phases()))


class TestGroups:
    wide = dataclasses.replace(CONFIG, method=methods.DPSGD(), parameter_ema=None, batch_size=256)

    def of(self, configs, digits, processes=1):
        given = [(config, None) for config in configs]
        return groups.groups(given, lambda config: digits, processes=processes)

    def test_rates_of_a_seed_are_together_and_seeds_apart(self, digits):
        configs = [
            dataclasses.replace(self.wide, learning_rate=rate, seed=seed)
            for rate in (0.1, 0.5, 2.0)
            for seed in (0, 1)
        ]
        assert self.of(configs, digits) == [[0, 2, 4], [1, 3, 5]]
        assert self.of(configs, digits, processes=3) == [[0, 2], [1, 3], [4], [5]]

    @pytest.mark.parametrize(
        "changes",
        [
            {"model": "mlp"},
            {"parallel": "devices"},
            pytest.param({"model": "cnn"}, marks=pytest.mark.slow),
        ],
        ids=lambda changes: next(iter(changes.values())),
    )
    def test_what_shares_little_or_takes_more_devices_is_alone(self, digits, changes):
        assert self.of(at(dataclasses.replace(self.wide, **changes)), digits) == [[0], [1]]

    def test_other_trials_are_apart(self, digits):
        pairs = [(config, rest) for rest in (False, True) for config in at(self.wide)]
        found = groups.groups(pairs, lambda config: digits, processes=1)
        assert found == [[0, 1], [2, 3]]


@pytest.mark.slow
def test_a_comparison_trains_rates_together_and_none_twice(tmp_path, monkeypatch):
    config = dataclasses.replace(TestGroups.wide, steps=2, eval_every=2)
    together = []

    def watched(configs, *rest, **options):
        together.append([config.learning_rate for config in configs])
        return train_together(configs, *rest, **options)

    monkeypatch.setattr(trials, "train_together", watched)
    comparison = Comparison(tmp_path, seeds=1, epsilon=4.0, learning_rates=RATES)
    first = compare({"linear": config}, comparison, progress=False)
    assert together == [list(RATES)]
    records = sorted((tmp_path / "runs").glob("*.json"))
    assert len(records) == len(RATES) + 1
    (result,) = first.methods
    assert result.runs[0]["config"]["learning_rate"] == result.learning_rate
    written = [json.loads(path.read_text()) for path in records]
    assert len({tuple(record) for record in written}) == 1  # of one form, alone or together
    assert {record["epsilon"] for record in written if "epsilon" in record} != {None}
    # One of the two is lost, and is trained again, alone.
    lost = next(path for path in records if json.loads(path.read_text())["config"]["seed"] == 0)
    assert compare({"linear": config}, comparison, progress=False) == first
    lost.unlink()
    assert compare({"linear": config}, comparison, progress=False).methods[0].grid == result.grid
    assert len(together) == 1
    assert lost.is_file()


@pytest.mark.slow
def test_what_was_recorded_is_not_trained_again_and_counts_for_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # bars of steps are for terminals
    with Runner(tmp_path) as runner, tqdm(total=5, unit="run") as bar:
        pair = [Trial(each) for each in at(TestGroups.wide)]
        runner.run(pair, bar)
        assert bar.n == 2
        assert f"{pair[0].config.steps}/{pair[0].config.steps}" in capsys.readouterr().err
        other = Trial(dataclasses.replace(pair[0].config, seed=1))
        found = runner.run([*pair, other], bar)
        assert bar.n == 5
        capsys.readouterr()
        runner.run([Trial(dataclasses.replace(other.config, seed=2))])
    assert "step" not in capsys.readouterr().err
    rates = [record["config"]["learning_rate"] for record in found]
    assert rates == [*RATES, RATES[0]]
