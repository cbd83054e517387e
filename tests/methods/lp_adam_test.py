"""Tests of DOPPLER within Adam as a trainer method, with GaLore's projection."""

import numpy as np
import optax
import pytest

from dpoptax.extend import scale_by_lp_adam
from experiments.methods import LPAdam


def test_equals_adam_with_momentum_of_adam():
    rng = np.random.default_rng(0)
    ours, theirs = LPAdam("momentum").direction(0.1), optax.scale_by_adam()
    params = {"w": np.zeros((3, 2), np.float32)}
    states = ours.init(params), theirs.init(params)
    for _ in range(5):
        grads = {"w": rng.normal(size=(3, 2)).astype(np.float32)}
        (a, first), (b, second) = (
            tx.update(grads, state) for tx, state in zip((ours, theirs), states, strict=True)
        )
        states = first, second
        np.testing.assert_allclose(a["w"], b["w"], rtol=1e-4)


def test_default_floor_is_the_root_of_the_deviation_of_v():
    """Var v̂ = 2 s⁴ (1 − β)/(1 + β), the variance of an average of s² χ²(1) with decay β."""
    stddev, b2, noise = 0.3, 0.9, np.random.default_rng(0)
    tx = scale_by_lp_adam(b=[1.0], a=[], b2=b2, stddev=stddev)
    weights = (1 - b2) * b2 ** np.arange(200)
    squares = np.square(noise.normal(0, stddev, (20_000, 200)))
    gradient = np.float32(1e-3)  # v̂ is below s², so the floor divides
    update, _ = tx.update(gradient, tx.init(gradient))
    assert 1e-3 / update == pytest.approx(np.std(squares @ weights) ** 0.5, rel=0.01)
