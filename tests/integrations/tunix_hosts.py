"""Trains with tunix in one or more processes; see `tunix_test.py`."""

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dpoptax.integrations.tunix import guarantee, plan_batches
from dpoptax.training import hosts
from tests.integrations.problem import (
    make_chain,
    make_model,
    make_plan,
    make_rows,
    make_trainer,
    trained,
)
from tests.integrations.shared import check_refused_on_hosts, write_params
from tests.integrations.tunix_devices import make_mesh


def main(folder):
    """Trains, goes on from a checkpoint, and checks refusals. See `check_two_processes`."""
    mesh = make_mesh("four")
    with mesh:
        for last in (2, 3):
            model = place(make_model(dropout=0.5), mesh)
            config = {"max_steps": last, "checkpoint_root_directory": f"{folder}/run"}
            trainer = make_trainer(make_plan(), model, **config)
            trainer.train(plan_batches(trainer.plan, make_rows()))
        assert guarantee(trainer).releases[0].number == 3
        write_params(folder, trained(trainer), mesh)
        check_refused_on_hosts(start)


def start(key, shift, clip):
    """Starts a run. Its parameters are not placed on the mesh."""
    plan, rows = make_plan(), make_rows()
    rows.input_tokens[0] += shift
    trainer = make_trainer(plan, make_model(), make_chain(plan, key=key), clip=clip)
    trainer.train(plan_batches(plan, rows))


def place(model, mesh):
    """Splits the rows of each array over the mesh, if they split evenly."""

    def placed(x):
        even = x.ndim and x.shape[0] % mesh.size == 0
        return hosts.place(x, NamedSharding(mesh, P("fsdp") if even else P()))

    nnx.update(model, jax.tree.map(placed, nnx.state(model)))
    return model
