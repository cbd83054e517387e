"""Third-party models with random weights: a module for each framework, imported on demand.

Each module has functions without arguments that return a `Model`. `python -m benchmarks models`
times the same models.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when something imports Keras

# The names of the tables and tests, the module of this folder, and its function.
MODELS = {
    "Gemma 3": "gemma:transformer",
    "Gemma 3, LoRA": "gemma:lora",
    "Penzai Llama": "penzai:llama",
    "Penzai GPT-NeoX, scanned": "penzai:gpt_neox_scanned",
    "Kauldron ViT": "kauldron:vit",
    "Keras CNN": "keras:cnn",
    "Haiku MLP": "haiku:mlp",
    "Haiku LSTM": "haiku:lstm",
    "Haiku ResNet": "haiku:resnet",
    "Equinox CNN": "equinox:cnn",
    "Equinox attention, dropout": "equinox:attention",
    "Equimo ViT": "equimo:vit",
    "Diffrax neural ODE": "diffrax:neural_ode",
    "FlowJAX flow": "flowjax:flow",
    "linen ResNet, scanned, remat": "linen:resnet",
    "NNX transformer, dropout": "nnx:transformer",
    "Jraph graph network": "jraph:graph_network",
    "NumPyro density": "numpyro:density",
}


class Model(NamedTuple):
    """A model as a loss.

    Attributes:
      loss_fn: the loss of one example, `loss_fn(params, example)`.
      params: a pytree of float32 arrays.
      make_batch: `make_batch(size)`, examples along the leading axis of every leaf.
      takes_key: whether the loss has a third argument, the key of an example.
      fallback: why `explain` reports per-example gradients, otherwise empty.
    """

    loss_fn: Callable[..., jax.Array]
    params: Any
    make_batch: Callable[[int], Any]
    takes_key: bool = False
    fallback: str = ""


def build(name: str) -> Model:
    """Returns a model of the table; raises `ModuleNotFoundError` if its package is missing."""
    module, function = MODELS[name].split(":")
    return getattr(importlib.import_module(f"tests.models.catalog.{module}"), function)()


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def images(size: int, shape=(28, 28, 1), classes: int = 10):
    """Returns images of random pixels and their labels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, *shape)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.integers(classes, size=size))


def texts(size: int, length: int = 33, vocabulary: int = 256):
    """Returns random tokens."""
    return jnp.asarray(np.random.default_rng(0).integers(1, vocabulary, (size, length)))
