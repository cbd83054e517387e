"""Tests that every function with a key accepts the same kinds and reports the line to write."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax import auditing
from experiments.studies.geodp_errors import random_mean_gradient
from tests.helpers import slow_but

KEY = jax.random.key(3)
CLIP = dpoptax.l2_clip(1.0)
RELEASE = {"noise_multiplier": 1.0, "batch_size": 4}
POINTS = dpoptax.gradient_points((), jnp.zeros(2))


def _random_loss(w, x, key):
    return jnp.vdot(w, x) * jax.random.normal(key)


def _game():
    tx = dpoptax.gaussian_noise(**RELEASE, key=KEY)
    sampler = dpoptax.sampling.PoissonSampler(dataset_size=4, batch_size=4, seed=0)
    return auditing.canary_gradient(tx, CLIP, {"w": jnp.zeros(2)}, sampler)


# Each result depends on the key or requires one.
TAKERS = {
    "gaussian_noise": lambda key: _started(dpoptax.gaussian_noise(**RELEASE, key=key)),
    "clip_and_noise": lambda key: _started(dpoptax.clip_and_noise(CLIP, **RELEASE, key=key)),
    "adaptive_gaussian_noise": lambda key: _started(
        dpoptax.contrib.adaptive_gaussian_noise(
            dpoptax.contrib.adaptive_clip(1.0), **RELEASE, key=key
        )
    ),
    "correlated_noise": lambda key: _started(
        dpoptax.correlated_noise(dpoptax.matrix.BandedToeplitz((1.0,)), **RELEASE, key=key)
    ),
    "geodp": lambda key: _started(dpoptax.contrib.geodp(0.1, **RELEASE, key=key)),
    "grad_fn": lambda key: (
        dpoptax.clipped_grad(_random_loss, CLIP)(
            POINTS, jnp.ones((3, 2)), key=key, ids=np.arange(3)
        ).sum
    ),
    "explain": lambda key: str(
        dpoptax.explain(_random_loss, jnp.zeros(2), jnp.ones(2), key=key)
    ).encode(),
    "audit": lambda key: auditing.audit(_game(), key=key, trials=64, delta=1e-2).attack.encode(),
    "random_mean_gradient": lambda key: random_mean_gradient(5, norm=1.0, key=key),
}


def _started(tx):
    return jnp.stack(
        [
            jax.random.key_data(leaf)
            for leaf in jax.tree.leaves(tx.init(jnp.zeros(2)))
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        ]
    )


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize(
    "whole",
    [0, True, np.int64(7), np.uint32(7), np.asarray(7), jnp.int32(7), jnp.uint32(7)],
    ids=str,
)
def test_refuses_integer_key_and_names_remedy(name, whole):
    line = r"`dpoptax\.random_key_from_os\(\)`.*`jax\.random\.key\("
    with pytest.raises(TypeError, match=line):
        TAKERS[name](whole)


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (jax.random.split(KEY, 3), r"`keys\[0\]`"),
        (np.zeros(3, np.uint32), r"single key, got an array of shape \(3,\) and dtype uint32"),
        (
            np.zeros((2, 2), np.uint32),
            r"single key, got an array of shape \(2, 2\) and dtype uint32",
        ),
        (np.zeros(2, np.int32), r"single key, got an array of shape \(2,\) and dtype int32"),
        (1.0, r"single key, got 1\.0"),
        ("seed", r"single key, got 'seed'"),
    ],
)
def test_refuses_other_values_as_key(name, wrong, message):
    with pytest.raises(TypeError, match=message):
        TAKERS[name](wrong)


# An audit takes seconds to compile, and checks keys like the others.
@pytest.mark.parametrize("name", slow_but(TAKERS.keys() - {"audit"}, TAKERS))
def test_legacy_keys_equal_typed_keys(name):
    want = TAKERS[name](KEY)
    for legacy in (jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))):
        np.testing.assert_array_equal(TAKERS[name](legacy), want)


def test_error_does_not_show_the_given_seed():
    with pytest.raises(TypeError, match=r"got an integer\. .*`jax\.random\.key\(seed\)`"):
        dpoptax.gaussian_noise(**RELEASE, key=12)


def test_refuses_traced_number_but_not_traced_key():
    noise = lambda key: dpoptax.gaussian_noise(**RELEASE, key=key).init(jnp.zeros(2)).count  # noqa: E731
    assert jax.jit(noise)(KEY) == 0
    assert jax.jit(noise)(jax.random.PRNGKey(0)) == 0
    with pytest.raises(TypeError, match="random_key_from_os"):
        jax.jit(noise)(7)


def test_audit_accepts_typed_keys_of_other_generators():
    key = jax.random.key(0, impl="rbg")
    TAKERS["audit"](key)
    with pytest.raises(TypeError, match=r"wrap_key_data\(data, impl="):
        TAKERS["audit"](jax.random.key_data(key))


def test_noise_refuses_rbg_keys():
    for name in ("gaussian_noise", "adaptive_gaussian_noise", "correlated_noise", "geodp"):
        with pytest.raises(TypeError, match=r"'rbg'\. .*key\(seed, impl='threefry2x32'\)"):
            TAKERS[name](jax.random.key(0, impl="rbg"))
