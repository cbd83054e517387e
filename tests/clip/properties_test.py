"""Tests under hostile input that no example moves the sum by more than the bound."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpoptax
from dpoptax._clipped_sum.clip_per_example import sum_clipped
from tests import helpers

pytestmark = pytest.mark.optimized

EXAMPLES = 5
CLIPS = {
    "l2": dpoptax.l2_clip(1.0),
    "l2 tiny": dpoptax.l2_clip(1e-8),
    "l2 huge": dpoptax.l2_clip(1e6),
    "automatic": dpoptax.automatic_clip(0.7),
    "AUTO-V": dpoptax.automatic_clip(0.7, gamma=0.0),
    "psac": dpoptax.contrib.psac_clip(2.0),
    "normalized": dpoptax.normalized_clip(3.0),
    "per layer": dpoptax.per_layer_clip([0.3, 2.0, 1e-3]),
    "per leaf": dpoptax.per_layer_clip(1.0),
    "per leaf, tiny": dpoptax.per_layer_clip(1e-8),
    "automatic per leaf": dpoptax.per_layer_clip(dpoptax.automatic_clip(0.7)),
    "AUTO-V per leaf": dpoptax.per_layer_clip(dpoptax.automatic_clip(0.7, gamma=0.0)),
    "of each kind": dpoptax.per_layer_clip(
        [
            dpoptax.automatic_clip(0.3, gamma=0.0),
            dpoptax.contrib.psac_clip(2.0),
            dpoptax.normalized_clip(9),
        ]
    ),
    "hyperspherical": dpoptax.contrib.hyperspherical_clip(1.0, angle_norm=0.5),
    "hyperspherical box": dpoptax.contrib.hyperspherical_clip(1.0, beta=0.3),
}
SHAPES = [[(3, 2), (4,), ()], [(1,), (2, 1, 3), (7,)], [(64,), (1, 1), (0, 2)]]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, 3.4e38, -3.4e38, 1e-45, 6e-8, 65504.0]

# Powers of ten that scale whole examples and single leaves, and a few entries of any value.
exponents = st.lists(st.integers(-45, 38), min_size=EXAMPLES, max_size=EXAMPLES)
spreads = st.lists(st.integers(-30, 0), min_size=3, max_size=3)
specials = st.lists(
    st.tuples(st.integers(0, EXAMPLES - 1), st.integers(0, 2), st.sampled_from(SPECIAL)),
    max_size=4,
)
masks = st.lists(st.booleans(), min_size=EXAMPLES, max_size=EXAMPLES)
seeds = st.integers(0, 2**32 - 1)
hostile = settings(max_examples=20, deadline=None, derandomize=True)


def _values(shapes, dtype, draw):
    """Returns per-example leaves (EXAMPLES, …) of the drawn magnitudes."""
    exponents, spreads, specials, seed = draw
    rng = np.random.default_rng(seed)
    scale = 10.0 ** np.array(exponents, np.float64)
    leaves = []
    with np.errstate(all="ignore"):
        for shape, spread in zip(shapes, spreads, strict=True):
            leaf = rng.normal(size=(EXAMPLES, *shape)) * 10.0**spread
            leaf = leaf * scale.reshape(-1, *[1] * len(shape))
            leaves.append(np.array(leaf.astype(np.float32).astype(dtype)))
        for example, index, value in specials:
            flat = leaves[index].reshape(EXAMPLES, -1)
            if flat.shape[1]:
                flat[example, rng.integers(flat.shape[1])] = np.float32(value)
    return leaves


def _moved(total, mask, index):
    """Returns in float64 how far example `index` moves the sum over the others in `mask`."""
    with_it, without = mask.copy(), mask.copy()
    with_it[index], without[index] = True, False
    sums = [jax.tree.leaves(total(m)) for m in (with_it, without)]
    for leaf in sums[0] + sums[1]:
        assert np.isfinite(np.asarray(leaf)).all()
    pairs = zip(*sums, strict=True)
    return helpers.global_norm([np.asarray(a, np.float64) - np.asarray(b) for a, b in pairs])


@functools.cache
def _summed(name):
    return jax.jit(lambda grads, mask: sum_clipped(CLIPS[name], grads, mask))


# Shapes are compiled one by one, so each geometry has one list of them. Layers reach their bound
# only in the first two lists, because the third has an empty layer.
LAYERED = [name for name in CLIPS if "per " in name] + ["of each kind"]
FLAT = [name for name in CLIPS if name not in LAYERED]
QUICK = {(name, "float32"): SHAPES[i % 2] for i, name in enumerate(LAYERED)}
QUICK |= {(name, "float32"): SHAPES[i % 3] for i, name in enumerate(FLAT)}
QUICK |= {("l2", "bfloat16"): SHAPES[1], ("l2", "float16"): SHAPES[2]}


def _others(*case):
    return [shapes for shapes in SHAPES if shapes is not QUICK.get(case)]


@pytest.mark.spread(12)
@pytest.mark.parametrize(
    ("name", "dtype", "lists"),
    [
        *[(*case, [shapes]) for case, shapes in QUICK.items()],
        *[
            pytest.param(name, dtype, _others(name, dtype), marks=pytest.mark.slow)
            for name in CLIPS
            for dtype in DTYPES
        ],
    ],
)
@hostile
@given(
    which=st.integers(0, 5),
    draw=st.tuples(exponents, spreads, specials, seeds),
    mask=masks,
    index=st.integers(0, EXAMPLES - 1),
)
def test_example_moves_sum_by_at_most_the_bound(name, dtype, lists, which, draw, mask, index):
    grads = _values(lists[which % len(lists)], DTYPES[dtype], draw)
    moved = _moved(lambda m: _summed(name)(grads, m), np.array(mask), index)
    assert moved <= CLIPS[name].sensitivity * (1 + 1e-5)


@pytest.mark.parametrize("kind", [float, functools.partial(dpoptax.automatic_clip, gamma=0.0)])
@pytest.mark.parametrize("small", [1.0, 1e-6, 1e-8, 1e-12])
@pytest.mark.parametrize("large", [1.0, 1e8, 1e11, 1e30])
def test_layer_with_underflowing_squares_keeps_its_bound(small, large, kind):
    """Checks a large layer next to one whose entries are 1e-19 times as large."""
    layer = np.full((1, 10_000), 1.07e-19)
    layer[0, 0] = 1.26e-19
    grads = [helpers.floats([[large]]), helpers.floats(large * layer)]
    clip = dpoptax.per_layer_clip([kind(1.0), kind(small)])
    total = jax.jit(lambda grads: sum_clipped(clip, grads))(grads)
    assert helpers.global_norm(total[1]) <= small * (1 + 1e-5)


@pytest.mark.parametrize("name", ["l2", "AUTO-V", "per leaf", "AUTO-V per leaf", "hyperspherical"])
@hostile
@given(draw=st.tuples(exponents, spreads, specials, seeds))
def test_masked_examples_add_nothing(name, draw):
    grads = _values(QUICK[name, "float32"], np.float32, draw)
    nothing = _summed(name)(grads, np.zeros(EXAMPLES, bool))
    assert all((np.asarray(leaf) == 0).all() for leaf in nothing)
