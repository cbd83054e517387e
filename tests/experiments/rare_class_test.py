"""Tests the measurement of a rare class: its data, and what a small clipping bound does to it."""

import jax
import numpy as np
import pytest

from experiments import rare_class


def test_thinned_images_have_the_share_of_eights():
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=5000)
    inputs, rare = rare_class.thinned((labels[:, None], labels), 0.02, rng)
    assert rare.mean() == pytest.approx(0.02, abs=2e-4)
    np.testing.assert_array_equal(inputs[:, 0] == 8, rare)


@pytest.mark.slow
def test_a_bound_below_the_norms_of_a_rare_class_makes_it_rarer():
    """Without noise, C = 1 divides the odds by about the norm, and C = 10 clips nothing."""
    columns = rare_class.synthetic(np.random.default_rng(0))
    start = rare_class.start_of(0, columns[0], 800, 200)
    found = {}
    for bound in (1.0, 10.0):
        params = rare_class.trained(start, bound, 0.01, sigma=0.0, batch_size=800)
        found[bound] = rare_class.scores(params, bound, *columns), params
    rate = 100 * columns[1][1].mean()
    clipped, mean, shift = found[1.0][0][:3]
    assert clipped == 100
    assert mean < rate / 4
    norm = np.median(rare_class.rare_norms(found[1.0][1], columns[0]))
    assert shift == pytest.approx(np.log(norm), abs=0.3)
    clipped, mean, shift = found[10.0][0][:3]
    assert clipped == 0
    assert mean == pytest.approx(rate, rel=0.15)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
