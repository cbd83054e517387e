"""Tests from the command to the first step: phases and compiled programs."""

import time

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import dpoptax
from dpoptax import auditing, sampling
from dpoptax.training.run import announcer


def test_reports_slow_phases_once(monkeypatch):
    monkeypatch.setattr(announcer, "PATIENCE", 0.05)
    lines = []
    measured = announcer.Announcer(lines.append)
    for _ in range(2):
        with measured("data"):
            time.sleep(0.2)
    with measured("accounting"):
        pass
    time.sleep(0.1)
    assert lines == ["loading data ..."]


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
