"""Tests that ghost clipping reads traced losses as `jax.grad` does, or refuses them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import dpoptax
from dpoptax._ghost_clipping import factor_products
from tests.ghost_clipping.comparison import both, close
from tests.ghost_clipping.reader_random_test import bounded
from tests.helpers import equations, slow_but
from tests.networks import Network

pytestmark = pytest.mark.usefixtures("no_room")

_NORMED = dpoptax.normalized_clip(0.5)
_FLOAT8 = jnp.float8_e4m3fn
_PROGRAMS = {}


@pytest.fixture(autouse=True)
def _no_room_for_zeros(monkeypatch):
    """Takes the room for products below 2⁻¹²⁶ off inner products, because these data have none.

    Only norms from factors have this room, so that ghost clipping shortens short vectors more.
    """
    monkeypatch.setattr(factor_products, "LOST_PRODUCTS", 0)


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


_DATA = _normal(5, 3, 4, seed=1)
_IDS = jnp.array([[0, 7, 2], [1, -9, 3], [-1, 0, 1], [4, 5, 0], [3, 3, 3]])


def _program(batch, **params):
    """Registers a loss with parameters, given or drawn by shape, and a batch."""

    def register(loss):
        drawn = {k: _normal(*p, seed=7) if isinstance(p, tuple) else p for k, p in params.items()}
        _PROGRAMS[loss.__name__.strip("_")] = (loss, drawn, batch)
        return loss

    return register


@_program(_DATA, w=5 * _normal(4, 4), v=(4, 4))
def _weights_cast_to_integers_are_frozen(p, x):
    return jnp.sum(jnp.sin(x @ p["w"].astype(jnp.int8).astype(jnp.float32) @ p["v"]))


@_program(_DATA, w=(4, 4), v=(4, 4))
def _weights_rounded_to_few_bits(p, x):
    narrow = lax.reduce_precision(p["w"], 4, 3) + p["v"].astype(_FLOAT8).astype(jnp.float32)
    return jnp.sum(jnp.sin(x @ narrow) @ narrow)


@_program(_DATA, w=(4, 4), v=(4, 4))
def _copies_and_names_and_casts(p, x):
    w = checkpoint_name(jnp.copy(p["w"]), "w")
    v = lax.optimization_barrier(lax.reduce_precision(p["v"], 8, 23))
    return jnp.sum(jnp.sin(x @ w) @ v + lax.stop_gradient(x @ v))


@_program(_DATA, w=(4, 4))
def _nonlinear_custom_vjp_of_a_parameter_used_twice(p, x):
    w = bounded(p["w"])
    return jnp.sum(jnp.sin(x @ w) @ w.T)


@_program(_DATA, w=(4, 4))
def _nonlinear_custom_vjp_used_in_sight_and_out_of_sight(p, x):
    w = bounded(p["w"])
    return jnp.sum(jnp.sin(x @ w) * w[0] ** 2)


@_program(_DATA, w=(4, 4))
def _nonlinear_custom_vjp_inside_another_operation(p, x):
    w = lax.cond(p["w"][0, 0] > 9, lambda w: w, bounded, p["w"])
    return jnp.sum(jnp.sin(x @ w) @ w)


@_program(_IDS, w=(4, 6), v=(6,))
def _index_outside_the_table(p, ids):
    return jnp.sum(jnp.sin(p["w"][ids] + p["v"]))


def _at(mode, **options):
    def loss(p, ids):
        rows = p["w"].at[ids].get(mode=mode, **options)
        columns = p["w"].at[:, ids].get(mode=mode, **options)
        return jnp.sum(jnp.sin(rows + p["v"])) + jnp.sum(columns**2)

    return loss


for _mode, _options in (
    ("clip", {}),
    ("drop", {}),
    ("promise_in_bounds", {}),
    ("fill", {"fill_value": 0.5}),
):
    _PROGRAMS[f"index_outside_by_{_mode}"] = (
        _at(_mode, **_options),
        {"w": _normal(4, 6), "v": _normal(6)},
        _IDS,
    )


@_program(_IDS.astype(jnp.uint8), w=(300, 2))
def _index_narrower_than_the_table(p, ids):
    return jnp.sum(jnp.sin(p["w"].at[ids].get(mode="fill", fill_value=0.0)))


@_program(_IDS[:, 0], w=(4, 6))
def _slice_outside_the_table(p, start):
    return jnp.sum(jnp.sin(lax.dynamic_slice(p["w"], (start, 0), (1, 6))))


@_program(_DATA, w=(4, 4))
def _entry_added_to_data(p, x):
    return jnp.sum(jnp.sin(x @ p["w"] - p["w"][0, 0]))


@_program(_DATA[:, 0], w=(4,))
def _entry_of_a_vector_added_to_data(p, x):
    return jnp.sum(jnp.sin(x + p["w"][0])) + jnp.sin(x[0] + p["w"][1])


@_program(_DATA, w=(9, 4), v=(4, 9), u=(6, 4))
def _rows_at_known_places_added_to_data(p, x):
    x = x + p["w"][jnp.arange(1, 2 * len(x), 2)] + jnp.take(p["v"], jnp.arange(len(x)), axis=1).T
    return jnp.sum(jnp.sin(x)) + jnp.sum(jnp.sin(x[:1] * x + p["u"][jnp.full(len(x), 5)]))


@_program(_DATA, w=(4, 4))
def _parameter_printed(p, x):
    jax.debug.callback(lambda _: None, p["w"])
    jax.debug.callback(lambda *_: None, p["w"], x)
    return jnp.sum(jnp.sin(x @ p["w"]))


@_program(_DATA, w=(4, 4), v=(4, 4))
def _complex_inside(p, x):
    phase = jnp.real((1j * p["w"]) * (1 - 2j))
    return jnp.sum(jnp.sin(x @ phase)) + jnp.sum(jnp.abs(jnp.exp(1j * x) @ (1j * p["v"])))


@_program(_DATA, w=(4, 4), none=(4, 0), nothing=(0, 4), empty=(0,))
def _empty_leaves(p, x):
    beside = jnp.concatenate([p["nothing"], x]) + jnp.sum(x @ p["none"])
    return (
        jnp.sum(jnp.sin(beside @ p["w"])) + jnp.sum(p["empty"]) + jnp.sum(x[:, :0] @ p["nothing"])
    )


@_program(_DATA[:, :0], w=(4, 4), v=(4, 4), e=(4, 4), h=(4,))
def _sequence_of_length_zero(p, x):
    last = lax.scan(lambda c, r: (jnp.tanh(c @ p["w"] + r), c), p["h"], x)[0]
    ids = x[:, 0].astype(jnp.int32)
    return jnp.sum(jnp.sin(x @ p["v"])) + jnp.sum(jnp.sin(p["e"][ids] @ p["v"])) + jnp.sum(last**2)


@_program(_DATA, w=(4, 4), v=(4, 4))
def _float8_operands(p, x):
    dims = (((1,), (0,)), ((), ()))
    x, w = x.astype(_FLOAT8), p["w"].astype(_FLOAT8)
    return jnp.sum(
        jnp.sin(lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)) @ p["v"]
    )


@_program((3 * _DATA).astype(jnp.int8), w=(4, 4))
def _integer_data_against_weights(p, x):
    dims = (((1,), (0,)), ((), ()))
    return jnp.sum(jnp.sin(lax.dot_general(x, p["w"], dims, preferred_element_type=jnp.float32)))


@_program(_DATA, w=(4, 4), h=(4,), unused=(3,))
def _values_without_gradients(p, x):
    shown, kept = lax.scan(lambda c, r: ((jnp.tanh(c[0] @ p["w"]), p["h"]), r), (x[0], x[1]), x)
    rounded = jnp.round(jnp.sum(shown[0] * p["unused"][0]))
    return jnp.sum(jnp.sin(shown[0])) + rounded + lax.stop_gradient(jnp.sum(kept * shown[1]))


@_program(_DATA, w=(4, 4), v=(4, 4), b=(4,))
def _values_in_references(p, x):
    total, last = jax.new_ref(p["b"]), jax.new_ref(jnp.zeros(4))

    def step(_, row):
        total[...] += jnp.tanh(row @ p["w"])
        last[0] = total[1] * p["v"][0, 0]
        return None, total[...]

    sums = lax.scan(step, None, x)[1]
    return jnp.sum(jnp.sin(sums @ p["v"])) + jnp.sum(last[...] @ p["w"])


@_program(_DATA, w=(3, 4, 4), v=(4, 4))
def _constants_of_scan_steps(p, x):
    places = jnp.arange(3)

    @jax.checkpoint
    def step(x, inputs):
        w, place = inputs
        mask = jnp.cumsum(places) * place < 3  # also read after a nested scan
        x = jnp.where(mask[:, None], jnp.tanh(x @ w), x)
        seen = lax.map(lambda i: x[i] * (i < place) + jnp.cos(place), places)
        # `mask` meets data and a parameter.
        return seen @ (p["v"] * mask[0]) * mask[1], jnp.sin(place + 1.0)

    x, ys = lax.scan(step, x, (p["w"], places))
    return jnp.sum(jnp.sin(x)) * jnp.sum(ys)


def test_combined_programs_equal_per_example_gradients():
    """Sums all losses. Each program has its own layer of the clip and its own comparison."""
    # lookups_test has the modes of indices outside the table.
    names = [n for n in _PROGRAMS if n not in {f"index_outside_by_{m}" for m in ("clip", "drop")}]

    def loss(params, example):
        return sum(_PROGRAMS[name][0](params[name], example[name]) for name in names)

    params, batch = ({name: _PROGRAMS[name][i] for name in names} for i in (1, 2))
    clip = dpoptax.per_layer_clip(dict.fromkeys(names, _NORMED))
    points = dpoptax.gradient_points((), params)
    got, want = both(Network(loss, None, None), clip, points, batch)
    for name in names:
        close(got[name], want[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", _PROGRAMS)
def test_each_program_equals_per_example_gradients(name):
    loss, params, batch = _PROGRAMS[name]
    points = dpoptax.gradient_points((), params)
    close(*both(Network(loss, None, None), _NORMED, points, batch))


@pytest.mark.parametrize(
    "name",
    slow_but(("complex_inside",), ("parameter_printed", "complex_inside", "float8_operands")),
)
def test_programs_at_two_points(name):
    loss, params, batch = _PROGRAMS[name]
    other = jax.tree.map(jnp.sin, params)
    points = dpoptax.GradientPoints((params, other), (0.7, 0.3))
    close(*both(Network(loss, None, None), _NORMED, points, batch))


def _infinite_aux_activation(p, x):
    large = jnp.exp(jnp.abs(x @ p["w"]))
    beside = large @ p["v"]
    seen, _ = jax.checkpoint(lambda large: (jnp.sum(large @ p["v"]), large))(large)
    carried, _ = lax.scan(
        lambda c, r: ((c[0] + r @ p["w"], c[1] + large[0] @ p["w"]), None),
        (x[0], x[0]),
        x / 1e30,
    )
    stopped = jnp.isfinite(jnp.sum(lax.stop_gradient(beside)))
    loss = jnp.sum(jnp.sin(carried[0] / 1e30 + p["b"])) + jnp.where(stopped, 0.1, 0.2)
    return loss, (beside, seen, carried[1])


def test_infinite_aux_activation_keeps_the_example():
    params = {"w": _normal(4, 4), "v": _normal(4, 4), "b": _normal(4)}
    points = dpoptax.gradient_points((), params)

    def total(method):
        grad_fn = dpoptax.clipped_grad(
            _infinite_aux_activation, _NORMED, has_aux=True, method=method
        )
        return jax.jit(grad_fn)(points, batch)

    batch = _DATA.at[1].set(1e30)
    (got, aux), (want, want_aux) = total("auto"), total("vmap")
    assert not np.all(np.isfinite(aux[0]))
    jax.tree.map(np.testing.assert_array_equal, aux, want_aux)
    close(got.sum, want.sum)
    assert np.any(np.abs(got.sum["b"]) > 0.5)


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_empty_batch_gives_zeros(microbatch_size):
    def loss(p, x):
        kept = lax.scan(lambda c, r: (jnp.tanh(c @ p["w"] + r), None), p["h"], x * p["b"])[0]
        return jnp.sum(kept), kept

    params = {"w": _normal(4, 4), "h": _normal(4), "b": _normal(4)}
    grad_fn = dpoptax.clipped_grad(loss, _NORMED, has_aux=True, microbatch_size=microbatch_size)
    total, aux = grad_fn(dpoptax.gradient_points((), params), _DATA[:0])
    jax.tree.map(np.testing.assert_array_equal, total.sum, jax.tree.map(jnp.zeros_like, params))
    assert aux.shape == (0, 4)


@pytest.mark.parametrize("clip", [_NORMED, dpoptax.per_layer_clip(0.5)])
def test_float32_next_to_float64(clip):
    def loss(p, x):
        x, ids = x
        hidden = jnp.sin(x @ p["w"] + p["b"] + p["e"].at[ids].get(mode="fill", fill_value=0.0))
        return jnp.sum(jnp.sin(hidden @ p["v"] + p["c"]))

    with jax.enable_x64(True):
        wide = functools.partial(jnp.asarray, dtype=jnp.float64)
        params = {"w": (4, 4), "b": (4,), "v": (4, 3), "c": (3,), "e": (4, 4)}
        params = {k: _normal(*shape, seed=3) for k, shape in params.items()}
        params |= {k: wide(params[k]) for k in ("b", "v")}
        ids = jnp.array([[0, 2**32, 1], [2, 3, 2**32 + 1], [3, 2**62, -1]])
        points = dpoptax.gradient_points((), params)
        got, want = both(Network(loss, None, None), clip, points, (_DATA[:3], ids))
        assert got["b"].dtype == got["v"].dtype == jnp.float64
        close(*jax.tree.map(lambda x: x.astype(jnp.float32), (got, want)))


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jnp.ones((4, 4), jnp.int8), r"\['w'\] is int8. It has no gradient"),
        (jnp.ones((4, 4), jnp.complex64), "is complex64. Store the real.*two parameters"),
        (jnp.ones((4, 4), _FLOAT8), "is float8_e4m3fn. Store it in bfloat16"),
    ],
)
def test_refuses_dtypes_that_cannot_be_clipped(method, leaf, message):
    def loss(p, x):
        return jnp.sum(jnp.abs(x @ p["w"].astype(jnp.complex64) @ p["v"]))

    params = {"w": leaf, "v": _normal(4, 4)}
    grad_fn = dpoptax.clipped_grad(loss, _NORMED, method=method)
    with pytest.raises(TypeError, match=message):
        grad_fn(dpoptax.gradient_points((), params), _DATA)
    with pytest.raises(TypeError, match=message):
        dpoptax.explain(loss, params, _DATA[0])


def test_overflowing_product_of_scales_adds_zero():
    def loss(p, x):
        return jnp.sum(x @ (1e-15 * p["near"])) + jnp.sum(x @ (1e30 * (1e30 * p["far"])))

    params = {"near": _normal(4, 4), "far": _normal(4, 4)}
    assert not dpoptax.explain(loss, params, _DATA[0]).fallbacks
    points, batch = dpoptax.gradient_points((), params), _DATA[0][None]
    for method in ("auto", "vmap"):
        grad_fn = jax.jit(dpoptax.clipped_grad(loss, dpoptax.l2_clip(1.0), method=method))
        total = grad_fn(points, batch).sum
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(total))


def test_explain_names_nonlinear_operations():
    def loss(p, x):
        return jnp.sum(jnp.sin(x @ bounded(p["w"])) @ p["v"]), x @ p["beside"]

    params = {"w": _normal(4, 4), "v": _normal(4, 4), "beside": _normal(4, 4)}
    rows = dpoptax.explain(loss, params, _DATA[0], has_aux=True).rows
    assert {row.parameter: row.why for row in rows} == {
        "['beside']": "",
        "['v']": "",
        "['w']": "meets data in custom_vjp_call",
    }
    assert rows[0].rule == "zero"


def test_scan_constants_are_not_stored_for_all_steps():
    steps, length = 4, 32

    def step(args):
        place, x = args
        return jnp.where(jnp.arange(length) <= place + jnp.arange(8)[:, None], x, 0.0)

    def loss_fn(w, x):
        rows = (x @ w).reshape(steps, 8, 1)
        return jnp.sum(lax.map(jax.checkpoint(step), (jnp.arange(steps), rows)) ** 2)

    def largest_mask(function, *args):
        shapes = [
            v.aval.shape
            for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr)
            for v in eqn.outvars
            if v.aval.dtype == bool
        ]
        return max(np.prod(shape) for shape in shapes)

    w, batch = jnp.ones((4, 8)), jnp.ones((2, steps, 4))
    one_step = 8 * length
    assert largest_mask(dpoptax.clipped_grad(loss_fn, 1.0), w, batch) <= 2 * one_step
