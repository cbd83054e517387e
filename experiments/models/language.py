"""Defines a RoBERTa-style encoder and a GPT-2-style decoder, with LoRA.

Each maps one row of tokens to logits. With `lora`, the published weights are variables of the
collection "frozen" and have no gradient. The corrections are trained, and for the encoder also the
classification head. Dropout is left out.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.models.transformer import SMALL, Frozen, Lora, Norm, Projection, run_layers


class _Embedding(Frozen):
    """A table (rows, features)."""

    rows: int = 0
    features: int = 0

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.weight("embedding", SMALL, (self.rows, self.features))


class _Tokens(nn.Module):
    """A model of one row of tokens.

    Attributes:
        vocab_size: Number of tokens.
        width: Features per token.
        depth: Number of layers.
        heads: Number of attention heads; it divides `width`.
        hidden: Features between the two projections of a layer.
        positions: Rows of the position table.
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
    activation: str = "gelu"
    lora: Lora | None = None

    def table(self, name: str, rows: int) -> jax.Array:
        """Returns the table `name` of rows (rows, width)."""
        return _Embedding(self.lora is not None, rows, self.width, name=name)()


class _Encoder(_Tokens):
    """A model of the BERT family.

    Attributes:
        types: Rows of the table of token types, of which the first is used.
        padding: Token that pads rows.
    """

    types: int = 1
    padding: int = 1

    def embedded(self, inputs: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns the features (length, width) of tokens at positions, both (length,)."""
        hidden = self.table("word_embeddings", self.vocab_size)[inputs]
        hidden += self.table("token_type_embeddings", self.types)[0]
        hidden += self.table("position_embeddings", self.positions)[positions]
        return Norm(self.lora is not None, self.epsilon, name="embeddings_norm")(hidden)


class RobertaClassifier(_Encoder):
    """RoBERTa with a classification head on its first token (Liu et al., 2019).

    The defaults are those of roberta-base. Positions of tokens other than padding are counted from
    `padding + 1`, so the position table has `padding + 1` rows more than the longest input.

    Attributes:
        num_classes: Number of logits.
    """

    vocab_size: int = 50_265
    positions: int = 514
    num_classes: int = 0

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns logits (num_classes,) of one row of tokens (length,)."""
        used = inputs != self.padding
        hidden = self.embedded(inputs, jnp.cumsum(used) * used + self.padding)
        hidden = run_layers(self, hidden, used, norm_first=False)
        first = jnp.tanh(Projection(False, self.width, name="head_dense")(hidden[0]))
        return Projection(False, self.num_classes, name="head_output")(first)


class BertEncoder(_Encoder):
    """BERT without a head: the normalized mean over its tokens (Devlin et al., 2019).

    The defaults are those of all-MiniLM-L6-v2, an encoder of sentences.
    """

    vocab_size: int = 30_522
    width: int = 384
    depth: int = 6
    hidden: int = 1536
    positions: int = 512
    types: int = 2
    padding: int = 0
    epsilon: float = 1e-12

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns features (width,) of Euclidean norm 1 of one row of tokens (length,)."""
        used = inputs != self.padding
        hidden = self.embedded(inputs, jnp.arange(len(inputs)))
        return mean_of_tokens(run_layers(self, hidden, used, norm_first=False), used)


def mean_of_tokens(hidden: jax.Array, used: jax.Array) -> jax.Array:
    """Returns the mean of the features (length, width) of used tokens, with norm 1."""
    total = jnp.sum(hidden * used[:, None], axis=0)
    return total * jax.lax.rsqrt(jnp.maximum(jnp.sum(total**2), 1e-12))


class Gpt2(_Tokens):
    """GPT-2, with logits from its table of tokens (Radford et al., 2019).

    The defaults are those of the small model. A position attends to itself and to earlier ones, so
    padding at the end does not change the rest.
    """

    activation: str = "gelu_new"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns next-token logits (length, vocab_size) for tokens (length,)."""
        words = self.table("word_embeddings", self.vocab_size)
        places = self.table("position_embeddings", self.positions)
        # Count positions from the inputs: the index then depends on the data, so this is a lookup.
        hidden = words[inputs] + places[jnp.cumsum(inputs >= 0) - 1]
        seen = jnp.tri(len(hidden), dtype=bool)
        hidden = run_layers(self, hidden, seen, norm_first=True, joint=True)
        normed = Norm(self.lora is not None, self.epsilon, name="final_norm")(hidden)
        return normed @ words.T
