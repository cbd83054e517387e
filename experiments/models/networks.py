"""The image models of the papers. Each maps one image (height, width, channels) to logits.

None has batch normalisation, which mixes examples; group normalisation stands in its place. Where
a paper leaves a width open, the docstring says which was taken.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


class TwoLayerCNN(nn.Module):
    """GeoDP's CNN: 21,840 parameters on 28x28 grey images, as its section VI-D states.

    Two 5x5 convolutions of 10 and 20 channels without padding, each with 2x2 max-pooling and ReLU,
    then 50 hidden units: the layers are not in the paper, but this is the usual network of its
    size. The softmax that the paper calls the activation is that of the loss.
    """

    num_classes: int

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits (num_classes,) of one image, at least 16x16."""
        hidden = inputs
        for channels in (10, 20):
            hidden = nn.Conv(channels, (5, 5), padding="VALID")(hidden)
            hidden = nn.relu(nn.max_pool(hidden, (2, 2), strides=(2, 2)))
        hidden = nn.relu(nn.Dense(50)(hidden.reshape(-1)))
        return nn.Dense(self.num_classes)(hidden)


class FiveLayerCNN(nn.Module):
    """The 5-layer CNN of DOPPLER, DiSK and DP-PMLF.

    Five 3x3 convolutions, each followed by tanh and 2x2 max-pooling (DP-PMLF, appendix), then a
    linear layer. The papers state no widths and no kernel sizes; these are taken from the usual
    small CNNs of differentially private training.
    """

    num_classes: int
    channels: tuple[int, ...] = (32, 64, 64, 128, 128)

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits (num_classes,) of one image."""
        hidden = inputs
        for channels in self.channels:
            hidden = nn.tanh(nn.Conv(channels, (3, 3))(hidden))
            # Padded, so that 28x28 images outlive five poolings too.
            hidden = nn.max_pool(hidden, (2, 2), strides=(2, 2), padding="SAME")
        return nn.Dense(self.num_classes)(hidden.reshape(-1))


Convolution = tuple[int, int, int, int]
"""Channels, height and width of the kernel, stride, and the rows of zeros at each edge."""


class TanhCNN(nn.Module):
    """Convolutions with tanh, max-pooling between them, then one or two linear layers.

    The defaults are the CNN of Papernot et al. (2021) for CIFAR-10, with 550,570 parameters on it.

    Attributes:
        num_classes: Number of logits.
        layers: Convolutions, and for a 2x2 max-pooling its stride.
        hidden: Units of tanh between the convolutions and the logits; 0: none.
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
        """Logits (num_classes,) of one image, or of its features."""
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
"""The layers of Papernot et al. (2021) for MNIST; with 32 hidden units 26,010 parameters on it."""

TANH_CNN_FEATURES: tuple[Convolution | int, ...] = ((64, 3, 1, 1), 2, (64, 3, 1, 1))
"""The layers of Tramèr and Boneh (2021) on scattering features of CIFAR-10; no hidden units."""


class StandardisedConv(nn.Module):
    """A convolution without bias whose kernel has mean 0 and variance 1/fan-in per channel."""

    channels: int
    size: int = 3
    stride: int = 1

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The image (height, width, channels), halved in size for a stride of 2."""
        shape = (self.size, self.size, inputs.shape[-1], self.channels)
        kernel = self.param(
            "kernel", nn.initializers.variance_scaling(1.0, "fan_in", "normal"), shape
        )
        centred = kernel - jnp.mean(kernel, axis=(0, 1, 2))
        fan_in = self.size * self.size * inputs.shape[-1]
        variance = jnp.mean(centred**2, axis=(0, 1, 2)) * fan_in
        kernel = centred * jax.lax.rsqrt(jnp.maximum(variance, 1e-4))
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
    """Group normalisation of one image, with one group where `groups` does not divide."""
    # One example has no batch axis: all its positions and a group's channels are averaged over.
    groups = groups if hidden.shape[-1] % groups == 0 else 1
    return nn.GroupNorm(num_groups=groups, reduction_axes=(-3, -2, -1))(hidden)


class _ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, a ReLU between them and, if asked for, after the sum.

    `preactivated`: norm and ReLU before each convolution, none after the sum.
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
    """A residual network of basic blocks for small images, with group normalisation.

    Attributes:
        num_classes: Number of logits.
        channels: Width of each stage; every stage but the first halves height and width.
        blocks: Number of blocks in a stage.
        relu_after_sum: Whether a block has its second ReLU; GeoDP's residual network has one a
            block (section VI-A).
    """

    num_classes: int
    channels: tuple[int, ...] = (64, 128, 256, 512)
    blocks: int = 2
    relu_after_sum: bool = True

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits (num_classes,) of one image."""
        hidden = nn.relu(group_norm(_conv(self.channels[0], 3)(inputs), 16))
        for stage, channels in enumerate(self.channels):
            for block in range(self.blocks):
                stride = 2 if stage and not block else 1
                hidden = _ResidualBlock(channels, stride, relu_after_sum=self.relu_after_sum)(
                    hidden
                )
        return nn.Dense(self.num_classes)(hidden.mean((0, 1)))


class WideResNet(nn.Module):
    """WRN-`depth`-`width` of De et al. (2022): group normalisation and weight standardisation.

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
        """Logits (num_classes,) of one image."""
        hidden = StandardisedConv(16)(inputs)
        for stage in range(3):
            for block in range((self.depth - 4) // 6):
                stride = 2 if stage and not block else 1
                channels = 16 * self.width * 2**stage
                hidden = _ResidualBlock(channels, stride, preactivated=True)(hidden)
        hidden = nn.relu(group_norm(hidden, 16))
        return nn.Dense(self.num_classes)(hidden.mean((0, 1)))
