"""Tests that shrinkage of sharded kernels equals that on one device, and stays sharded."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dpoptax
from tests.helpers import floats
from tests.multidevice.problem import KINDS, make_mesh, put

METHODS = {
    "singular values": lambda: dpoptax.contrib.singular_value_shrinkage(1.0, decay=0.5),
    "James-Stein": lambda: dpoptax.contrib.james_stein(1.0, per_leaf=False),
    "shrunk Muon": lambda: dpoptax.contrib.scale_by_shrunk_muon(1.0),
}


SPECS = (P("data"), P(None, "data"))


@pytest.mark.spread(4)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec"), list(itertools.product(KINDS, SPECS)), ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_sharded_kernel_shrinks_like_whole_one(name, kind, spec):
    tx = METHODS[name]()
    g = {
        "w": floats(3.0 * np.random.default_rng(0).normal(size=(16, 24))),
        "b": floats(np.arange(8)),
    }
    want, _ = jax.jit(tx.update)(g, tx.init(g), g)
    mesh = make_mesh((8,), ("data",), kind)
    with jax.set_mesh(mesh):
        split = {"w": put(g["w"], mesh, spec), "b": put(g["b"], mesh, P("data"))}
        out, _ = jax.jit(tx.update)(split, tx.init(split), split)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), out, want)
    if kind == AxisType.Explicit:
        assert out["w"].sharding.is_equivalent_to(split["w"].sharding, 2)
