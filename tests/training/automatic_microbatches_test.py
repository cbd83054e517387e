"""Tests of `fit` with microbatch_size="auto": which size, on which values, and when it resumes."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax.training import fit
from dpoptax.training.run import step
from tests.training.fit_test import KEY, X, Y, assert_same, linear_loss, make_plan


@pytest.fixture
def choose(monkeypatch):
    """Returns a function that sets the next choices, and returns the batch sizes tuned for."""

    def chosen(*sizes):
        left, asked = list(sizes), []

        def tune(make_step, *state, batch_size):
            asked.append(batch_size)
            make_step(left[0])(*jax.tree.map(jnp.copy, state))
            return left.pop(0)

        monkeypatch.setattr(step, "_FASTEST", {})
        monkeypatch.setattr(dpoptax, "tune_microbatch_size", tune)
        return asked

    return chosen


def run(data=(X, Y), size="auto", params=None, **options):
    options = {"plan": make_plan(), "key": KEY, "progress": False} | options
    params = np.ones(5) if params is None else params
    return fit(options.pop("loss_fn", linear_loss), params, data, microbatch_size=size, **options)


@pytest.mark.parametrize("resident", [False, True])
def test_steps_are_timed_on_zeros_without_the_noise_key(resident, choose, monkeypatch):
    choose(4)
    calls, compiled_step = [], step.compiled_step

    def recorded(*args):
        compiled = compiled_step(*args)

        def call(state, *rest):
            calls.append((jax.tree.map(jnp.copy, state), rest))
            return compiled(state, *rest)

        return call

    monkeypatch.setattr(step, "compiled_step", recorded)
    result = run((jnp.asarray(X), jnp.asarray(Y)) if resident else (X, Y))
    [((params, opt_state), (batch, mask, _))] = calls
    assert not any(np.any(x) for x in jax.tree.leaves((batch, mask)))
    assert batch.examples()[0].shape == (len(mask), 5)
    np.testing.assert_array_equal(params, np.ones(5))
    assert_same(*map(jax.random.key_data, (result.opt_state[0].key, KEY)))
    assert not np.any(jax.random.key_data(opt_state[0].key))


def test_result_is_that_of_the_chosen_size(choose):
    asked = choose(4)
    assert_same(run().params, run(size=4).params)
    assert asked == [make_plan().sampler.padded_size]


def test_equal_steps_share_a_choice_and_the_compiled_step(choose):
    asked = choose(4, 2)
    run(loss_fn=lambda *args: 1.3 * linear_loss(*args))
    compiled = step._compile.cache_info().misses
    run(loss_fn=lambda *args: 1.3 * linear_loss(*args), key=jax.random.key(9))
    assert len(asked) == 1
    assert step._compile.cache_info().misses == compiled
    run(loss_fn=lambda *args: 1.4 * linear_loss(*args))
    assert len(asked) == 2


@pytest.mark.parametrize("first", ["auto", 4, None])
def test_resumed_run_keeps_the_size_of_the_first_start(first, choose, tmp_path):
    def evaluate(params):
        if stops and len(shown) == 3:
            raise KeyboardInterrupt
        shown.append(params)
        return {}

    options = {"evaluate": evaluate, "eval_every": 1, "checkpoint_every": 1}
    choose(4)
    shown, stops = [], False
    whole = run(size=first, workdir=tmp_path / "whole", **options)
    choose(4)
    shown, stops = [], True
    with pytest.raises(KeyboardInterrupt):
        run(size=first, workdir=tmp_path / "run", **options)
    asked, stops = choose(2), False
    assert_same(run(workdir=tmp_path / "run", **options).params, whole.params)
    assert asked == []
    same, other = (4, 2) if first else (None, 4)
    run(size=same, workdir=tmp_path / "run")
    with pytest.raises(ValueError, match=f"`microbatch_size` must be {same}, .* got {other}"):
        run(size=other, workdir=tmp_path / "run")


def test_real_times_choose_a_size():
    with mock.patch.object(step, "_FASTEST", {}):
        run()
        [size] = step._FASTEST.values()
    assert 1 <= size <= make_plan().sampler.padded_size


@pytest.mark.slow
def test_whole_batch_without_compilation():
    with jax.disable_jit(), mock.patch.object(dpoptax, "tune_microbatch_size", None):
        assert run(plan=make_plan(steps=1)).steps == 1


def test_several_hosts_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="`microbatch_size` must be a number .* several hosts"):
        run()
