"""Tests that noise of many small arrays at once has the stated bits, in every program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpoptax._random import box_muller, tree_noise
from dpoptax._random.discrete_gaussian import discrete_gaussian
from dpoptax._release import fixed_point

pytestmark = pytest.mark.optimized

SMALL = [
    *((), (1,), (2,), (127,), (128,), (129,), (256,), (1001,), (0,), (3, 0, 2)),
    *((7, 5), (5, 7), (1, 9), (256, 130), (9, 33), (130, 3), (512, 512)),
    *((3, 3, 3, 16), (3, 3, 5, 7), (5, 5, 1, 32), (3, 3, 64, 64), (7, 7, 3, 3), (1, 1, 1)),
]
LARGE = [(2**18 + 2,), (512, 513), (7, 7, 7, 7, 7, 16)]
KEYS = {"threefry": jax.random.key(3), "chacha20": jnp.arange(8, dtype=jnp.uint32)}
_INTEGERS = fixed_point.integers(1000.0)
NOISES = {
    "normal": (
        lambda tree, key: tree_noise.add_noise(tree, 1.0, key),
        lambda key, shape, leaf: box_muller.normal(key, shape, leaf=leaf),
    ),
    "integers": (
        lambda tree, key: tree_noise.each_leaf(tree, key, _INTEGERS, lambda _, drawn: drawn),
        lambda key, shape, leaf: discrete_gaussian(key, shape, 1000.0, leaf=leaf),
    ),
}


def same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    return np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def _zeros(shapes):
    return [jnp.zeros(shape) for shape in shapes]


@pytest.mark.parametrize("program", [lambda draw: draw, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("noise", "key"),
    [
        *(("normal", "threefry"), ("integers", "threefry"), ("normal", "chacha20")),
        pytest.param("integers", "chacha20", marks=pytest.mark.slow),
    ],
)
def test_large_leaves_have_own_numbers_and_small_ones_share_a_vector(noise, key, program):
    every = (noise, key) == ("normal", "threefry")  # the others take a second per shape to compile
    shapes = [LARGE[0], *SMALL, *LARGE[1:], (3,), (7, 5)]
    if not every:
        shapes = [(7, 5), LARGE[0], (129,), (7, 5)]
    together, alone = NOISES[noise]
    drawn = program(together)(_zeros(shapes), KEYS[key])
    small = [i for i, shape in enumerate(shapes) if shape not in LARGE]
    small.sort(key=lambda i: shapes.index(shapes[i]))  # equal shapes side by side
    vector = alone(KEYS[key], (sum(drawn[i].size for i in small),), small[0])
    assert same_bits(jnp.concatenate([drawn[i].ravel() for i in small]), vector)
    for i in set(range(len(shapes))) - set(small):
        assert same_bits(drawn[i], alone(KEYS[key], shapes[i], i)), shapes[i]


@pytest.mark.parametrize("most", [0, 2**30], ids=["by numbers", "by pairs"])
@pytest.mark.parametrize("size", [1, 2, 7, 1000, 1001])
def test_vector_is_that_of_one_array(size, most, monkeypatch):
    monkeypatch.setattr(box_muller, "_MAX_PAIRED_SIZE", most)
    key = KEYS["threefry"]
    drawn = jax.jit(lambda key: box_muller.normal_vector(key, size))(key)
    assert same_bits(drawn, box_muller.normal(key, (size,)))


@pytest.mark.parametrize("size", [203_530, 2**20 + 1])
def test_cpu_hashes_vectors_in_loops_that_it_vectorizes(size):
    program = jax.jit(lambda key: box_muller.normal_vector(key, size)).lower(KEYS["threefry"])
    lengths = re.findall(r"c64\[(\d+)\]\S* fusion\(", program.compile().as_text())
    assert lengths
    assert all(int(length) % 64 == 0 for length in lengths)


def test_no_number_is_drawn_twice():
    drawn = jax.jit(NOISES["normal"][0])(_zeros(SMALL + LARGE), KEYS["threefry"])
    rows = [np.ravel(x) for x in drawn if x.size]
    ends = np.abs([number for row in rows if len(row) > 1 for number in (row[0], row[-1])])
    assert len(np.unique(ends)) == len(ends)
    numbers = np.abs(np.concatenate(rows[: len(SMALL) - 2]))
    assert len(np.unique(numbers)) > 0.99 * numbers.size  # float32 has few numbers
