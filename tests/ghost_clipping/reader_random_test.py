"""Tests ghost clipping against per-example gradients on random programs with all constructs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from jax import lax

import dpoptax
from dpoptax._rounding import bounds
from tests.ghost_clipping.comparison import both, close
from tests.helpers import cancellations, force_norm_method
from tests.networks import Network

pytestmark = pytest.mark.usefixtures("no_room")

_DIM = 4


@jax.custom_vjp
def bounded(w):
    """Returns w. Its derivative clips cotangents, so it is not linear in the cotangent."""
    return w


bounded.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_jvp
def _doubled(w):
    return jnp.sin(w)


_doubled.defjvp(lambda w, t: (jnp.sin(w[0]), 2 * jnp.cos(w[0]) * t[0]))


def _standardized(w):
    return w * lax.rsqrt(jnp.mean(w**2, 0) + 1e-3)


def _rounded(w):
    return (3 * w).astype(jnp.int8).astype(jnp.float32) / 3


# Functions of a 4×4 parameter before it meets data.
_DERIVED = {
    "itself": lambda w: w,
    "transposed": lambda w: w.T,
    "scaled": lambda w: -0.5 * w,
    "divided": lambda w: w / 3,
    "flipped": lambda w: w[::-1],
    "moved": lambda w: w.reshape(2, 2, 4).transpose(1, 0, 2).reshape(4, 4),
    "rolled": lambda w: jnp.roll(w, 1, axis=0),
    "half, padded": lambda w: jnp.pad(w[:, 1:3], ((0, 0), (1, 1))),
    "halves swapped": lambda w: jnp.concatenate([w[2:], w[:2]]),
    "rounded": _rounded,
    "straight through": lambda w: w + lax.stop_gradient(_rounded(w) - w),
    "stopped": lax.stop_gradient,
    "bounded": bounded,
    "custom_jvp": _doubled,
    "through bfloat16": lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
    "through float8": lambda w: w.astype(jnp.float8_e4m3fn).astype(jnp.float32),
    "reduced": lambda w: lax.reduce_precision(w, 5, 2),
    "sign": jnp.sign,
    "complex": lambda w: jnp.real((1j * w) * (2 - 1j)),
    "masked": lambda w: jnp.where(w > 0, w, 0.0),
    "triangle": jnp.tril,
    "standardized": lambda w: _standardized(w - w.mean(0)),
    "over its deviation": lambda w: (w - w.mean(0)) / (w.std(0) + 0.1),
    "normalized": lambda w: w / jnp.linalg.norm(w),
    "weight norm": lambda w: w / jnp.linalg.norm(w, axis=1, keepdims=True),
    "merged": lambda w: w - 0.5 * w @ w,
    "sorted": lambda w: jnp.sort(w, axis=0),
    "cumulated": lambda w: jnp.cumsum(w, axis=1),
    "squared": lambda w: w @ w,
    "jitted": jax.jit(lambda w: jnp.tanh(w.T)),
    "by cond": lambda w: lax.cond(w[0, 0] > 0, lambda w: w, lambda w: 2 * w, w),
    "by scan": lambda w: lax.scan(lambda c, r: (c + r, c), w[0], w)[1],
    "mapped": jax.vmap(lambda row: row / (1 + jnp.sum(row**2))),
    "barrier": lambda w: sum(lax.optimization_barrier((w, w.T))),
    "printed": lambda w: (jax.debug.callback(lambda _: None, w), w)[1],
}


def _conv(x, w, **options):
    numbers = ("NCW", "OIW", "NCW")
    return lax.conv_general_dilated(
        x.T[None], w, (1,), "SAME", dimension_numbers=numbers, **options
    )[0].T


def _ids(x, spread=3.0):
    return jnp.round(spread * x[:, 0]).astype(jnp.int32)


def _grow(limit):
    def body(state):
        i, x = state
        return i + 1, 1.5 * x

    return lambda x: lax.while_loop(lambda s: (s[0] < 5) & (jnp.max(s[1]) < limit), body, (0, x))[1]


# Ways to combine two 4×4 values with data, (T, 4), that preserve the shape.
_MEETINGS = {
    "dot": lambda w, v, x: x @ w,
    "dot, dot": lambda w, v, x: jnp.tanh(x @ w) @ v,
    "twice": lambda w, v, x: jnp.tanh(x @ w) @ w.T,
    "from the left": lambda w, v, x: (w @ x.T).T,
    "bilinear": lambda w, v, x: jnp.einsum("ta,ab,bc->tc", x, w, v),
    "attention": lambda w, v, x: jax.nn.softmax(x @ w @ x.T) @ x @ v,
    "product of uses": lambda w, v, x: (x @ w) * (x @ v),
    "grouped": lambda w, v, x: jnp.einsum(
        "tha,hac->thc", x.reshape(-1, 2, 2), w.reshape(2, 2, 4)
    ).sum(1),
    "overlapping": lambda w, v, x: x[:, :3] @ w[:3] + x[:, 1:] @ w[1:],
    "side by side": lambda w, v, x: (x @ jnp.concatenate([w, v], 1)).reshape(-1, 2, 4).sum(1),
    "scaled, shifted": lambda w, v, x: x * w[0] + v[:, 1],
    "row and entry": lambda w, v, x: x + w[0] - v[1, 2],
    "sum": lambda w, v, x: x + jnp.sum(w),
    "power": lambda w, v, x: jnp.abs(x) ** (2 + jnp.tanh(w[1])),
    "maximum": lambda w, v, x: jnp.maximum(x @ v, w[2]),
    "selected": lambda w, v, x: jnp.where(x > 0, w[0], x @ v),
    "lookup": lambda w, v, x: x + w[_ids(x)],
    "lookup, clipped": lambda w, v, x: x + w.at[_ids(x)].get(mode="clip"),
    "lookup, filled": lambda w, v, x: x + w.at[_ids(x)].get(mode="fill", fill_value=0.5),
    "lookup, promised": lambda w, v, x: x + w.at[_ids(x)].get(mode="promise_in_bounds"),
    "lookup of columns": lambda w, v, x: x + w[:, _ids(x)].T @ v,
    "lookup of entries": lambda w, v, x: x + w[_ids(x), _ids(x, 1.0)][:, None],
    "lookup and dot": lambda w, v, x: (x + w[_ids(x)]) @ w,
    "one row": lambda w, v, x: x + lax.dynamic_index_in_dim(w, _ids(x)[0], keepdims=False),
    "rows from": lambda w, v, x: x + lax.dynamic_slice(w, (_ids(x)[0], 0), (2, 4)).sum(0),
    "permuted by a parameter": lambda w, v, x: x[:, jnp.argsort(w[0])] @ v,
    "scattered": lambda w, v, x: x + v.at[_ids(x)].add(x @ w)[0],
    "updated": lambda w, v, x: x + lax.dynamic_update_slice(w, x[:1], (1, 0)).sum(0),
    "concatenated": lambda w, v, x: jnp.concatenate([w[:1], x @ v])[1:] + w[1],
    "token": lambda w, v, x: (jnp.concatenate([w[:1], x])[:-1]) @ v,
    "convolution": lambda w, v, x: _conv(x, w.reshape(4, 2, 2), feature_group_count=2),
    "depthwise": lambda w, v, x: _conv(x, w[:, None, :3], feature_group_count=4),
    "recurrent": lambda w, v, x: lax.scan(lambda c, r: (jnp.tanh(c @ w + r @ v),) * 2, x[0], x)[1],
    "layers": lambda w, v, x: lax.scan(
        lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack([w, v])
    )[0],
    "biases": lambda w, v, x: lax.scan(lambda c, r: (c + r, r), x @ v, w)[0],
    "carried": lambda w, v, x: lax.scan(lambda c, r: (c + 0.1 * r, r @ c), w, x)[1],
    "trained inside": lambda w, v, x: x @ (
        w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)) + jnp.sum(w * v))(w)
    ),
    "no loop": lambda w, v, x: lax.scan(lambda c, r: (c @ w, None), x @ v, x[:0])[0],
    "nothing": lambda w, v, x: x + jnp.sum(x[:0] @ w, axis=0),
    "remat": lambda w, v, x: jax.checkpoint(lambda x: jnp.tanh(x @ w) @ v)(x),
    "remat of scan": lambda w, v, x: jax.checkpoint(
        lambda w, x: lax.scan(lambda c, r: (jnp.tanh(c @ w + r),) * 2, x[0], x)[1]
    )(w, x),
    "cond on data": lambda w, v, x: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x + v[0], x),
    "switch on a parameter": lambda w, v, x: lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, x @ v),
    "while": lambda w, v, x: x @ w + lax.stop_gradient(_grow(w[0, 0])(x @ v)),
    "loop": lambda w, v, x: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w + v[i]), x),
    "custom": lambda w, v, x: bounded(x @ w),
    "custom of both": lambda w, v, x: jax.nn.relu(x * w[0]) @ v,
    "mapped": lambda w, v, x: jax.vmap(lambda r: jnp.tanh(r @ w) @ v)(x),
    "mapped over columns": lambda w, v, x: jax.vmap(lambda c: x @ c, 1, 1)(w),
    "derivative": lambda w, v, x: jax.vmap(jax.grad(lambda r: jnp.sum(jnp.sin(r @ w) * v[0])))(x),
    "tangent": lambda w, v, x: jax.jvp(lambda x: jnp.sin(x @ w), (x,), (x @ v,))[1],
    "rounded data": lambda w, v, x: jnp.round(x @ w) + x @ v,
    "stopped": lambda w, v, x: lax.stop_gradient(x @ w) * (x @ v),
    "cumulated": lambda w, v, x: jnp.cumsum(x @ w, axis=0) + v[0],
    "sorted": lambda w, v, x: jnp.sort(x @ w + v[0], axis=0),
    "top": lambda w, v, x: lax.top_k(x @ w, 2)[0] @ v[:2],
    "bfloat16": lambda w, v, x: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype),
    "complex": lambda w, v, x: jnp.real(jnp.fft.ifft(jnp.fft.fft(x) * (w[0] + 1j * v[0]))),
    "integers": lambda w, v, x: x + (x.astype(jnp.int8) @ w.astype(jnp.int8)) @ v,
    "solved": lambda w, v, x: jnp.linalg.solve(w @ w.T + 2 * jnp.eye(4), x.T).T,
}  # fmt: skip

_values = st.tuples(st.sampled_from(list(_DERIVED)), st.integers(0, 1))
_layers = st.lists(
    st.tuples(st.sampled_from(list(_MEETINGS)), _values, _values), min_size=1, max_size=3
)
_programs = {
    "layers": _layers,
    "length": st.integers(1, 5),
    "count": st.integers(1, 2),
    "seed": st.integers(0, 99),
}


def _normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def check(layers, *, length=3, count=1, seed=0, tolerance=0.0):
    """Compares the two methods on the program that `layers` describe.

    If they differ in float32, float64 decides. Second derivatives of powers near 0 differ in
    float32, while the error of a wrong rule persists in float64.
    """
    try:
        _check(layers, length, count, seed, tolerance, np.float32)
    except AssertionError:
        with jax.enable_x64(True):
            _check(layers, length, count, seed, tolerance, np.float64)


def _check(layers, length, count, seed, tolerance, dtype):
    def loss(params, x):
        for meeting, first, second in layers:
            w, v = (_DERIVED[kind](params[which]) for kind, which in (first, second))
            x = jnp.sin(_MEETINGS[meeting](w, v, x))
        return jnp.sum(x**2)

    rng = np.random.default_rng(seed)
    trees = [[_normal(rng, _DIM, _DIM).astype(dtype) for _ in range(2)] for _ in range(count)]
    points = dpoptax.GradientPoints(tuple(trees), (0.7, 0.3)[:count])
    batch = _normal(rng, 3, length, _DIM).astype(dtype)
    with cancellations() as seen:
        got, want = both(Network(loss, None, None), dpoptax.normalized_clip(0.5), points, batch)
        jax.effects_barrier()
    most = max(seen, default=1.0)
    if most > 8.0:  # near M, where the term norms clip the gradient
        reject()
    # Per-example gradients are rounded to the narrow type, but those of the sum are not.
    narrow = any("bfloat16" in str(layer) for layer in layers)
    if any(np.any(leaf) for leaf in want):
        own = 0.03 if narrow else 3e-5 + bounds.gamma(64) * most**2
        close(got, want, max(own, tolerance))
    else:
        assert not any(np.any(leaf) for leaf in got)


# reader_test has quick programs of all constructs.
@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(**_programs)
def test_random_programs(**program):
    check(**program)


@pytest.mark.slow
@pytest.mark.optimized
@settings(max_examples=25, deadline=None)
@given(**_programs)
def test_random_programs_with_inner_products(**program):
    """Forces inner products instead of formed gradients. Norm bounds may exceed norms."""
    with pytest.MonkeyPatch.context() as patch:
        force_norm_method(patch, "gram")
        check(**program, tolerance=2e-3)


@pytest.mark.slow
@pytest.mark.spread(15)
@pytest.mark.parametrize("meeting", _MEETINGS)
def test_each_combination_of_parameters_and_data(meeting):
    check([(meeting, ("itself", 0), ("itself", 1))])


@pytest.mark.slow
@pytest.mark.spread(8)
@pytest.mark.parametrize("kind", _DERIVED)
def test_each_function_of_parameters(kind):
    check([("dot, dot", (kind, 0), ("itself", 1)), ("twice", (kind, 1), ("itself", 0))], count=2)
