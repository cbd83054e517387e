"""Tests of filters: the papers' coefficients, and checks."""

import numpy as np
import pytest
from scipy import signal

from dpoptax import filters
from dpoptax.filters import Filter

ALL = filters.presets()
NAMES = list(ALL)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_stable_with_unit_gain_and_correctable(name):
    filt = filters.preset(name)
    assert filters.validate(*filt) == filt
    assert sum(filt.b) - sum(filt.a) == pytest.approx(1.0, abs=1e-12)
    assert filters.impulse_response(filt, 400).sum() == pytest.approx(1.0, abs=1e-6)


def test_unknown_preset_lists_names():
    with pytest.raises(ValueError, match=r"`name` must be one of .*doppler-f6.* got 'f6'"):
        filters.preset("f6")


def test_mutating_presets_does_not_change_library():
    filters.presets().clear()
    assert filters.presets() == ALL


def test_filters_of_paper_are_butterworth_designs():
    for order, cutoff, name, error in (
        (2, 1 / np.sqrt(47), "doppler-second-order", 0.01),
        (1, 1 / 10, "doppler-first-order-1", 1e-12),
    ):
        b, a = signal.butter(order, 2 / np.pi * np.arctan(cutoff))
        np.testing.assert_allclose([*b, *a[1:]], sum(ALL[name], ()), atol=error)


# Checks.


@pytest.mark.parametrize(
    ("b", "a", "message"),
    [
        ([], [], "`b` must not be empty"),
        ([float("nan")], [], "`b` must be finite"),
        ([0.1], [-float("inf")], "`a` must be finite"),
        ([0.1], [-1.1], r"pole 1\.1\+0j has modulus 1\.1"),
        ([0.0], [-1.0], "modulus 1 and"),
        ([0.1], [0.9 * -2, 1.01], r"modulus 1\.00499"),
        ([0.2], [-0.9], r"gain .* must be 1, got 1\.1.*Scale `b` by 0\.5"),
        ([1.0, -1.0], [], "gain .* must be 1, got 0.*Scaling `b` cannot"),
        ([0.1], [1.0, -0.9], "Omit scipy's leading 1"),
        ([0.0, 1.0], [], r"c_0 = 0 at t = 0"),
        ([1.0, -1.5, 1.5], [], r"c_1 = -0\.5 at t = 1"),
        ([-0.05, 0.15], [-0.9], r"c_0 = -0\.05"),
        # Far from the start: a lightly damped pair of poles rings below zero after ten steps.
        ([3.0, -5.8775, 2.8876], [-1.98, 0.9901], r"c_\d\d = -"),
    ],
)
def test_validate_explains_errors(b, a, message):
    with pytest.raises(ValueError, match=message):
        filters.validate(b, a)


@pytest.mark.parametrize("b", [1.0, [[1.0]], "ab", ["1"], [1j], [None], [True]])
def test_validate_refuses_non_numeric_sequences(b):
    with pytest.raises(TypeError, match="flat sequence of real numbers"):
        filters.validate(b)


@pytest.mark.parametrize("whole", [filters.preset("momentum"), "momentum"])
def test_validate_explains_how_to_unpack_a_filter(whole):
    with pytest.raises(TypeError, match=r"Unpack .* as in `\*dpoptax\.filters\.preset"):
        filters.validate(whole)


def test_validate_can_skip_step_response():
    assert filters.validate([0.0, 1.0], correctable=False) == Filter((0.0, 1.0))
    # The papers print fractions, so a rounded coefficient is a typing error.
    with pytest.raises(ValueError, match="gain"):
        filters.validate([0.0909, 0.0909], [-9 / 11])
    assert filters.validate(np.float32([0.1]), np.float32([-0.9])).a[0] == pytest.approx(-0.9)


def test_validates_very_slow_filter():
    slow = filters.validate([1e-7], [-(1 - 1e-7)])
    assert filters.impulse_response(slow, 1000)[-1] == pytest.approx(1e-7, rel=1e-3)


def test_random_stable_filters_match_scipy():
    rng = np.random.default_rng(1)
    for order in range(5):
        roots = rng.uniform(-0.9, 0.9, order)
        a = np.atleast_1d(np.poly(roots))[1:]
        b = rng.normal(size=order + 1)
        b *= (1 + a.sum()) / b.sum()
        filt = filters.validate(b, a, correctable=False)
        g = rng.normal(size=60)
        expected = signal.lfilter(b, [1, *a], g)
        actual = np.convolve(filters.impulse_response(filt, 60), g)[:60]
        np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-8)
