"""Computes EfficientNet-Lite0 with the statistics of its training folded into its kernels."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Layer = dict[str, jax.Array]
"""A "kernel" and a "bias"."""
Block = dict[str, Layer]
"""Layers "expand" (if any), "depthwise" and "project"."""
Network = dict[str, Any]
"""The layer "stem", the tuple "blocks" of blocks, and the layers "head" and "classifier"."""

STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1)
"""Stride of each of the 16 blocks."""
FEATURES = 1280
_EPSILON = 1e-3  # of the batch normalizations


def fold(tensors: Mapping[str, np.ndarray]) -> Network:
    """Returns the network of published tensors.

    Batch normalization with the stored mean m and variance v is a part of the layer before it:

        kernel ↦ kernel · γ / √(v + ε),   bias = β − m γ / √(v + ε)

    All of these are public constants, so examples do not depend on each other.
    """

    def layer(name: str, norm: str) -> Layer:
        kernel = tensors[f"{name}.weight"].transpose(2, 3, 1, 0).astype(np.float64)
        scale = tensors[f"{norm}.weight"] / np.sqrt(tensors[f"{norm}.running_var"] + _EPSILON)
        bias = tensors[f"{norm}.bias"] - tensors[f"{norm}.running_mean"] * scale
        kernel *= scale
        if kernel.shape[:2] == (1, 1):
            kernel = kernel[0, 0]
        return {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}

    blocks = []
    for i in range(len(STRIDES)):
        at = f"_blocks.{i}."
        block = {
            "depthwise": layer(f"{at}_depthwise_conv", f"{at}_bn1"),
            "project": layer(f"{at}_project_conv", f"{at}_bn2"),
        }
        if f"{at}_expand_conv.weight" in tensors:
            block["expand"] = layer(f"{at}_expand_conv", f"{at}_bn0")
        blocks.append(block)
    return {
        "stem": layer("_conv_stem", "_bn0"),
        "blocks": tuple(blocks),
        "head": layer("_conv_head", "_bn1"),
        "classifier": {
            "kernel": jnp.asarray(tensors["_fc.weight"].T),
            "bias": jnp.asarray(tensors["_fc.bias"]),
        },
    }


def trunk(network: Network, images: jax.Array, end: int) -> jax.Array:
    """Returns the features (N, height, width, channels) that enter block `end`.

    Args:
        network: The network.
        images: Images (N, height, width, 3) with colors in [-1, 1].
        end: Number of blocks that run.
    """
    stem = network["stem"]
    hidden = jax.lax.conv_general_dilated(
        images, stem["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    hidden = jax.nn.relu6(hidden + stem["bias"])
    for block, stride in zip(network["blocks"][:end], STRIDES, strict=False):
        hidden = run_block(block, hidden, stride)
    return hidden


def run_block(block: Block, hidden: jax.Array, stride: int) -> jax.Array:
    """Applies expansion, depthwise convolution and projection to features (N, h, w, channels)."""
    inputs = hidden
    if "expand" in block:
        hidden = jax.nn.relu6(_dense(block["expand"], hidden))
    depthwise = block["depthwise"]
    hidden = jax.nn.relu6(_depthwise(depthwise["kernel"], hidden, stride) + depthwise["bias"])
    hidden = _dense(block["project"], hidden)
    return hidden + inputs if hidden.shape == inputs.shape else hidden


def tail(network: Network, hidden: jax.Array, start: int) -> jax.Array:
    """Returns features (N, 1280) from the features that enter block `start`."""
    for block, stride in zip(network["blocks"][start:], STRIDES[start:], strict=True):
        hidden = run_block(block, hidden, stride)
    return jax.nn.relu6(_dense(network["head"], hidden)).mean((1, 2))


def _dense(layer: Layer, hidden: jax.Array) -> jax.Array:
    return hidden @ layer["kernel"] + layer["bias"]


def _depthwise(kernel: jax.Array, hidden: jax.Array, stride: int) -> jax.Array:
    """Convolves each channel with its own kernel (size, size, 1, channels).

    XLA's grouped convolution takes seven times as long on a CPU as this sum of shifted products.
    """
    size = len(kernel)
    lengths = [-(-length // stride) for length in hidden.shape[1:3]]
    missing = [
        max((count - 1) * stride + size - length, 0)
        for count, length in zip(lengths, hidden.shape[1:3], strict=True)
    ]
    around = [(0, 0), *((space // 2, space - space // 2) for space in missing), (0, 0)]
    padded = jnp.pad(hidden, around)
    ends = [(count - 1) * stride + 1 for count in lengths]
    total = jnp.zeros((len(hidden), *lengths, hidden.shape[-1]), hidden.dtype)
    for i in range(size):
        for j in range(size):
            total += kernel[i, j, 0] * padded[:, i : i + ends[0] : stride, j : j + ends[1] : stride]
    return total
