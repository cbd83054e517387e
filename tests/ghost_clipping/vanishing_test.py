"""Tests that parameters with exactly zero gradients, as before batch normalization, are named."""

import functools
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import dpoptax
from tests.helpers import normal
from tests.networks import NETWORKS

pytestmark = pytest.mark.slow  # a warning, which no guarantee needs

_IMAGE, _VECTOR = normal(1, (6, 6, 2)), normal(2, (4,))
_CASES = {}


def _case(vanishing, params, example=_VECTOR):
    """Registers a loss with the parameters whose gradients vanish."""

    def register(loss):
        drawn = {k: normal(i, s) if isinstance(s, tuple) else s for i, (k, s) in enumerate(params)}
        _CASES[loss.__name__.strip("_")] = (loss, drawn, example, vanishing)
        return loss

    return register


def _dense(**extra):
    return [("w", (4, 3)), ("b", (3,)), ("scale", (3,)), ("bias", (3,)), ("out", (3, 2))]


def _head(p, x):
    return jnp.sum(jnp.sin((x * p["scale"] + p["bias"]) @ p["out"]))


@_case(["['w']"], [("w", (4, 4)), ("b", (4,)), ("stack", (2, 4, 4))])
def _in_a_scan(p, x):
    def layer(rows, kernel):
        x = rows[None] @ p["w"]
        return jnp.tanh((x - x.mean(0))[0] + rows @ kernel), None

    return jnp.sum(lax.scan(layer, x, p["stack"])[0] * p["b"])


@_case(["['scale']"], _dense())
def _compared_only(p, x):
    x = x @ p["w"] + p["b"]
    return jnp.sum(jnp.sin((jnp.where(x > p["scale"], x, -x) + p["bias"]) @ p["out"]))


@_case(["['b']", "['bias']", "['out']", "['w']"], _dense())
def _used_by_no_operation(p, x):
    return jnp.sum(jnp.sin(x[:3] * p["scale"]))


@_case([], _dense())
def _regularization_alone(p, x):
    return sum(jnp.sum(w**2) for w in p.values()) + jnp.sum(x) * 0.0


@_case([], _dense())
def _one_of_two_uses_stopped(p, x):
    x = x @ p["w"] + p["b"]
    return _head(p, lax.stop_gradient(x) + jnp.sin(x))


@_case([], [("w", (4, 3)), ("gate", (3,))])
def _chosen_by_a_condition(p, x):
    y = lax.cond(x[0] < 1e9, lambda: x @ p["w"], lambda: p["gate"] * 1.0)
    return jnp.sum(jnp.sin(y)) + jnp.sum(p["gate"] * jnp.where(x[0] < 1e9, 1.0, 0.0))


@_case([], _dense())
def _reached_another_way(p, x):
    y = x @ p["w"] + p["b"]
    z = y[None]
    return _head(p, (z - z.mean(0)) + jnp.sin(y))


_HIDDEN = [("w", (4, 3))]


@_case(["['w']"], _HIDDEN)
def _contrastive_loss_of_one(p, x):
    a, b = jnp.tanh(x[None] @ p["w"]), jnp.tanh(x[None, ::-1] @ p["w"])
    return optax.softmax_cross_entropy_with_integer_labels(a @ b.T, jnp.arange(1)).mean()


class _Linen(nn.Module):
    """Applies a layer, batch normalization, and a second layer."""

    first: nn.Module
    norm: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(jnp.tanh(self.norm(self.first(x))))


def _moved(params):
    """Returns parameters that are not zero, unlike initial biases."""
    return jax.tree.map(lambda x: x + 0.1, params)


def _linen(first, example):
    model = _Linen(first, nn.BatchNorm(use_running_average=False))
    params, stats = map(model.init(jax.random.key(0), example[None]).get, ("params", "batch_stats"))

    def loss(params, x):
        variables = {"params": params, "batch_stats": stats}
        out, _ = model.apply(variables, x[None], mutable=["batch_stats"])
        return jnp.sum(jnp.sin(out))

    return loss, _moved(params)


_OF_LINEN = ["['first']['bias']", "['first']['kernel']", "['norm']['scale']"]


# Created on demand, because compiled programs draw the parameters.
_CASES |= {
    "linen": lambda: (*_linen(nn.Dense(3), _VECTOR), _VECTOR, _OF_LINEN),
    "linen, of an image": lambda: (*_linen(nn.Conv(3, (3, 3)), _IMAGE), _IMAGE, []),
}  # fmt: skip


@functools.cache
def _made(name):
    made = _CASES[name]
    return made() if callable(made) else made


@pytest.mark.parametrize("name", _CASES)
def test_names_parameters_with_zero_gradients(name):
    loss, params, example, vanishing = _made(name)
    explanation = dpoptax.explain(loss, params, example)
    assert sorted(row.parameter for row in explanation.vanishing) == vanishing
    assert all(row.rule == "zero" for row in explanation.vanishing)
    assert bool(explanation.note) == bool(vanishing)
    assert all(path in explanation.note for path in vanishing)
    grads = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params, example))
    assert sorted(jax.tree_util.keystr(p) for p, g in grads if not np.any(g)) == vanishing


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_give_no_false_alarm(name):
    network = NETWORKS[name]
    params, batch = network.params(0), network.batch(1, 4)
    example, keys = jax.tree.map(lambda x: x[0], batch), [jax.random.key(2)] * network.keyed
    key = keys[0] if keys else None
    found = {
        row.parameter for row in dpoptax.explain(network.loss, params, example, key=key).vanishing
    }
    each = jax.vmap(lambda x: jax.grad(network.loss)(params, x, *keys))(batch)
    grads = jax.tree_util.tree_leaves_with_path(each)
    assert found <= {jax.tree_util.keystr(p) for p, g in grads if g.size and not np.any(g)}


@pytest.mark.parametrize("method", ["auto", "recompute"])
def test_clipped_grad_names_frozen_parameters_and_remedy(method):
    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ lax.stop_gradient(params["base"])) @ params["head"])

    params = {"base": jnp.ones((4, 3)), "head": jnp.ones((3, 2)), "left": jnp.ones(2)}
    step = jax.jit(dpoptax.clipped_grad(loss, 1.0, method=method))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for seed in range(3):
            step(params, normal(seed, (5, 4)))
    (warning,) = caught
    assert "only noise" in str(warning.message)
    assert re.search(r"\['base'\], \['left'\]\. .*as `frozen`", str(warning.message))
    assert "['head']" not in str(warning.message)
