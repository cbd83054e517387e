"""A loss with all kinds of layers, and the meshes to shard it over."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dpoptax
from tests.helpers import floats

CLIP = dpoptax.l2_clip(0.3)
KINDS = (AxisType.Auto, AxisType.Explicit)
FSDP = {
    "embedding": P(None, "data"),
    "kernel": P(None, None, None, "data"),
    "attention": P(None, "data"),
    "dense": P("data"),
    "bias": P(),
}


def make_params(seed=0):
    """Returns embedding, convolution, attention and dense parameters; sharded axes are even."""
    shapes = {
        "embedding": (11, 8),
        "kernel": (3, 3, 1, 8),
        "attention": (3, 8, 8),
        "dense": (16, 4),
        "bias": (4,),
    }
    rng = np.random.default_rng(seed)
    return {k: floats(rng.normal(size=s)) for k, s in shapes.items()}


def make_batch(seed, size):
    """Returns images, tokens and labels."""
    rng = np.random.default_rng(seed)
    return {
        "image": rng.normal(size=(size, 5, 5, 1)).astype(np.float32),
        "tokens": rng.integers(11, size=(size, 6)).astype(np.int32),
        "label": rng.integers(4, size=size).astype(np.int32),
    }


def loss_fn(params, example, key=None):
    """Computes the cross-entropy of one example."""
    numbers = ("NHWC", "HWIO", "NHWC")
    image = example["image"][None]
    pixels = lax.conv_general_dilated(image, params["kernel"], (1, 1), "SAME", None, None, numbers)
    words = params["embedding"][example["tokens"]]
    queries, keys, values = (words @ w for w in params["attention"])
    words = jax.nn.softmax(queries @ keys.T / 8**0.5) @ values
    hidden = jnp.concatenate([jnp.tanh(pixels).mean((0, 1, 2)), jnp.tanh(words).mean(0)])
    if key is not None:
        hidden = jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), 2 * hidden, 0)
    logits = hidden @ params["dense"] + params["bias"]
    return -jax.nn.log_softmax(logits)[example["label"]]


def conv_params():
    """Returns the parameters of `conv_loss`."""
    params = make_params()
    return {"kernel": params["kernel"], "dense": params["dense"][:8]}


def conv_loss(params, example):
    """Computes a small loss with a convolution."""
    numbers = ("NHWC", "HWIO", "NHWC")
    image = example["image"][None]
    pixels = lax.conv_general_dilated(image, params["kernel"], (1, 1), "SAME", None, None, numbers)
    logits = jnp.tanh(pixels).mean((0, 1, 2)) @ params["dense"]
    return -jax.nn.log_softmax(logits)[example["label"]]


def make_mesh(shape, names, kind):
    """Returns a mesh over the first devices."""
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def put(tree, mesh, specs):
    """Places `tree` on `mesh`."""
    if isinstance(specs, P):
        specs = jax.tree.map(lambda _: specs, tree)
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)


def assert_close(got, want, atol=1e-6):
    """Checks that trees are equal leaf by leaf, on any devices."""
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=0, atol=atol),
        got,
        want,
    )


def largest_error(got, want):
    """Returns the largest difference between two trees."""
    errors = jax.tree.map(lambda g, w: np.abs(np.asarray(g) - np.asarray(w)).max(), got, want)
    return max(jax.tree.leaves(errors))
