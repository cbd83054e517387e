"""Tests of hyperspherical coordinates against the sequential formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpoptax.contrib._geodp import from_hyperspherical, to_hyperspherical
from tests.helpers import slow_but
from tests.oracles import geodp as oracle


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    scale = np.abs(expected).max() or 1.0
    return np.linalg.norm((actual - expected) / scale) / (np.linalg.norm(expected / scale) or 1.0)


def polar(angles):
    """Returns the paper's θ from angles measured from the equator."""
    angles = np.asarray(angles, np.float64)
    return np.concatenate([np.pi / 2 - angles[:-1], angles[-1:]])


# Compiled once per length; most vectors share one.
to_coordinates = jax.jit(to_hyperspherical)
round_trip = jax.jit(lambda v: from_hyperspherical(*to_hyperspherical(v)))


def vector(d, seed=0):
    return np.random.default_rng(seed).normal(size=d).astype(np.float32)


def special_vectors():
    with_zeros = vector(9)
    with_zeros[[0, 3, 4, 8]] = 0
    ends_in_zeros = vector(9)
    ends_in_zeros[4:] = 0
    last_negative = np.abs(vector(9))
    last_negative[-1] *= -1
    return {
        "plain": vector(9),
        "zero": np.zeros(9, np.float32),
        "zeros inside": with_zeros,
        "zeros at the end": ends_in_zeros,
        "one axis": np.eye(9, dtype=np.float32)[2],
        "minus the first axis": -np.eye(9, dtype=np.float32)[0],
        "minus the last axis": -np.eye(9, dtype=np.float32)[8],
        "last negative": last_negative,
        "all negative": -np.abs(vector(9)),
        "tiny tail": np.float32([1.0, 1e-3, -1e-3, 1e-5, 0, 0, 0, 1e-6, 1e-6]),
        "huge": vector(9) * np.float32(1e38 / 9),
        "tiny": vector(9) * np.float32(1e-36),
        "wide range": np.float32([1e30, -1e-30, 1e25, 1e10, -1e29, 1, 2, 3, -4]),
        "d = 2": np.float32([-0.3, -0.4]),
        "d = 3": np.float32([0.1, -2.0, 0.7]),
    }


SPECIAL = special_vectors()


@pytest.mark.parametrize("name", SPECIAL)
def test_coordinates_match_paper(name):
    norm, angles = to_coordinates(SPECIAL[name])
    expected_norm, theta = oracle.to_spherical(SPECIAL[name].astype(np.float64))
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-6)
    if name == "zero":  # eq. (26) leaves arctan2(0, 0) undefined; here it is zero
        np.testing.assert_array_equal(angles, 0)
    else:
        tail = np.sqrt(np.cumsum(SPECIAL[name][::-1].astype(np.float64) ** 2))[::-1]
        # Where only rounding errors remain, the direction is undefined.
        defined = tail[:-1] > 1e-12 * tail[0]
        np.testing.assert_allclose(polar(angles)[defined], theta[defined], atol=1e-6)


@pytest.mark.parametrize("name", SPECIAL)
def test_round_trip(name):
    back = round_trip(SPECIAL[name])
    assert back.shape == SPECIAL[name].shape
    assert relative_error(back, SPECIAL[name]) < 1e-6


def test_zero_tail_round_trips_to_zero():
    back = round_trip(jnp.float32([3.0, -1.0] + 7 * [0.0]))
    np.testing.assert_array_equal(back[2:], 0)


@pytest.mark.parametrize(
    "distribution", slow_but(("heavy tails",), ("normal", "heavy tails", "sparse"))
)
def test_round_trip_of_a_million_dimensions(distribution):
    rng = np.random.default_rng(0)
    v = {
        "normal": lambda: rng.normal(size=10**6),
        "heavy tails": lambda: rng.standard_t(1.5, size=10**6),
        "sparse": lambda: rng.normal(size=10**6) * (rng.uniform(size=10**6) < 0.01),
    }[distribution]().astype(np.float32)
    norm, angles = to_coordinates(v)
    assert angles.dtype == jnp.float32
    assert relative_error(norm, np.linalg.norm(v.astype(np.float64))) < 1e-6
    assert relative_error(jax.jit(from_hyperspherical)(norm, angles), v) < 1e-6


@pytest.mark.parametrize("d", slow_but((2, 50), (2, 3, 4, 50)))
def test_decodes_any_angle_as_in_paper(d):
    rng = np.random.default_rng(d)
    theta = rng.normal(scale=5.0, size=d - 1)  # far outside [0, π], with sines of either sign
    angles = np.concatenate([np.pi / 2 - theta[:-1], theta[-1:]])
    decoded = jax.jit(from_hyperspherical)(np.float32(-2.5), np.asarray(angles, np.float32))
    np.testing.assert_allclose(decoded, oracle.to_rectangular(-2.5, theta), atol=5e-6)


def test_compiles_without_sequential_loop():
    v = jnp.ones(4096)
    assert "while" not in round_trip.lower(v).as_text()


def test_batched_and_mapped_coordinates_agree():
    batch = np.stack([vector(12, seed) for seed in range(4)])
    batch[2] = 0
    norm, angles = to_coordinates(batch)
    mapped = jax.jit(jax.vmap(to_hyperspherical))(batch)
    np.testing.assert_allclose(norm, mapped[0], rtol=1e-6)
    np.testing.assert_allclose(angles, mapped[1], rtol=1e-6)
    np.testing.assert_allclose(round_trip(batch), jax.jit(jax.vmap(round_trip))(batch), atol=1e-6)


def test_one_dimension_has_signed_norm_and_no_angle():
    norm, angles = to_hyperspherical(jnp.float32([-3.0]))
    assert angles.shape == (0,)
    np.testing.assert_array_equal(from_hyperspherical(norm, angles), [-3.0])
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        to_hyperspherical(jnp.zeros(0))


def test_low_precision_is_computed_in_float32():
    norm, angles = to_hyperspherical(jnp.asarray(vector(20), jnp.bfloat16))
    assert norm.dtype == angles.dtype == jnp.float32
