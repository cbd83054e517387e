"""Trains with tunix in one or more processes; see `tunix_test.py`."""

from pathlib import Path

import jax
import numpy as np
import pytest
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
from tests.integrations.shared import KEY
from tests.integrations.tunix_devices import make_mesh


def main(folder):
    """Trains, goes on from a checkpoint, and writes the parameters of each process.

    If there are several processes, it also checks that other data, seeds or keys are refused.
    """
    number, rank = jax.process_count(), jax.process_index()
    mesh = make_mesh("four")
    with mesh:
        for last in (2, 3):
            trainer = make_trainer(
                make_plan(), place(make_model(dropout=0.5), mesh),
                max_steps=last, checkpoint_root_directory=f"{folder}/run",
            )  # fmt: skip
            trainer.train(plan_batches(trainer.plan, make_rows()))
        assert guarantee(trainer).releases[0].number == 3
        params = hosts.replicate(trained(trainer), mesh)
        leaves = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(params))}
        np.savez(Path(folder) / f"{rank}.npz", **leaves)
        for changed in ("rows", "seed", "key") if number > 1 else ():
            plan = make_plan(seed=5 + rank if changed == "seed" else 5)
            key = jax.random.fold_in(KEY, rank) if changed == "key" else KEY
            rows = make_rows()
            rows.input_tokens[0] += rank if changed == "rows" else 0
            trainer = make_trainer(plan, make_model(), make_chain(plan, key=key))
            with pytest.raises(ValueError, match="All hosts must have the same"):
                trainer.train(plan_batches(plan, rows))


def place(model, mesh):
    """Splits the rows of each array over the mesh, if they split evenly."""

    def placed(x):
        even = x.ndim and x.shape[0] % mesh.size == 0
        return hosts.place(x, NamedSharding(mesh, P("fsdp") if even else P()))

    nnx.update(model, jax.tree.map(placed, nnx.state(model)))
    return model
