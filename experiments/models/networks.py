"""Defines the papers' image models: one image (height, width, channels) to logits.

Batch normalization mixes examples, so group normalization replaces it. Where a paper leaves a width
open, the docstring states the choice.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


class TwoLayerCNN(nn.Module):
    """GeoDP's CNN: 21,840 parameters on 28x28 gray images, as its section VI-D states.

    The paper does not list the layers. This is the usual network of that size: two 5x5 convolutions
    of 10 and 20 channels without padding, each with 2x2 max-pooling and ReLU, then 50 hidden units.
    The paper calls softmax the activation; here it is the softmax of the loss.
    """

    num_classes: int

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns logits (num_classes,) of one image of at least 16x16."""
        hidden = inputs
        for channels in (10, 20):
            hidden = nn.Conv(channels, (5, 5), padding="VALID")(hidden)
            hidden = nn.relu(nn.max_pool(hidden, (2, 2), strides=(2, 2)))
        hidden = nn.relu(nn.Dense(50)(hidden.reshape(-1)))
        return nn.Dense(self.num_classes)(hidden)


class FiveLayerCNN(nn.Module):
    """The 5-layer CNN of DOPPLER, DiSK and DP-PMLF.

    It has five 3x3 convolutions, each followed by tanh and 2x2 max-pooling (DP-PMLF, appendix), and
    a linear layer. The papers do not state widths or kernel sizes. These are taken from the usual
    small CNNs of differentially private training. DiSK's released code (564612540/KalmanDP at
    39091a5) has other widths: 32, 64, 128, 256 and 100 channels with group normalization in 16
    groups, and the 100 channels are the logits.
    """

    num_classes: int
    channels: tuple[int, ...] = (32, 64, 64, 128, 128)

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns logits (num_classes,) of one image."""
        hidden = inputs
        for channels in self.channels:
            hidden = nn.tanh(nn.Conv(channels, (3, 3))(hidden))
            # Padding lets 28x28 images survive five poolings.
            hidden = nn.max_pool(hidden, (2, 2), strides=(2, 2), padding="SAME")
        return nn.Dense(self.num_classes)(hidden.reshape(-1))


Convolution = tuple[int, int, int, int]
"""Channels, height and width of the kernel, stride, and rows of zeros at each edge."""


class TanhCNN(nn.Module):
    """Convolutions with tanh and max-pooling, then one or two linear layers.

    The defaults are the CNN of Papernot et al. (2021) for CIFAR-10, with 550,570 parameters on
    CIFAR-10.

    Attributes:
        num_classes: Number of logits.
        layers: Convolutions; an integer is the stride of a 2x2 max-pooling.
        hidden: Number of tanh units between the convolutions and the logits. 0: no hidden layer.
    """

    num_classes: int
    layers: tuple[Convolution | int, ...] = (
        *((32, 3, 1, 1), (32, 3, 1, 1), 2),
        *((64, 3, 1, 1), (64, 3, 1, 1), 2),
        *((128, 3, 1, 1), (128, 3, 1, 1), 2),
    )
    hidden: int = 128

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns logits (num_classes,) of one image, or of its features."""
        hidden = inputs
        for layer in self.layers:
            if isinstance(layer, int):
                hidden = nn.max_pool(hidden, (2, 2), strides=(layer, layer))
                continue
            channels, size, stride, zeros = layer
            convolution = nn.Conv(channels, (size, size), (stride, stride), padding=zeros)
            hidden = nn.tanh(convolution(hidden))
        hidden = hidden.reshape(-1)
        if self.hidden:
            hidden = nn.tanh(nn.Dense(self.hidden)(hidden))
        return nn.Dense(self.num_classes)(hidden)


TANH_CNN_MNIST: tuple[Convolution | int, ...] = ((16, 8, 2, 2), 1, (32, 4, 2, 0), 1)
"""Layers of Papernot et al. (2021) for MNIST; 26,010 parameters with 32 hidden units."""

TANH_CNN_FEATURES: tuple[Convolution | int, ...] = ((64, 3, 1, 1), 2, (64, 3, 1, 1))
"""Layers of Tramèr and Boneh (2021) on scattering features of CIFAR-10, without hidden units."""


class StandardisedConv(nn.Module):
    """A convolution without bias; its kernels have mean 0 and variance 1/fan-in."""

    channels: int
    size: int = 3
    stride: int = 1

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the image (height, width, channels); a stride of 2 halves its size."""
        shape = (self.size, self.size, inputs.shape[-1], self.channels)
        kernel = self.param(
            "kernel", nn.initializers.variance_scaling(1.0, "fan_in", "normal"), shape
        )
        centered = kernel - jnp.mean(kernel, axis=(0, 1, 2))
        fan_in = self.size * self.size * inputs.shape[-1]
        variance = jnp.mean(centered**2, axis=(0, 1, 2)) * fan_in
        kernel = centered * jax.lax.rsqrt(jnp.maximum(variance, 1e-4))
        return jax.lax.conv_general_dilated(
            inputs[None],
            kernel,
            (self.stride, self.stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )[0]


def _conv(channels: int, size: int, stride: int = 1) -> nn.Module:
    return nn.Conv(channels, (size, size), strides=(stride, stride), use_bias=False)


def group_norm(hidden: jax.Array, groups: int) -> jax.Array:
    """Normalizes groups of one image, or a single group if `groups` does not divide."""
    # Examples have no batch axis: the mean is over all positions and the channels of a group.
    groups = groups if hidden.shape[-1] % groups == 0 else 1
    return nn.GroupNorm(num_groups=groups, reduction_axes=(-3, -2, -1))(hidden)


class _ResidualBlock(nn.Module):
    """Adds two 3x3 convolutions with a ReLU between them to a shortcut.

    A ReLU after the sum is optional. With `preactivated`, norm and ReLU come before each
    convolution, and no ReLU follows the sum.
    """

    channels: int
    stride: int = 1
    groups: int = 16
    preactivated: bool = False
    relu_after_sum: bool = True

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        changes = self.stride != 1 or inputs.shape[-1] != self.channels
        shortcut = hidden = inputs
        if self.preactivated:
            hidden = nn.relu(group_norm(hidden, self.groups))
            if changes:
                shortcut = StandardisedConv(self.channels, 1, self.stride)(hidden)
            hidden = StandardisedConv(self.channels, 3, self.stride)(hidden)
            hidden = nn.relu(group_norm(hidden, self.groups))
            return shortcut + StandardisedConv(self.channels)(hidden)
        hidden = _conv(self.channels, 3, self.stride)(hidden)
        hidden = nn.relu(group_norm(hidden, self.groups))
        hidden = group_norm(_conv(self.channels, 3)(hidden), self.groups)
        if changes:
            shortcut = _conv(self.channels, 1, self.stride)(inputs)
            shortcut = group_norm(shortcut, self.groups)
        return nn.relu(shortcut + hidden) if self.relu_after_sum else shortcut + hidden


class ResNet(nn.Module):
    """A residual network of basic blocks for small images, with group normalization.

    Attributes:
        num_classes: Number of logits.
        channels: Width of each stage. Every stage except the first halves height and width.
        blocks: Number of blocks per stage.
        relu_after_sum: Whether a block has a second ReLU, after the sum. GeoDP's residual network
            has one ReLU per block (section VI-A).
    """

    num_classes: int
    channels: tuple[int, ...] = (64, 128, 256, 512)
    blocks: int = 2
    relu_after_sum: bool = True

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns logits (num_classes,) of one image."""
        hidden = nn.relu(group_norm(_conv(self.channels[0], 3)(inputs), 16))
        for stage, channels in enumerate(self.channels):
            for block in range(self.blocks):
                stride = 2 if stage and not block else 1
                hidden = _ResidualBlock(channels, stride, relu_after_sum=self.relu_after_sum)(
                    hidden
                )
        return nn.Dense(self.num_classes)(hidden.mean((0, 1)))


class WideResNet(nn.Module):
    """WRN-`depth`-`width` of De et al. (2022): group norm and weight standardization.

    Attributes:
        num_classes: Number of logits.
        depth: Number of layers, 6n + 4 for n blocks in each of the three stages.
        width: Multiple of 16, 32 and 64 channels.
    """

    num_classes: int
    depth: int = 16
    width: int = 4

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns logits (num_classes,) of one image."""
        hidden = StandardisedConv(16)(inputs)
        for stage in range(3):
            for block in range((self.depth - 4) // 6):
                stride = 2 if stage and not block else 1
                channels = 16 * self.width * 2**stage
                hidden = _ResidualBlock(channels, stride, preactivated=True)(hidden)
        hidden = nn.relu(group_norm(hidden, 16))
        return nn.Dense(self.num_classes)(hidden.mean((0, 1)))


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
