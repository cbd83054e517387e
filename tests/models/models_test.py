"""Tests that third-party models train privately: exact sums, without fallbacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from tests.models import catalog

pytestmark = pytest.mark.slow
SIZE = 3
KEY = jax.random.key(7)


@pytest.fixture(scope="module", params=catalog.MODELS)
def model(request):
    """Returns a model of the catalog, or skips if its package is not installed."""
    try:
        return catalog.build(request.param)
    except ModuleNotFoundError as error:
        if error.name.startswith("tests"):
            raise
        pytest.skip(f"{error.name} is not installed: `uv sync --group models`")


def _gradients(model, params, batch):
    """Returns the gradient of each example, by `jax.vmap` of `jax.grad`."""
    gradient = jax.grad(model.loss_fn)
    if not model.takes_key:
        return jax.vmap(gradient, (None, 0))(params, batch)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(SIZE))
    return jax.vmap(gradient, (None, 0, 0))(params, batch, keys)


def _rows(tree):
    """Returns a matrix with a row for each example."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


@pytest.mark.usefixtures("no_room")
def test_sum_matches_clipped_gradients(model):
    batch = model.make_batch(SIZE)
    gradients = _rows(jax.jit(lambda params: _gradients(model, params, batch))(model.params))
    norms = np.linalg.norm(gradients, axis=1)
    assert norms.min() > 0.0
    bound = float(np.median(norms))  # some examples are clipped, and some are not
    expected = np.minimum(1.0, bound / norms) @ gradients

    options = {"key": KEY, "ids": jnp.arange(SIZE)} if model.takes_key else {}
    grad_fn = dpoptax.clipped_grad(model.loss_fn, bound)
    found = jax.jit(lambda params: grad_fn(params, batch, **options).sum)(model.params)
    (found,) = _rows(jax.tree.map(lambda x: x[None], found))
    length = np.linalg.norm(expected)
    # Norms are bounds that include rounding, so clipped examples may be a little shorter.
    assert np.linalg.norm(found - expected) <= 2e-3 * length
    coefficients, *_ = np.linalg.lstsq(gradients.T, found)
    assert np.linalg.norm(found - coefficients @ gradients) <= 1e-5 * length


def test_no_parameter_falls_back_or_has_vanishing_gradient(model):
    example = jax.tree.map(lambda x: x[0], model.make_batch(1))
    options = {"key": KEY} if model.takes_key else {}
    found = dpoptax.explain(model.loss_fn, model.params, example, **options)
    if model.fallback:
        assert all(row.why.startswith(model.fallback) for row in found.rows), found
    else:
        assert not found.fallbacks, found
    assert not found.vanishing, found
