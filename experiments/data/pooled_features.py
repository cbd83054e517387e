"""Computes features of a network's last layer from the activations before a block."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.data.features import in_chunks
from experiments.models import efficientnet_lite
from experiments.models.torch_weights import read_torch_weights

_TOGETHER = 32  # examples that pass through the last blocks at once


@dataclasses.dataclass(frozen=True)
class PooledFeatures:
    """Features (1280,) of length 1 from activations, as means over the copies of an image.

    Attributes:
        weights: The published file.
        start: Number of the block that the activations enter.
    """

    weights: Path = dataclasses.field(repr=False)  # the name in the cache does not depend on it
    start: int

    @property
    def name(self) -> str:
        """The name in messages."""
        return "efficientnet_lite0"

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

        return jax.jit(lambda hidden: in_chunks(together, hidden, _TOGETHER))


def scale_to_length_1(features: jax.Array) -> jax.Array:
    """Divides features (..., width) by their Euclidean norm, a function of one example."""
    return features * jax.lax.rsqrt(jnp.sum(features**2, -1, keepdims=True) + 1e-12)
