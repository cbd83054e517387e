"""Tests that the discrete Gaussian has exactly the law proved in docs/developers/fixed-point.md."""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from jax.extend import random as jex_random
from scipy import stats

from dpoptax._random import discrete_gaussian as dg
from dpoptax._support.xla import places

STDDEVS = (dg.SMOOTHING, 5.0, 64.3, 2.0**17.3, math.hypot(2.0**22, dg.SMOOTHING))


@pytest.fixture(autouse=True)
def forty_digits():
    with mpmath.workdps(40):
        yield


def density(x, stddev):
    return mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * mpmath.mpf(stddev) ** 2))


def mass(stddev):
    """Sums over the integers by Poisson's formula; its second term is below 2⁻⁹⁰."""
    return (
        mpmath.sqrt(2 * mpmath.pi) * stddev * (1 + 2 * mpmath.exp(-2 * (mpmath.pi * stddev) ** 2))
    )


def law_of(table):
    """Returns the probabilities of |Z| under uniform words, in units of 2⁻⁹⁵."""
    bits, columns = table
    law = [0] * 2**bits
    for k, words in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        other, share = words[0], words[1] << 64 | words[2] << 32 | words[3]
        law[k] += share
        law[other] += 2 ** (95 - bits) - share
    return law


@pytest.mark.parametrize(
    "stddev", [*STDDEVS[:-1], pytest.param(STDDEVS[-1], marks=pytest.mark.slow)]
)
def test_table_has_law_of_discrete_gaussian(stddev):
    """Checks |Z|; a separate bit gives the sign and has no effect at 0."""
    law = law_of(dg._table(stddev))
    assert sum(law) == 2**95
    squares = sum(factor**2 for factor in dg._factors(stddev))
    alone = mpmath.mpf(stddev) / mpmath.sqrt(squares)
    assert alone / mpmath.sqrt(squares) >= dg.SMOOTHING
    want = [(1 + (k > 0)) * density(k, alone) / mass(alone) for k in range(len(law))]
    distance = sum(abs(p - mpmath.mpf(c) / 2**95) for p, c in zip(want, law, strict=True)) / 2
    assert distance + (1 - sum(want)) / 2 < 2.0**-80 / 2
    # A relative error of 2⁻⁴⁸ in one count would be visible.
    off = mpmath.mpf(law[1]) / 2**95 * (1 + mpmath.mpf(2) ** -48)
    assert abs(want[1] - off) > 2.0**-80


@pytest.mark.parametrize(("smoothing", "closest"), [(dg.SMOOTHING, 2.0**-90), (1.0, 2.0**-26)])
def test_two_draws_sum_to_discrete_gaussian(smoothing, closest, monkeypatch):
    """The law agrees everywhere to 2⁻⁹⁰, but not if the parts are too far from each other."""
    monkeypatch.setattr(dg, "SMOOTHING", smoothing)
    stddev = 64.3
    a, b = dg._factors(stddev)
    alone = mpmath.mpf(stddev) / mpmath.sqrt(a * a + b * b)
    worst = 0
    for n in (*range(0, 20), 64, 129, 255, 400):
        # a x + b y = n: x = n + b t and y = −n − a t, most likely near t = −n (a + b)/(a² + b²).
        around = -n * (a + b) // (a * a + b * b)
        chances = [
            density(n + b * t, alone) * density(n + a * t, alone)
            for t in range(around - 60, around + 60)
        ]
        ratio = sum(chances) / mass(alone) ** 2 * mass(stddev) / density(n, stddev)
        worst = max(worst, abs(ratio - 1))
    assert worst < closest
    assert (worst > 2.0**-40) == (smoothing == 1.0)


def test_randomly_rounded_gaussian_is_discrete_gaussian():
    """Post-processing of the Gaussian mechanism: Y ↦ K, P[K = k] ∝ exp(−(k − Y)²/(2 · 1.8²))."""
    rounding = mpmath.mpf(dg.SMOOTHING)
    continuous = mpmath.mpf(6)
    stddev = mpmath.sqrt(continuous**2 + rounding**2)

    # The sum over the integers about any center, by Poisson's formula.
    def around(x):
        wave = 2 * mpmath.exp(-2 * (mpmath.pi * rounding) ** 2) * mpmath.cos(2 * mpmath.pi * x)
        return mpmath.sqrt(2 * mpmath.pi) * rounding * (1 + wave)

    for offset in (0.0, 0.25, 0.5):
        direct = sum(density(k - offset, rounding) for k in range(-40, 41))
        assert abs(around(offset) / direct - 1) < mpmath.mpf(2) ** -110

    def integrand(x, n):
        return density(x, continuous) * density(n - x, rounding) / around(x)

    for n in (0, 1, 7, 40):
        chance = mpmath.quad(lambda x, n=n: integrand(x, n), range(-120, 121, 4))
        chance /= mpmath.sqrt(2 * mpmath.pi) * continuous
        assert abs(chance * mass(stddev) / density(n, stddev) - 1) < mpmath.mpf(2) ** -89


def by_hand(words, stddev):
    """Computes Z from three words, with Python integers."""
    bits, columns = dg._table(stddev)
    number = words[0] << 64 | words[1] << 32 | words[2]
    entry = number >> (95 - bits) & (2**bits - 1)
    other, first, middle, last = (int(column[entry]) for column in columns)
    share = first << 64 | middle << 32 | last
    size = entry if number & (2 ** (95 - bits) - 1) < share else other
    return -size if number >> 95 else size


@pytest.mark.parametrize("stddev", STDDEVS)
def test_comparison_uses_all_bits(stddev):
    """Checks the threshold of an entry, and one below and above it in each word."""
    bits, columns = dg._table(stddev)
    rng = np.random.default_rng(0)
    words = []
    for entry in rng.integers(0, 2**bits, 300).tolist():
        first, middle, last = (int(column[entry]) for column in columns[1:])
        share = first << 64 | middle << 32 | last
        for off in (-(2**64), -(2**32), -1, 0, 1, 2**32, 2**64):
            number = (share + off) % 2 ** (95 - bits)
            number |= entry << (95 - bits) | int(rng.integers(2)) << 95
            words.append([number >> 64, number >> 32 & (2**32 - 1), number & (2**32 - 1)])
    got = dg._draw(jnp.asarray(np.array(words, np.uint32).T), stddev, None)
    assert got.tolist() == [by_hand(each, stddev) for each in words]


@pytest.mark.parametrize("shape", [(), (7,), (5, 1, 9)])
@pytest.mark.parametrize("stddev", [3.0, 2.0**17.3])
def test_each_number_uses_three_hashes(shape, stddev):
    key = jax.random.key(3)
    counters = [
        np.stack([np.full(places(shape).size, s), places(shape).ravel()]) for s in (2, 3, 4)
    ]
    hashed = [
        jex_random.threefry_2x32(jax.random.key_data(key), jnp.asarray(c, jnp.uint32))
        for c in counters
    ]
    words = np.concatenate(hashed).T
    a, b = dg._factors(stddev)
    want = [a * by_hand(w[:3], stddev) + b * by_hand(w[3:], stddev) for w in words.tolist()]
    got = jax.jit(lambda key: dg.discrete_gaussian(key, shape, stddev))(key)
    assert got.dtype == jnp.int32
    assert got.shape == shape
    assert got.reshape(-1).tolist() == want


def test_draws_follow_discrete_gaussian_law():
    draw = jax.jit(lambda key: dg.discrete_gaussian(key, (1_000_000,), 5.0))
    drawn = np.asarray(draw(jax.random.key(1)))
    edges = np.arange(-16, 17)
    counts = np.array([np.sum(drawn == edge) for edge in edges])
    chances = stats.norm.pdf(edges / 5.0) / 5.0
    rest = drawn.size - counts.sum(), 1 - chances.sum()
    found = stats.chisquare([*counts, rest[0]], drawn.size * np.array([*chances, rest[1]]))
    assert found.pvalue > 1e-3
    wider = stats.norm.pdf(edges / 5.03) / 5.03
    found = stats.chisquare([*counts, rest[0]], drawn.size * np.array([*wider, 1 - wider.sum()]))
    assert found.pvalue < 1e-6


def test_refuses_more_numbers_than_counters():
    with pytest.raises(ValueError, match="at most 2³² numbers"):
        jax.eval_shape(
            lambda key: dg.discrete_gaussian(key, (2**16, 2**17), 9.0), jax.random.key(0)
        )
