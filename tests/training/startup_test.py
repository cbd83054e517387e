"""Tests from the command to the first step: phases and compiled programs."""

import dataclasses
import time

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import dpoptax
from dpoptax import auditing, sampling
from dpoptax.training import CNN, loop
from dpoptax.training.classifier import initial_variables
from dpoptax.training.run import announcer
from dpoptax.training.run.announcer import Announcer
from dpoptax.training.run.program import bounds
from dpoptax.training.run.training_loop import evaluated_steps
from tests.runs import CONFIG


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr("dpoptax.training.run.figures.plot_run", lambda *_: None)


class TestAnnouncer:
    def test_reports_slow_phases_once(self, monkeypatch):
        monkeypatch.setattr(announcer, "PATIENCE", 0.05)
        lines = []
        measured = Announcer(lines.append)
        for _ in range(2):
            with measured("data"):
                time.sleep(0.2)
        with measured("accounting"):
            pass
        time.sleep(0.1)
        assert lines == ["loading data ..."]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 5000}, "^`batch_size` must be at most .* got 5000"),
        ({"model": "lineer"}, "^`model`"),
        ({"optimizer": "sdg"}, "^`optimizer`"),
        ({"sampling": "shuffled"}, "`sampling` must not be 'shuffled'"),
    ],
)
def test_errors_follow_the_order_of_the_run(tmp_path, changes, message):
    config = CONFIG.replace(**changes)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            loop.train_and_evaluate(config, tmp_path / "run", progress=False)


@pytest.mark.slow
def test_jitted_initialization_matches_eager():
    model = CNN(10)
    inputs, key = np.ones((8, 8, 1), np.float32), jax.random.key(3)
    one = initial_variables(model, inputs, key)
    with jax.disable_jit():
        eager = initial_variables(model, inputs, key)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(eager), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-7)


def test_shown_epsilon_is_never_below_spent_epsilon():
    task = CONFIG.task(noise_multiplier=6.0, steps=12, accountant="pld")
    shown = bounds(task.plan, evaluated_steps(1, 12))
    assert list(shown) == list(range(13))
    spent = {n: dataclasses.replace(task.plan, steps=n).epsilon for n in (1, 5, 11, 12)}
    assert all(shown[n] >= spent[n] for n in spent)
    assert shown[12] == spent[12]


@pytest.fixture
def cache(tmp_path):
    """An empty compilation cache for all programs."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX fixes the folder at first use
        if values is settings:
            yield tmp_path


@pytest.mark.parametrize("attack", ["many runs", pytest.param("one run", marks=pytest.mark.slow)])
def test_cached_programs_of_audit_hold_no_data_and_no_key(attack, cache):
    """Data and keys are arguments, not constants, so other runs share the same programs."""
    clip, sampler = dpoptax.l2_clip(1.0), sampling.PoissonSampler(64, 64, seed=0)
    grad_fn = dpoptax.clipped_grad(auditing.linear_loss, clip)

    def kept(seed):
        key = jax.random.key(seed)
        tx = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=64, key=key)
        data = jax.random.normal(key, (64, 3))
        game = auditing.Game(tx, grad_fn, jax.numpy.zeros(3), data, sampler)
        if attack == "many runs":
            auditing.audit(game, key=jax.random.key(1), trials=64, claimed_epsilon=1.0)
        else:
            for threat_model in ("white-box", "last-iterate"):
                auditing.audit_one_run(
                    game,
                    key=jax.random.key(1),
                    threat_model=threat_model,
                    claimed_epsilon=1.0,
                )
        return {file.name for file in cache.glob("*-cache")}

    first = kept(0)
    assert first
    assert kept(1) == first
