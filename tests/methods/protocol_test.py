"""Tests the contract of all transforms: jit, dtypes, scan, donation, checkpoints and masks."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import dpoptax
from dpoptax.tables._row_selecting_noise import release_context
from tests.helpers import covering, floats, slow_but

KEY = jax.random.key(0)
CLIP = dpoptax.l2_clip(1.0)
ADAPTIVE = dpoptax.contrib.adaptive_clip(0.1)
FILTER = dpoptax.filters.preset("doppler-second-order")
SELECTING = dpoptax.tables.row_selecting_clip(
    CLIP, dpoptax.tables.RowSelection(table_size=9, capacity=3, threshold=8.0)
)


# Transforms of the noise stage take a ClippedSum; all others take privatized gradients.
NOISE = {
    "gaussian_noise": lambda: dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=4, key=KEY),
    "geodp": lambda: dpoptax.contrib.geodp(0.01, noise_multiplier=0.1, batch_size=4, key=KEY),
    "adaptive_gaussian_noise": lambda: dpoptax.contrib.adaptive_gaussian_noise(
        ADAPTIVE, noise_multiplier=1.0, batch_size=4, key=KEY
    ),
    "row_selecting_noise": lambda: dpoptax.tables.row_selecting_noise(
        SELECTING, noise_multiplier=1.0, batch_size=4, key=KEY
    ),
    "correlated_noise": lambda: dpoptax.correlated_noise(
        dpoptax.matrix.BandedToeplitz((1.0, 0.5)), noise_multiplier=1.0, batch_size=4, key=KEY
    ),
    "correlated_noise_fixed_point": lambda: dpoptax.correlated_noise(
        dpoptax.matrix.BandedToeplitz((1.0, 0.5)),
        noise_multiplier=1.0,
        batch_size=4,
        key=KEY,
        fixed_point_clip=CLIP,
    ),
    "correlated_noise_redrawn": lambda: dpoptax.correlated_noise(
        dpoptax.matrix.BandedInverseToeplitz((1.0, -0.5, -0.25), 8),
        noise_multiplier=1.0,
        batch_size=4,
        key=KEY,
    ),
    "correlated_noise_buffered": lambda: dpoptax.correlated_noise(
        dpoptax.matrix.BufferedToeplitz((0.9, 0.5), (0.2, 0.3), 8),
        noise_multiplier=1.0,
        batch_size=4,
        key=KEY,
    ),
}
METHODS = {
    "low_pass": lambda: dpoptax.low_pass(*FILTER),
    "low_pass_steady": lambda: dpoptax.low_pass(*FILTER, start="steady"),
    "doppler": lambda: dpoptax.doppler(*FILTER),
    "track_iterates": lambda: dpoptax.extend.track_iterates([(1.5, -0.5)], [1.0]),
    "disk": lambda: dpoptax.disk(0.7, 0.5),
    "disk_one_gradient": lambda: dpoptax.disk(0.7, None),
    "disk_swapped_gain": lambda: dpoptax.disk(0.7, 0.5, filter_gain=0.3),
    "pmlf": lambda: dpoptax.pmlf(3, 0.5, *FILTER),
    "inner_outer": lambda: dpoptax.contrib.inner_outer(3, 0.5, 0.9),
    "scale_by_lp_adam": lambda: dpoptax.extend.scale_by_lp_adam(*FILTER),
    "adaptive_kalman": lambda: dpoptax.adaptive_kalman(0.1),
    "adaptive_kalman_per_leaf": lambda: dpoptax.adaptive_kalman(0.1, per_leaf=True),
}
ALL = {**NOISE, **METHODS}


# Programs of these transforms are compiled in quick tests: all noise stages, and a few methods.
COMPILED = (*NOISE, "disk", "pmlf", "scale_by_lp_adam")


@pytest.fixture(params=slow_but(COMPILED, ALL))
def name(request):
    return request.param


def _params(dtype=jnp.float32):
    return {
        "w": floats(np.linspace(-1.0, 1.0, 6).reshape(3, 2), dtype),
        "b": [floats(np.ones(2), dtype)],
    }


def _inputs(name, params, step):
    tree = jax.tree.map(lambda p: jnp.sin(3.0 * p + step).astype(p.dtype), params)
    if name == "adaptive_gaussian_noise":
        pair = dpoptax.extend.CountedGradient(tree, jnp.float32(0.3))
        return dpoptax.extend.trust_clipped(pair, ADAPTIVE, jnp.float32(0.1))
    if name == "row_selecting_noise":
        next_release = release_context(ALL[name]().init(params))
        count = jnp.asarray(step).astype(jnp.int32)
        return dpoptax.extend.trust_clipped(
            tree, SELECTING, dataclasses.replace(next_release, count=count)
        )
    return dpoptax.extend.trust_clipped(tree, CLIP) if name in NOISE else tree


def _run(name, update, params, steps=4):
    state = ALL[name]().init(params)
    for step in range(steps):
        out, state = update(_inputs(name, params, step), state, params)
        params = optax.apply_updates(params, out)
    return params, state


@functools.cache
def _compiled(name):
    """Returns a transform's update, shared by its tests; the state is donated, as in training."""
    return jax.jit(ALL[name]().update, donate_argnums=1)


@pytest.mark.spread(8)
@pytest.mark.parametrize("name", slow_but(["disk"], ALL))
def test_jit_matches_eager(name):
    eager = _run(name, ALL[name]().update, _params())
    compiled = _run(name, _compiled(name), _params())
    chex.assert_trees_all_close(eager[0], compiled[0], rtol=1e-5, atol=1e-6)


DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@pytest.mark.spread(20)
@pytest.mark.parametrize(("name", "dtype"), covering(list(ALL), DTYPES, strength=1))
def test_keeps_dtypes_and_shapes(name, dtype):
    tx, params = ALL[name](), _params(dtype)

    def first(params):
        return tx.update(_inputs(name, params, 0), tx.init(params), params)[0]

    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(first, params), params)


@pytest.mark.spread(12)
@pytest.mark.parametrize(
    ("name", "dtype"),
    covering(list(ALL), {kind: DTYPES[kind] for kind in ("float32", "bfloat16")}, strength=1),
)
def test_state_is_stable_under_scan(name, dtype):
    tx, params = ALL[name](), _params(dtype)

    def body(carry, step):
        params, state = carry
        out, state = tx.update(_inputs(name, params, step), state, params)
        return (optax.apply_updates(params, out), state), None

    state = tx.init(params)
    # Uses only shapes and types, so nothing is compiled.
    steps = jax.ShapeDtypeStruct((3,), jnp.float32)
    (_, last), _ = jax.eval_shape(lambda *of: jax.lax.scan(body, *of), (params, state), steps)
    chex.assert_trees_all_equal_shapes_and_dtypes(last, state)
    assert jax.tree.structure(last) == jax.tree.structure(state)


def test_init_shares_no_buffers_and_survives_donation(name):
    tx, params, step = ALL[name](), _params(), _compiled(name)
    step(_inputs(name, params, 0), tx.init(params), params)
    step(_inputs(name, params, 0), tx.init(params), params)
    jax.block_until_ready(params)


@pytest.mark.parametrize("name", slow_but(COMPILED, ALL))
def test_extra_arguments_pass_through_a_chain(name):
    tx = optax.chain(ALL[name](), optax.scale(2.0))
    params = _params()
    state = tx.init(params)
    jax.eval_shape(
        lambda grads: tx.update(grads, state, params, value=1.0), _inputs(name, params, 0)
    )


@pytest.fixture(scope="module")
def checkpointer():
    with ocp.StandardCheckpointer() as checkpointer:
        yield checkpointer


def test_checkpoint_resumes_bit_for_bit(name, tmp_path, checkpointer):
    tx, params, update = ALL[name](), _params(), _compiled(name)
    middle, state = _run(name, update, params, steps=2)
    checkpointer.save(tmp_path / "state", {"state": state, "params": middle})
    checkpointer.wait_until_finished()
    target = {"state": tx.init(params), "params": params}
    restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: target))
    after = update(_inputs(name, middle, 2), state, middle)
    again = update(_inputs(name, middle, 2), restored["state"], restored["params"])
    jax.tree.map(np.testing.assert_array_equal, again[0], after[0])
    if name in NOISE:
        assert dpoptax.ledgers(again[1]) == dpoptax.ledgers(after[1])


@pytest.mark.parametrize("name", slow_but(("disk", "scale_by_lp_adam"), METHODS))
def test_works_under_optax_masked(name):
    tx, params = METHODS[name](), _params()
    masked = optax.masked(tx, {"w": True, "b": [False]})
    grads = _inputs(name, params, 0)
    out, state = jax.jit(masked.update)(grads, masked.init(params), params)
    chex.assert_trees_all_equal(out["b"], grads["b"])
    own = {"w": params["w"]}
    alone, _ = jax.jit(tx.update)({"w": grads["w"]}, tx.init(own), own)
    np.testing.assert_allclose(out["w"], alone["w"], rtol=1e-6)
    dpoptax.gradient_points(state, params)


@pytest.mark.parametrize("name", slow_but(COMPILED, METHODS))
def test_does_not_rescale_constant_gradients(name):
    """A method that silently rescaled gradients would shift every tuned learning rate."""
    if name.startswith("inner_outer"):
        return
    update, params = _compiled(name), jax.tree.map(jnp.zeros_like, _params())
    ones, state = jax.tree.map(jnp.ones_like, params), METHODS[name]().init(params)
    for _ in range(5):
        out, state = update(ones, state, params)
    for leaf in jax.tree.leaves(out):
        np.testing.assert_allclose(leaf, 1.0, rtol=1e-4)
