"""Tests that noise of many small arrays at once equals that of separate arrays, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpoptax._random import box_muller, tree_noise
from dpoptax._random.keys import split
from dpoptax._release import fixed_point

pytestmark = pytest.mark.optimized

SMALL = [
    *((), (1,), (2,), (127,), (128,), (129,), (256,), (1001,)),
    *((7, 5), (5, 7), (1, 9), (256, 130), (9, 33), (130, 3)),
    *((3, 3, 3, 16), (3, 3, 5, 7), (5, 5, 1, 32), (3, 3, 64, 64), (7, 7, 3, 3), (1, 1, 1)),
]
ALONE = [(0,), (3, 0, 2), (2**18 + 2,), (512, 513), (7, 7, 7, 7, 7, 2)]
KEYS = {"threefry": jax.random.key(3), "chacha20": jnp.arange(8, dtype=jnp.uint32)}
NOISES = {
    "normal": (lambda tree, key: tree_noise.add_noise(tree, 1.0, key)),
    "integers": (
        lambda tree, key: tree_noise.each_leaf(tree, key, _INTEGERS, lambda _, drawn: drawn)
    ),
}
_INTEGERS = fixed_point.integers(1000.0)


def same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    return np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def _zeros(shapes):
    return [jnp.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("noise", "key"),
    [
        *(("normal", "threefry"), ("integers", "threefry"), ("normal", "chacha20")),
        pytest.param("integers", "chacha20", marks=pytest.mark.slow),
    ],
)
def test_bits_equal_separate_draws(noise, key):
    """Bits agree with draws outside of jit, where each leaf is drawn separately."""
    every = (noise, key) == ("normal", "threefry")  # the others take a second per shape to compile
    shapes = [*SMALL[::2], *ALONE[:3]] if every else [(7, 5), (129,), ALONE[0]]
    alone = NOISES[noise](_zeros(shapes), KEYS[key])
    together = jax.jit(NOISES[noise])(_zeros(shapes), KEYS[key])
    for shape, got, want in zip(shapes, together, alone, strict=True):
        assert same_bits(got, want), shape


@pytest.mark.parametrize("most", [0, 2**30], ids=["by numbers", "by pairs"])
def test_each_leaf_has_its_own_key(most, monkeypatch):
    monkeypatch.setattr(box_muller, "_MAX_PAIRED_SIZE", most)
    shapes = SMALL[1::2]  # the other half is drawn alone in the test above
    keys = split(KEYS["threefry"], np.arange(len(shapes)))
    drawn = jax.jit(lambda *given: NOISES["normal"](*given))(_zeros(shapes), KEYS["threefry"])
    for key, shape, got in zip(keys, shapes, drawn, strict=True):
        assert same_bits(got, box_muller.normal(key, shape)), shape


def test_no_number_is_drawn_twice():
    drawn = jax.jit(NOISES["normal"])(_zeros(SMALL), KEYS["threefry"])
    numbers = np.abs(np.concatenate([np.ravel(x) for x in drawn]))
    assert len(np.unique(numbers)) > 0.999 * numbers.size
