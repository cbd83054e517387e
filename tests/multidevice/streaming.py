"""Tests that streamed and two-pass sums are the same on eight devices as on one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dpoptax
from dpoptax._ghost_clipping.backward import use_sum
from dpoptax._ghost_clipping.backward.batch_devices import Slices
from dpoptax._losses.rules import FactorLayout
from dpoptax.auditing import _worst_example as adversary
from tests import helpers
from tests.helpers import floats, no_room
from tests.multidevice.problem import (
    FSDP,
    KINDS,
    assert_close,
    loss_fn,
    make_batch,
    make_mesh,
    make_params,
    put,
)

CLIP = dpoptax.per_layer_clip(0.3)
STREAM = {"clip": CLIP, "method": "streaming"}
WAYS = {"streaming": STREAM, "recompute": {"clip": 0.3, "method": "recompute"}}
EXAMPLES = 16
MASK = np.arange(EXAMPLES) % 5 != 2
KEYS = {"key": jax.random.key(3), "ids": 7 * np.arange(EXAMPLES) % 1000}


@functools.cache
def one_device(way):
    with no_room():
        grad_fn = dpoptax.clipped_grad(loss_fn, **WAYS[way])
        return jax.jit(grad_fn)(make_params(), make_batch(0, EXAMPLES), MASK, **KEYS).sum


@pytest.mark.spread(6)
@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize(
    "case",
    helpers.slow_but(
        # Gradients of 192 and fewer entries in slices; more slices take longer to compile.
        (("streaming", "data", 64), ("recompute", "data", 16)),
        tuple(itertools.product(WAYS, ("data", ("model", "data")), (2**24, 64, 16, 1))),
    ),
    ids=str,
)
def test_sum_equals_one_device(case, monkeypatch):
    way, axes, entries = case
    monkeypatch.setattr(use_sum, "_SLICE_ENTRIES", entries)
    mesh = make_mesh((2, 4), ("model", "data"), KINDS[0])
    # "model" is an axis of the parameters only, or one of the examples as well.
    specs = FSDP | {"dense": P(("data", "model")), "kernel": P(None, None, None, "model")}
    params, batch = put(make_params(), mesh, specs), put(make_batch(0, EXAMPLES), mesh, P(axes))
    layout = {"mesh": mesh, "axis_name": axes, "param_specs": specs}
    grad_fn = dpoptax.clipped_grad(loss_fn, **WAYS[way], **layout)
    total = jax.jit(grad_fn)(params, batch, put(MASK, mesh, P(axes)), **KEYS).sum
    assert_close(total, one_device(way))
    for name, leaf in total.items():
        assert leaf.sharding.is_equivalent_to(params[name].sharding, leaf.ndim), name


@pytest.mark.usefixtures("no_room")
def test_overlapping_slices_equal_one_device(monkeypatch):
    def squared_error(weights, example):
        return 0.5 * jnp.sum((example[0] @ weights - example[1]) ** 2)

    rng, spec = np.random.default_rng(4), P(None, "data")
    weights, x, y = (floats(rng.normal(size=s)) for s in ((4, 24), (EXAMPLES, 4), (EXAMPLES, 24)))
    expected = dpoptax.clipped_grad(squared_error, **STREAM)(weights, (x, y), MASK).sum
    # Each device has three columns, which are summed in slices of two.
    monkeypatch.setattr(use_sum, "_SLICE_ENTRIES", weights.size // 2)
    layout = FactorLayout((4, 24), (), (0,), (1,))
    assert Slices.even(layout, 1, shards=8, count=2).starts == [0, 1]
    mesh = make_mesh((8,), ("data",), KINDS[0])
    grad_fn = dpoptax.clipped_grad(squared_error, **STREAM, mesh=mesh, param_specs=spec)
    args = put(weights, mesh, spec), put((x, y), mesh, P("data")), MASK
    assert_close(jax.jit(grad_fn)(*args).sum, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("way", WAYS)
def test_sum_on_explicit_axes_equals_one_device(way):
    mesh = make_mesh((2, 4), ("model", "data"), KINDS[1])
    specs = FSDP | {"kernel": P(None, None, None, ("model", "data"))}
    grad_fn = dpoptax.clipped_grad(loss_fn, **WAYS[way], mesh=mesh)
    with jax.set_mesh(mesh):
        params, batch = (
            put(make_params(), mesh, specs),
            put(make_batch(0, EXAMPLES), mesh, P("data")),
        )
        total = jax.jit(grad_fn)(params, batch, put(MASK, mesh, P("data")), **KEYS).sum
    assert_close(total, one_device(way))
    for name, leaf in total.items():
        assert jax.typeof(leaf).sharding == jax.typeof(params[name]).sharding, name


@pytest.mark.parametrize(
    ("way", "devices"), [*((way, 8) for way in WAYS), ("auto", 8), ("auto", 2)]
)
def test_example_moves_sum_by_at_most_the_bound(way, devices):
    """Checks terms that cancel in the gradient, next to other examples; see adversary_test.py."""
    mesh = make_mesh((devices,), ("data",), KINDS[0])
    params = floats(np.zeros((4, 4)))
    grad_fn = dpoptax.clipped_grad(
        jax.checkpoint(lambda w, example: 0.5 * jnp.sum((example[0] @ w - example[1]) ** 2)),
        **WAYS.get(way, {"clip": 0.3}),
        mesh=mesh,
    )
    total = jax.jit(lambda batch, mask: grad_fn(params, batch, mask).sum)
    others = tuple(np.random.default_rng(1).normal(size=(2, 16, 16, 4)).astype(np.float32))
    found, _ = adversary.climb(total, others, seed=0, starts=2 * adversary.FAMILIES, steps=5)
    assert found <= CLIP.sensitivity


def test_refuses_uneven_batches_and_microbatches_on_a_mesh():
    mesh = make_mesh((8,), ("data",), KINDS[0])
    with pytest.raises(ValueError, match="must split evenly over the 8 devices"):
        dpoptax.clipped_grad(loss_fn, **STREAM, mesh=mesh)(make_params(), make_batch(0, 12))
    with pytest.raises(ValueError, match="must be `None` for .*on a mesh, got 2"):
        dpoptax.clipped_grad(loss_fn, **STREAM, mesh=mesh, microbatch_size=2)
