"""Book-keeping equals the per-example gradients, on every kind of network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._bookkeeping import bookkept_sum
from dpoptax._gradients import per_example_sum
from tests.networks import NETWORKS

SIZE = 5


def both(network, clip, points, batch, mask=None, has_aux=False):
    """The sum by book-keeping, and by per-example gradients."""
    mask = jnp.ones(SIZE, bool) if mask is None else mask
    keys = jax.random.split(jax.random.key(7), len(mask)) if network.keyed else None
    return [
        jax.jit(
            lambda points, batch, mask, keys, m=method: m(
                network.loss, clip, points, batch, mask, keys, has_aux=has_aux
            )
        )(points, batch, mask, keys)
        for method in (bookkept_sum, per_example_sum)
    ]


def points_of(network, count, tangent=False):
    """Gradient points near each other, as iterates are, with weights that cancel."""
    params = network.params(jax.random.key(0))
    other = network.params(jax.random.key(1))
    move = lambda j: jax.tree.map(lambda p, q: p + 0.1 * j * q, params, other)  # noqa: E731
    weights = {1: (1.0,), 2: (3.0, -2.0), 4: (0.4, 0.3, 0.2, 0.1)}[count]
    return dpoptax.GradientPoints(
        tuple(move(j) for j in range(count)),
        tuple(jnp.asarray(weights)) if count == 2 else weights,
        other if tangent else None,
    )


def close(got, want, tolerance=1e-5):
    """Equal to `tolerance`, relative to the largest entry of the whole tree."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    largest = max(np.max(np.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(want))
    assert largest > 0
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_equals_per_example_gradients(name, count):
    network = NETWORKS[name]
    batch = network.batch(jax.random.key(2), SIZE)
    got, want = both(network, dpoptax.l2_clip(0.3), points_of(network, count), batch)
    close(got[0], want[0])


@pytest.mark.parametrize("name", NETWORKS)
def test_equals_per_example_gradients_with_a_tangent(name):
    if name == "custom_rules":
        pytest.skip("a function with a custom vjp has no second derivatives of that kind")
    network = NETWORKS[name]
    batch = network.batch(jax.random.key(2), SIZE)
    got, want = both(network, dpoptax.l2_clip(0.3), points_of(network, 1, tangent=True), batch)
    close(got[0], want[0])
