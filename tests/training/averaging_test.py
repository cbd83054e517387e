"""Tests of parameter averaging: the recursion, and its use in evaluation and checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpoptax.training.run.averaging import average_params, averaged
from tests.training.training_test import run, tiny

GIVEN = {"noise_multiplier": 1.0, "epsilon": None}


def recursion(iterates, decay):
    """Returns x̄ after all iterates, in NumPy."""
    mean = np.asarray(iterates[0], np.float64)
    for t, iterate in enumerate(iterates[1:]):
        kept = min(decay, (1 + t) / (10 + t))
        mean = kept * mean + (1 - kept) * np.asarray(iterate, np.float64)
    return mean


@pytest.mark.parametrize("decay", [0.3, 0.99999])
def test_average_follows_recursion(decay):
    tx = optax.chain(optax.sgd(0.1), average_params(decay))
    params = {"w": jnp.arange(3.0)}
    state, iterates = tx.init(params), [params["w"]]
    for step in range(30):
        grads = {"w": jax.random.normal(jax.random.key(step), (3,))}
        updates, state = tx.update(grads, state, params)
        np.testing.assert_allclose(updates["w"], -0.1 * grads["w"], rtol=1e-6)
        params = optax.apply_updates(params, updates)
        iterates.append(params["w"])
    want = recursion(iterates, decay)
    np.testing.assert_allclose(averaged(params, state)["w"], want, rtol=1e-5)


def test_averages_bfloat16_parameters_in_float32():
    tx = optax.chain(optax.identity(), average_params(0.999))
    params = {"w": jnp.full(2, 256.0, jnp.bfloat16)}
    state = tx.init(params)
    for _ in range(100):  # steps of 2 are the spacing of bfloat16 here
        updates, state = tx.update({"w": jnp.full(2, 2.0, jnp.bfloat16)}, state, params)
        params = optax.apply_updates(params, updates)
    mean = optax.tree.get(state, "averaged_params")["w"]
    assert mean.dtype == jnp.float32
    assert averaged(params, state)["w"].dtype == jnp.bfloat16
    iterates = [np.full(2, min(512.0, 256.0 + 2 * t)) for t in range(101)]
    np.testing.assert_allclose(mean, recursion(iterates, 0.999), rtol=1e-5)


def test_update_requires_params():
    tx = average_params(0.9)
    with pytest.raises(ValueError, match="`params` must be given"):
        tx.update(jnp.zeros(2), tx.init(jnp.zeros(2)))


@pytest.mark.slow
def test_run_keeps_and_evaluates_average():
    config = tiny(steps=2, eval_every=2, **GIVEN)
    iterates = [run(config.replace(steps=1)).params, run(config).params]
    of_average = config.replace(parameter_ema=0.15)
    result, task = run(of_average), of_average.task()
    mean = averaged(result.params, result.opt_state)
    leaves = [jax.tree.leaves(params) for params in (task.params, *iterates)]
    for got, *each in zip(jax.tree.leaves(mean), *leaves, strict=True):
        np.testing.assert_allclose(got, recursion(each, 0.15), rtol=1e-4, atol=1e-6)
    found, of_last = task.evaluate(mean), task.evaluate(iterates[-1])
    assert result.summary["test_loss"] == pytest.approx(found["test_loss"], rel=1e-5)
    assert abs(found["test_loss"] - of_last["test_loss"]) > 1e-4


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_refuses_decay_out_of_range(decay):
    with pytest.raises(ValueError, match="must be strictly between 0 and 1"):
        average_params(decay)
