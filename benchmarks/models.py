"""Defines the models: parameters, the loss of one example, and a batch maker."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Problem(NamedTuple):
    """A training problem.

    Attributes:
      params: a pytree of float32 arrays.
      loss_fn: `loss_fn(params, example)`, a scalar.
      make_batch: `make_batch(size)`, examples along the leading axis of every leaf.
      frozen: arrays that are not trained; `None` for none. Otherwise the loss is
        `loss_fn(frozen, params, example)`, and the step has an argument for them.
    """

    params: Any
    loss_fn: Callable[..., jax.Array]
    make_batch: Callable[[int], Any]
    frozen: Any = None


def mlp(width: int = 256) -> Problem:
    """Returns a 784-width-10 ReLU network for images of MNIST's size."""

    def loss_fn(params, example):
        x, label = example
        hidden = jax.nn.relu(_dense(params["hidden"], x))
        return _cross_entropy(_dense(params["output"], hidden), label)

    params = {"hidden": _dense_params(0, 784, width), "output": _dense_params(1, width, 10)}
    return Problem(params, loss_fn, lambda size: images(size, (784,)))


def wide_mlp(width: int = 4096) -> Problem:
    """Returns a 784-4096-10 network, where noise takes the largest share of a step."""
    return mlp(width)


def cnn(channels: int = 32) -> Problem:
    """Returns a CNN for 32×32×3: three 3×3 convolutions, two dense layers, 0.55 M."""
    params = {
        "conv1": _conv_params(0, 3, channels),
        "conv2": _conv_params(1, channels, 2 * channels),
        "conv3": _conv_params(2, 2 * channels, 4 * channels),
        "hidden": _dense_params(3, 64 * channels, 7 * channels),
        "output": _dense_params(4, 7 * channels, 10),
    }
    return Problem(params, cnn_loss, lambda size: images(size, (32, 32, 3)))


def cnn_loss(params, example):
    """Returns the loss of a CNN with layers "conv1", "conv2", … and two dense layers."""
    x, label = example
    for name in sorted(params.keys() - {"hidden", "output"}):
        x = jax.nn.relu(_conv(params[name], x))
        x = x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2, -1).mean((1, 3))
    x = jax.nn.relu(_dense(params["hidden"], x.reshape(-1)))
    return _cross_entropy(_dense(params["output"], x), label)


def transformer(
    length: int = 64, width: int = 256, layers: int = 4, vocabulary: int = 512
) -> Problem:
    """Returns a causal pre-norm language model: 4 heads, 4 blocks of width 256, 3.4 M."""

    def block(params, x):
        y = _layer_norm(params["norm1"], x)
        q, k, v = (_dense(params[n], y).reshape(length, 4, width // 4) for n in ("q", "k", "v"))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / math.sqrt(width // 4)
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(length, width)
        x = x + _dense(params["mix"], mixed)
        y = jax.nn.gelu(_dense(params["up"], _layer_norm(params["norm2"], x)))
        return x + _dense(params["down"], y)

    def loss_fn(params, example):
        tokens, targets = example
        x = params["tokens"][tokens] + params["positions"]
        for layer in params["blocks"]:
            x = block(layer, x)
        logits = _dense(params["output"], _layer_norm(params["norm"], x))
        return _cross_entropy(logits, targets).mean()

    def block_params(seed):
        dense = {name: _dense_params(seed + i, width, width) for i, name in enumerate("qkv")}
        norm = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
        return dense | {
            "mix": _dense_params(seed + 3, width, width),
            "up": _dense_params(seed + 4, width, 4 * width),
            "down": _dense_params(seed + 5, 4 * width, width),
            "norm1": norm,
            "norm2": jax.tree.map(jnp.copy, norm),
        }

    params = {
        "tokens": _normal(0, (vocabulary, width), 0.02),
        "positions": _normal(1, (length, width), 0.02),
        "blocks": [block_params(10 * (i + 1)) for i in range(layers)],
        "norm": {"scale": jnp.ones(width), "bias": jnp.zeros(width)},
        "output": _dense_params(2, width, vocabulary),
    }
    return Problem(params, loss_fn, lambda size: texts(size, length, vocabulary))


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "wide_mlp": wide_mlp}


def _dense(params, x):
    return x @ params["kernel"] + params["bias"]


def _conv(params, x):
    dimensions = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(
        x[None], params["kernel"], (1, 1), "SAME", dimension_numbers=dimensions
    )
    return y[0] + params["bias"]


def _layer_norm(params, x):
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * params["scale"] + params["bias"]


def _cross_entropy(logits, label):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), label[..., None], -1)[..., 0]


def _dense_params(seed, inputs, outputs):
    kernel = _normal(seed, (inputs, outputs), inputs**-0.5)
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def _conv_params(seed, inputs, outputs):
    kernel = _normal(seed, (3, 3, inputs, outputs), (9 * inputs) ** -0.5)
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}


def _normal(seed, shape, stddev):
    return stddev * jax.random.normal(jax.random.key(seed), shape)


def texts(size, length, vocabulary):
    """Returns rows of random tokens, and the token that follows each of them."""
    tokens = jax.random.randint(jax.random.key(1), (size, length + 1), 0, vocabulary)
    return tokens[:, :-1], tokens[:, 1:]


def images(size, shape):
    """Returns random images and labels of ten classes."""
    x = jax.random.normal(jax.random.key(0), (size, *shape))
    return x, jax.random.randint(jax.random.key(1), (size,), 0, 10)
