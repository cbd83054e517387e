"""Compares the sums of all engines of `clipped_grad`, and checks that only one is imported."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._clipped_sum.clip_per_example import sum_clipped
from tests.helpers import floats

EXAMPLES = 12
MASK = np.arange(EXAMPLES) % 5 != 2
BOUND = 0.5
GRID = 2.0**-20
# Options of `clipped_grad`, and how close the sum is to that of per-example gradients.
ENGINES = {
    "gradients": ({"method": "vmap"}, 1e-5),
    "ghost": ({}, 1e-5),
    "bfloat16": ({"precision": "bfloat16"}, 2e-2),
    "two_turns": ({"method": "recompute"}, 1e-5),
    "streaming": ({"clip": dpoptax.per_layer_clip(BOUND), "method": "streaming"}, 1e-5),
    "rounded_gradients": ({"method": "vmap", "grid": GRID}, 1e-4),
}


def _dense(params, example):
    h = jnp.tanh(example["x"] @ params["first"]["w"] + params["first"]["b"])
    return jnp.sum((h @ params["last"]["w"] - example["y"]) ** 2)


def _scanned(params, example):
    block = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    h, _ = jax.lax.scan(block, example["x"], params["layers"]["w"])
    return jnp.sum((h @ params["last"]["w"] - example["y"]) ** 2)


def _lookup(params, example):
    tokens = jnp.argsort(example["x"])[:3]
    return jnp.sum((jnp.mean(params["table"]["w"][tokens], 0) - example["y"]) ** 2)


def _joined(params, example):
    products = [example["x"] @ params[name]["w"] for name in ("first", "last")]
    joined = jnp.concatenate([params["token"]["w"][:1], *products])
    return jnp.sum((joined - example["y"]) ** 2)


def _counted(params, example):
    """A loss whose product reads a counter, which is equal for all examples."""

    def turn(carry, x):
        total, count = carry
        return (total + x, count + 1.0), None

    (total, count), _ = jax.lax.scan(turn, (0.0, 0.0), example["x"])
    found = jnp.full(3, count) @ params["last"]["w"]
    return total * jnp.sum((found - example["y"]) ** 2)


PROGRAMS = {
    "counted": (_counted, {"last": {"w": (3, 4)}}),
    "dense": (_dense, {"first": {"w": (6, 5), "b": (5,)}, "last": {"w": (5, 4)}}),
    "scanned": (_scanned, {"layers": {"w": (3, 6, 6)}, "last": {"w": (6, 4)}}),
    "lookup": (_lookup, {"table": {"w": (6, 4)}}),
    "joined": (_joined, {"token": {"w": (2,)}, "first": {"w": (6, 2)}, "last": {"w": (6, 1)}}),
}


def _problem(name):
    loss, shapes = PROGRAMS[name]
    rng = np.random.default_rng(1)
    draw = lambda shape: floats(rng.normal(size=shape))  # noqa: E731
    params = jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return loss, params, {"x": draw((EXAMPLES, 6)), "y": draw((EXAMPLES, 4))}


def _vector(total, options):
    unit = options.get("grid", 1.0)
    return np.concatenate([np.ravel(x) * unit for x in jax.tree.leaves(total)])


def _distance(found, want):
    return np.linalg.norm(found - want) / np.linalg.norm(want)


# Streaming clips the steps of a scan separately; `backward_test` has the sum.
PAIRS = [(name, engine) for name in PROGRAMS for engine in ENGINES]
PAIRS.remove(("scanned", "streaming"))


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_engines_return_sum_of_clipped_gradients(name, engine, no_room):
    loss, params, batch = _problem(name)
    options, rtol = ENGINES[engine]
    given = {"clip": BOUND} | options
    clip = given["clip"] if engine == "streaming" else dpoptax.l2_clip(BOUND)
    batch["y"] = batch["y"].at[4].set(jnp.nan)  # adds zero, like a masked example
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    want = _vector(sum_clipped(clip, grads, jnp.asarray(MASK & (np.arange(EXAMPLES) != 4))), {})
    for microbatch_size in (None, 5):
        grad_fn = dpoptax.clipped_grad(
            loss, **given, microbatch_size=microbatch_size, return_values=True
        )
        clipped, values = jax.jit(grad_fn)(params, batch, MASK)
        assert _distance(_vector(clipped.sum, options), want) < rtol
        np.testing.assert_allclose(values, jax.vmap(loss, (None, 0))(params, batch), rtol=1e-5)


@pytest.mark.parametrize("microbatch_size", [None, 5])
@pytest.mark.parametrize("engine", ENGINES)
def test_aux_and_keys_match_their_examples(engine, microbatch_size):
    loss, params, batch = _problem("dense")

    def keyed(params, example, key):
        value = loss(params, example)
        return value * jax.random.uniform(key), value

    options = {"clip": BOUND, "microbatch_size": microbatch_size} | ENGINES[engine][0]
    grad_fn = dpoptax.clipped_grad(keyed, has_aux=True, return_values=True, **options)
    key, ids = jax.random.key(0), np.arange(EXAMPLES) + 7
    _, (values, aux) = jax.jit(grad_fn)(params, batch, key=key, ids=ids)
    want = jax.vmap(loss, (None, 0))(params, batch)
    drawn = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(ids)
    np.testing.assert_allclose(aux, want, rtol=1e-5)
    np.testing.assert_allclose(values, want * drawn, rtol=1e-5)


# The parts of `_ghost_clipping` that each method may import.
IMPORTED = {
    "vmap": set(),
    "auto": {"records", "factor_products", "plan", "make_plan", "sums"},
    "recompute": {"records", "factor_products", "plan", "make_plan", "sums", "backward"},
    "streaming": {"records", "factor_products", "plan", "make_plan", "sums", "backward"},
}
BACKWARD = {"recompute": {"recomputed_sum"}, "streaming": {"streamed_sum"}}
_SCRIPT = """
import sys, jax, jax.numpy as jnp, dpoptax
loss_fn = lambda w, x: jnp.sum(jnp.tanh(x @ w))
clip = dpoptax.per_layer_clip(1.0) if {method!r} == "streaming" else 1.0
grad_fn = dpoptax.clipped_grad(loss_fn, clip, method={method!r})
jax.eval_shape(grad_fn, jnp.ones((3, 2)), jnp.ones((4, 3)))
print(*(m for m in sys.modules if m.startswith("dpoptax.")))
"""


@pytest.mark.parametrize("method", IMPORTED)
def test_only_the_chosen_engine_is_imported(method):
    script = _SCRIPT.format(method=method)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    parts = {
        m.split(".")[2] for m in done.stdout.split() if m.startswith("dpoptax._ghost_clipping.")
    }
    assert parts - {"explain"} == IMPORTED[method]
    engines = {m.rpartition(".")[2] for m in done.stdout.split()}
    assert engines & {"recomputed_sum", "streamed_sum"} == BACKWARD.get(method, set())
    assert "dpoptax._clipped_grad.sharding" not in done.stdout.split()
    assert "dpoptax._clipped_grad.rewrites" not in done.stdout.split()
