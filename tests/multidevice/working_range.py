"""Tests that the bound holds on eight devices for numbers of every magnitude."""

import jax
import numpy as np
import pytest

import dpoptax
from dpoptax.auditing import _worst_example as adversary
from tests import programs
from tests.multidevice.problem import KINDS, make_mesh

SIDES = (1e-45, 1e-30, 1e-12, 1.0, 2.0**39, 2.0**40, 1e19, 3e38, np.nan, np.inf)
STREAM = {"clip": dpoptax.per_layer_clip(1e-3), "method": "streaming"}
WAYS = {"auto": {}, "recompute": {"method": "recompute"}, "streaming": STREAM}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_example_moves_sum_by_at_most_the_bound(way):
    options = {"clip": dpoptax.l2_clip(1e-3), "mesh": make_mesh((8,), ("data",), KINDS[0])}
    grad_fn = dpoptax.clipped_grad(programs.regression, **options | WAYS[way])
    params = [programs.zeros(4, 4)]
    total = jax.jit(lambda batch, mask: grad_fn(params, batch, mask).sum)
    rng = np.random.default_rng(0)
    others = tuple(rng.normal(size=(16, 16, 4)).astype(np.float32) for _ in "xy")
    unit = rng.choice([-1.0, 0.5], size=(2, 16, 4))
    with np.errstate(all="ignore"):
        for first in SIDES:
            for second in SIDES:
                example = unit[0] * first, unit[1] * second
                assert adversary.moved(total, others, example) <= 1e-3 * (1 + 1e-5)
