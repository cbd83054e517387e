"""Tiny networks of every kind that ghost clipping must support, each a `Network`.

NumPy draws parameters and batches, because JAX would compile a generator for every shape.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers import floats


class Network(NamedTuple):
    """A loss of one example, parameters and batch of a seed, and whether it uses keys."""

    loss: Callable[..., Any]
    params: Callable[[int], Any]
    batch: Callable[[int, int], Any]
    keyed: bool = False


NETWORKS: dict[str, Network] = {}


def _network(params, batch, keyed=False):
    def register(loss):
        name = loss.__name__.strip("_")
        NETWORKS[name] = Network(loss, params, batch, keyed)
        return loss

    return register


def _floats(rng, shape, scale=1.0):
    return floats(scale * rng.normal(size=shape))


def _normal(**shapes):
    def make(seed):
        rng = np.random.default_rng(seed)
        return {
            name: _floats(rng, shape, max(1, shape[-1] if shape else 1) ** -0.5)
            for name, shape in shapes.items()
        }

    return make


def _vectors(*shape):
    return lambda seed, n: _floats(np.random.default_rng(seed), (n, *shape))


def _labeled(*shape, classes=3):
    def make(seed, n):
        rng = np.random.default_rng(seed)
        return _floats(rng, (n, *shape)), jax.device_put(rng.integers(0, classes, n))

    return make


def _tokens(length, vocabulary):
    def make(seed, n):
        return jax.device_put(np.random.default_rng(seed).integers(0, vocabulary, (n, length)))

    return make


def _cross_entropy(logits, label):
    return -jax.nn.log_softmax(logits)[label]


def _norm(x, scale=1.0, axes=-1):
    x = x - x.mean(axes, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x**2, axes, keepdims=True) + 1e-5) * scale


def _conv(x, w, stride=1, padding="SAME", **kwargs):
    x = x[None] if x.ndim == 3 else x
    return lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **kwargs
    )


@_network(_normal(w=(5, 4), b=(4,), v=(4, 3), c=(3,)), _labeled(5))
def _mlp(p, example):
    x, y = example
    return _cross_entropy(jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"], y)


@_network(_normal(a=(3, 3, 2, 4), b=(4,), c=(3, 3, 4, 6), d=(6,), e=(24, 3)), _labeled(8, 8, 2))
def _cnn(p, example):
    x, y = example
    x = jax.nn.relu(_conv(x, p["a"], 2) + p["b"])
    x = jax.nn.relu(_conv(x, p["c"]) + p["d"])
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return _cross_entropy(x.reshape(-1) @ p["e"], y)


@_network(
    _normal(a=(3, 2, 2, 4), b=(3, 3, 1, 4), c=(2, 3, 2, 6), d=(2, 2, 6, 4), e=(3, 3, 4, 2)),
    _labeled(9, 9, 2),
)
def _odd_convolutions(p, example):
    x, y = example
    x = jnp.tanh(_conv(x, p["a"], padding=((1, 2), (0, -1)), rhs_dilation=(2, 1)))
    x = jnp.tanh(_conv(x, p["b"], stride=2, feature_group_count=4))
    x = jnp.tanh(_conv(x, p["c"], feature_group_count=2))
    x = jnp.tanh(_conv(x, p["d"], padding=((1, 1), (1, 1)), lhs_dilation=(2, 2)))
    x = _conv(x, p["e"], padding="VALID")
    return _cross_entropy(x.sum((0, 1, 2)), y) + jnp.mean(x**2)


@_network(_normal(w=(3, 2, 4), v=(4, 3)), _labeled(10, 2))
def _convolution_over_time(p, example):
    x, y = example
    x = lax.conv_general_dilated(
        x.T[None], p["w"].transpose(2, 1, 0), (1,), "SAME", dimension_numbers=("NCW", "OIW", "NCW")
    )
    return _cross_entropy(jnp.tanh(x).mean((0, 2)) @ p["v"], y)


def _attention(x, q, k, v, o, heads):
    length, width = x.shape
    split = lambda w: (x @ w).reshape(length, heads, -1)  # noqa: E731
    scores = jnp.einsum("thd,shd->hts", split(q), split(k)) / (width // heads) ** 0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
    return jnp.einsum("hts,shd->thd", weights, split(v)).reshape(length, -1) @ o


_BLOCK = dict(
    q=(8, 8), k=(8, 8), v=(8, 8), o=(8, 8), u=(8, 16), s=(16,), d=(16, 8), t=(8,), g=(8,), h=(8,)
)


def _block(p, x):
    x = x + _attention(_norm(x, p["g"]), p["q"], p["k"], p["v"], p["o"], 2)
    return x + jax.nn.gelu(_norm(x, p["h"]) @ p["u"] + p["s"]) @ p["d"] + p["t"]


@_network(_normal(e=(11, 8), pos=(6, 8), out=(8, 11), **_BLOCK), _tokens(7, 11))
def _transformer(p, tokens):
    x = p["e"][tokens[:-1]] + p["pos"]
    logits = _block(p, x) @ p["out"]
    return jnp.mean(jax.vmap(_cross_entropy)(logits, tokens[1:]))


@_network(_normal(e=(11, 8), **_BLOCK), _tokens(7, 11))
def _tied_embeddings(p, tokens):
    x = jnp.take(p["e"], tokens[:-1], axis=0)
    logits = jnp.einsum("td,vd->tv", _block(p, x), p["e"])
    return jnp.mean(jax.vmap(_cross_entropy)(logits, tokens[1:]))


@_network(_normal(e=(5, 8), out=(8, 3), **_BLOCK), _labeled(4, 4, 2))
def _vit(p, example):
    x, y = example
    patches = x.reshape(2, 2, 2, 2, 2).transpose(0, 2, 1, 3, 4).reshape(4, 8)
    x = jnp.concatenate([p["e"][:1], patches @ p["q"].T]) + p["e"]
    return _cross_entropy(_block(p, x)[0] @ p["out"], y)


@_network(
    lambda seed: {
        **_normal(e=(11, 8))(seed),
        "blocks": _normal(**{name: (3, *shape) for name, shape in _BLOCK.items()})(seed + 10),
    },
    _tokens(7, 11),
)
def _scanned_layers(p, tokens):
    x, _ = lax.scan(lambda x, block: (_block(block, x), None), p["e"][tokens[:-1]], p["blocks"])
    return jnp.mean(jax.vmap(_cross_entropy)(x @ p["e"].T, tokens[1:]))


def _lstm_step(p, carry, x):
    h, c = carry
    i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"] + p["b"], 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(c), c), c


@_network(_normal(w=(3, 16), u=(4, 16), b=(16,), h=(4,), v=(4, 3)), _labeled(6, 3))
def _lstm(p, example):
    x, y = example
    start = (jnp.tanh(p["h"]), jnp.zeros(4))
    (h, _), cells = lax.scan(lambda c, x: _lstm_step(p, c, x), start, x)
    return _cross_entropy(h @ p["v"], y) + jnp.mean(cells**2)


@_network(_normal(w=(3, 16), u=(4, 16), b=(16,), h=(4,), v=(4, 3)), _labeled(4, 5, 3))
def _nested_scans(p, example):
    x, y = example

    def outer(carry, row):
        carry, _ = lax.scan(lambda c, x: _lstm_step(p, c, x), carry, row, reverse=True)
        return carry, jnp.tanh(carry[0] @ p["v"])

    _, outputs = lax.scan(outer, (p["h"], jnp.zeros(4)), x)
    return _cross_entropy(outputs.sum(0), y)


@_network(
    _normal(a=(3, 3, 2, 4), b=(3, 3, 4, 4), c=(3, 3, 4, 4), g=(4,), h=(4,), o=(4, 3)),
    _labeled(6, 6, 2),
)
def _resnet(p, example):
    def group_norm(x, scale):
        shape = x.shape
        x = x.reshape(*shape[:-1], 2, 2)
        return _norm(x, 1.0, (1, 2, 4)).reshape(shape) * scale

    x, y = example
    x = _conv(x, p["a"])
    for _ in range(2):  # the same block twice
        x = x + _conv(jax.nn.silu(group_norm(x, p["g"])), p["b"])
        x = x + _conv(jax.nn.silu(group_norm(x, p["h"])), p["c"])
    return _cross_entropy(x.mean((0, 1, 2)) @ p["o"], y)


@_network(_normal(a=(3, 3, 2, 4), gain=(4,), b=(3, 3, 4, 4), o=(4, 3)), _labeled(6, 6, 2))
def _weight_standardization(p, example):
    x, y = example
    x = jax.nn.relu(_conv(x, _norm(p["a"], p["gain"], (0, 1, 2))))
    x = jax.nn.relu(_conv(x, _norm(p["b"], 0.5, (0, 1, 2))))
    return _cross_entropy(x.mean((0, 1, 2)) @ p["o"], y)


@_network(_normal(w=(5, 4), a=(5, 2), b=(2, 4), c=(4, 1), d=(1, 3), v=(4, 3)), _labeled(2, 5))
def _lora(p, example):
    x, y = example
    x = jnp.tanh(x @ lax.stop_gradient(p["w"]) + 0.5 * (x @ p["a"]) @ p["b"])
    return _cross_entropy((x @ (p["v"] + 2.0 * p["c"] @ p["d"])).sum(0), y)


@_network(_normal(w=(4, 4), v=(4, 4), b=(4,), o=(4, 3)), _labeled(4))
def _shared_layers(p, example):
    x, y = example
    for _ in range(3):
        x = jnp.tanh(x @ p["w"] + p["b"])
        x = jnp.tanh(p["w"] @ x)  # the same matrix, from the other side
    return _cross_entropy(jnp.tanh(x @ p["v"]) @ p["o"], y)


@_network(_normal(w=(3, 4, 2, 5), v=(2, 5, 4), r=(12,), s=(6, 4)), _vectors(3, 4))
def _einsums(p, x):
    y = jnp.tanh(jnp.einsum("td,tdhk->htk", x, p["w"]))
    z = jnp.einsum("htk,hkd->td", y, 2.0 * p["v"])
    a, b = jnp.split(p["s"], 2)
    z = jnp.tanh(z @ (-p["r"]).reshape(4, 3)) @ a + x @ b.T @ a
    return jnp.sum(jnp.sin(z))


@_network(_normal(w=(5, 8), v=(8, 3)), _labeled(5), keyed=True)
def _dropout(p, example, key):
    x, y = example
    x = jnp.tanh(x @ p["w"])
    x = jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0.0)
    return _cross_entropy(x @ p["v"], y)


@_network(_normal(w=(5, 8), v=(8, 8), o=(8, 3), b=(8,)), _labeled(4, 5))
def _rematerialized(p, example):
    x, y = example

    @jax.checkpoint
    def layer(x):
        x = jnp.tanh(x @ p["w"] + p["b"])
        return jnp.tanh(jax.checkpoint(lambda x: x @ p["v"])(x)), p["o"]

    x, o = layer(x)
    return _cross_entropy((x @ o).sum(0), y)


@_network(_normal(w=(5, 5), v=(5, 5), u=(5, 5), o=(5, 3)), _labeled(5))
def _control_flow(p, example):
    x, y = example
    x = jnp.tanh(x @ p["u"])
    x = lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ p["w"]), lambda x: x + p["w"][0], x)
    x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["v"]), x)
    x = lax.switch(y, [lambda x: x, jnp.sin, jnp.cos], x)
    return _cross_entropy(x @ p["o"], y)


@jax.custom_jvp
def _halved(w, x):
    return x @ w


@_halved.defjvp
def _halved_jvp(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    return x @ w, 0.5 * (x @ dw) + dx @ w


@jax.custom_vjp
def _doubled(x, b):
    return x + b


_doubled.defvjp(lambda x, b: (x + b, None), lambda _, ct: (ct, 2.0 * ct))


@_network(_normal(w=(5, 4), v=(4, 4), b=(4,), o=(4, 3)), _labeled(5))
def _custom_rules(p, example):
    x, y = example
    x = jax.nn.elu(jax.nn.relu(_halved(p["w"], x)) @ jax.nn.softplus(p["v"]))
    return _cross_entropy(_doubled(x, p["b"]) @ p["o"], y)


@_network(_normal(w=(4, 4), u=(4, 2), g=(), o=(4, 3), unused=(3,)), _labeled(4))
def _penalized(p, example):
    x, y = example
    x = jnp.tanh(x @ p["w"] * jnp.exp(p["g"]))
    x = x + (p["u"] * x[:, None]).sum(1)
    return _cross_entropy(x @ p["o"], y) + 0.1 * jnp.sum(p["w"] ** 2) + jnp.sum(p["g"])


@_network(_normal(table=(6, 3), rows=(2, 7, 3), w=(4, 3, 2)), _tokens(5, 6))
def _lookups(p, tokens):
    x = p["table"].at[tokens].get(mode="fill", fill_value=0.0)
    x = x + p["table"].at[tokens + 2].get(mode="drop", fill_value=1.0)
    x = x + p["rows"][1][tokens] + p["rows"].at[tokens[0] % 2, tokens].get()
    x = x @ p["w"][tokens[0] % 4] + x @ p["w"][1]
    return jnp.sum(jnp.sin(x)) + lax.dynamic_index_in_dim(p["table"], tokens[0])[0, 0]


@_network(_normal(steps=(4, 3, 3), b=(4, 3), s=(3, 3)), _vectors(2, 3))
def _steps_over_stacks(p, x):
    def step(carry, layer):
        x, i = carry
        w, b = layer
        x = jnp.tanh(x @ w.T @ p["s"].reshape(3, 3) + b) + (w * 0.5) @ x.sum(0)
        return (x, i + 1), x.sum() * i

    (x, _), sums = lax.scan(step, (x, 0), (p["steps"], p["b"]))
    return jnp.sum(x**2) + jnp.sum(jnp.sin(sums))


@_network(_normal(a=(3, 2), b=(3, 4), c=(3, 6), d=(5, 3), s=(2, 3)), _vectors(4, 3))
def _side_by_side(p, x):
    q, k = jnp.split(x @ jnp.concatenate([p["a"], p["b"]], axis=1), [2], axis=1)
    x = jnp.tanh(x + k @ jnp.concatenate([p["s"], p["d"][:2]]))
    y = jnp.einsum("td,dhk->thk", x, jnp.concatenate([p["c"], -p["c"]], 1).reshape(3, 2, 6))
    return jnp.sum(jnp.sin(y)) + jnp.sum(q**2)


@_network(_normal(t=(7, 4), u=(2, 5, 4), b=(5, 4), w=(4, 4)), _vectors(3, 4))
def _parts_added(p, x):
    x = jnp.tanh((x + p["t"][:3] * 0.5) @ p["w"]) - p["t"][4:]
    x = jnp.sin(p["u"][1, 1:4] - x) + p["u"][0, :1]

    def step(x, b):
        return jnp.tanh(x @ p["w"]) + b, jnp.sum(x)

    x, sums = lax.scan(step, x[0], p["b"][1:4])
    return jnp.sum(x) + jnp.sum(jnp.sin(sums))


@_network(_normal(t=(7, 4), u=(2, 4), p=(2, 2, 4), s=(3, 1, 4), w=(4, 4)), _vectors(3, 4))
def _tokens_beside(p, x):
    x = jnp.concatenate([x, -2.0 * p["t"][1:3], x @ p["w"]])  # a slice between data
    x = jnp.concatenate([p["u"], x @ p["w"], p["u"][:1]])  # the whole parameter, and a slice of it
    y = jnp.concatenate([x[:4].T, p["t"][3:].T], axis=1)  # along another axis
    for prompt in p["p"]:
        x = jnp.concatenate([prompt, x])

    def step(x, token):  # one token for each layer
        return jnp.tanh(jnp.concatenate([token, x]) @ p["w"])[1:], None

    x, _ = lax.scan(step, x, p["s"])
    return jnp.sum(jnp.sin(x)) + jnp.sum(y**2)
