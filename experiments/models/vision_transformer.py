"""Defines a vision transformer."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class VisionTransformer(nn.Module):
    """Vision transformer with class token and positions (Dosovitskiy et al., 2020).

    Attributes:
        num_classes: Number of logits.
        patch: Height and width of a patch; it divides those of the image.
        width: Features of a token.
        depth: Number of blocks.
        heads: Number of attention heads; it divides `width`.
    """

    num_classes: int
    patch: int = 4
    width: int = 384
    depth: int = 12
    heads: int = 6

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns logits (num_classes,) of one image."""
        size = (self.patch, self.patch)
        tokens = nn.Conv(self.width, size, strides=size, padding="VALID")(inputs)
        tokens = tokens.reshape(-1, self.width)
        small = nn.initializers.normal(0.02)
        token = self.param("class_token", nn.initializers.zeros_init(), (1, self.width))
        tokens = jnp.concatenate([token, tokens])
        tokens += self.param("positions", small, tokens.shape)
        for _ in range(self.depth):
            normed = nn.LayerNorm()(tokens)
            tokens += nn.MultiHeadDotProductAttention(self.heads)(normed, normed)
            hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(tokens)))
            tokens += nn.Dense(self.width)(hidden)
        return nn.Dense(self.num_classes)(nn.LayerNorm()(tokens[0]))
