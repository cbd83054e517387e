"""Checks of private fine-tuning with tunix on eight virtual devices; see `tunix_test.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix", reason="tunix is not installed: see docs/developers/testing.md")

import qwix
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tunix.models.gemma3 import model as gemma3

import dpoptax
from dpoptax.integrations import tunix as private
from tests.integrations.problem import (
    make_model,
    make_plan,
    make_rows,
    make_trainer,
    trained,
)
from tests.multidevice.problem import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SHAPES = {"data": ((8,), ("fsdp",)), "data and tensors": ((4, 2), ("fsdp", "tp"))}


def make_mesh(name):
    shape, axes = SHAPES[name]
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))


def make_devices_plan():
    sampler = dpoptax.sampling.PoissonSampler(
        dataset_size=100, batch_size=10, multiple_of=8, seed=5
    )
    return dpoptax.PrivacyPlan(steps=3, sampler=sampler, noise_multiplier=1.0)


def shard(model, mesh):
    """Shards the rows of each array, if they split evenly."""
    size = mesh.shape["fsdp"]

    def place(x):
        if not hasattr(x, "shape"):
            return x
        even = x.ndim and x.shape[0] % size == 0
        return jax.device_put(x, NamedSharding(mesh, P("fsdp") if even else P()))

    nnx.update(model, jax.tree.map(place, nnx.state(model)))
    return model


def train(plan, model, mesh=None, **options):
    def run():
        trainer = make_trainer(plan, model, max_steps=3, **options)
        trainer.train(private.plan_batches(plan, make_rows()))
        return trainer

    if mesh is None:
        return run()
    with mesh:
        return run()


@pytest.mark.parametrize(
    ("name", "kind", "sharded"),
    [("data", "full", False), ("data", "full", True), ("data and tensors", "lora", True)],
)
def test_equals_one_device(name, kind, sharded):
    plan, mesh = make_devices_plan(), make_mesh(name)
    want = trained(train(plan, make_model(kind)))
    model = shard(make_model(kind), mesh) if sharded else make_model(kind)
    got = trained(train(plan, model, mesh))
    assert_close(got, want, atol=2e-6)
    if sharded:
        kept = [x.sharding.spec for x in jax.tree.leaves(got) if x.shape[0] % 8 == 0]
        assert set(kept) == {P("fsdp")}


def test_dropout_on_a_mesh():
    plan, mesh = make_devices_plan(), make_mesh("data")
    want = trained(train(plan, make_model(dropout=0.5)))
    got = trained(train(plan, make_model(dropout=0.5), mesh))
    assert_close(got, want, atol=2e-6)


def test_goes_on_from_checkpoint(tmp_path):
    plan, mesh, folder = make_devices_plan(), make_mesh("data"), str(tmp_path)
    whole = trained(train(plan, shard(make_model("lora"), mesh), mesh))
    with mesh:
        first = make_trainer(
            plan, shard(make_model("lora"), mesh), max_steps=2, checkpoint_root_directory=folder
        )
        first.train(private.plan_batches(plan, make_rows()))
    resumed = train(plan, shard(make_model("lora"), mesh), mesh, checkpoint_root_directory=folder)
    assert resumed.train_steps == 3
    jax.tree.map(np.testing.assert_array_equal, trained(resumed), whole)


def test_refuses_batches_that_devices_cannot_share():
    plan, mesh = make_plan(), make_mesh("data")
    assert plan.sampler.padded_size % 8
    with pytest.raises(ValueError, match="sampler with multiple_of=8"):
        train(plan, make_model(), mesh)


def test_gemma3_with_lora():
    config = gemma3.ModelConfig(
        num_layers=1, num_embed=32, embed_dim=16, hidden_dim=32, num_heads=2, head_dim=8,
        num_kv_heads=1, sliding_window_size=4,
        shd_config=gemma3.ShardingConfig.get_default_sharding(),
    )  # fmt: skip
    plan, mesh = make_devices_plan(), make_mesh("data and tensors")
    text = jnp.zeros((1, 6), int)

    def make():
        model = gemma3.Gemma3(config, rngs=nnx.Rngs(0))
        provider = qwix.LoraProvider(module_path=".*q_einsum|.*_proj", rank=2, alpha=2.0)
        return qwix.apply_lora_to_model(
            model, provider, text, text, None, jnp.ones((1, 6, 6), bool), rngs=nnx.Rngs(1)
        )

    want = trained(train(plan, make()))
    with mesh:
        model = make()
        specs = nnx.get_partition_spec(nnx.state(model))
        nnx.update(
            model,
            jax.tree.map(
                lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), nnx.state(model), specs
            ),
        )
    got = trained(train(plan, model, mesh))
    errors = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), got, want
    )
    assert len(jax.tree.leaves(errors)) >= 8
    assert max(jax.tree.leaves(errors)) < 1e-5
