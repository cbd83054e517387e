"""Checks of private training with Kauldron on eight virtual devices; see `kauldron_test.py`."""

import jax
import numpy as np
import pytest

pytest.importorskip("kauldron", reason="kauldron is not installed: see docs/developers/testing.md")

from jax.sharding import PartitionSpec as P
from kauldron import kd

import dpoptax
from dpoptax.integrations import kauldron as private
from tests.integrations.kauldron_problem import (
    STEPS,
    Classifier,
    make_chain,
    make_plan,
    make_trainer,
    saved_each_step,
    train_by_hand,
    trained,
)
from tests.multidevice.problem import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SHARDINGS = {
    "rows": kd.sharding.ShardingStrategy(),
    "rows and parameters": kd.sharding.ShardingStrategy(
        params=kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
    ),
}


def make_devices_plan():
    sampler = dpoptax.sampling.PoissonSampler(dataset_size=100, batch_size=10, multiple_of=8)
    return dpoptax.PrivacyPlan(steps=STEPS, sampler=sampler, noise_multiplier=1.0)


@pytest.mark.parametrize(("kind", "name"), [("full", "rows"), ("lora", "rows and parameters")])
def test_equals_one_device(kind, name, tmp_path):
    plan, chain = make_devices_plan(), make_chain(make_devices_plan())
    options = {"kind": kind, "sharding": SHARDINGS[name], "optimizer": chain}
    trainer = make_trainer(plan, tmp_path, **options)
    first = jax.device_put(trainer.init_state().params, jax.devices()[0])
    got = trainer.train()[0].params
    assert_close(trained(got, kind), train_by_hand(plan, chain, first, kind), atol=2e-6)
    specs = {x.sharding.spec for x in jax.tree.leaves(got)}
    assert (specs == {P()}) == (name == "rows")


def test_goes_on_from_checkpoint(tmp_path):
    plan = make_devices_plan()
    options = {"sharding": SHARDINGS["rows and parameters"], "model": Classifier(dropout=0.5)}
    whole = make_trainer(plan, tmp_path / "whole", **options).train()[0]
    for last in (2, STEPS):
        state = make_trainer(
            plan, tmp_path, checkpointer=saved_each_step(), stop_after_steps=last, **options
        ).train()[0]
    jax.tree.map(np.testing.assert_array_equal, state.params, whole.params)


def test_exports_sharded_parameters(tmp_path):
    trainer = make_trainer(make_devices_plan(), tmp_path, sharding=SHARDINGS["rows and parameters"])
    private.export(trainer, trainer.init_state(), tmp_path / "public")
    assert (tmp_path / "public" / "params").is_dir()


def test_pads_batches_that_devices_cannot_share(tmp_path):
    plan = make_plan()
    assert plan.sampler.padded_size % 8
    trainer = make_trainer(plan, tmp_path)
    first = jax.device_put(trainer.init_state().params, jax.devices()[0])
    got = trainer.train()[0].params
    assert_close(got, train_by_hand(plan, make_chain(plan), first), atol=2e-6)
