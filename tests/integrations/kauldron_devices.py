"""Checks of private training with Kauldron on eight virtual devices; see `kauldron_test.py`."""

import jax
import numpy as np
import pytest

pytest.importorskip("kauldron", reason="kauldron is not installed: see docs/developers/testing.md")

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kauldron import kd

import dpoptax
from tests.integrations.kauldron_problem import (
    STEPS,
    Classifier,
    make_plan,
    make_trainer,
    saved_each_step,
)
from tests.multidevice.problem import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def make_devices_plan():
    sampler = dpoptax.sampling.PoissonSampler(
        dataset_size=100, batch_size=10, multiple_of=8, seed=5
    )
    return dpoptax.PrivacyPlan(steps=STEPS, sampler=sampler, noise_multiplier=1.0)


def make_sharding(name):
    """Returns a sharding: all on one device, rows, rows and parameters, or two axes."""
    if name == "one":
        mesh = jax.make_mesh((1,), ("devices",), devices=jax.devices()[:1])
        batch = NamedSharding(mesh, P("devices"))
        return kd.sharding.ShardingStrategy(batch=batch, params=NamedSharding(mesh, P()), aux=None)
    if name == "data":
        return kd.sharding.ShardingStrategy()
    return kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding(min_size_to_shard_mb=0))


def train(plan, folder, name, kind="full", **options):
    trainer = make_trainer(plan, folder, kind, sharding=make_sharding(name), **options)
    return trainer.train()[0]


@pytest.mark.parametrize(
    ("kind", "name"), [("full", "data"), ("full", "fsdp"), ("lora", "data"), ("lora", "fsdp")]
)
def test_equals_one_device(kind, name, tmp_path):
    plan = make_devices_plan()
    with jax.default_device(jax.devices()[0]):
        pass
    want = train(plan, tmp_path, "data", kind, microbatch_size=None)
    got = train(plan, tmp_path, name, kind)
    assert_close(got.params, want.params, atol=2e-6)
