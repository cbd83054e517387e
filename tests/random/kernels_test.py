"""Tests that the number of compiled programs depends on shapes, not on the number of layers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import dpoptax
from dpoptax._random.tree_noise import add_noise
from dpoptax._support.xla import unstack
from tests.helpers import equations

pytestmark = pytest.mark.optimized


def _programs(function, *args):
    """Returns the distinct programs of XLA's fusions."""
    text = jax.jit(function).lower(*args).compile().as_text()
    fusions = re.findall(r"^%?fused_computation\S* \(.*?^}", text, re.MULTILINE | re.DOTALL)
    assert fusions
    return {re.sub(r"metadata=\{.*?\}|[%.][\w.]*", "", body) for body in fusions}


def _step_programs(layers):
    """Returns the programs of a private step."""

    def loss_fn(params, x):
        for kernel, bias in params:
            x = jnp.tanh(x @ kernel + bias)
        return jnp.sum(x**2)

    params = [(jnp.ones((16, 16)), jnp.ones(16)) for _ in range(layers)]
    grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0))
    key = jax.random.key(0)
    noise = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=8, key=key)
    tx = optax.chain(noise, optax.sgd(0.1))

    def step(params, state, batch):
        grads = grad_fn(dpoptax.gradient_points(state, params), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return _programs(step, params, tx.init(params), jnp.ones((8, 4, 16)))


@pytest.mark.slow
def test_more_layers_add_hardly_any_programs():
    few, many = len(_step_programs(10)), len(_step_programs(18))
    assert many - few < 2, f"10 layers need {few} programs, 18 need {many}"


def test_large_leaves_of_a_shape_share_a_program():
    def noisy(tree, key):
        return add_noise(tree, 1.0, key)

    few, many = (_programs(noisy, [jnp.zeros((512, 1024))] * n, jax.random.key(0)) for n in (2, 4))
    assert few == many


def test_more_leaves_add_few_operations_on_several_devices():
    """The draws of alike leaves are one loop, since each would be compiled separately."""
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())

    def operations(leaves):
        bias = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=replicated)
        draw = jax.make_jaxpr(lambda tree, key: add_noise(tree, 1.0, key))
        return len(list(equations(draw([bias] * leaves, jax.random.key(0)).jaxpr)))

    # The noise is added to each leaf, and a draw takes more than 200 operations.
    assert operations(20) - operations(10) < 10 * 20


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.vmap(f, 1)])
def test_unstack_returns_parts_of_arrays(transform):
    def parts(x):
        return unstack(x, x[:3] > 0, x[:1])

    x = jax.random.normal(jax.random.key(0), (5, 2, 3))
    found = transform(parts)(x)
    assert [len(x) for x in found] == [5, 3, 1]
    for parts_of_one, stack in zip(found, (x, x[:3] > 0, x[:1]), strict=True):
        for part, want in zip(parts_of_one, stack, strict=True):
            np.testing.assert_array_equal(part, want)
