"""Tests that a step compiled ahead of time for other devices does not depend on the host's."""

import types

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpoptax
from dpoptax._losses import trace_loss

MESHES = {
    kind: AbstractMesh((8,), ("data",), axis_types=(kind,))
    for kind in (AxisType.Auto, AxisType.Explicit)
}


def shapes(mesh, tree, spec):
    sharding = None if mesh is None else NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def trace(mesh, params_spec):
    """Returns the traced private step for a mesh, or for one device."""
    placed = {} if mesh is None else {"mesh": mesh, "param_specs": params_spec}
    # By default, the host decides these.
    options = {"precision": "bfloat16", "microbatch_size": 16, **placed}
    tx = optax.chain(
        dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=16, key=jax.random.key(0)),
        optax.sgd(0.1),
    )
    grad_fn = dpoptax.clipped_grad(
        lambda params, x: sum(jnp.sum(jnp.tanh(x @ w)) for w in params), 1.0, **options
    )

    def step(params, state, batch):
        updates, state = tx.update(grad_fn(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params, batch = [jnp.ones((8, 256))] * 2, jnp.ones((16, 8))
    state = jax.eval_shape(tx.init, params)
    args = (
        shapes(mesh, params, params_spec),
        shapes(mesh, state, P()),
        shapes(mesh, batch, P("data")),
    )
    return jax.jit(step).trace(*args)


@pytest.mark.parametrize("mesh", [None, *MESHES.values()], ids=str)
def test_tracing_does_not_query_host_devices(mesh, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("asked for the devices of the host")

    for name in ("device_count", "devices", "local_device_count", "local_devices"):
        monkeypatch.setattr(jax, name, refuse)
    monkeypatch.setattr(jax, "default_backend", refuse)
    assert trace(mesh, P("data"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES, ids=str)
def test_noise_and_seal_gather_no_shards(kind):
    text = str(trace(MESHES[kind], P("data")).lower(lowering_platforms=("cpu",)).as_text())
    assert "stablehlo.all_gather" in text  # of the parameters, for the loss
    sealed_and_noised = text[text.index("stablehlo.reduce_scatter") :]
    assert "stablehlo.all_gather" not in sealed_and_noised


@pytest.mark.parametrize(
    ("clip", "method"),
    [(1.0, "auto"), (1.0, "vmap"), (dpoptax.per_layer_clip(1.0), "streaming")],
    ids=["auto", "vmap", "streaming"],
)
def test_sum_is_zero_where_platform_mixes_examples(clip, method, monkeypatch):
    """XLA's eigenvalues on TPU iterate a batch until its last example has converged."""

    def loss(w, x):
        return jnp.sum(jnp.linalg.eigvalsh(jnp.outer(x, x) + jnp.eye(3)) * (x @ w))

    def total():
        grad_fn = dpoptax.clipped_grad(loss, clip, method=method)
        return jax.jit(lambda w, x: grad_fn(w, x).sum)(jnp.ones((3, 3)), jnp.ones((4, 3)))

    assert jnp.any(total() != 0)
    on_tpu = types.SimpleNamespace(platform_dependent=lambda mask, tpu, default: tpu(mask))
    monkeypatch.setattr(trace_loss, "lax", on_tpu)
    assert jnp.all(total() == 0)
