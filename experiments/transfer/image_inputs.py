"""Computes the inputs of private training from images: activations of a frozen network."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.features import featured
from experiments.data.network_features import NetworkFeatures
from experiments.data.published_data import load_published
from experiments.models import efficientnet_lite
from experiments.models.efficientnet_lite import Network

_PART = 10_000  # images whose activations are one file of the cache
_CHUNK = 100  # examples that pass through the last block at once
_NODES = 64  # of the quadrature


class ImageProblem(NamedTuple):
    """Images as features of a frozen network.

    Attributes:
        train: "inputs" and "labels" of the training images.
        test: Those of the held-out images.
        classes: Number of classes.
    """

    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    classes: int

    def hold_out(self, share: float) -> "ImageProblem":
        """Returns the problem with a random share of the training images as held-out images."""
        count = len(self.train["labels"])
        order = np.random.default_rng(0).permutation(count)
        out, kept = np.split(order, [round(share * count)])
        train, test = (
            {name: column[np.sort(rows)] for name, column in self.train.items()}
            for rows in (kept, out)
        )
        return self._replace(train=train, test=test)


def load_activations(dataset: str, data_dir: Path, wanted: NetworkFeatures) -> ImageProblem:
    """Returns the activations of all images, from the cache of features where it has them.

    Each 10,000 images have a file of their own, so that an interrupted computation continues.
    """
    data = load_published(dataset, data_dir, progress=True)
    splits = []
    for name, split in (("train", data.train), ("test", data.test)):
        assert isinstance(split, Mapping)
        parts = [
            featured(
                {column: values[start : start + _PART] for column, values in split.items()},
                wanted,
                name=f"{dataset}, {name} {start}",
                progress=True,
            )["inputs"]
            for start in range(0, len(split["labels"]), _PART)
        ]
        splits.append({"inputs": np.concatenate(parts), "labels": split["labels"]})
    return ImageProblem(*splits, data.num_classes)


def pool(problem: ImageProblem, network: Network, start: int) -> ImageProblem:
    """Returns the problem with normalized features (1280,) of the network's last layer as inputs.

    A feature is the mean over the copies of an image. See `normalize`.
    """

    def pooled(split: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        inputs, count = split["inputs"], len(split["inputs"])
        found = np.empty((count, efficientnet_lite.FEATURES), np.float32)
        for first in range(0, count, _CHUNK):
            part = inputs[first : first + _CHUNK]
            padded = np.pad(part, [(0, _CHUNK - len(part))] + [(0, 0)] * (part.ndim - 1))
            found[first : first + _CHUNK] = _pooled(start)(network, padded)[: len(part)]
        return {**split, "inputs": found}

    return problem._replace(train=pooled(problem.train), test=pooled(problem.test))


@functools.cache
def _pooled(start: int):  # type: ignore[no-untyped-def]
    def chunk(network: Network, hidden: jax.Array) -> jax.Array:
        copies = hidden.shape[1]
        hidden = hidden.astype(jnp.float32).reshape(-1, *hidden.shape[2:])
        features = efficientnet_lite.tail(network, hidden, start)
        return normalize(network, features.reshape(-1, copies, features.shape[-1]).mean(1))

    return jax.jit(chunk)


def normalize(network: Network, features: jax.Array) -> jax.Array:
    """Centers, scales and shortens features by public constants and their own length.

        y = (f − μ) / s,    f̂ = y / ‖y‖

    μ and s are the mean and the standard deviation of min(max(z, 0), 6) for normal z with the mean
    and deviation that the network's last normalization stored while it was trained on ImageNet.
    They use no statistic of the private images.
    """
    moments = network["moments"]
    centered = (features - moments["mean"]) / moments["stddev"]
    return centered * jax.lax.rsqrt(jnp.sum(centered**2, -1, keepdims=True) + 1e-12)


def public_moments(tensors: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns μ and s of `normalize` from the published tensors."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    weights = weights / weights.sum()
    values = tensors["_bn1.bias"] + np.abs(tensors["_bn1.weight"]) * nodes[:, None]
    values = np.clip(values, 0, 6)
    mean = weights @ values
    variance = weights @ (values - mean) ** 2
    stddev = np.sqrt(variance + 1e-2 * variance.mean())
    return {"mean": jnp.asarray(mean, jnp.float32), "stddev": jnp.asarray(stddev, jnp.float32)}
