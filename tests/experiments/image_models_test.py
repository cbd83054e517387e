"""Tests of the papers' models: their sizes, shapes and layers."""

import functools

import jax
import jax.numpy as jnp
import pytest

from dpoptax.training.classifier import initial_variables
from experiments.models import MODELS, networks

pytestmark = pytest.mark.usefixtures("no_room")

GRAY, COLOR, LARGE = (28, 28, 1), (32, 32, 3), (224, 224, 3)


def shapes(model, shape):
    init = functools.partial(initial_variables, model, key=jax.random.key(0))
    return jax.eval_shape(init, jnp.zeros(shape)).params


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("linear", GRAY, 10, 7_850),
        ("cnn_2", GRAY, 10, 21_840),  # GeoDP, section VI-D
        ("cnn_5", COLOR, 10, 279_050),
        ("tanh_cnn_mnist", GRAY, 10, 26_010),  # Papernot et al.'s layers, summed by hand
        ("tanh_cnn", COLOR, 10, 550_570),
        ("tanh_cnn_features", (8, 8, 243), 10, 187_210),
        ("resnet_18", COLOR, 10, 11_173_962),  # same as with batch normalization
        ("resnet_50", LARGE, 1000, 25_549_352),  # Kolesnikov et al.: 25.5 M
        ("wrn_16_4", COLOR, 10, 2_748_890),  # De et al.: 2.7 M
        ("transformer", (8, 8, 1), 10, 26_538),  # summed by hand
    ],
)
def test_parameter_counts(name, shape, classes, count):
    assert size(shapes(MODELS[name](classes), shape)) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("shape", [GRAY, COLOR])
def test_every_model_accepts_small_images(name, shape):
    # Initialization and application share one trace, because tracing is slow.
    both = functools.partial(MODELS[name](7).init_with_output, jax.random.key(0))
    logits, _ = jax.eval_shape(both, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert logits.shape == (7,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet_3", 1 + 3),  # GeoDP, section VI-A: one per block; ours has one in the stem
        ("resnet_18", 1 + 2 * 8),
    ],
)
def test_residual_networks_have_published_number_of_relus(name, count, monkeypatch):
    calls = []
    monkeypatch.setattr(networks.nn, "relu", lambda hidden: calls.append(1) or jax.nn.relu(hidden))
    jax.eval_shape(MODELS[name](10).init, jax.random.key(0), jnp.zeros(COLOR))
    assert len(calls) == count


@pytest.mark.parametrize("standardized_scale", [1e-3, 1.0, 50.0])
def test_standardized_kernel_keeps_scale_of_input(standardized_scale):
    conv = networks.StandardisedConv(64)
    inputs = jax.random.normal(jax.random.key(0), (16, 16, 32))
    params = conv.init(jax.random.key(1), inputs)
    scaled = jax.tree.map(lambda kernel: 3.0 + standardized_scale * kernel, params)
    if standardized_scale < 1:  # below the variance floor, so nothing is divided by almost zero
        assert jnp.std(conv.apply(scaled, inputs)) < 1
        return
    inside = conv.apply(scaled, inputs)[1:-1, 1:-1]
    assert float(jnp.std(inside)) == pytest.approx(1.0, abs=0.1)
