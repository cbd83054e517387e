"""`tune_microbatch_size` returns the smallest of the fast candidates; the clock is replaced."""

import jax
import jax.numpy as jnp
import pytest

from dpoptax import _tuning, tune_microbatch_size


@pytest.fixture
def clock(monkeypatch):
    """Time passes only when a step says so."""
    now = [0.0]
    monkeypatch.setattr(_tuning.time, "perf_counter", lambda: now[0])
    return now


def steps(clock, seconds, calls=None):
    def make_step(size):
        def step(x):
            if isinstance(seconds[size], Exception):
                raise seconds[size]
            clock[0] += seconds[size]
            if calls is not None:
                calls.append(size)
            return x

        return step

    return make_step


def test_returns_the_fastest(clock):
    make_step = steps(clock, {1: 3.0, 4: 1.0, 16: 2.0})
    assert tune_microbatch_size(make_step, 0.0, batch_size=16, candidates=[1, 4, 16]) == 4


def test_of_equally_fast_ones_the_smallest(clock):
    make_step = steps(clock, {1: 1.1, 4: 1.04, 16: 1.0, 64: 1.02})
    assert tune_microbatch_size(make_step, 0.0, batch_size=64, candidates=[1, 4, 16, 64]) == 4


def test_slow_candidates_drop_out(clock):
    calls = []
    make_step = steps(clock, {4: 1.0, 16: 9.0}, calls)
    assert tune_microbatch_size(make_step, 0.0, batch_size=16, rounds=3) == 4
    assert calls.count(4) == 4
    assert calls.count(16) == 2


def test_out_of_memory_is_left_out(clock):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    assert tune_microbatch_size(steps(clock, {16: error, 4: 1.0}), 0.0, batch_size=16) == 4
    with pytest.raises(MemoryError, match="16, 4"):
        tune_microbatch_size(steps(clock, {16: error, 4: error}), 0.0, batch_size=16)
    other = jax.errors.JaxRuntimeError("INTERNAL")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        tune_microbatch_size(steps(clock, {16: other, 4: 1.0}), 0.0, batch_size=16)


def test_donated_arguments_survive():
    x, key = jnp.ones(4), jax.random.key(0)
    step = jax.jit(lambda x, key: (x + 1, key), donate_argnums=(0, 1))
    assert tune_microbatch_size(lambda size: step, x, key, batch_size=4) == 4
    assert not x.is_deleted()
    assert not key.is_deleted()


@pytest.mark.parametrize(
    ("batch_size", "expected"),
    [(1, [1]), (8, [8]), (16, [16, 4]), (256, [256, 64, 16, 4]), (96, [96, 24, 6])],
)
def test_default_candidates(batch_size, expected):
    assert _tuning._default_candidates(batch_size) == expected


@pytest.mark.parametrize("candidates", [[], [0], [17]])
def test_rejects_candidates(candidates):
    with pytest.raises(ValueError, match="batch_size=16"):
        tune_microbatch_size(lambda size: None, batch_size=16, candidates=candidates)


def test_rejects_rounds():
    with pytest.raises(ValueError, match="rounds=0"):
        tune_microbatch_size(lambda size: None, batch_size=16, rounds=0)
