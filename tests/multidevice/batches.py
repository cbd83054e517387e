"""Tests that `PrivateRun.batches` splits batches over devices, and keeps their rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpoptax

X = np.arange(60 * 5, dtype=np.float32).reshape(60, 5)


def test_batches_of_a_run_are_split_over_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    plan = dpoptax.PrivacyPlan(dataset_size=len(X), batch_size=12, steps=3, noise_multiplier=2.0)
    run, other = (plan.new_run(jax.random.key(7)) for _ in range(2))
    data = {"x": X, "y": jnp.arange(len(X))}
    for split, whole in zip(run.batches(data, sharding=rows), other.batches(data), strict=True):
        size = len(whole.mask)
        assert split.examples["x"].sharding == split.mask.sharding == rows
        assert split.mask.shape[0] % 8 == 0
        np.testing.assert_array_equal(split.mask[:size], whole.mask)
        assert not split.mask[size:].any()
        np.testing.assert_array_equal(split.ids[:size], whole.ids)
        for name in data:
            np.testing.assert_array_equal(split.examples[name][:size], whole.examples[name])


def test_batches_of_users_are_split_over_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    rows = NamedSharding(mesh, P("data"))
    table = dpoptax.users.UserTable(np.arange(400) % 200, records_per_user=2, seed=0)
    sampler = table.sampler(dpoptax.sampling.PoissonSampler, batch_size=21)
    plan = dpoptax.PrivacyPlan(sampler=sampler, steps=2, noise_multiplier=2.0)
    run, other = (plan.new_run(jax.random.key(3)) for _ in range(2))
    options = {"data": np.arange(400.0), "users": table}
    pairs = zip(run.batches(**options, sharding=rows), other.batches(**options), strict=True)
    for split, whole in pairs:
        size = len(whole.mask)
        for a, b in zip(split.examples, whole.examples, strict=True):
            assert a.sharding.is_equivalent_to(rows, a.ndim)
            np.testing.assert_array_equal(a[:size], b)
        np.testing.assert_array_equal(split.ids[:size], whole.ids)
