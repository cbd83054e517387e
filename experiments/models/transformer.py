"""Defines the layers of published transformers, with LoRA.

With `lora`, the published weights are variables of the collection "frozen" and have no gradient.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}
"""Activations by their names in published configurations."""

SMALL = nn.initializers.normal(0.02)
"""Initializer of weights that no checkpoint provides."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank corrections x ↦ x W + (alpha/rank) (x A) B to frozen projections W.

    A is initialized at random and B at zero, so the initial correction is zero.

    Attributes:
        rank: Number of columns of A.
        alpha: Scale of the correction, times rank.
        projections: Names of the corrected projections, in every layer.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """

    rank: int
    alpha: float
    projections: tuple[str, ...]


class Frozen(nn.Module):
    """A base of layers whose weights are parameters, or constants if `frozen`."""

    frozen: bool

    def weight(self, name: str, init: Any, shape: tuple[int, ...]) -> jax.Array:
        """Returns the weight `name`."""
        if not self.frozen:
            return self.param(name, init, shape)
        constant = self.variable("frozen", name, lambda: init(self.make_rng("params"), shape))
        return constant.value


class Projection(Frozen):
    """Maps x ↦ x W + b, with LoRA's correction if it is among `lora.projections`."""

    features: int = 0
    lora: Lora | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps (..., width) to (..., features)."""
        width = inputs.shape[-1]
        kernel = self.weight("kernel", SMALL, (width, self.features))
        bias = self.weight("bias", nn.initializers.zeros_init(), (self.features,))
        outputs = inputs @ kernel + bias
        if self.lora is None or self.name not in self.lora.projections:
            return outputs
        down = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        a = self.param("lora_a", down, (width, self.lora.rank))
        b = self.param("lora_b", nn.initializers.zeros_init(), (self.lora.rank, self.features))
        return outputs + self.lora.alpha / self.lora.rank * (inputs @ a @ b)


class Norm(Frozen):
    """Layer normalization."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Normalizes the last axis to mean 0 and variance 1, then scales and shifts it."""
        shape = inputs.shape[-1:]
        scale = self.weight("scale", nn.initializers.ones_init(), shape)
        bias = self.weight("bias", nn.initializers.zeros_init(), shape)
        centered = inputs - jnp.mean(inputs, axis=-1, keepdims=True)
        variance = jnp.mean(centered**2, axis=-1, keepdims=True)
        return centered * jax.lax.rsqrt(variance + self.epsilon) * scale + bias


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, heads: int, seen: jax.Array
) -> jax.Array:
    """Computes attention of queries (length, width), masked by `seen`."""
    query, key, value = (x.reshape(len(x), heads, -1) for x in (query, key, value))
    scores = jnp.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, value).reshape(len(query), -1)


class _Layer(nn.Module):
    """Attention, then two projections; the output of each part is added to its input.

    Attributes:
        heads: Number of attention heads; it divides the width.
        hidden: Features between the two projections.
        epsilon: ε of the layer normalizations.
        activation: Name of the activation.
        lora: Corrections to train instead of the weights.
        norm_first: Whether to normalize the input of a part instead of its sum with the output.
        joint: Whether one projection computes queries, keys and values.
    """

    heads: int
    hidden: int
    epsilon: float
    activation: str
    lora: Lora | None
    norm_first: bool
    joint: bool

    @nn.compact
    def __call__(self, inputs: jax.Array, seen: jax.Array) -> jax.Array:
        frozen, width = self.lora is not None, inputs.shape[-1]

        def project(x: jax.Array, features: int, name: str) -> jax.Array:
            return Projection(frozen, features, self.lora, name=name)(x)

        def norm(x: jax.Array, name: str, here: bool) -> jax.Array:
            return Norm(frozen, self.epsilon, name=name)(x) if here else x

        normed = norm(inputs, "attention_norm", self.norm_first)
        if self.joint:
            query, key, value = jnp.split(project(normed, 3 * width, "query_key_value"), 3, axis=-1)
        else:
            query, key, value = (project(normed, width, name) for name in ("query", "key", "value"))
        attended = attend(query, key, value, self.heads, seen)
        middle = inputs + project(attended, width, "attention_output")
        middle = norm(middle, "attention_norm", not self.norm_first)
        normed = norm(middle, "output_norm", self.norm_first)
        hidden = ACTIVATIONS[self.activation](project(normed, self.hidden, "intermediate"))
        outputs = middle + project(hidden, width, "output")
        return norm(outputs, "output_norm", not self.norm_first)


def run_layers(
    model: Any,
    hidden: jax.Array,
    seen: jax.Array,
    *,
    norm_first: bool,
    joint: bool = False,
) -> jax.Array:
    """Runs the layers of a model from within its call, and sows inputs and outputs.

    Args:
        model: A module with `depth` and the attributes of a layer; its tree has "layer_0" and so
            on.
        hidden: Features (length, width).
        seen: Mask of visible keys, (keys,), or for each query, (length, keys).
        norm_first: Whether to normalize the input of a part instead of its sum with the output.
        joint: Whether one projection computes queries, keys and values.

    Returns:
        The features after the last layer.
    """
    model.sow("intermediates", "hidden", hidden)
    fields = (model.heads, model.hidden, model.epsilon, model.activation, model.lora)
    for i in range(model.depth):
        hidden = _Layer(*fields, norm_first, joint, name=f"layer_{i}")(hidden, seen)
        model.sow("intermediates", "hidden", hidden)
    return hidden
