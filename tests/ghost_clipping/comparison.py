"""Compares ghost clipping with per-example gradients, the textbook's way to the same sum."""

import functools

import jax
import numpy as np

import dpoptax
from dpoptax._clipped_grad.per_example_sum import per_example_sum
from dpoptax._ghost_clipping.sums.ghost_clipped_sum import ghost_clipped_sum, join_sums
from tests.helpers import floats, sum_by

# Compilation dominates the time of these tests.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.lru_cache(maxsize=4)
def _compiled(method, loss, clip):
    def total(points, batch, mask, keys):
        sums = sum_by(method, loss, clip, points, batch, mask, keys)
        return sums if method is per_example_sum else join_sums(clip, points.points[0], sums)

    return jax.jit(total, compiler_options=QUICK)


def clipped_sum(method, network, clip, points, batch, mask=None):
    """Returns the sum of `per_example_sum`, or of `ghost_clipped_sum` with some options."""
    mask = np.ones(len(jax.tree.leaves(batch)[0]), bool) if mask is None else mask
    keys = jax.random.split(jax.random.key(7), len(mask)) if network.keyed else None
    return _compiled(method, network.loss, clip)(points, batch, mask, keys)


def both(*args):
    """Returns the sums by ghost clipping and by per-example gradients."""
    return clipped_sum(ghost_clipped_sum, *args), clipped_sum(per_example_sum, *args)


def points_of(network, count):
    """Returns gradient points near each other, like iterates, with partly canceling weights."""
    params, other = network.params(0), network.params(1)

    def near(p, q, j):
        return floats(np.asarray(p) + np.float32(0.1 * j) * np.asarray(q))

    points = [jax.tree.map(functools.partial(near, j=j), params, other) for j in range(count)]
    weights = {1: (1.0,), 2: (3.0, -2.0), 4: (0.4, 0.3, 0.2, 0.1)}[count]
    return dpoptax.GradientPoints(tuple(points), weights)


def close(got, want, tolerance=1e-5):
    """Checks equality to `tolerance`, relative to the largest entry of the whole tree."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    largest = max(np.max(np.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(want))
    assert largest > 0
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * largest)
