"""Tests that saved parameters of any library are read back, and nothing secret is saved."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax.training import load_params, save_params


class Layer(NamedTuple):
    weights: jax.Array
    biases: list[jax.Array]


TREES = {
    "array": jnp.arange(6.0).reshape(2, 3),
    "dict": {"b": jnp.ones(2), "a": {"c/d": np.arange(3), "e": jnp.ones((), jnp.bfloat16)}},
    "sequences": (jnp.zeros(2), [jnp.ones(1), {"x": jnp.ones(3)}], Layer(jnp.ones(2), [])),
    "many items": [jnp.full(i, i) for i in range(12)],
    "module": eqx.filter(eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0)), eqx.is_array),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_tree_is_read_back(tree, tmp_path):
    path = tmp_path / "params.msgpack"
    save_params(str(path), tree)
    found = load_params(path, jax.tree.map(jnp.zeros_like, tree))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for one, other in zip(*map(jax.tree.leaves, (found, tree)), strict=True):
        assert isinstance(one, np.ndarray)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    save_params(tmp_path / "again.msgpack", load_params(path))
    assert (tmp_path / "again.msgpack").read_bytes() == path.read_bytes()


def test_other_parameters_are_refused(tmp_path):
    path = tmp_path / "params.msgpack"
    save_params(path, TREES["dict"])
    for like in ({"b": jnp.ones(2)}, {**TREES["dict"], "b": jnp.ones(3)}, jnp.ones(2)):
        with pytest.raises(ValueError, match="`like` must have the arrays and shapes"):
            load_params(path, like)
    with pytest.raises(ValueError, match=r"params.msgpack, \{'b': \(.*got \{'b': \(7,\)\}"):
        load_params(path, {**TREES["dict"], "b": jnp.ones(7)})


def test_refuses_secrets_and_objects(tmp_path):
    path = tmp_path / "params.msgpack"
    noise = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=2, key=jax.random.key(0))
    state = optax.chain(noise, optax.adam(0.1)).init(jnp.zeros(2))
    for tree, place in [
        (state, "0.key"),
        ({"a": {"b": "text"}}, "a.b"),
        ({"a": np.array([{}])}, "a"),
    ]:
        with pytest.raises(TypeError, match=f"got .* at '{place}'"):
            save_params(path, tree)
        assert not path.exists()
