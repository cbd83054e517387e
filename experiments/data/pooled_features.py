"""Computes normalized features of a network's last layer from the activations before a block."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.features import in_chunks
from experiments.models import efficientnet_lite
from experiments.models.efficientnet_lite import Network
from experiments.models.torch_weights import read_torch_weights

_TOGETHER = 32  # examples that pass through the last blocks at once
_NODES = 64  # of the quadrature


@dataclasses.dataclass(frozen=True)
class PooledFeatures:
    """Normalized features (1280,) of activations, as means over the copies of an image.

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
        network = load_network(self.weights)

        def together(hidden: jax.Array) -> jax.Array:
            copies = hidden.astype(jnp.float32).reshape(-1, *hidden.shape[2:])
            features = efficientnet_lite.tail(network, copies, self.start)
            features = features.reshape(*hidden.shape[:2], features.shape[-1])
            return normalize(network, features.mean(1))

        return jax.jit(lambda hidden: in_chunks(together, hidden, _TOGETHER))


def load_network(weights: Path) -> Network:
    """Returns the network of a published file, with the "moments" that `normalize` needs."""
    tensors = read_torch_weights(weights)
    return {**efficientnet_lite.fold(tensors), "moments": public_moments(tensors)}


def normalize(network: Network, features: jax.Array) -> jax.Array:
    """Centers and scales features (..., 1280) by public constants, and to length 1.

        y = (f − μ) / s,    f̂ = y / ‖y‖

    μ and s are the mean and the standard deviation of min(max(z, 0), 6) for normal z with the mean
    and deviation of the network's last normalization. They use no statistic of the private images.
    """
    moments = network["moments"]
    centered = (features - moments["mean"]) / moments["stddev"]
    return centered * jax.lax.rsqrt(jnp.sum(centered**2, -1, keepdims=True) + 1e-12)


def public_moments(tensors: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns "mean" μ and "stddev" s of `normalize` from the published tensors."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    weights = weights / weights.sum()
    values = tensors["_bn1.bias"] + np.abs(tensors["_bn1.weight"]) * nodes[:, None]
    values = np.clip(values, 0, 6)
    mean = weights @ values
    variance = weights @ (values - mean) ** 2
    stddev = np.sqrt(variance + 1e-2 * variance.mean())
    return {"mean": jnp.asarray(mean, jnp.float32), "stddev": jnp.asarray(stddev, jnp.float32)}
