"""Tests that `tune_microbatch_size` returns the smallest of the fast candidates on a fake clock."""

import math

import jax
import jax.numpy as jnp
import pytest

from dpoptax import tune_microbatch_size
from dpoptax._clipped_grad import microbatch_tuning


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock with one that only steps advance."""
    now = [0.0]
    monkeypatch.setattr(microbatch_tuning.time, "perf_counter", lambda: now[0])
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


def test_returns_smallest_of_equally_fast_candidates(clock):
    make_step = steps(clock, {1: 1.1, 4: 1.04, 16: 1.0, 64: 1.02})
    assert tune_microbatch_size(make_step, 0.0, batch_size=64, candidates=[1, 4, 16, 64]) == 4


def test_candidate_slow_twice_is_dropped(clock):
    calls = []
    make_step = steps(clock, {4: 1.0, 16: 9.0}, calls)
    options = {"batch_size": 16, "candidates": [4, 16], "rounds": 4}
    assert tune_microbatch_size(make_step, 0.0, **options) == 4
    assert calls.count(4) == 5
    assert calls.count(16) == 3


def test_candidate_slow_once_is_kept(clock):
    def make_step(size):
        seconds = iter([9.0, 9.0, 1.0, 1.0] if size == 16 else [2.0] * 4)

        def step(_):
            clock[0] += next(seconds)
            return 0.0

        return step

    options = {"batch_size": 16, "candidates": [4, 16], "rounds": 3}
    assert tune_microbatch_size(make_step, 0.0, **options) == 16


@pytest.mark.parametrize(
    ("batch_size", "fast", "tried"),
    [
        (16, 8, {2, 4, 8, 16}),
        (16, 16, {4, 8, 16}),
        (256, 128, {4, 16, 32, 64, 128, 256}),
        (100, 13, {4, 7, 14, 25, 100}),
        (1, 1, {1}),
    ],
)
def test_default_search_also_tries_neighbors_of_the_best(batch_size, fast, tried, clock):
    """A step of size m takes 1 + |log(m / fast)| seconds."""
    calls = []
    seconds = {size: 1 + abs(math.log(size / fast)) for size in tried}
    make_step = steps(clock, seconds, calls)
    best = min(tried, key=seconds.__getitem__)
    assert tune_microbatch_size(make_step, 0.0, batch_size=batch_size, rounds=1) == best
    assert set(calls) == tried


def test_skips_candidate_out_of_memory(clock):
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    seconds = {16: error, 8: error, 4: 1.0, 2: 2.0}
    assert tune_microbatch_size(steps(clock, seconds), 0.0, batch_size=16) == 4

    def compiled(size):
        if size > 4:
            raise error
        return steps(clock, seconds)(size)

    assert tune_microbatch_size(compiled, 0.0, batch_size=16) == 4
    with pytest.raises(MemoryError, match="16, 4"):
        tune_microbatch_size(steps(clock, {16: error, 4: error}), 0.0, batch_size=16)
    other = jax.errors.JaxRuntimeError("INTERNAL")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        tune_microbatch_size(steps(clock, {16: other, 4: 1.0}), 0.0, batch_size=16)


def test_donated_arguments_survive():
    x, key = jnp.ones(4), jax.random.key(0)
    step = jax.jit(lambda x, key: (x + 1, key), donate_argnums=(0, 1))
    assert tune_microbatch_size(lambda size: step, x, key, batch_size=4, candidates=[4]) == 4
    assert not x.is_deleted()
    assert not key.is_deleted()


def test_step_outputs_feed_next_step(clock):
    """Outputs are matched to arguments by structure, in any order and across candidates."""
    seen = []

    def make_step(size):
        def step(params, state, batch):
            clock[0] += 1.0
            seen.append((params.tolist(), state["count"].tolist(), batch.shape))
            return {"count": state["count"] + 1}, params + 1

        return step

    args = jnp.zeros([]), {"count": jnp.zeros([])}, jnp.zeros(4)
    assert tune_microbatch_size(make_step, *args, batch_size=4, candidates=[2, 4], rounds=1) == 2
    assert seen == [(t, t, (4,)) for t in range(4)]


def test_fast_steps_are_repeated_within_a_round(clock):
    calls = []
    make_step = steps(clock, {4: 0.02, 16: 0.001}, calls)
    assert tune_microbatch_size(make_step, 0.0, batch_size=16, candidates=[4, 16], rounds=1) == 16
    assert (calls.count(4), calls.count(16)) == (2 * 3, 2 * 20)


@pytest.mark.parametrize("candidates", [[], [0], [17]])
def test_refuses_bad_candidates(candidates):
    with pytest.raises(ValueError, match="batch_size=16"):
        tune_microbatch_size(lambda size: None, batch_size=16, candidates=candidates)


def test_refuses_zero_rounds():
    with pytest.raises(ValueError, match="`rounds` must .* got 0"):
        tune_microbatch_size(lambda size: None, batch_size=16, rounds=0)
