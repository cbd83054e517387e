"""Tests that the benchmark suite runs and reports, without checking times."""

import json
from functools import partial

import jax
import numpy as np
import optax
import pytest

import dpoptax
from benchmarks import contenders, report
from benchmarks.__main__ import Config, main
from benchmarks.contenders import Setting, make_step, params_and_state
from benchmarks.models import MODELS
from benchmarks.networks import NETWORKS
from benchmarks.timing import Budget, Result, _set_ratios, measure, pythons
from benchmarks.variants import ALGORITHMS, Cell, Variant

pytestmark = pytest.mark.slow

ONCE = Budget(rounds=1, seconds_per_turn=0.0)


@pytest.mark.slow
def test_small_run_writes_its_report(tmp_path):
    config = Config(
        models=("mlp",),
        batch_sizes=(4,),
        methods=("dp-sgd",),
        libraries=("non-private", "optax.contrib"),
        sweeps=(),
        budget=ONCE,
        output=tmp_path,
    )
    markdown = main(config)
    saved = json.loads((tmp_path / "results.json").read_text())
    names = [row["variant"]["library"] for row in saved["results"]]
    assert names == ["non-private"] * 3 + ["optax.contrib"]  # 4, 2 and 1 at once
    assert all(row["error"] is None for row in saved["results"])
    assert all(row["ratio"] > 0 and row["peak_mb"] > 0 for row in saved["results"])
    assert "| optax.contrib " in markdown
    assert (tmp_path / "results.md").read_text() == markdown
    assert (tmp_path / "ratios.png").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`loss_fn` closes over")  # the frozen weights of LoRA
@pytest.mark.parametrize("name", NETWORKS)
def test_no_network_falls_back(name):
    problem = NETWORKS[name]()
    example = jax.tree.map(lambda x: x[0], problem.make_batch(1))
    assert not dpoptax.explain(problem.loss_fn, problem.params, example).fallbacks


def one_step(library, algorithm="dp-sgd", *, noise=True, microbatch_size=2):
    problem = MODELS["mlp"](width=3)
    setting = Setting(4, microbatch_size, algorithm, noise, points=2)
    step, opt_state = make_step(library, problem, setting)
    results = step(problem.params, opt_state, problem.make_batch(4))
    params, _ = params_and_state(results, algorithm)
    return params


def assert_close(actual, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), actual, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")  # Raised by jax_privacy.
def test_private_contenders_agree_without_noise(monkeypatch):
    monkeypatch.setattr(contenders, "NOISE_MULTIPLIER", 0.0)
    expected = one_step("optax.contrib")
    initial = MODELS["mlp"](width=3).params
    assert 0 < optax.tree.norm(optax.tree.sub(expected, initial)) <= contenders.LEARNING_RATE
    for library in ("jax_privacy", "dpoptax vmap", "dpoptax auto"):
        assert_close(one_step(library), expected)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_clipped_grad_methods_agree_and_noise_is_optional(algorithm):
    noisy, quiet = (one_step("dpoptax auto", algorithm, noise=noise) for noise in (True, False))
    assert_close(quiet, one_step("dpoptax vmap", algorithm, noise=False))
    assert optax.tree.norm(optax.tree.sub(noisy, quiet)) > 0.01


def test_accumulated_non_private_step_equals_whole_step():
    whole = one_step("non-private", microbatch_size=None)
    assert_close(one_step("non-private", microbatch_size=2), whole)


def test_reports_missing_peers_and_memory():
    cell = Cell("mlp", 4, {"width": 3})
    reason = "torch: could not be installed"
    greedy = Budget(rounds=1, seconds_per_turn=0.0, memory_limit_gb=0.01)
    wanted = [Variant("non-private"), Variant("Opacus ghost")]
    short, missing = measure(cell, wanted, pythons(None, reason), greedy, lambda text: None)
    assert missing.error == reason
    assert short.error
    table = report.to_markdown([short, missing], {})
    assert f"failed: {reason}" in table
    assert "1.00" not in table


def test_ratios_use_fastest_baseline_of_each_round():
    cell = Cell("mlp", 4)

    def result(variant, *rounds):
        return Result(cell, variant, rounds=[list(steps) for steps in rounds], peak_mb=100.0)

    whole = result(Variant("non-private"), (4.0,), (40.0,), (4.0,))
    small = result(Variant("non-private", microbatch_size=2), (2.0,), (20.0,), (2.0,))
    private = result(Variant("dpoptax auto"), (3.0,), (30.0,), (3.0, 3.0))
    torch = result(Variant("torch non-private"), (1.0,), (1.0,), (1.0,))
    _set_ratios([whole, small, private, torch])
    assert private.ratio == pytest.approx(1.5)
    assert private.baseline == "non-private, 2 at once"
    assert private.interval == pytest.approx((1.5, 1.5))
    assert (whole.ratio, small.ratio, torch.ratio) == pytest.approx((2.0, 1.0, 1.0))
    assert torch.baseline == "torch non-private"
