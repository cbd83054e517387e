"""Defines models for large images with group normalization."""

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

    DOPPLER uses it. DiSK uses it on ImageNet, except for details that the paper leaves open. The
    stem reduces height and width to a quarter.

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


def _norm(hidden: jax.Array) -> jax.Array:
    """Normalizes groups of eight channels, which divide all widths of EfficientNet."""
    return group_norm(hidden, hidden.shape[-1] // 8)


class _InvertedBottleneck(nn.Module):
    """Applies expansion, depthwise convolution, squeeze-and-excitation and projection."""

    expansion: int
    channels: int
    stride: int
    size: int

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        width, hidden = inputs.shape[-1], inputs
        wide = self.expansion * width
        if self.expansion > 1:
            hidden = nn.swish(_norm(nn.Conv(wide, (1, 1), use_bias=False)(hidden)))
        hidden = nn.Conv(
            wide,
            (self.size, self.size),
            strides=(self.stride, self.stride),
            feature_group_count=wide,
            use_bias=False,
        )(hidden)
        hidden = nn.swish(_norm(hidden))
        squeezed = nn.swish(nn.Dense(max(1, width // 4))(hidden.mean((0, 1))))
        hidden *= nn.sigmoid(nn.Dense(wide)(squeezed))
        hidden = _norm(nn.Conv(self.channels, (1, 1), use_bias=False)(hidden))
        return hidden + inputs if self.stride == 1 and self.channels == width else hidden


class EfficientNetB0(nn.Module):
    """EfficientNet-B0 (Tan and Le, 2019) with group normalization, without dropout.

    The stem and four stages halve height and width: 32x32 images end as one pixel.

    Attributes:
        num_classes: Number of logits.
        stages: Expansion, channels, number of blocks, stride and kernel size of each stage.
    """

    num_classes: int
    stages: tuple[tuple[int, int, int, int, int], ...] = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns logits (num_classes,) of one image."""
        hidden = nn.Conv(32, (3, 3), strides=(2, 2), use_bias=False)(inputs)
        hidden = nn.swish(_norm(hidden))
        for expansion, channels, blocks, stride, size in self.stages:
            for block in range(blocks):
                own = 1 if block else stride
                hidden = _InvertedBottleneck(expansion, channels, own, size)(hidden)
        hidden = nn.swish(_norm(nn.Conv(1280, (1, 1), use_bias=False)(hidden)))
        return nn.Dense(self.num_classes)(hidden.mean((0, 1)))
