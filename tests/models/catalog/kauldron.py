"""A model of Kauldron."""

import jax
import jax.numpy as jnp
from kauldron import kd

from tests.models.catalog import Model, cross_entropy, images


def vit() -> Model:
    """Returns Kauldron's vision transformer with a class token, 2 layers of width 64."""
    encoder = kd.nn.VitEncoder.from_spec(
        num_heads=4,
        hidden_size=64,
        num_layers=2,
        patch_size=4,
        mlp_size=128,
        prepend_cls_token=True,
        image="batch.image",
    )
    network = kd.nn.Vit(encoder=encoder, num_classes=10, mode="cls_token", image="batch.image")

    def loss_fn(params, example):
        image, label = example
        return cross_entropy(network.apply(params, image)["logits"], label)

    params = jax.jit(network.init)(jax.random.key(0), jnp.zeros((32, 32, 3)))
    return Model(loss_fn, params, lambda size: images(size, (32, 32, 3)))
