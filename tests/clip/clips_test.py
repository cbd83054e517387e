"""Tests the clip geometries: curves, bounds for any input, and per-layer clipping."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._clipped_sum.clip_per_example import sum_clipped
from tests import helpers

# properties_test compiles these clips as users do.
pytestmark = pytest.mark.usefixtures("no_room")

FLAT = {
    "l2": dpoptax.l2_clip(0.7),
    "auto-v": dpoptax.automatic_clip(0.7, gamma=0.0),
    "auto-s": dpoptax.automatic_clip(0.7, gamma=0.01),
    "psac": dpoptax.contrib.psac_clip(0.7, r=0.1),
    "normalized": dpoptax.normalized_clip(0.7),
}
CURVES = {
    "l2": lambda n: min(1.0, 0.7 / n),
    "auto-v": lambda n: 0.7 / n,
    "auto-s": lambda n: 0.7 / (n + 0.01),
    "psac": lambda n: 0.7 / (n + 0.1 / (n + 0.1)),
    "normalized": lambda n: min(1.0 / 0.7, 1.0 / n),
}
LAYERED = {
    "two": dpoptax.per_layer_clip({"a": 0.5, "b": 1.2}),
    "leaves": dpoptax.per_layer_clip({"a": 0.5, "b": {"c": 0.1, "d": 0.2}}),
    "whole": dpoptax.per_layer_clip(0.7),
    "auto-v each": dpoptax.per_layer_clip(FLAT["auto-v"]),
    "auto-s each": dpoptax.per_layer_clip(FLAT["auto-s"]),
    "psac each": dpoptax.per_layer_clip(FLAT["psac"]),
    "named": dpoptax.per_layer_clip({"a": FLAT["auto-s"], "b": FLAT["normalized"]}),
}


@jax.jit
def _sums(grads):
    """Returns the sums for all clips, computed in one program."""
    return {name: sum_clipped(clip, grads) for name, clip in (FLAT | LAYERED).items()}


def _summed(name):
    return lambda grads: _sums(grads)[name]


_sums_of_each = jax.jit(jax.vmap(_sums))


def _alone(clip, grads):
    return jax.jit(functools.partial(sum_clipped, clip))(grads)


def _grads(seed, batch=5, scale=1.0):
    rng = np.random.default_rng(seed)
    make = lambda *shape: helpers.floats(scale * rng.normal(size=(batch, *shape)))  # noqa: E731
    return {"a": make(3, 2), "b": {"c": make(4), "d": make()}}


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 30.0])
def test_flat_clips_follow_their_curves(name, scale):
    grads = _grads(0, scale=scale)
    want = jax.tree.map(lambda g: np.zeros(g.shape[1:]), grads)
    for i in range(5):
        g = jax.tree.map(lambda x, i=i: np.asarray(x, np.float64)[i], grads)
        factor = CURVES[name](helpers.global_norm(g))
        want = jax.tree.map(lambda w, x, f=factor: w + f * x, want, g)
    got = _summed(name)(grads)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize("name", [*FLAT, *LAYERED])
def test_example_adds_at_most_the_sensitivity(name):
    clip = {**FLAT, **LAYERED}[name]
    rng = np.random.default_rng(1)
    scales = 10.0 ** np.arange(-44, 39)
    # Layers have very different lengths. No layer may use a bound that another leaves unused.
    grads = {
        "a": rng.normal(size=(83, 1, 3)).clip(-3, 3),
        "b": {
            "c": 10.0 ** rng.integers(-9, 1, size=(83, 1, 2)),
            "d": rng.integers(0, 2, size=(83, 1)),
        },
    }
    grads = jax.tree.map(lambda g: helpers.floats((g.T * scales).T), grads)
    totals = jax.tree.map(np.asarray, _sums_of_each(grads)[name])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(totals))
    norms = [helpers.global_norm(jax.tree.map(lambda x, i=i: x[i], totals)) for i in range(83)]
    longest = max(norms)
    assert longest <= clip.sensitivity * (1 + 1e-6)
    assert longest > clip.sensitivity * (0.999 if name in FLAT else 0.7)


@pytest.mark.parametrize("name", [*FLAT, *LAYERED])
@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_zero_and_non_finite_gradients_add_exactly_zero(name, bad):
    grads = jax.tree.map(lambda g: np.full(g.shape, bad, np.float32), _grads(0))
    grads["b"]["d"][:] = 0.0
    total = _summed(name)(grads)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(total))


@pytest.mark.parametrize(
    "clip", [dpoptax.contrib.psac_clip(1.0, r=1e-42), dpoptax.normalized_clip(1e-12)]
)
def test_zero_gradient_adds_zero_if_its_factor_is_nan(clip):
    grads = jnp.array([[3.0, 4.0], [0.0, 0.0]])  # 0/0 where numbers below 2⁻¹²⁶ are flushed to zero
    np.testing.assert_allclose(_alone(clip, grads), [0.6, 0.8], rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class _Dividing(dpoptax.Clip):
    """Scales to C tanh(‖g‖/C)/‖g‖ g without a limit at zero, where the factor is 0/0."""

    sensitivity = 1.0

    def factors(self, norms):
        return jnp.tanh(norms) / norms


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("layers", [False, True])
def test_non_finite_factor_only_drops_its_example(method, layers):
    clip = _Dividing()
    if layers:
        clip = dpoptax.per_layer_clip({"w": clip, "b": clip})
    examples = jnp.array([[3.0, 4.0], [0.0, 0.0], [0.3, 0.0]])
    points = dpoptax.gradient_points((), {"w": jnp.ones(2), "b": jnp.ones(())})
    loss_fn = lambda p, x: jnp.vdot(p["w"], x) + p["b"] * x[1]  # noqa: E731
    grad_fn = jax.jit(dpoptax.clipped_grad(loss_fn, clip, method=method))
    whole = grad_fn(points, examples, jnp.ones(3, bool)).sum
    without = grad_fn(points, examples, jnp.array([True, False, True])).sum
    jax.tree.map(np.testing.assert_array_equal, whole, without)
    assert float(whole["w"][0]) > 0.3


def test_clip_declares_only_what_users_write():
    public = {name for name in vars(dpoptax.Clip) if not name.startswith("_")}
    assert public == {"sensitivity", "factors", "groups"}


def _third(make, **options):
    """Returns a clip with the share of each of three leaves in a bound of 0.7."""
    return make(0.7 / 3**0.5, **options)


@pytest.mark.parametrize(
    ("name", "alone", "sensitivity"),
    [
        ("two", {"a": dpoptax.l2_clip(0.5), "b": dpoptax.l2_clip(1.2)}, 1.3),
        ("named", {"a": FLAT["auto-s"], "b": FLAT["normalized"]}, (0.7**2 + 1.0) ** 0.5),
        ("whole", _third(dpoptax.l2_clip), 0.7),
        ("auto-s each", _third(dpoptax.automatic_clip, gamma=0.01), 0.7),
        ("psac each", _third(dpoptax.contrib.psac_clip, r=0.1), 0.7),
    ],
)
def test_layers_are_clipped_separately(name, alone, sensitivity):
    """Each layer has its own bound. One bound is split evenly; γ and r are unchanged."""
    grads = _grads(3)
    alone = alone if isinstance(alone, dict) else jax.tree.map(lambda _: alone, grads)
    flat = lambda x: isinstance(x, dpoptax.Clip)  # noqa: E731
    want = jax.tree.map(_alone, alone, grads, is_leaf=flat)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), _summed(name)(grads), want
    )
    assert LAYERED[name].sensitivity == pytest.approx(sensitivity, rel=1e-12)


def test_per_layer_auto_v_fills_every_bound():
    # One short example. The others add nothing.
    first = np.array([1e-6, 0, 0, 0, 0], np.float32)
    total = _summed("auto-v each")(jax.tree.map(lambda g: (np.asarray(g).T * first).T, _grads(6)))
    for leaf in jax.tree.leaves(total):
        np.testing.assert_allclose(np.linalg.norm(leaf), 0.7 / 3**0.5, rtol=1e-5)


@pytest.mark.parametrize(
    "clip",
    [
        dpoptax.per_layer_clip(1.0),
        dpoptax.contrib.adaptive_clip(1.0),
        dpoptax.contrib.hyperspherical_clip(1.0, beta=0.5),
    ],
)
def test_refuses_layers_with_clips_that_are_not_flat(clip):
    for given in (clip, [clip, 1.0]):
        with pytest.raises(TypeError, match="must hold bounds or geometries"):
            dpoptax.per_layer_clip(given)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_unused_layer_keeps_its_share_of_the_bound(method):
    params = {name: jnp.zeros(3) for name in "abcd"}
    loss = lambda p, x: jnp.vdot(p["b"], x)  # noqa: E731
    grad_fn = dpoptax.clipped_grad(loss, dpoptax.per_layer_clip(1.0), method=method)
    clipped = grad_fn(dpoptax.gradient_points((), params), jnp.full((1, 3), 9.0))
    np.testing.assert_allclose(jnp.linalg.norm(clipped.sum["b"]), 0.5, rtol=1e-4)


def test_refuses_layers_that_are_not_a_tree_prefix():
    with pytest.raises(ValueError, match="`per_layer_clip` must be a tree prefix"):
        sum_clipped(dpoptax.per_layer_clip({"a": 1.0, "x": 1.0}), _grads(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dpoptax.automatic_clip(0.0), "`l2_clip_norm` must .* got 0"),
        (lambda: dpoptax.l2_clip(1e12), "`l2_clip_norm` must be a number"),
        (lambda: dpoptax.l2_clip(np.nan), "`l2_clip_norm` must be a number"),
        (lambda: dpoptax.l2_clip("1.0"), "`l2_clip_norm` must be a number .* got '1.0'"),
        (lambda: dpoptax.l2_clip(None), "`l2_clip_norm` must be a number .* got None"),
        (lambda: dpoptax.contrib.psac_clip(1.0, r=[0.1]), r"`r` must be a number .* got \[0.1\]"),
        (lambda: dpoptax.automatic_clip(1.0, gamma=-0.1), "`gamma` must .* got -0.1"),
        (lambda: dpoptax.automatic_clip(1.0, gamma=float("nan")), "`gamma` must .* got nan"),
        (lambda: dpoptax.contrib.psac_clip(1.0, r=0.0), "`r` must .* got 0"),
        (lambda: dpoptax.normalized_clip(-1.0), "`l2_clip_norm` must .* got -1"),
        (lambda: dpoptax.per_layer_clip({"a": 1.0, "b": 0.0}), "`clips` must .* got 0"),
        (lambda: dpoptax.per_layer_clip({}), "at least one bound"),
        (
            lambda: dpoptax.per_layer_clip(dpoptax.normalized_clip(1.0)),
            "can be split over the layers",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


BOUNDED = {
    "l2_clip": dpoptax.l2_clip,
    "automatic_clip": dpoptax.automatic_clip,
    "psac_clip": dpoptax.contrib.psac_clip,
    "normalized_clip": dpoptax.normalized_clip,
    "per_layer_clip": dpoptax.per_layer_clip,
    "per_layer_clip of layers": lambda bound: dpoptax.per_layer_clip([1.0, bound]),
    "adaptive_clip": dpoptax.contrib.adaptive_clip,
    "hyperspherical_clip": lambda bound: dpoptax.contrib.hyperspherical_clip(bound, angle_norm=1.0),
}


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize(
    ("bound", "meant"),
    [
        (0, r"got 0\.0\. .*write `dpoptax\.automatic_clip\(1\.0, gamma=0\.0\)`"),
        (np.float32(np.inf), r"got inf\. .*write `dpoptax\.contrib\.adaptive_clip\(1\.0\)`"),
    ],
)
def test_zero_or_infinite_bound_error_names_alternative(name, bound, meant):
    with pytest.raises(ValueError, match=meant):
        BOUNDED[name](bound)


def test_alternative_to_zero_bound_is_limit_of_small_bounds():
    grads = _grads(7)
    meant = _alone(dpoptax.automatic_clip(1.0, gamma=0.0), grads)
    limit = _alone(dpoptax.normalized_clip(1e-6), grads)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), meant, limit)


def test_refuses_traced_bound():
    with pytest.raises(TypeError, match="`l2_clip_norm` must .* got a traced array"):
        jax.jit(lambda bound: dpoptax.l2_clip(bound).sensitivity)(0.0)


def test_dividing_loss_by_bound_clips_at_the_bound():
    """Checks the recipe of docs/guides/clipping.md for a scheduled clipping bound."""
    batch = jnp.array([[3.0, 4.0], [0.1, 0.2], [0.0, 0.0]])
    points = dpoptax.gradient_points((), jnp.zeros(2))

    @jax.jit
    def scaled(bound):
        grad_fn = dpoptax.clipped_grad(lambda w, x: jnp.vdot(w, x) / bound, dpoptax.l2_clip(1.0))
        return bound * grad_fn(points, batch).sum

    for bound in (0.25, 0.7, 10.0):
        grad_fn = dpoptax.clipped_grad(jnp.vdot, dpoptax.l2_clip(bound), method="vmap")
        want = jax.jit(grad_fn)(points, batch).sum
        np.testing.assert_allclose(scaled(bound), want, rtol=1e-5)
