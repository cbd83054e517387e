"""Tests values computed from parameters: gradients are pulled back without being formed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpoptax
from dpoptax._ghost_clipping import factor_products
from dpoptax._ghost_clipping.transformed import point_differences
from dpoptax._ghost_clipping.transformed.cotangents import FixedTerm, OuterSum
from dpoptax._ghost_clipping.transformed.pulled_back_norms import assemble_gradients, measure_terms
from dpoptax._losses.rules import FactorLayout
from tests import helpers
from tests.ghost_clipping.comparison import QUICK, both, close
from tests.networks import Network

pytestmark = pytest.mark.usefixtures("no_room")

_ROWS, _COLUMNS = 4, 5
_LAYOUT = FactorLayout((4, 4), (), (0,), (1,))


def _standardized(w, axes=0):
    w = w - w.mean(axes, keepdims=True)
    return w * lax.rsqrt(jnp.mean(w**2, axes, keepdims=True) + 1e-5)


def _spectral(w):
    u = lax.stop_gradient(w[:1] / jnp.linalg.norm(w[:1]))
    v = lax.stop_gradient(u @ w.T)
    return w / (v @ w @ u.T)[0, 0]


# Functions of parameters (4, 5), (4, 2), (2, 5), (5,) that return a kernel (4, 5), and their
# number.
FUNCTIONS = {
    "standardized": (_standardized, 1),
    "standardized by the variance's floor": (
        lambda w: (w - w.mean(0)) / jnp.sqrt(jnp.maximum(w.var(0), 0.5)), 1,
    ),
    "standardized, with a gain": (lambda w, a, b, g: _standardized(w) * g, 4),
    "weight norm": (lambda w, a, b, g: g * w / jnp.linalg.norm(w, axis=0), 4),
    "weight norm along columns": (lambda w: w / jnp.linalg.norm(w, axis=1, keepdims=True), 1),
    "over the norm of all": (lambda w: w / jnp.linalg.norm(w), 1),
    "standardized as a whole": (lambda w: _standardized(w, (0, 1)), 1),
    "spectral norm": (_spectral, 1),
    "scaled": (lambda w, a, b, g: w * jnp.exp(g), 4),
    "transposed twice": (lambda w: _standardized(w.T, 1).T, 1),
    "merged LoRA": (lambda w, a, b: lax.stop_gradient(w) + 0.5 * a @ b, 3),
    "LoRA beside its weight": (lambda w, a, b: w + 0.5 * (a @ b), 3),
    "of large entries": (lambda w: _standardized(1e12 * w), 1),
    "of small entries": (lambda w: 1e15 * w / jnp.linalg.norm(1e15 * w), 1),
}  # fmt: skip


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _params(count):
    shapes = [(_ROWS, _COLUMNS), (_ROWS, 2), (2, _COLUMNS), (_COLUMNS,)]
    return [_normal(*shape, seed=i) for i, shape in enumerate(shapes[:count])]


def _loss(function):
    def loss(params, x):
        w = function(*params)
        return jnp.sum(jnp.sin(jnp.tanh(x @ w) * (jnp.cos(x) @ w)))

    return loss


_DATA = _normal(5, 3, _ROWS, seed=9)
_QUICK = ("standardized, with a gain", "merged LoRA")


def _check(names, way, monkeypatch):
    """Checks the sum of the losses. Each function has its own layer of the clip."""
    helpers.force_norm_method(monkeypatch, way)
    losses = {name: _loss(FUNCTIONS[name][0]) for name in names}
    params = {name: _params(FUNCTIONS[name][1]) for name in names}

    def loss(params, x):
        return sum(losses[name](params[name], x) for name in names)

    rows = dpoptax.explain(loss, params, _DATA[0]).rows
    assert all(row.why == "" and ("pulled back" in row.rule) == bool(row.cost) for row in rows)
    mask = jnp.array([True, True, False, True, True])
    data = _DATA.at[1].set(jnp.nan).at[2].set(jnp.inf)
    points = dpoptax.gradient_points((), params)
    # Some examples are clipped and some are not.
    clip = dpoptax.per_layer_clip(dict.fromkeys(names, 2.0))
    got, want = both(Network(loss, None, None), clip, points, data, mask)
    for name in names:
        close(got[name], want[name], tolerance=5e-4)


def test_combined_sums_equal_per_example_gradients(monkeypatch):
    _check(_QUICK, "gram", monkeypatch)


@pytest.mark.slow
@pytest.mark.spread(10)
@pytest.mark.parametrize("way", ["gram", "form", "keep"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_clipped_sum_equals_per_example_gradients(name, way, monkeypatch):
    _check([name], way, monkeypatch)


@pytest.mark.parametrize("way", ["form", "keep"])
def test_clipped_sums_with_formed_gradients(way, monkeypatch):
    _check(["weight norm"], way, monkeypatch)


# Several weights cancel. If they cancel most, differences are summed.
WEIGHTS = {
    "two": (0.7, 0.3),
    "of both signs": (1.5, -0.7),
    "three": (0.5, 1.5, -0.7),
    "large and canceling": (430.0, -429.0),
}


def _points(params, weights, apart=0.05):
    """Returns points as far apart as iterates, each with separate parameters."""

    def moved(j):
        return [p + apart * j * _normal(*p.shape, seed=70 + j) for p in params]

    return dpoptax.GradientPoints(tuple(moved(j) for j in range(len(weights))), weights)


def _check_several(loss, params, weights, monkeypatch, way="gram"):
    helpers.force_norm_method(monkeypatch, way)
    rows = dpoptax.explain(loss, params, _DATA[0], num_points=len(weights)).rows
    assert all(row.why == "" and ("pulled back" in row.rule) == bool(row.cost) for row in rows)
    mask = jnp.array([True, True, False, True, True])
    data = _DATA.at[1].set(jnp.nan).at[2].set(jnp.inf)
    points = _points(params, weights, apart=1e-3 if max(weights) > 9 else 0.05)
    got, want = both(Network(loss, None, None), dpoptax.l2_clip(2.0), points, data, mask)
    close(got, want, tolerance=2e-3)


@pytest.mark.slow
@pytest.mark.spread(8)
@pytest.mark.parametrize("weights", ["of both signs", "large and canceling"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_clipped_sums_at_several_points(name, weights, monkeypatch):
    function, count = FUNCTIONS[name]
    loss = lambda params, x: jnp.sum(jnp.sin(x @ function(*params)))  # noqa: E731
    _check_several(loss, _params(count), WEIGHTS[weights], monkeypatch)


def _tied(w, gain, x):
    y = jnp.tanh(x @ (w * jnp.exp(gain))) + x @ w
    return y * (jnp.cos(x) @ _standardized(w))


def _tied_and_scaled(params, x):
    """Uses one kernel unchanged, scaled by a gain and standardized, and merged LoRA factors."""
    w, a, b, gain = params
    return jnp.sum(jnp.sin(_tied(w, gain, x) + x @ (0.5 * a @ b)))


# adversary_test attacks derived kernels at several points.
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["three", "large and canceling"])
def test_several_uses_at_several_points(weights, monkeypatch):
    _check_several(_tied_and_scaled, _params(4), WEIGHTS[weights], monkeypatch)


def _power_iterations(w):
    """Divides by the spectral norm and differentiates the iterations, each doubling the terms."""
    u = w[:, 0]
    for _ in range(2):
        v = u @ w / jnp.linalg.norm(u @ w)
        u = w @ v / jnp.linalg.norm(w @ v)
    return w / (u @ w @ v)


def _orthonormalized(w):
    """Applies Björck's iteration, which turns each product into four."""
    for _ in range(10):
        w = 1.5 * w - 0.5 * w @ (w.T @ w)
    return w


# Functions that mix entries by more than scaling, sums along axes and matrix products.
UNPULLED = {
    "squashed": jnp.tanh,
    "masked": lambda w: jnp.where(w > 0, w, 0.0),
    "standardized, then multiplied": lambda w: _standardized(w) @ w.T @ w,
    "cumulated": lambda w: jnp.cumsum(_standardized(w), axis=0),
    "through bfloat16": lambda w: _standardized(w).astype(jnp.bfloat16).astype(jnp.float32),
    "scaled along both": lambda w: w * w[:1] * w[:, :1],
    "over the norm by power iterations": _power_iterations,
    "orthonormalized": _orthonormalized,
}


@pytest.mark.parametrize("points", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", UNPULLED)
def test_other_functions_of_parameters_fall_back(name, points):
    loss = _loss(UNPULLED[name])
    (row,) = dpoptax.explain(loss, [_normal(4, 5)], _DATA[0], num_points=points).rows
    assert row.why == "computed on before it meets data in dot_general"


def test_uses_in_two_layouts_fall_back():
    """A part, a table or the transpose next to a value computed from the kernel also falls back."""
    others = {
        "transposed": lambda w, x: x @ w.T,
        "part": lambda w, x: x[:, :2] @ w[:2],
        "table": lambda w, x: x + w[jnp.argmax(x, -1)],
    }
    for other in others.values():
        loss = lambda w, x: jnp.sum(jnp.sin(other(w, x) + x @ _standardized(w)))  # noqa: B023, E731
        (row,) = dpoptax.explain(loss, _normal(4, 4), _DATA[0]).rows
        assert row.why == "its uses overlap in different layouts"


def test_sum_does_not_depend_on_parameter_magnitude():
    size = 1e7
    loss = _loss(lambda w: w / jnp.max(jnp.abs(lax.stop_gradient(w))) - (w / size).mean(0))
    params = [size * _normal(_ROWS, _COLUMNS)]
    assert dpoptax.explain(loss, params, _DATA[0]).fallbacks == ()
    grad_fn = dpoptax.clipped_grad(loss, dpoptax.automatic_clip(1.0, gamma=0.0))
    of_ones = _loss(lambda w: w / jnp.max(jnp.abs(lax.stop_gradient(w))) - w.mean(0))
    want = dpoptax.clipped_grad(of_ones, dpoptax.automatic_clip(1.0, gamma=0.0))
    (got,) = grad_fn(dpoptax.gradient_points((), params), _DATA).sum
    params = [params[0] / size]
    (want,) = want(dpoptax.gradient_points((), params), _DATA).sum
    np.testing.assert_allclose(got, want, atol=1e-2)


def test_undefined_derivative_adds_zero():
    """The norm of a zero column has no derivative, so no example adds anything."""
    loss = _loss(lambda w: w / jnp.linalg.norm(w, axis=0))
    params = [_normal(_ROWS, _COLUMNS).at[:, 2].set(0.0)]
    grad_fn = jax.jit(dpoptax.clipped_grad(loss, dpoptax.l2_clip(1.0)), compiler_options=QUICK)
    (total,) = grad_fn(dpoptax.gradient_points((), params), _DATA).sum
    np.testing.assert_array_equal(total, jnp.zeros((_ROWS, _COLUMNS)))


@pytest.mark.parametrize("differences", [False, True])
def test_computed_norm_bounds_canceling_points(differences):
    """Checks two points, each with its own scale, whose products and terms almost cancel."""
    rng = np.random.default_rng(0)

    def near(x):
        return (-x * (1 + 2.0**-20 * rng.normal(size=x.shape))).astype(np.float32)

    rows, columns = (rng.normal(size=(256, 1, 6, 4)).astype(np.float32) / 4 for _ in range(2))
    bases = rng.normal(size=(2, 4, 4)).astype(np.float32) / 4
    bases[1] = -near(bases[0])
    weights = rng.normal(size=(256, 1, 4)).astype(np.float32) / 4
    scales = np.array([np.ones((1, 4)), 1 + 2.0**-18 * rng.normal(size=(1, 4))], np.float32)
    sides = [(rows, columns), (-near(rows), near(columns))]
    weights = [weights, near(weights)]

    @jax.jit
    def measured(sides, scales, bases, weights):
        outers = [
            OuterSum(factor_products.Segment(*pair), _LAYOUT, scale)
            for pair, scale in zip(sides, scales, strict=True)
        ]
        terms = [FixedTerm(*pair) for pair in zip(bases, weights, strict=True)]
        if differences:
            outers = point_differences._join_outers(tuple(outers))
            terms = point_differences._join_terms(tuple(terms))
        found = assemble_gradients(outers, terms, None)
        fixed = [(t.basis, t.weights) for t in found.fixed_terms]
        return ([tuple(s) for s in found.segments], fixed), *measure_terms(found)

    found, square, bound = measured(sides, scales, bases, weights)
    # The exact gradient is that of the stored factors.
    exact = np.zeros((256, 1, 4, 4))
    absolute = np.zeros(256)
    for segment in found[0]:
        r, c = (np.asarray(x, np.float64) for x in segment)
        exact += np.einsum("bktr,bktc->bkrc", r, c)
        absolute += (np.linalg.norm(r, axis=-1) * np.linalg.norm(c, axis=-1)).sum((1, 2))
    for term in found[1]:
        part = np.asarray(term[0], np.float64) * np.asarray(term[1], np.float64)
        exact += part
        absolute += np.sqrt(np.sum(part**2, axis=(1, 2, 3)))
    norms = np.sqrt(np.sum(exact**2, axis=(1, 2, 3)))
    assert differences or (norms < 1e-4 * absolute).all()
    assert (np.sqrt(np.asarray(square, np.float64)) >= norms).all()
    assert (np.asarray(bound, np.float64) >= absolute * (1 - 1e-12)).all()
