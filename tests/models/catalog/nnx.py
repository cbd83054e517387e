"""A model of Flax nnx."""

import jax.numpy as jnp
from flax import nnx

from tests.models.catalog import Model, cross_entropy, texts


class _Block(nnx.Module):
    def __init__(self, width, rngs):
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, dropout_rate=0.1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.first, self.second = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.dropout(self.attention(self.first(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.second(x)))))


class _Transformer(nnx.Module):
    def __init__(self, rngs):
        self.words = nnx.Embed(256, 64, rngs=rngs)
        self.places = nnx.Embed(32, 64, rngs=rngs)
        self.blocks = nnx.List([_Block(64, rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.output = nnx.Linear(64, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.words(tokens) + self.places(jnp.arange(len(tokens)))
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(tokens))
        return self.output(self.norm(x))


def transformer() -> Model:
    """Returns the transformer of the nnx tutorial, with dropout that holds its generators."""
    model = _Transformer(nnx.Rngs(0))
    model.train()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, text, key):
        model = nnx.merge(graph, params, rest, copy=True)
        nnx.reseed(model, default=key)
        return cross_entropy(model(text[:-1]), text[1:])

    return Model(loss_fn, nnx.as_pure(params), texts, takes_key=True)
