"""Tests of `PrivateRun.batches`: checked rows, their order, and each kind of array."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax import runs, sampling, users
from dpoptax.runs._batches import read_ahead

X = np.arange(200 * 3, dtype=np.float32).reshape(200, 3)
Y = np.arange(200)


def run_of(key=None):
    sizes = {"dataset_size": 200, "batch_size": 20, "steps": 4}
    return dpoptax.PrivacyPlan(**sizes, noise_multiplier=2.0).new_run(key)


def memory_mapped(folder):
    np.save(folder / "x.npy", X)
    return np.load(folder / "x.npy", mmap_mode="r")


@pytest.mark.parametrize("kind", ["numpy", "jax", "memory-mapped"])
def test_batches_are_the_drawn_rows(kind, tmp_path):
    x = {"numpy": lambda: X, "jax": lambda: jnp.asarray(X), "memory-mapped": lambda: None}[kind]()
    x = memory_mapped(tmp_path) if x is None else x
    key = jax.random.key(7)
    batches = list(run_of(key).batches({"x": x, "y": Y}))
    assert [batch.step for batch in batches] == [0, 1, 2, 3]
    for batch, (step, indices, mask) in zip(batches, run_of(key).draws(), strict=True):
        assert batch.step == step
        np.testing.assert_array_equal(batch.ids, indices)
        np.testing.assert_array_equal(batch.mask, mask)
        np.testing.assert_array_equal(batch.examples["x"], X[indices])
        np.testing.assert_array_equal(batch.examples["y"], indices)
        assert isinstance(batch.examples["x"], jax.Array if kind == "jax" else np.ndarray)
        assert not isinstance(batch.examples["x"], np.memmap)


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (jnp.asarray(X[:180]), ValueError, "`data` must have 200 rows, .* example .* got 180"),
        ({"x": X, "y": Y[:-1]}, ValueError, r"`data\['y'\]` must have 200 rows, .* got 199"),
        ((X, np.concatenate([Y, Y])), ValueError, r"`data\[1\]` must have 200 rows, .* got 400"),
        ({"x": X, "y": 3.0}, TypeError, r"`data\['y'\]` must be an array .* got a float"),
        ([[1.0, 2.0], [3.0, 4.0]], TypeError, r"`data\[0\]\[0\]` must be an array"),
        ({}, ValueError, "`data` must hold arrays with 200 rows"),
    ],
)
def test_wrong_rows_are_refused_before_the_first_step(data, error, match):
    with pytest.raises(error, match=match):
        run_of().batches(data)


def test_run_itself_is_not_a_loop_over_unchecked_indices():
    for each in (run_of(), run_of().plan):
        with pytest.raises(TypeError, match="not iterable"):
            iter(each)


def test_batches_of_users_hold_their_records():
    owners = np.arange(400) % 200
    table = users.UserTable(owners, records_per_user=2, seed=0)
    sampler, key = table.sampler(sampling.PoissonSampler, batch_size=20), jax.random.key(3)
    plan = dpoptax.PrivacyPlan(sampler=sampler, steps=2, noise_multiplier=2.0)
    records = np.arange(400.0)
    for batch in plan.new_run(key).batches(records, users=table):
        drawn = table.sample(runs.seeded(sampler, key), batch.step)
        rows, rows_mask = batch.examples
        np.testing.assert_array_equal(rows, records[drawn.records])
        np.testing.assert_array_equal(rows_mask, drawn.records_mask)
        np.testing.assert_array_equal(batch.mask, drawn.mask)
        np.testing.assert_array_equal(batch.ids, drawn.users)
        assert np.all(owners[rows.astype(int)][rows_mask] == np.repeat(batch.ids[batch.mask], 2))
    with pytest.raises(ValueError, match="must have 400 rows, one for each record of `users`"):
        plan.new_run().batches(records[:200], users=table)
    with pytest.raises(ValueError, match="`users` must be the table"):
        plan.new_run().batches(records)
    with pytest.raises(ValueError, match="`users` must be the table"):
        run_of().batches(X, users=table)


def test_reads_one_step_ahead_in_order():
    loaded, second = [], threading.Event()

    def load(step):
        loaded.append(step)
        if step == 1:
            second.set()
        return step

    steps = read_ahead(load, range(4))
    assert next(steps) == 0
    assert second.wait(10)  # the next step is loaded while the first is used
    assert list(steps) == [1, 2, 3]
    assert loaded == [0, 1, 2, 3]
    assert list(read_ahead(load, range(0))) == []


def test_error_of_a_step_reaches_the_loop_and_an_early_end_stops_the_thread():
    def load(step):
        if step == 2:
            raise OSError("disk")
        return step

    steps = read_ahead(load, range(5))
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(OSError, match="disk"):
        next(steps)
    before = threading.active_count()
    steps = read_ahead(lambda step: step, range(100))
    next(steps)
    steps.close()
    assert threading.active_count() <= before


ABANDONED = """
from dpoptax import extend

steps = extend.read_ahead(lambda step: step, range(9))
for step in steps:
    if step == 3:
        break
print(step)
"""


def test_an_iterator_abandoned_in_the_loop_is_silent_at_exit():
    done = subprocess.run(
        [sys.executable, "-c", ABANDONED], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("3\n", "")
