"""Checks `dpoptax.training.fit` over meshes, also of explicit axes and with sharded parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpoptax
from dpoptax.training import fit
from tests.training import fit_test


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_two_devices_train_like_one(kind, tmp_path):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    one = fit_test.quiet(key=fit_test.KEY, workdir=tmp_path / "one")
    data = jnp.asarray(fit_test.X), fit_test.Y
    two = fit_test.quiet(data, key=fit_test.KEY, mesh=mesh, workdir=tmp_path / "two")
    assert len(two.params.sharding.device_set) == 2
    # Adam moves each entry by 1e-2 a step, so other noise would differ by that much. An entry may
    # end near zero, where only the absolute rounding of its sum is small.
    np.testing.assert_allclose(one.params, two.params, rtol=1e-4, atol=1e-6)
    for options in ({"mesh": mesh}, {}):  # the program's digest does not depend on the devices
        again = fit_test.quiet(data, workdir=tmp_path / "two", **options)
        np.testing.assert_array_equal(again.params, two.params)


@pytest.mark.slow
def test_given_gradient_shares_batches_over_two_axes(tmp_path):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    options = {"mesh": mesh, "axis_name": ("data", "model"), "method": "vmap"}
    grad_fn = dpoptax.clipped_grad(fit_test.linear_loss, 1.0, **options)
    given = {"loss_fn": None, "grad_fn": grad_fn, "mesh": mesh, "key": fit_test.KEY}
    sampler = dpoptax.sampling.PoissonSampler(fit_test.N, 12, multiple_of=4)
    plan = dpoptax.PrivacyPlan(sampler=sampler, steps=6, noise_multiplier=0.0)
    one = fit_test.quiet(plan=plan, key=fit_test.KEY)
    four = fit_test.quiet(plan=plan, **given)
    np.testing.assert_allclose(one.params, four.params, rtol=1e-4, atol=1e-6)  # as above
    first, again = (fit_test.quiet(plan=plan, **given, workdir=tmp_path) for _ in range(2))
    np.testing.assert_array_equal(again.params, first.params)


def loss_fn(params, example, *, frozen):
    x, y = example
    hidden = jnp.tanh(x @ (params["inner"] + frozen))
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["outer"], y)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_parameters_stay_sharded(kind, tmp_path):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    specs = {"inner": P(None, ("data", "model")), "outer": P("model")}
    columns = fit_test.X.shape[1]
    params = {"inner": jnp.full((columns, 8), 0.1), "outer": jnp.ones((8, 2))}
    frozen = jnp.linspace(-1, 1, columns * 8).reshape(columns, 8)

    def run(params, frozen, **options):
        return fit(
            loss_fn,
            params,
            (fit_test.X, (fit_test.Y > 0).astype(np.int32)),
            fit_test.make_plan(),
            frozen=frozen,
            optimizer=optax.chain(dpoptax.disk(), optax.adam(0.1)),
            progress=False,
            **options,
        )

    one = run(params, frozen, key=fit_test.KEY, workdir=tmp_path / "one")
    sharded = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in params.items()}
    base = jax.device_put(frozen, NamedSharding(mesh, specs["inner"]))
    four = run(sharded, base, key=fit_test.KEY, mesh=mesh, workdir=tmp_path / "four")
    for name, spec in specs.items():
        assert four.params[name].sharding.spec == spec
        np.testing.assert_allclose(one.params[name], four.params[name], rtol=1e-4, atol=1e-5)
    momenta = optax.tree.get(four.opt_state, "mu")
    assert jax.tree.map(lambda x: x.sharding.spec, momenta) == specs
    again = run(sharded, base, mesh=mesh, workdir=tmp_path / "four")
    jax.tree.map(np.testing.assert_array_equal, again.params, four.params)


@pytest.mark.slow
def test_programs_of_two_devices_are_not_shared():
    rng = np.random.default_rng(0)
    examples = rng.normal(size=(60, 5)).astype(np.float32), rng.normal(size=60).astype(np.float32)
    plan = dpoptax.PrivacyPlan(
        dataset_size=60, batch_size=12, steps=3, noise_multiplier=2.0, accountant="rdp"
    )
    found = []
    for device in jax.devices()[:2]:
        data, params, key = jax.device_put(
            (examples, np.zeros(5, np.float32), jax.random.key(3)), device
        )
        result = fit(lambda p, e: (e[0] @ p - e[1]) ** 2, params, data, plan, key=key)
        assert result.params.devices() == {device}
        found.append(np.asarray(result.params))
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_runs_on_another_device():
    data, params, key = jax.device_put(
        ((fit_test.X, fit_test.Y), np.zeros(5), fit_test.KEY), jax.devices()[1]
    )
    found = fit(fit_test.linear_loss, params, data, fit_test.make_plan(), key=key)
    assert found.params.devices() == {jax.devices()[1]}
