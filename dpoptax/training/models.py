"""Flax models by name, and the loss of one example."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from dpoptax.training import networks
from dpoptax.training.errors import unknown_name

Params = Any


class MLP(nn.Module):
    """Fully connected layers with tanh between them; tanh keeps gradients bounded under noise."""

    num_classes: int
    widths: tuple[int, ...] = (64,)

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits (num_classes,) of one example of any shape."""
        hidden = inputs.reshape(-1)
        for width in self.widths:
            hidden = nn.tanh(nn.Dense(width)(hidden))
        return nn.Dense(self.num_classes)(hidden)


class CNN(nn.Module):
    """Two 3x3 convolutions with tanh and average pooling, then one linear layer."""

    num_classes: int
    channels: tuple[int, ...] = (16, 32)

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits (num_classes,) of one image (height, width, channels)."""
        hidden = inputs
        for channels in self.channels:
            hidden = nn.tanh(nn.Conv(channels, (3, 3))(hidden))
            hidden = nn.avg_pool(hidden, (2, 2), strides=(2, 2))
        return nn.Dense(self.num_classes)(hidden.reshape(-1))


MODELS: dict[str, Callable[[int], nn.Module]] = {}


def register_model(name: str, build: Callable[[int], nn.Module]) -> None:
    """Makes `build(num_classes)` available as a config's `model`; it maps one example to logits."""
    MODELS[name] = build


register_model("linear", lambda num_classes: MLP(num_classes, widths=()))
register_model("mlp", MLP)
register_model("cnn", CNN)
register_model("cnn_2", networks.TwoLayerCNN)
register_model("cnn_5", networks.FiveLayerCNN)
register_model("resnet_3", lambda n: networks.ResNet(n, channels=(16, 32, 64), blocks=1))
register_model("resnet_18", networks.ResNet)
register_model("wrn_16_4", networks.WideResNet)
register_model("vit_tiny", lambda n: networks.VisionTransformer(n, width=64, depth=4, heads=2))
register_model("vit_small", networks.VisionTransformer)
register_model("vit_small_16", lambda n: networks.VisionTransformer(n, patch=16))


def build_model(name: str, num_classes: int) -> nn.Module:
    """The model registered under `name`."""
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return MODELS[name](num_classes)


def init_params(model: nn.Module, inputs: jax.Array, key: jax.Array) -> Params:
    """Initial parameters for examples shaped like `inputs`, whose values are not used."""
    return model.init(key, jnp.zeros_like(inputs))["params"]


def example_loss(model: nn.Module) -> Callable[[Params, Any], jax.Array]:
    """`loss(params, example)`: the cross-entropy of one example, a scalar."""

    def loss(params: Params, example: Any) -> jax.Array:
        logits = model.apply({"params": params}, example["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, example["labels"])

    return loss


def evaluate_split(
    model: nn.Module, chunk: int = 1024
) -> Callable[[Params, Any], tuple[jax.Array, jax.Array]]:
    """`evaluate(params, split)`: mean cross-entropy and accuracy, `chunk` examples at a time."""

    def evaluate(params: Params, split: Any) -> tuple[jax.Array, jax.Array]:
        def one(example: Any) -> tuple[jax.Array, jax.Array]:
            logits: Any = model.apply({"params": params}, example["inputs"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, example["labels"])
            return loss, (jnp.argmax(logits) == example["labels"]).astype(jnp.float32)

        losses, correct = jax.lax.map(one, split, batch_size=chunk)
        return jnp.mean(losses), jnp.mean(correct)

    return jax.jit(evaluate)
