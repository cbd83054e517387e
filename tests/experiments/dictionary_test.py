"""Tests of dictionary features: the formula, and independence of other images."""

import numpy as np
import pytest

from dpoptax.training import ConfigError
from experiments.data import dictionary
from experiments.data.dictionary import Dictionary, dead_leaves
from tests.oracles import dictionary as oracle

SMALL = Dictionary(filters=7, patch=3, grid=2)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Uses fewer images and patches to save time."""
    monkeypatch.setattr(dictionary, "_IMAGES", 40)
    monkeypatch.setattr(dictionary, "_PATCHES", 2000)


def features(wanted, images):
    return np.asarray(wanted.transform(images.shape[1:])(images))


def images(count, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=(count, *shape)).astype(np.float32)


def oracle_parts(wanted, shape):
    """Returns the drawn images and the oracle's inputs, without mirror images of the filters."""
    drawn = dead_leaves(dictionary._IMAGES, shape)
    found = (np.asarray(part, float) for part in wanted._dictionary(drawn))
    filters, offset = (part[..., : wanted.filters] for part in found)
    mean = np.linalg.lstsq(filters.T, offset, rcond=None)[0]  # equivalent to m for these filters
    return drawn, {
        "filters": filters,
        "mean": mean,
        "size": wanted.patch,
        "contrast": 0.0025,
        "threshold": 0.5,
    }


@pytest.mark.parametrize(
    ("wanted", "shape"),
    [(SMALL, (8, 9, 3)), (SMALL, (7, 7, 1)), (Dictionary(5, 4, 3), (10, 8, 3))],
)
def test_features_match_formula(wanted, shape):
    drawn, parts = oracle_parts(wanted, shape)
    raw = np.asarray(wanted._pooled(drawn)(drawn), float)
    flat = raw.reshape(-1, raw.shape[-1])
    covariance = np.cov(flat.T)
    largest = np.linalg.eigvalsh(covariance).max()
    inverse = np.linalg.inv(covariance + 1e-3 * largest * np.eye(len(covariance)))
    given = images(18, *shape)  # more than one transform handles at once
    found = features(wanted, given)
    assert found.shape == (18, *wanted.shape(shape))
    # The symmetric root of the inverse covariance; its square must equal the inverse.
    _, whitening = dictionary._whitening(flat, 1e-3, relative=True)
    np.testing.assert_allclose(whitening @ whitening, inverse, rtol=1e-3, atol=1e-3 * inverse.max())
    for image, have in zip(given[[0, 17]], found[[0, 17]], strict=True):
        want = oracle.features(
            image, grid=wanted.grid, center=flat.mean(0), whitening=whitening, **parts
        )
        np.testing.assert_allclose(have, want, atol=2e-4)


def test_filters_are_whitened_patches_and_mirror_images(monkeypatch):
    monkeypatch.setattr(dictionary, "_PATCHES", 20_000)
    wanted, shape = Dictionary(filters=9, patch=3, grid=2), (12, 12, 3)
    drawn = dead_leaves(40, shape)
    filters, _ = (np.asarray(part, float) for part in wanted._dictionary(drawn))
    assert filters.shape == (27, 18)
    straight, mirrored = (half.T.reshape(9, 3, 3, 3) for half in np.split(filters, 2, axis=1))
    np.testing.assert_allclose(mirrored, straight[:, :, ::-1], atol=1e-5)
    # V is (covariance + 0.1)^-1/2 of patches, here over all patches of these images.
    windows = np.lib.stride_tricks.sliding_window_view(drawn, (3, 3), (1, 2))
    patches = np.moveaxis(windows, 3, -1).reshape(-1, 27).astype(float)
    patches -= patches.mean(1, keepdims=True)
    patches /= np.sqrt(patches.var(1, keepdims=True) + 0.0025)
    values, directions = np.linalg.eigh(np.cov(patches.T))
    unwhitened = filters.T @ directions * np.sqrt(values + 0.1)
    np.testing.assert_allclose(np.linalg.norm(unwhitened, axis=1), 1, atol=0.05)


def test_mirror_images_have_same_features():
    given = images(3, 9, 11, 3)
    found = features(SMALL, given)
    np.testing.assert_allclose(found, features(SMALL, given[:, :, ::-1]), atol=1e-4)
    assert np.abs(found - features(SMALL, given[:, ::-1])).max() > 0.1
    np.testing.assert_allclose((found**2).mean((1, 2, 3)), 1, atol=1e-5)
    assert np.isfinite(features(SMALL, np.zeros((1, 9, 11, 3), np.float32))).all()


@pytest.mark.parametrize(("channels", "least", "largest"), [(3, -2, 2), (1, 0, 1)])
def test_dead_leaves_have_range_and_spectrum_of_photographs(channels, least, largest):
    drawn = dead_leaves(60, (32, 32, channels))
    assert drawn.shape == (60, 32, 32, channels)
    assert drawn.dtype == np.float32
    assert least <= drawn.min() < drawn.max() <= largest
    spread = (largest - least) / 4
    assert 0.7 * spread < drawn.std() < 1.3 * spread
    # The power of photographs decreases roughly with the square of the frequency.
    gray = drawn.mean(-1) - drawn.mean((1, 2, 3), keepdims=True)[..., 0]
    power = (np.abs(np.fft.fft(gray, axis=2)) ** 2).mean((0, 1))
    slope = np.polyfit(np.log(np.arange(1, 9)), np.log(power[1:9]), 1)[0]
    assert -2.3 < slope < -0.7
    np.testing.assert_array_equal(drawn, dead_leaves(60, (32, 32, channels)))


@pytest.mark.parametrize(
    ("wanted", "shape", "message"),
    [
        (SMALL, (784,), "must be images .height, width, 1 or 3. .* got shape"),
        (SMALL, (8, 8, 2), "must be images .height, width, 1 or 3. .* got shape"),
        (
            Dictionary(),
            (6, 28, 1),
            "`patch` and `grid` must fit images .* got 5 and 3",
        ),
        (
            Dictionary(filters=2001),
            (28, 28, 1),
            "`filters` must be at most 2000.* got 2001",
        ),
    ],
)
def test_refuses_unsupported_images(wanted, shape, message):
    with pytest.raises(ConfigError, match=message):
        wanted.shape(shape)
