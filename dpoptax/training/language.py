"""A RoBERTa-style encoder and a GPT-2-style decoder, as published, with LoRA.

Each maps one row of tokens to logits. With `lora`, the published weights are variables of the
collection "frozen", which no gradient is taken of; the trained parameters are the corrections, and
of the encoder the classification head. Dropout is left out.
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
"""Activations under the names that published configurations have."""

SMALL = nn.initializers.normal(0.02)
"""What weights are drawn from where no checkpoint gives them."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank corrections x ↦ x W + (alpha/rank) (x A) B to projections whose W is frozen.

    A starts random and B at zero: at first nothing is changed.

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
    """Base of layers whose weights are parameters, or constants where `frozen`."""

    frozen: bool

    def weight(self, name: str, init: Any, shape: tuple[int, ...]) -> jax.Array:
        """The weight `name`."""
        if not self.frozen:
            return self.param(name, init, shape)
        constant = self.variable("frozen", name, lambda: init(self.make_rng("params"), shape))
        return constant.value


class Projection(Frozen):
    """x ↦ x W + b, with LoRA's correction if it is among `lora.projections`."""

    features: int = 0
    lora: Lora | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """(..., features) of (..., width)."""
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
    """Layer normalisation."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`inputs`, with mean 0 and variance 1 over the last axis, scaled and shifted."""
        shape = inputs.shape[-1:]
        scale = self.weight("scale", nn.initializers.ones_init(), shape)
        bias = self.weight("bias", nn.initializers.zeros_init(), shape)
        centred = inputs - jnp.mean(inputs, axis=-1, keepdims=True)
        variance = jnp.mean(centred**2, axis=-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + self.epsilon) * scale + bias


class _Embedding(Frozen):
    """A table (rows, features)."""

    rows: int = 0
    features: int = 0

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.weight("embedding", SMALL, (self.rows, self.features))


def attend(query: jax.Array, key: jax.Array, value: jax.Array, heads: int, seen: jax.Array):
    """Attention over (length, width) with `seen` (length, length) or (length,) of the keys."""
    query, key, value = (x.reshape(len(x), heads, -1) for x in (query, key, value))
    scores = jnp.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, value).reshape(len(query), -1)


class _RobertaLayer(nn.Module):
    """Attention, then two projections, each normalised after the sum with its input."""

    heads: int
    hidden: int
    epsilon: float
    activation: str
    lora: Lora | None

    @nn.compact
    def __call__(self, inputs: jax.Array, seen: jax.Array) -> jax.Array:
        frozen, width = self.lora is not None, inputs.shape[-1]

        def project(x: jax.Array, features: int, name: str) -> jax.Array:
            return Projection(frozen, features, self.lora, name=name)(x)

        query, key, value = (project(inputs, width, name) for name in ("query", "key", "value"))
        attended = project(attend(query, key, value, self.heads, seen), width, "attention_output")
        middle = Norm(frozen, self.epsilon, name="attention_norm")(inputs + attended)
        hidden = ACTIVATIONS[self.activation](project(middle, self.hidden, "intermediate"))
        outputs = project(hidden, width, "output")
        return Norm(frozen, self.epsilon, name="output_norm")(middle + outputs)


class RobertaClassifier(nn.Module):
    """RoBERTa with a classification head on its first token (Liu et al., 2019).

    The defaults are those of roberta-base. Positions count from `padding + 1`, padding apart.

    Attributes:
        num_classes: Number of logits.
        vocab_size: Number of tokens.
        width: Features of a token.
        depth: Number of layers.
        heads: Number of attention heads; it divides `width`.
        hidden: Features between the two projections of a layer.
        positions: Rows of the table of positions, `padding + 1` more than the longest input.
        types: Rows of the table of token types, of which the first is used.
        padding: The token that rows are padded with.
        epsilon: Of the layer normalisations.
        activation: Name of the activation.
        lora: Corrections to train instead of the weights; None: all weights are trained.
    """

    num_classes: int
    vocab_size: int = 50_265
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072
    positions: int = 514
    types: int = 1
    padding: int = 1
    epsilon: float = 1e-5
    activation: str = "gelu"
    lora: Lora | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits (num_classes,) of one row of tokens (length,)."""
        frozen = self.lora is not None

        def table(name: str, rows: int) -> jax.Array:
            return _Embedding(frozen, rows, self.width, name=name)()

        used = inputs != self.padding
        position = jnp.cumsum(used) * used + self.padding
        hidden = table("word_embeddings", self.vocab_size)[inputs]
        hidden += table("token_type_embeddings", self.types)[0]
        hidden += table("position_embeddings", self.positions)[position]
        hidden = Norm(frozen, self.epsilon, name="embeddings_norm")(hidden)
        self.sow("intermediates", "hidden", hidden)
        for i in range(self.depth):
            layer = (self.heads, self.hidden, self.epsilon, self.activation, self.lora)
            hidden = _RobertaLayer(*layer, name=f"layer_{i}")(hidden, used)
            self.sow("intermediates", "hidden", hidden)
        first = jnp.tanh(Projection(False, self.width, name="head_dense")(hidden[0]))
        return Projection(False, self.num_classes, name="head_output")(first)


Past = tuple[jax.Array, jax.Array]
"""Keys and values (room, width) of the tokens before, in one layer; later rows are unused."""


class _Gpt2Layer(nn.Module):
    """Causal attention, then two projections, each normalised before."""

    heads: int
    hidden: int
    epsilon: float
    activation: str
    lora: Lora | None

    @nn.compact
    def __call__(self, inputs: jax.Array, past: Past | None, position: Any) -> Any:
        frozen, (length, width) = self.lora is not None, inputs.shape

        def project(x: jax.Array, features: int, name: str) -> jax.Array:
            return Projection(frozen, features, self.lora, name=name)(x)

        normed = Norm(frozen, self.epsilon, name="attention_norm")(inputs)
        whole = project(normed, 3 * width, "query_key_value")
        query, key, value = jnp.split(whole, 3, axis=-1)
        seen = jnp.tril(jnp.ones((length, length), bool))
        if past is not None:
            key, value = (
                jax.lax.dynamic_update_slice(old, new, (position, 0))
                for old, new in zip(past, (key, value), strict=True)
            )
            seen = jnp.arange(len(key)) <= position + jnp.arange(length)[:, None]
        attended = attend(query, key, value, self.heads, seen)
        middle = inputs + project(attended, width, "attention_output")
        normed = Norm(frozen, self.epsilon, name="output_norm")(middle)
        hidden = ACTIVATIONS[self.activation](project(normed, self.hidden, "intermediate"))
        outputs = middle + project(hidden, width, "output")
        return outputs if past is None else (outputs, (key, value))


class Gpt2(nn.Module):
    """GPT-2, whose logits are products with its table of tokens (Radford et al., 2019).

    The defaults are those of the small one. A position sees itself and those before it, so padding
    at the end changes nothing before.

    Attributes:
        vocab_size: Number of tokens.
        width: Features of a token.
        depth: Number of layers.
        heads: Number of attention heads; it divides `width`.
        hidden: Features between the two projections of a layer.
        positions: Rows of the table of positions, the longest input.
        epsilon: Of the layer normalisations.
        activation: Name of the activation.
        lora: Corrections to train instead of the weights; None: all weights are trained.
    """

    vocab_size: int = 50_257
    width: int = 768
    depth: int = 12
    heads: int = 12
    hidden: int = 3072
    positions: int = 1024
    epsilon: float = 1e-5
    activation: str = "gelu_new"
    lora: Lora | None = None

    @nn.compact
    def __call__(
        self, inputs: jax.Array, past: tuple[Past, ...] | None = None, position: Any = 0
    ) -> Any:
        """Logits (length, vocab_size) of what follows each of the tokens (length,).

        With `past`, of every layer the keys and values (room, width) of earlier tokens, the inputs
        are the tokens from number `position` on, and the result is the logits and `past` with them.
        """
        frozen = self.lora is not None
        words = _Embedding(frozen, self.vocab_size, self.width, name="word_embeddings")()
        places = _Embedding(frozen, self.positions, self.width, name="position_embeddings")()
        # Counted from the data: a table that is looked up needs no gradient for every example, one
        # that is cut and added does.
        hidden = words[inputs] + places[jnp.cumsum(inputs >= 0) - 1 + position]
        self.sow("intermediates", "hidden", hidden)
        grown: list[Past] = []
        for i in range(self.depth):
            layer = (self.heads, self.hidden, self.epsilon, self.activation, self.lora)
            block = _Gpt2Layer(*layer, name=f"layer_{i}")
            if past is None:
                hidden = block(hidden, None, 0)
            else:
                hidden, of_layer = block(hidden, past[i], position)
                grown.append(of_layer)
            self.sow("intermediates", "hidden", hidden)
        logits = Norm(frozen, self.epsilon, name="final_norm")(hidden) @ words.T
        return logits if past is None else (logits, tuple(grown))
