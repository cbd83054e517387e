"""Defines a residual network for large images with group normalization."""

import flax.linen as nn
import jax

from experiments.models.networks import StandardisedConv, group_norm


class _Bottleneck(nn.Module):
    """Adds 1x1, 3x3 and 1x1 convolutions, each after norm and ReLU, to a shortcut."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        hidden = nn.relu(group_norm(inputs, 32))
        shortcut = inputs
        if inputs.shape[-1] != 4 * self.channels or self.stride != 1:
            shortcut = StandardisedConv(4 * self.channels, 1, self.stride)(hidden)
        hidden = StandardisedConv(self.channels, 1)(hidden)
        hidden = nn.relu(group_norm(hidden, 32))
        hidden = StandardisedConv(self.channels, 3, self.stride)(hidden)
        hidden = nn.relu(group_norm(hidden, 32))
        return shortcut + StandardisedConv(4 * self.channels, 1)(hidden)


class ResNet50(nn.Module):
    """ResNet-50 "BiT" (Kolesnikov et al., 2019): group norm, weight standardization.

    DOPPLER uses it. The stem reduces height and width to a quarter.

    Attributes:
        num_classes: Number of logits.
        blocks: Number of blocks in each stage, of 64, 128, ... channels.
    """

    num_classes: int
    blocks: tuple[int, ...] = (3, 4, 6, 3)

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns logits (num_classes,) of one image."""
        hidden = StandardisedConv(64, 7, 2)(inputs)
        hidden = nn.max_pool(hidden, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                hidden = _Bottleneck(64 * 2**stage, stride)(hidden)
        hidden = nn.relu(group_norm(hidden, 32))
        return nn.Dense(self.num_classes)(hidden.mean((0, 1)))
