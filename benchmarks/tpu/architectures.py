"""Defines transformers and a ResNet by parameter shapes and loss.

No array is created, so a model of any size can be traced and compiled.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from benchmarks.models import Problem


class Architecture(NamedTuple):
    """A model.

    Attributes:
      params: shapes of the parameters, in float32.
      example: shapes of one example.
      loss_fn: `loss_fn(params, example)`, a scalar.
      specs: how FSDP splits the parameters over the axis "data".
    """

    params: Any
    example: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    specs: Any = P()


def small(problem: Problem) -> Architecture:
    """Returns the shapes of a small network, whose parameters exist."""
    shapes = jax.eval_shape(lambda: (problem.params, problem.make_batch(1)))
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes[1])
    return Architecture(shapes[0], example, problem.loss_fn)


def gpt2(
    length: int,
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50_257,
    dtype: str = "float32",
    remat: bool = False,
    query_block: int | None = None,
    constrained: bool = False,
    tied: bool = True,
) -> Architecture:
    """Returns GPT-2 small: learned positions, and a scan over the layers.

    Args:
      length: tokens per sequence.
      layers: blocks, with stacked parameters.
      width: features per token.
      heads: attention heads.
      vocabulary: rows of the embedding.
      dtype: dtype of activations and matrix products.
      remat: whether the backward pass computes the blocks again.
      query_block: queries per block of the attention, each block recomputed; `None` for all.
      constrained: whether activations are constrained to stay on the device of their example, as
        under FSDP.
      tied: whether the head is the transposed embedding.
    """
    stay = _stay if constrained else lambda x: x
    attend = functools.partial(_attention, heads=heads, causal=True, block=query_block)

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return _block(stay(x), layer, attend), None

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        x = params["tokens"][tokens[:-1]] + params["positions"][:length]
        x, _ = jax.lax.scan(jax.checkpoint(block) if remat else block, x, params["blocks"])
        head = params["tokens"].T if tied else params["head"]
        logits = stay(_layer_norm(params["norm"], stay(x)) @ head)
        return _cross_entropy(logits, tokens[1:]).mean()

    params = {
        "tokens": _shape(vocabulary, width),
        "positions": _shape(max(1024, length), width),
        "blocks": _block_shapes(layers, width),
        "norm": _norm_shapes(width),
    }
    if not tied:
        params["head"] = _shape(width, vocabulary)
    specs = jax.tree.map(lambda _: P(), params)
    specs["tokens"] = specs["positions"] = P(None, "data")
    for name, split in (("qkv", 1), ("mix", 2), ("up", 1), ("down", 2)):
        specs["blocks"][name]["kernel"] = P(*(None,) * split, "data")
    return Architecture(params, jax.ShapeDtypeStruct((length + 1,), jnp.int32), loss_fn, specs)


def vit_s(
    *, layers: int = 12, dtype: str = "float32", pixels: int = 32, patch: int = 4
) -> Architecture:
    """Returns ViT-S for square images of square patches, with a scan over the layers."""
    width, attend = 384, functools.partial(_attention, heads=6, causal=False, block=None)
    side = pixels // patch

    def loss_fn(params: Any, example: Any) -> jax.Array:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        image, label = example
        patches = image.astype(dtype).reshape(side, patch, side, patch, 3).swapaxes(1, 2)
        patches = patches.reshape(side**2, 3 * patch**2)
        x = _dense(params["patch"], patches) + params["positions"]
        x, _ = jax.lax.scan(lambda x, p: (_block(x, p, attend), None), x, params["blocks"])
        logits = _dense(params["head"], _layer_norm(params["norm"], x).mean(0))
        return _cross_entropy(logits, label)

    params = {
        "patch": _dense_shapes(3 * patch**2, width),
        "positions": _shape(side**2, width),
        "blocks": _block_shapes(layers, width),
        "norm": _norm_shapes(width),
        "head": _dense_shapes(width, 10),
    }
    return Architecture(params, _image(pixels), loss_fn)


def resnet_18(*, dtype: str = "float32") -> Architecture:
    """Returns ResNet-18 for 32×32 pixels, with group normalization."""
    units, inputs = [], 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for first in (True, False):
            units.append((inputs, width, 2 if stage and first else 1))
            inputs = width

    def loss_fn(params: Any, example: Any) -> jax.Array:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        pixels, label = example
        x = _convolution(params["stem"], pixels.astype(dtype)[None], 1)
        x = jax.nn.relu(_group_norm(params["norm"], x))
        for unit, (_, _, stride) in zip(params["units"], units, strict=True):
            y = _group_norm(unit["norm1"], _convolution(unit["conv1"], x, stride))
            y = _group_norm(unit["norm2"], _convolution(unit["conv2"], jax.nn.relu(y), 1))
            shortcut = _convolution(unit["shortcut"], x, stride) if "shortcut" in unit else x
            x = jax.nn.relu(y + shortcut)
        return _cross_entropy(_dense(params["head"], x.mean((0, 1, 2))), label)

    def unit_shapes(inputs: int, width: int, stride: int) -> Any:
        shapes = {
            "conv1": _shape(3, 3, inputs, width),
            "norm1": _norm_shapes(width),
            "conv2": _shape(3, 3, width, width),
            "norm2": _norm_shapes(width),
        }
        return shapes | ({"shortcut": _shape(1, 1, inputs, width)} if stride > 1 else {})

    params = {
        "stem": _shape(3, 3, 3, 64),
        "norm": _norm_shapes(64),
        "units": [unit_shapes(*unit) for unit in units],
        "head": _dense_shapes(512, 10),
    }
    return Architecture(params, _image(), loss_fn)


def _block(x: jax.Array, params: Any, attend: Callable[..., jax.Array]) -> jax.Array:
    qkv = _dense(params["qkv"], _layer_norm(params["norm1"], x))
    x = x + _dense(params["mix"], attend(*jnp.split(qkv, 3, -1)))
    hidden = _dense(params["up"], _layer_norm(params["norm2"], x))
    return x + _dense(params["down"], jax.nn.gelu(hidden))


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, heads: int, causal: bool, block: int | None
) -> jax.Array:
    length, width = q.shape
    q, k, v = (x.reshape(length, heads, width // heads) for x in (q, k, v))

    def mixed(q: jax.Array, places: jax.Array) -> jax.Array:
        scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) / math.sqrt(width // heads)
        if causal:
            scores = jnp.where(jnp.arange(length) <= places[:, None], scores, -1e9)
        weights = jax.nn.softmax(scores).astype(q.dtype)
        return jnp.einsum("hqk,khd->qhd", weights, v)

    places = jnp.arange(length)
    if block is None:
        return mixed(q, places).reshape(length, width)
    blocks = q.reshape(-1, block, *q.shape[1:]), places.reshape(-1, block)
    return jax.lax.map(lambda args: jax.checkpoint(mixed)(*args), blocks).reshape(length, width)


def _stay(x: jax.Array) -> jax.Array:
    if jax.sharding.get_abstract_mesh().are_all_axes_manual:
        return x  # in `shard_map`, where `x` is on one device
    return jax.lax.with_sharding_constraint(x, P(*(None,) * x.ndim))


def _dense(params: Any, x: jax.Array) -> jax.Array:
    y = x @ params["kernel"] + params["bias"]
    return y + x @ params["a"] @ params["b"] if "a" in params else y  # LoRA


def _convolution(kernel: jax.Array, x: jax.Array, stride: int) -> jax.Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=dimensions
    )


def _normalize(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    x = x.astype(jnp.float32)
    x = x - x.mean(axes, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(axes, keepdims=True) + 1e-5)


def _layer_norm(params: Any, x: jax.Array) -> jax.Array:
    return _normalize(x, (-1,)).astype(x.dtype) * params["scale"] + params["bias"]


def _group_norm(params: Any, x: jax.Array) -> jax.Array:
    groups = x.reshape(*x.shape[:-1], 32, -1)
    normalized = _normalize(groups, (1, 2, 4)).reshape(x.shape).astype(x.dtype)
    return normalized * params["scale"] + params["bias"]


def _cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), label)


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _dense_shapes(inputs: int, outputs: int, *stacked: int) -> Any:
    return {"kernel": _shape(*stacked, inputs, outputs), "bias": _shape(*stacked, outputs)}


def _norm_shapes(width: int, *stacked: int) -> Any:
    return {"scale": _shape(*stacked, width), "bias": _shape(*stacked, width)}


def _block_shapes(layers: int, width: int) -> Any:
    return {
        "norm1": _norm_shapes(width, layers),
        "qkv": _dense_shapes(width, 3 * width, layers),
        "mix": _dense_shapes(width, width, layers),
        "norm2": _norm_shapes(width, layers),
        "up": _dense_shapes(width, 4 * width, layers),
        "down": _dense_shapes(4 * width, width, layers),
    }


def _image(pixels: int = 32) -> Any:
    image = jax.ShapeDtypeStruct((pixels, pixels, 3), jnp.float32)
    return image, jax.ShapeDtypeStruct((), jnp.int32)
