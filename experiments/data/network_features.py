"""Computes features of images with a network of published weights."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp

from dpoptax.training import ConfigError
from experiments.data.features import in_chunks
from experiments.models import efficientnet_lite
from experiments.models.torch_weights import read_torch_weights

_TOGETHER = 8
"""Images that are computed at once, few enough to stay in the processor's cache."""

_TOGETHER_POOLED = 32
"""Activations that pass through the last blocks at once."""


@dataclasses.dataclass(frozen=True)
class NetworkFeatures:
    """Features of a scaled image that enter a block of EfficientNet-Lite0.

    They depend on one image and on public constants only.

    Attributes:
        weights: The published file.
        size: Height and width to which images are scaled.
        end: Number of blocks that run.
        mirror: Whether to also compute the features of the mirror image.
    """

    name: ClassVar[str] = "efficientnet_lite0"

    weights: Path = dataclasses.field(repr=False)  # the name in the cache does not depend on it
    size: int
    end: int
    mirror: bool

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape (1 or 2, height, width, channels) of the features of an image.

        Raises:
            ConfigError: The image has no three colors.
        """
        if len(shape) != 3 or shape[-1] != 3:
            raise ConfigError(f"`inputs` must be images with three colors, got shape {shape}.")
        found = jax.eval_shape(self.transform(shape), jax.ShapeDtypeStruct((1, *shape), "float32"))
        return tuple(found.shape[1:])

    def transform(self, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        """Returns the compiled map from images (N, *shape), with colors in [-2, 2], to features."""
        network = efficientnet_lite.fold(read_torch_weights(self.weights))

        def together(images: jax.Array) -> jax.Array:
            scaled = (len(images), self.size, self.size, 3)
            images = jax.image.resize(images / 2, scaled, "bicubic")
            copies = [images, images[:, :, ::-1]] if self.mirror else [images]
            return jnp.stack(
                [efficientnet_lite.trunk(network, copy, self.end) for copy in copies], 1
            )

        return jax.jit(lambda images: in_chunks(together, images, _TOGETHER))


@dataclasses.dataclass(frozen=True)
class PooledFeatures:
    """Features (1280,) of length 1 from activations, as means over the copies of an image.

    Attributes:
        weights: The published file.
        start: Number of the block that the activations enter.
    """

    name: ClassVar[str] = "efficientnet_lite0"

    weights: Path = dataclasses.field(repr=False)  # the name in the cache does not depend on it
    start: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the features of activations (copies, height, width, channels)."""
        return (efficientnet_lite.FEATURES,)

    def transform(self, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        """Returns the compiled map from activations (N, *shape) to features (N, 1280)."""
        network = efficientnet_lite.fold(read_torch_weights(self.weights))

        def together(hidden: jax.Array) -> jax.Array:
            copies = hidden.astype(jnp.float32).reshape(-1, *hidden.shape[2:])
            features = efficientnet_lite.tail(network, copies, self.start)
            features = features.reshape(*hidden.shape[:2], features.shape[-1])
            return scale_to_length_1(features.mean(1))

        return jax.jit(lambda hidden: in_chunks(together, hidden, _TOGETHER_POOLED))


def scale_to_length_1(features: jax.Array) -> jax.Array:
    """Divides features (..., width) by their Euclidean norm, a function of one example."""
    return features * jax.lax.rsqrt(jnp.sum(features**2, -1, keepdims=True) + 1e-12)
