"""Models of Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp

from tests.models.catalog import Model, cross_entropy, images, texts


def cnn() -> Model:
    """Returns the CNN of Equinox's MNIST tutorial, with `eqx.nn.GroupNorm`."""
    keys = jax.random.split(jax.random.key(0), 4)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 16, kernel_size=4, key=keys[0]),
            eqx.nn.GroupNorm(4, 16),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            eqx.nn.Conv2d(16, 32, kernel_size=3, key=keys[1]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(800, 64, key=keys[2]),
            eqx.nn.Lambda(jax.nn.sigmoid),
            eqx.nn.Linear(64, 10, key=keys[3]),
        ]
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, example):
        image, label = example
        return cross_entropy(eqx.combine(params, static)(image.transpose(2, 0, 1)), label)

    return Model(loss_fn, params, images)


class _Attention(eqx.Module):
    embedding: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    output: eqx.nn.Linear

    def __init__(self, key):
        first, second, third = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(256, 64, key=first)
        self.attention = eqx.nn.MultiheadAttention(4, 64, dropout_p=0.1, key=second)
        self.norm = eqx.nn.LayerNorm(64)
        self.dropout = eqx.nn.Dropout(0.1)
        self.output = eqx.nn.Linear(64, 256, key=third)

    def __call__(self, tokens, key):
        one, two = jax.random.split(key)
        x = jax.vmap(self.embedding)(tokens)
        mask = jnp.tri(len(x), dtype=bool)
        x = x + self.dropout(self.attention(x, x, x, mask, key=one), key=two)
        return jax.vmap(self.output)(jax.vmap(self.norm)(x))


def attention() -> Model:
    """Returns a language model with `eqx.nn.MultiheadAttention` and dropout."""
    params, static = eqx.partition(_Attention(jax.random.key(0)), eqx.is_inexact_array)

    def loss_fn(params, text, key):
        return cross_entropy(eqx.combine(params, static)(text[:-1], key), text[1:])

    return Model(loss_fn, params, texts, takes_key=True)
