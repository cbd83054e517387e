"""Defines a linear probe, and the last block of a network before it."""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.data.network_features import scale_to_length_1
from experiments.models import efficientnet_lite
from experiments.models.efficientnet_lite import Network
from experiments.transfer.training import Params, classify


def probe_logits(params: Params, example: Any, frozen: Any = None) -> jax.Array:
    """Returns the logits of an example with features (width,)."""
    return classify(params["classifier"], example["inputs"])


def trained_layers(network: Network) -> Params:
    """Returns the parameters of the last block and of the layer after it that are trained.

    These are all of its kernels for single pixels, with their biases. The depthwise kernels are
    frozen, and so are the statistics that are folded into all kernels.
    """
    block = network["blocks"][-1]
    return {"expand": block["expand"], "project": block["project"], "head": network["head"]}


def block_logits(params: Params, example: Any, frozen: Network) -> jax.Array:
    """Returns the logits of an image with activations (copies, height, width, channels)."""
    layers = params["layers"]
    block = {
        "expand": layers["expand"],
        "depthwise": frozen["blocks"][-1]["depthwise"],
        "project": layers["project"],
    }
    network = {"blocks": (*frozen["blocks"][:-1], block), "head": layers["head"]}
    hidden = jnp.asarray(example["inputs"], jnp.float32)
    features = efficientnet_lite.tail(network, hidden, len(efficientnet_lite.STRIDES) - 1)
    return classify(params["classifier"], scale_to_length_1(features.mean(0)))
