"""Defines a RoBERTa-style encoder and a GPT-2-style decoder, with LoRA.

Each maps one row of tokens to logits. With `lora`, the published weights are variables of the
collection "frozen" and have no gradient. The corrections are trained, and for the encoder also the
classification head. Dropout is left out.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.models.transformer import (
    SMALL,
    Frozen,
    Lora,
    Norm,
    Projection,
    run_layers,
)


class _Embedding(Frozen):
    """A table (rows, features)."""

    rows: int = 0
    features: int = 0

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.weight("embedding", SMALL, (self.rows, self.features))


class RobertaClassifier(nn.Module):
    """RoBERTa with a classification head on its first token (Liu et al., 2019).

    The defaults are those of roberta-base. Positions of tokens other than padding are counted from
    `padding + 1`.

    Attributes:
        num_classes: Number of logits.
        vocab_size: Number of tokens.
        width: Features per token.
        depth: Number of layers.
        heads: Number of attention heads; it divides `width`.
        hidden: Features between the two projections of a layer.
        positions: Rows of the position table, `padding + 1` more than the longest input.
        types: Rows of the table of token types, of which the first is used.
        padding: Token that pads rows.
        epsilon: ε of the layer normalizations.
        activation: Name of the activation.
        lora: Corrections to train instead of the weights. None: all weights are trained.
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
        """Returns logits (num_classes,) of one row of tokens (length,)."""
        frozen = self.lora is not None

        def table(name: str, rows: int) -> jax.Array:
            return _Embedding(frozen, rows, self.width, name=name)()

        used = inputs != self.padding
        position = jnp.cumsum(used) * used + self.padding
        hidden = table("word_embeddings", self.vocab_size)[inputs]
        hidden += table("token_type_embeddings", self.types)[0]
        hidden += table("position_embeddings", self.positions)[position]
        hidden = Norm(frozen, self.epsilon, name="embeddings_norm")(hidden)
        hidden = run_layers(self, hidden, used, norm_first=False)
        first = jnp.tanh(Projection(False, self.width, name="head_dense")(hidden[0]))
        return Projection(False, self.num_classes, name="head_output")(first)


class BertEncoder(nn.Module):
    """BERT without a head: the normalized mean over its tokens (Devlin et al., 2019).

    The defaults are those of all-MiniLM-L6-v2, an encoder of sentences.

    Attributes:
        vocab_size: Number of tokens.
        width: Features per token.
        depth: Number of layers.
        heads: Number of attention heads; it divides `width`.
        hidden: Features between the two projections of a layer.
        positions: Rows of the position table, the length of the longest input.
        types: Rows of the table of token types, of which the first is used.
        padding: Token that pads rows.
        epsilon: ε of the layer normalizations.
        activation: Name of the activation.
        lora: Corrections to train instead of the weights. None: all weights are trained.
        first: Number of the first layer that runs. Above 0, inputs are features of tokens.
    """

    vocab_size: int = 30_522
    width: int = 384
    depth: int = 6
    heads: int = 12
    hidden: int = 1536
    positions: int = 512
    types: int = 2
    padding: int = 0
    epsilon: float = 1e-12
    activation: str = "gelu"
    lora: Lora | None = None
    first: int = 0

    @nn.compact
    def __call__(self, inputs: jax.Array, used: jax.Array | None = None) -> jax.Array:
        """Returns features (width,) of Euclidean norm 1.

        Args:
            inputs: One row of tokens (length,), or the features (length, width) that enter layer
                `first`.
            used: Mask (length,) of tokens other than padding. Required with features.
        """
        frozen = self.lora is not None

        def table(name: str, rows: int) -> jax.Array:
            return _Embedding(frozen, rows, self.width, name=name)()

        hidden = inputs
        if not self.first:
            used = inputs != self.padding
            hidden = table("word_embeddings", self.vocab_size)[inputs]
            hidden += table("token_type_embeddings", self.types)[0]
            hidden += table("position_embeddings", self.positions)[: len(inputs)]
            hidden = Norm(frozen, self.epsilon, name="embeddings_norm")(hidden)
        assert used is not None
        hidden = run_layers(self, hidden, used, norm_first=False, first=self.first)
        return mean_of_tokens(hidden, used)


def mean_of_tokens(hidden: jax.Array, used: jax.Array) -> jax.Array:
    """Returns the mean of the features (length, width) of used tokens, with norm 1."""
    total = jnp.sum(hidden * used[:, None], axis=0)
    return total * jax.lax.rsqrt(jnp.maximum(jnp.sum(total**2), 1e-12))


class Gpt2(nn.Module):
    """GPT-2, with logits from its table of tokens (Radford et al., 2019).

    The defaults are those of the small model. A position attends to itself and to earlier ones, so
    padding at the end does not change the rest.

    Attributes:
        vocab_size: Number of tokens.
        width: Features per token.
        depth: Number of layers.
        heads: Number of attention heads; it divides `width`.
        hidden: Features between the two projections of a layer.
        positions: Rows of the position table, the length of the longest input.
        epsilon: ε of the layer normalizations.
        activation: Name of the activation.
        lora: Corrections to train instead of the weights. None: all weights are trained.
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
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns next-token logits (length, vocab_size) for tokens (length,)."""
        frozen = self.lora is not None
        words = _Embedding(frozen, self.vocab_size, self.width, name="word_embeddings")()
        places = _Embedding(frozen, self.positions, self.width, name="position_embeddings")()
        # Count positions from the inputs: the index then depends on the data, so this is a lookup.
        hidden = words[inputs] + places[jnp.cumsum(inputs >= 0) - 1]
        seen = jnp.tri(len(hidden), dtype=bool)
        hidden = run_layers(self, hidden, seen, norm_first=True, joint=True)
        return Norm(frozen, self.epsilon, name="final_norm")(hidden) @ words.T
