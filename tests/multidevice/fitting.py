"""Checks `dpoptax.training.fit` over a mesh of two devices, also of explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.training import fit_test


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_two_devices_train_as_one_does(kind, tmp_path):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    one = fit_test.quiet(key=fit_test.KEY)
    data = jnp.asarray(fit_test.X), fit_test.Y
    two = fit_test.quiet(data, key=fit_test.KEY, mesh=mesh, workdir=tmp_path)
    assert len(two.params.sharding.device_set) == 2
    np.testing.assert_allclose(one.params, two.params, rtol=1e-4)
    again = fit_test.quiet(data, mesh=mesh, workdir=tmp_path)
    np.testing.assert_array_equal(again.params, two.params)
