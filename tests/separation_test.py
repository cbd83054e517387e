"""Losses that would mix the examples they are mapped over are refused; others are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import dpoptax

CLIP = dpoptax.l2_clip(1.0)
POINTS = dpoptax.gradient_points((), jnp.zeros(3))
BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


@jax.custom_batching.custom_vmap
def _centred(x):
    return x


@_centred.def_vmap
def _(size, batched, x):
    del size, batched
    return x - jnp.mean(x, axis=0), True


def _outside(x, method):
    found = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda y: y, found, jax.lax.stop_gradient(x), vmap_method=method)


def _effect(x):
    return io_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _in_a_scan(x):
    return jax.lax.scan(lambda total, row: (total + _centred(row), None), x, x[None])[0]


MIXING = {
    "a vmap rule": (lambda w, x: w @ _centred(x), "vmap rule of its own"),
    "a vmap rule in a scan": (lambda w, x: w @ _in_a_scan(x), "vmap rule of its own"),
    "a callback": (lambda w, x: w @ _outside(x, "broadcast_all"), "whole batch"),
    "an effect": (lambda w, x: w @ _effect(x), "whole batch"),
    "a collective": (lambda w, x: w @ (x - jax.lax.pmean(x, "runs")), "over the axis 'runs'"),
    "a place": (lambda w, x: w @ x * jax.lax.axis_index("runs"), "over the axis 'runs'"),
}


def _moved(method, loss, **random):
    """The sum with an axis "runs" around, as `vmap` and `shard_map` make."""
    grad_fn = dpoptax.clipped_grad(loss, CLIP, method=method)
    sums = lambda batch: grad_fn(POINTS, batch, **random).sum  # noqa: E731
    return jax.vmap(sums, axis_name="runs")(BATCH[None])[0]


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("name", MIXING)
def test_what_may_mix_examples_is_refused(name, method):
    loss, message = MIXING[name]
    with pytest.raises(TypeError, match=message):
        _moved(method, loss)


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_random_numbers_by_place_in_the_batch_are_refused(impl, method):
    loss = lambda w, x, key: w @ (x * jax.random.normal(key, (3,)))  # noqa: E731
    random = {"key": jax.random.key(0, impl=impl), "ids": jnp.arange(4)}
    with pytest.raises(TypeError, match="generator 'rbg'.*threefry2x32"):
        _moved(method, loss, **random)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_what_is_the_same_for_all_examples_or_one_by_one_is_not(method):
    mask = lambda: jax.random.bernoulli(jax.random.key(1, impl="rbg"), shape=(3,))  # noqa: E731

    def loss(w, x):
        jax.debug.callback(lambda y: None, x)
        same = _centred(jnp.ones(3))
        return (w * same) @ jnp.where(mask(), _outside(x, "sequential"), x)

    plain = lambda w, x: w @ x  # noqa: E731
    np.testing.assert_allclose(_moved(method, loss), _moved(method, plain), rtol=1e-6)
