"""Tests of the papers' models: sizes, and suitability for per-example gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax.training.classifier import example_loss, initial_variables
from experiments.models import MODELS, large_networks, networks
from experiments.models.networks import VisionTransformer

pytestmark = pytest.mark.usefixtures("no_room")

GRAY, COLOR, LARGE = (28, 28, 1), (32, 32, 3), (224, 224, 3)
TINY = {
    "cnn_2": (networks.TwoLayerCNN(4), (16, 16, 1)),
    "cnn_5": (networks.FiveLayerCNN(4, channels=(4, 4, 4, 8, 8)), (12, 12, 3)),
    "resnet": (networks.ResNet(4, channels=(16, 32), blocks=1), (8, 8, 3)),
    "wrn": (networks.WideResNet(4, depth=10, width=1), (8, 8, 3)),
    "resnet_50": (large_networks.ResNet50(4, blocks=(1,)), (8, 8, 3)),
    "efficientnet": (
        large_networks.EfficientNetB0(4, stages=((1, 16, 1, 1, 3), (6, 16, 2, 2, 5))),
        (16, 16, 3),
    ),
    "vit": (VisionTransformer(4, width=8, depth=1, heads=2), (8, 8, 1)),
}
"""The same layers at sizes that compile in seconds."""


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
        ("efficientnet_b0", LARGE, 1000, 5_288_548),  # same as with batch normalization
        ("wrn_16_4", COLOR, 10, 2_748_890),  # De et al.: 2.7 M
        ("transformer", (8, 8, 1), 10, 26_538),  # summed by hand
        ("vit_small_16", LARGE, 1000, 22_050_664),  # Dosovitskiy et al.: 22 M
    ],
)
def test_parameter_counts(name, shape, classes, count):
    assert size(shapes(MODELS[name](classes), shape)) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("shape", [GRAY, COLOR])
def test_every_model_accepts_small_images(name, shape):
    if name == "vit_small_16":
        shape = LARGE
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


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY))
def test_clipped_gradients_are_exact(name):
    model, shape = TINY[name]
    rng = np.random.default_rng(0)
    batch = {
        "inputs": jnp.asarray(rng.normal(size=(3, *shape)), jnp.float32),
        "labels": jnp.asarray([0, 1, 3]),
    }
    params, _ = initial_variables(model, batch["inputs"][0], jax.random.key(0))
    loss = example_loss(model)
    per_example = jax.device_get(
        jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(params, batch)
    )
    squares = [np.sum(leaf.reshape(3, -1) ** 2, axis=1) for leaf in jax.tree.leaves(per_example)]
    norms = np.sqrt(sum(squares))
    bound = float(np.median(norms))  # one gradient is clipped and one is not
    factors = np.minimum(1.0, bound / norms)
    expected = jax.tree.map(lambda leaf: np.tensordot(factors, leaf, 1), per_example)
    clipped = jax.jit(dpoptax.clipped_grad(loss, dpoptax.l2_clip(bound)))(params, batch)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, atol=2e-5 * bound),
        clipped.sum,
        expected,
    )
