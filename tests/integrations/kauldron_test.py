"""Tests private training with Kauldron. They need kauldron and gemma."""

import logging
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("kauldron", reason="kauldron is not installed: see docs/developers/testing.md")

import orbax.checkpoint as ocp
from absl import logging as absl_logging
from kauldron import kd

import dpoptax
from dpoptax.integrations import kauldron as private
from tests.integrations.kauldron_problem import (
    STEPS,
    Classifier,
    Normalized,
    make_chain,
    make_plan,
    make_rows,
    make_trainer,
    saved_each_step,
    train_by_hand,
    trained,
)

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def train(plan, folder, *args, **options):
    """Returns a trainer that has trained, and its last state."""
    trainer = make_trainer(plan, folder, *args, **options)
    return trainer, trainer.train()[0]


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


METHODS = {"adam": (), "disk": (dpoptax.disk(),), "doppler": (dpoptax.doppler(),)}


@pytest.mark.parametrize(("kind", "method"), [("full", m) for m in METHODS] + [("lora", "disk")])
def test_equals_loop_by_hand(kind, method, tmp_path):
    plan = make_plan()
    chain = make_chain(plan, methods=METHODS[method])
    trainer = make_trainer(plan, tmp_path, kind, optimizer=chain)
    first = trainer.init_state().params
    _, state = train(plan, tmp_path, kind, optimizer=chain)
    assert_equal(trained(state.params, kind), train_by_hand(plan, chain, first, kind))
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), state.params, first)
    selected = moved if kind == "full" else kd.optim.select("lora")(first)
    assert moved == jax.tree.map(bool, selected) if kind == "lora" else all(jax.tree.leaves(moved))
    assert private.guarantee(trainer, state).releases[0].number == STEPS


def test_correlated_noise_equals_loop_by_hand(tmp_path):
    sampler = dpoptax.matrix.CyclicPoissonSampler(
        dataset_size=100, batch_size=10, cycle_length=2, seed=5
    )
    plan = dpoptax.PrivacyPlan(
        steps=STEPS,
        sampler=sampler,
        noise_multiplier=1.0,
        strategy=dpoptax.matrix.optimal_banded_toeplitz(STEPS, 2),
    )
    trainer, state = train(plan, tmp_path)
    want = train_by_hand(plan, make_chain(plan), trainer.init_state().params)
    assert_equal(state.params, want)


class CountedRows:
    """Counts how often each row was read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, []

    def __getitem__(self, indices):
        self.reads.append(np.asarray(indices))
        return self.array[indices]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_goes_on_from_checkpoint_of_kauldron(kind, tmp_path):
    plan = make_plan()
    _, whole = train(plan, tmp_path / "whole", kind)
    options = {"kind": kind, "checkpointer": kd.ckpts.Checkpointer(save_interval_steps=2)}
    _, stopped = train(plan, tmp_path / "run", **options, stop_after_steps=3)
    assert stopped.step == 3
    rows = {**make_rows(), "text": CountedRows(make_rows()["text"])}
    fresh = make_chain(plan, key=jax.random.key(9))  # the restored key wins
    options["checkpointer"] = kd.ckpts.Checkpointer(save_interval_steps=2)
    trainer, state = train(plan, tmp_path / "run", **options, rows=rows, optimizer=fresh)
    assert_equal(state.params, whole.params)
    assert private.guarantee(trainer, state).releases[0].number == STEPS
    expected = [plan.sampler.sample(step)[0] for step in range(2, STEPS)]
    assert_equal(rows["text"].reads, expected)


def test_users_have_one_gradient_each(tmp_path):
    table = dpoptax.users.UserTable(np.arange(100) % 40, records_per_user=3, seed=0)
    sampler = table.sampler(dpoptax.sampling.PoissonSampler, batch_size=8, seed=1)
    plan = dpoptax.PrivacyPlan(steps=STEPS, sampler=sampler, noise_multiplier=1.0)
    data = private.plan_batches(plan, make_rows(), users=table)
    trainer, state = train(plan, tmp_path, train_ds=data)
    assert private.guarantee(trainer, state).event.unit == "user"
