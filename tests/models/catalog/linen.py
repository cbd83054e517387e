"""A model of Flax linen."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.models.catalog import Model, cross_entropy, images


class _Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Conv(32, (3, 3), use_bias=False)(nn.relu(nn.GroupNorm(4)(x)))
        y = nn.Conv(32, (3, 3), use_bias=False)(nn.relu(nn.GroupNorm(4)(y)))
        return x + y, None


class _ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(32, (3, 3), (2, 2))(x)
        blocks = nn.scan(
            nn.remat(_Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=4
        )
        x, _ = blocks()(x, None)
        return nn.Dense(10)(nn.relu(nn.GroupNorm(4)(x)).mean((0, 1)))


def resnet() -> Model:
    """Returns a ResNet whose blocks are scanned by `nn.scan` and recomputed by `nn.remat`."""
    model = _ResNet()

    def loss_fn(params, example):
        image, label = example
        return cross_entropy(model.apply(params, image), label)

    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((32, 32, 3)))
    return Model(loss_fn, params, lambda size: images(size, (32, 32, 3)))
