"""Checks of private fine-tuning with tunix on eight virtual devices; see `tunix_test.py`."""

import jax
import numpy as np
import pytest

pytest.importorskip("tunix", reason="tunix is not installed: see docs/developers/testing.md")

from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpoptax
from dpoptax.integrations import tunix as private
from tests.integrations.problem import (
    make_gemma,
    make_model,
    make_plan,
    make_rows,
    make_trainer,
    trained,
)
from tests.multidevice.problem import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SHAPES = {
    "data": ((8,), ("fsdp",)),
    "four": ((4,), ("fsdp",)),
    "data and tensors": ((4, 2), ("fsdp", "tp")),
    "all axes": ((2, 2, 2), ("data", "fsdp", "tp")),
}
# The settings of tunix that name the axes of examples, if not its default.
DATA_AXES = {"data and tensors": {}, "all axes": {"data_sharding_axis": ("data",)}}


def make_mesh(name):
    shape, axes = SHAPES[name]
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))


def make_devices_plan():
    sampler = dpoptax.sampling.PoissonSampler(dataset_size=100, batch_size=10, multiple_of=8)
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


def test_pads_batches_that_devices_cannot_share():
    plan, mesh = make_plan(), make_mesh("data")
    assert plan.sampler.padded_size % 8
    got = trained(train(plan, make_model(), mesh))
    assert_close(got, trained(train(plan, make_model())), atol=2e-6)


@pytest.mark.parametrize(
    ("name", "kind", "remat"),
    [
        ("data and tensors", "lora", "NONE"),
        ("data and tensors", "full", "BLOCK"),
        ("all axes", "lora", "BLOCK"),
    ],
)
def test_gemma3_with_its_own_shardings(name, kind, remat):
    plan, mesh = make_devices_plan(), make_mesh(name)
    want = trained(train(plan, make_gemma(kind, remat, sharded=True)))
    with mesh:
        model = make_gemma(kind, remat, sharded=True)
        state = nnx.state(model)
        specs = nnx.get_partition_spec(state)
        placed = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, specs
        )
        nnx.update(model, placed)
    got = trained(train(plan, model, mesh, **DATA_AXES[name]))
    assert_close(got, want, atol=1e-5)
    axes = {axis for x in jax.tree.leaves(got) for axis in x.sharding.spec}
    assert axes >= set(mesh.axis_names) - {"data"}
