"""Losses of one example that the adversarial search attacks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def parameters(shapes):
    """Returns random parameters of these shapes, or those that a program creates."""
    if callable(shapes):
        return shapes()
    rng = np.random.default_rng(0)
    return [_floats(rng.normal(size=s) / max(1, s[0])) for s in shapes]


def zeros(*shape, dtype=jnp.float32):
    return _floats(np.zeros(shape), dtype)


def _floats(values, dtype=jnp.float32):
    return jax.device_put(np.asarray(values, dtype))


def regression(params, example):
    x, y = example
    return 0.5 * jnp.sum((x @ params[0] - y) ** 2)


def linear(params, example):
    """The gradient of the kernel is xᵀ d, both given by the example."""
    x, d = example
    return jnp.sum((x @ params[0]) * d)


def lookup(params, example):
    token, d = example
    return jnp.sum(params[0][token] * d)


def convolution(groups, params, example):
    x, d = example
    numbers = ("NWC", "WIO", "NWC")
    out = jax.lax.conv_general_dilated(
        x[None], params[0], (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )
    return jnp.sum(out[0] * d)


def batched(params, example):
    x, d = example
    return jnp.sum(jnp.einsum("tka,kac->tkc", x, params[0]) * d)


def scanned(params, example):
    x, d = example

    def layer(total, inputs):
        w, x, d = inputs
        return total + jnp.sum((x @ w) * d), None

    return jax.lax.scan(layer, 0.0, (params[0], x, d))[0]


def elementwise(params, example):
    x, d = example
    return jnp.sum((x * params[0] + params[1]) * d)


def opaque(params, example):
    x, d = example
    return jnp.sum(x @ (params[0] @ params[0]) * d)


def tied(params, example):
    x, d = example
    token = jnp.array([0, 1, 1, 2])
    return jnp.sum((params[0][token] * x) * d) + jnp.sum((x @ params[0].T) ** 2)


def token(params, example):
    x, d = example
    x = jnp.concatenate([params[0][:1], x]) + params[0][2:3]
    return jnp.sum(jnp.concatenate([x, params[1]]) * d)


def standardized(params, example):
    x, d = example
    w = params[0] - params[0].mean(0)
    return jnp.sum((x @ (w * jax.lax.rsqrt(jnp.mean(w**2, 0) + 1e-5))) * d)


def standardized_squared(params, example):
    """Even in the parameters, so the gradients at opposite points cancel."""
    x, d = example
    w = params[0] - params[0].mean(0)
    return jnp.sum((x @ (w * jax.lax.rsqrt(jnp.mean(w**2, 0) + 1e-5))) ** 2 * d)


def merged_squared(params, example):
    """Even in the first two parameters."""
    x, d = example
    return jnp.sum((x @ (params[0] + 2.0 * params[1] @ params[2])) ** 2 * d)


def standardized_kernel(params, example):
    w = params[0] - params[0].mean((0, 1))
    w = w / jnp.sqrt(jnp.maximum(jnp.sum(w**2, (0, 1)), 1e-4))
    return convolution(1, [w], example)


def weight_norm(params, example):
    """One channel is 2^30 times shorter than the others, with gradients larger by that factor."""
    x, d = example
    w = params[0] * jnp.array([1.0, 2.0**-30, 1.0, 1.0])
    return jnp.sum((x @ (w / jnp.linalg.norm(w, axis=0) * params[1])) * d)


def tied_and_standardized(params, example):
    x, d = example
    w = params[0] - params[0].mean(0)
    w = w * jax.lax.rsqrt(jnp.mean(w**2, 0) + 1e-5)
    return jnp.sum((x @ params[0]) * d) + jnp.sum((x @ w) * (x @ (params[0] * params[1])))


def over_the_norm_of_all(params, example):
    x, d = example
    return jnp.sum((x @ (params[0] / jnp.linalg.norm(params[0]))) * d)


def merged(params, example):
    x, d = example
    return jnp.sum((x @ (params[0] + 2.0 * params[1] @ params[2])) * d)


PROGRAMS = {
    "regression": (regression, [(4, 4)], [(16, 4), (16, 4)]),
    "short": (linear, [(40, 40)], [(4, 40), (4, 40)]),
    "long": (linear, [(3, 3)], [(64, 3), (64, 3)]),
    "one position": (linear, [(6, 5)], [(1, 6), (1, 5)]),
    "convolution": (functools.partial(convolution, 1), [(3, 2, 4)], [(8, 2), (8, 4)]),
    "depthwise": (functools.partial(convolution, 4), [(3, 1, 4)], [(8, 4), (8, 4)]),
    "batched": (batched, [(3, 2, 2)], [(5, 3, 2), (5, 3, 2)]),
    "scanned": (scanned, [(3, 4, 2)], [(3, 5, 4), (3, 5, 2)]),
    "elementwise": (elementwise, [(4,), (4,)], [(6, 4), (6, 4)]),
    "opaque": (opaque, [(3, 3)], [(4, 3), (4, 3)]),
    "token": (token, [(3, 4), (1, 4)], [(4, 4), (6, 4)]),
    "standardized": (standardized, [(4, 4)], [(16, 4), (16, 4)]),
    "standardized kernel": (standardized_kernel, [(3, 2, 4)], [(8, 2), (8, 4)]),
    "weight norm": (weight_norm, [(4, 4), (4,)], [(16, 4), (16, 4)]),
    "norm of all": (over_the_norm_of_all, [(4, 4)], [(16, 4), (16, 4)]),
    "merged": (merged, [(4, 4), (4, 2), (2, 4)], [(16, 4), (16, 4)]),
    "tied": (tied, [(3, 5)], [(4, 5), (4, 5)]),
}


def lora(params, example):
    """LoRA after an RMSNorm, on a frozen kernel."""
    x, d = example
    x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * params["gain"]
    return jnp.sum((x @ jnp.ones((4, 4)) + (x @ params["a"]) @ params["b"]) * d)


def while_loop(params, example):
    """Applies Newton's iteration for 1/√mean(x²) to the data until it converges."""
    x, d = example
    square = jnp.clip(jnp.mean(x**2), 1e-3, 1e3)

    def far(y):
        return jnp.abs(y * y * square - 1) > 1e-3

    y = jax.lax.while_loop(far, lambda y: y * (1.5 - 0.5 * square * y * y), jnp.float32(1e-2))
    return jnp.sum(jnp.tanh(x * jax.lax.stop_gradient(y) @ params[0]) * d)


def cond(params, example):
    x, d = example
    out = jax.lax.cond(x[0, 0] > 0, lambda x: x @ params[0], lambda x: x @ (2 * params[1]), x)
    return jnp.sum(out * d)


def switch(params, example):
    x, d = example
    branches = [lambda x, w=w: jnp.tanh(x @ w) for w in params]
    which = jnp.clip(jnp.nan_to_num(jnp.abs(x[0, 0])), 0, len(params)).astype(int)
    return jnp.sum(jax.lax.switch(which, branches, x) * d)


@jax.custom_vjp
def _step(x):
    return jnp.sign(x)


_step.defvjp(lambda x: (_step(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 1, g, 0),))


def straight_through(params, example):
    """Signs of activations and of a kernel, with custom derivatives."""
    x, d = example
    return jnp.sum((_step(x @ params[0]) @ _step(params[1])) * d)


def experts(params, example):
    """Two of three experts per position, chosen by the largest gates of a router."""
    x, d = example
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    outs = jnp.einsum("ta,eac->tec", x, params["experts"])
    picked = jnp.take_along_axis(outs, chosen[..., None], axis=1)
    return jnp.sum(jnp.einsum("tk,tkc->tc", gates, picked) * d)


def graph(params, example):
    """Messages along the edges of a graph, summed at their targets."""
    x, d = example
    start, end = jnp.array([0, 0, 1, 2, 3, 4, 5]), jnp.array([1, 2, 3, 3, 4, 5, 0])
    messages = jax.ops.segment_sum(x[start] @ params[0], end, num_segments=6)
    return jnp.sum(jax.nn.relu(messages + x @ params[1]) @ params[2] * d)


def weight_standardized(params, example):
    x, d = example
    w = params[0] - params[0].mean((0, 1, 2))
    w = w * jax.lax.rsqrt(jnp.mean(w**2, (0, 1, 2)) + 1e-4) * params[1]
    out = jax.lax.conv_general_dilated(
        x[None], w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.sum(jnp.tanh(out[0]) * d)


def _linen():
    from flax import linen

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = x + linen.MultiHeadDotProductAttention(2, qkv_features=4)(linen.LayerNorm()(x))
            return linen.Dense(4)(jnp.tanh(linen.Dense(8)(linen.LayerNorm()(x))))

    return Block()


def linen_block(params, example):
    x, d = example
    return jnp.sum(_linen().apply(params, x) * d)


@functools.cache
def _nnx():
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.last = nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)

        def __call__(self, x):
            return self.last(jnp.tanh(x + self.attention(self.norm(x))))

    return nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)


def nnx_block(params, example):
    from flax import nnx

    x, d = example
    graph, _, rest = _nnx()
    return jnp.sum(nnx.merge(graph, params, rest, copy=True)(x) * d)


@functools.cache
def _equinox():
    import equinox

    keys = jax.random.split(jax.random.key(0))
    layers = [equinox.nn.LayerNorm(4), equinox.nn.MLP(4, 4, 6, 1, key=keys[0])]
    return equinox.partition(layers, equinox.is_inexact_array)


def equinox_layers(params, example):
    import equinox

    x, d = example
    norm, mlp = equinox.combine(params, _equinox()[1])
    return jnp.sum(jax.vmap(lambda x: mlp(norm(x)))(x) * d)


@functools.cache
def _haiku():
    import haiku

    def forward(x):
        x = haiku.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        return haiku.nets.MLP([6, 4], activation=jnp.tanh)(x)

    return haiku.without_apply_rng(haiku.transform(forward))


def haiku_layers(params, example):
    x, d = example
    return jnp.sum(_haiku().apply(params, x) * d)


def _lora_parameters():
    a, b, gain = parameters([(4, 2), (2, 4), (4,)])
    return {"a": a, "b": b, "gain": gain}


_SEQUENCES = [(6, 4), (6, 4)]
# Programs like those of users: control flow, custom rules, and library layers.
MODELS = {
    "LoRA": (lora, _lora_parameters, _SEQUENCES),
    "while_loop": (while_loop, [(4, 4)], _SEQUENCES),
    "cond": (cond, [(4, 4), (4, 4)], _SEQUENCES),
    "switch": (switch, [(4, 4), (4, 4), (4, 4)], _SEQUENCES),
    "custom_vjp": (straight_through, [(4, 4), (4, 4)], _SEQUENCES),
    "experts": (
        experts,
        lambda: dict(zip(("router", "experts"), parameters([(4, 3), (3, 4, 4)]), strict=True)),
        _SEQUENCES,
    ),
    "graph": (graph, [(4, 5), (4, 5), (5, 4)], _SEQUENCES),
    "weight standardized": (
        weight_standardized,
        [(3, 3, 2, 4), (4,)],
        [(4, 4, 2), (4, 4, 4)],
    ),
    "linen": (
        linen_block,
        lambda: _linen().init(jax.random.key(0), jnp.zeros((6, 4))),
        _SEQUENCES,
    ),
    "nnx": (nnx_block, lambda: _nnx()[1], _SEQUENCES),
    "equinox": (equinox_layers, lambda: _equinox()[0], _SEQUENCES),
    "haiku": (
        haiku_layers,
        lambda: _haiku().init(jax.random.key(0), jnp.zeros((6, 4))),
        _SEQUENCES,
    ),
}
# Programs whose kernels are computed from parameters. Sums by uses refuse them.
COMPUTED_KERNELS = (
    "standardized", "standardized kernel", "weight norm", "norm of all", "merged", "opaque",
    "weight standardized",
)  # fmt: skip
