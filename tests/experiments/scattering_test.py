"""Tests of scattering features against the formula in NumPy and against Kymatio."""

import dataclasses

import numpy as np
import pytest

from dpoptax.training import ConfigError
from experiments.data import scattering
from experiments.data.scattering import Scattering
from tests.oracles import scattering as oracle

RAW = Scattering(groups=None)


def features(wanted, images):
    return np.asarray(wanted.transform(images.shape[1:])(images))


def images(count, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=(count, *shape)).astype(np.float32)


@pytest.mark.parametrize(("scale", "angles"), [(0, 8), (1, 8), (2, 6)])
def test_wavelets_match_formula(scale, angles):
    for angle in range(angles):
        found = scattering.morlet((24, 32), scale, angle, angles)
        want = np.fft.fft2(oracle.wavelet((24, 32), scale, angle, angles))
        np.testing.assert_allclose(found, want, atol=1e-12)
        assert abs(found[0, 0]) < 1e-12  # the mean is 0
    sigma = 0.8 * 2**scale
    want = np.fft.fft2(oracle.gabor((24, 32), sigma, 0.0, 0.0, 1.0))
    np.testing.assert_allclose(scattering.gaussian((24, 32), scale + 1), want, atol=1e-12)


@pytest.mark.parametrize(
    ("wanted", "shape"),
    [
        (RAW, (8, 12, 2)),
        (RAW, (9, 14, 1)),  # reflected to (12, 16)
        (Scattering(1, 4, None), (6, 4, 1)),
        (Scattering(3, 2, None), (24, 16, 1)),
    ],
)
def test_coefficients_match_formula(wanted, shape):
    given = images(2, *shape)
    found = features(wanted, given)
    assert found.shape == (2, *wanted.shape(shape))
    for image, have in zip(given, found, strict=True):
        planes = [
            oracle.scattering(p, wanted.scale, wanted.angles) for p in np.moveaxis(image, -1, 0)
        ]
        np.testing.assert_allclose(np.moveaxis(have, -1, 0), np.concatenate(planes), atol=2e-6)


@pytest.mark.parametrize(("colors", "channels"), [(1, 81), (3, 243)])
def test_groups_have_mean_0_and_variance_1(colors, channels):
    found = features(Scattering(), images(3, 16, 16, colors))
    assert found.shape == (3, 4, 4, channels)
    grouped = found.reshape(3, 16, 27, -1)
    np.testing.assert_allclose(grouped.mean((1, 3)), 0, atol=1e-5)
    # Very small values have variances close to the constant that is added to them.
    raw = features(RAW, images(3, 16, 16, colors))
    for have, example in zip(found, raw, strict=True):
        want = oracle.normalized(np.moveaxis(example, -1, 0).astype(float), 27)
        np.testing.assert_allclose(np.moveaxis(have, -1, 0), want, atol=2e-4)


def test_opponent_colors_are_a_fixed_map_of_each_pixel():
    given = images(2, 8, 8, 3)
    red, green, blue = np.moveaxis(given.astype(float), -1, 0)
    mixed = [red + green + blue, red - blue, red - 2 * green + blue]
    mixed = np.stack(mixed, -1) / np.sqrt([3, 2, 6])
    found = features(dataclasses.replace(RAW, colors="opponent"), given)
    np.testing.assert_allclose(found, features(RAW, mixed.astype(np.float32)), atol=1e-6)


@pytest.mark.parametrize(
    ("wanted", "shape", "message"),
    [
        (Scattering(), (4, 28, 1), "`scale` must be small enough for images .* got 2"),
        (
            Scattering(groups=28),
            (28, 28, 1),
            "`feature_groups` must divide the 81 channels .* got 28",
        ),
        (Scattering(colors="opponent"), (28, 28, 1), "`feature_colors` must be 'given' for images"),
        (Scattering(), (784,), "must be images .height, width, channels. .* got shape"),
    ],
)
def test_refuses_unsupported_images(wanted, shape, message):
    with pytest.raises(ConfigError, match=message):
        wanted.shape(shape)


def pattern():
    """Returns an image that is cheap to define and to compute."""
    down, right = np.mgrid[:12, :16]
    return np.cos(0.9 * down + 0.1 * right**1.5) * (1 + right / 16)


def test_matches_recorded_values_of_kymatio():
    # Printed by the oracle. Kymatio 0.3.0, with 3.1415 for π and in float32, gives 0.39281655,
    # 0.32104675, 0.61639667, 0.0035236, 0.00414518 and the sum 37.61979350.
    want = [0.39280499, 0.32102783, 0.61636031, 0.00352329, 0.00414482]
    for found in (
        oracle.scattering(pattern()),
        np.moveaxis(features(RAW, pattern()[None, ..., None].astype(np.float32))[0], -1, 0),
    ):
        np.testing.assert_allclose(found[[0, 3, 11, 20, 80], 1, 2], want, rtol=2e-5)
        np.testing.assert_allclose(found.sum(), 37.61733704944257, rtol=1e-6)
