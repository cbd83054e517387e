"""A model of Equimo."""

import equinox as eqx
import jax
from equimo.models.vit import VisionTransformer

from tests.models.catalog import Model, cross_entropy, images


def vit() -> Model:
    """Returns a vision transformer with dropout, stochastic depth and register tokens."""
    model = VisionTransformer(
        img_size=32,
        in_channels=3,
        dim=64,
        patch_size=4,
        num_heads=[4],
        depths=[2],
        num_classes=10,
        pos_drop_rate=0.1,
        drop_path_rate=0.1,
        key=jax.random.key(0),
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, example, key):
        image, label = example
        logits = eqx.combine(params, static)(image.transpose(2, 0, 1), key)
        return cross_entropy(logits, label)

    return Model(loss_fn, params, lambda size: images(size, (32, 32, 3)), takes_key=True)
