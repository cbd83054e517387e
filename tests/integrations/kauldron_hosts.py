"""Trains with Kauldron in one or more processes; see `kauldron_test.py`."""

from kauldron import kd

from dpoptax.integrations.kauldron import guarantee, plan_batches
from tests.integrations.kauldron_problem import (
    STEPS,
    Classifier,
    make_chain,
    make_plan,
    make_rows,
    make_trainer,
    saved_each_step,
)
from tests.integrations.shared import check_refused_on_hosts, write_params

SHARDING = kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding(min_size_to_shard_mb=0))


def main(folder):
    """Trains, goes on from a checkpoint, and checks refusals. See `check_two_processes`."""
    for last in (2, STEPS):
        trainer = make_trainer(
            make_plan(),
            f"{folder}/run",
            sharding=SHARDING,
            model=Classifier(dropout=0.5),
            checkpointer=saved_each_step(),
            stop_after_steps=last,
        )
        state, _ = trainer.train()
    assert guarantee(trainer, state).releases[0].number == STEPS
    write_params(folder, state.params, kd.sharding.DEVICES_MESH)
    check_refused_on_hosts(lambda *run: start(f"{folder}/other", *run))


def start(folder, key, shift, clip):
    """Starts a run."""
    plan, rows = make_plan(), make_rows()
    rows["label"][0] += shift
    options = {"train_ds": plan_batches(plan, rows), "optimizer": make_chain(plan, key=key)}
    options["step"] = {"clip": clip}
    make_trainer(plan, folder, sharding=SHARDING, **options).train()
