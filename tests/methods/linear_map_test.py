"""Tests of gradients through a public linear map before clipping: bound, sum, and inverse map."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax.auditing import _worst_example as adversary
from dpoptax.auditing import worst_example
from tests import programs
from tests.clipped_grad import adversary_test
from tests.ghost_clipping.comparison import both, close, points_of
from tests.helpers import (
    floats,
    force_norm_method,
    global_norm,
    mlp_batch,
    mlp_loss,
    mlp_params,
    normal,
    slow_but,
)
from tests.networks import NETWORKS

pytestmark = pytest.mark.usefixtures("no_room")

KINDS = ("side", "entry", "matrix", "leaf")


def _factor(kind, shape, seed, spread=2.0):
    rng = np.random.default_rng(seed)

    def scale(*shape):
        return floats(spread ** rng.uniform(-1, 1, shape))

    def matrix(n):
        return floats(np.eye(n) + 0.5 * rng.normal(size=(n, n)) / n)

    if kind == "leaf" or not shape:
        return dpoptax.extend.Diagonal((scale(),))
    if kind == "entry":
        return dpoptax.extend.Diagonal((scale(*shape),))
    if len(shape) < 2:
        return scale(*shape)
    if kind == "matrix":
        return dpoptax.extend.Sides(matrix(int(np.prod(shape[:-1]))), matrix(shape[-1]))
    # A scale along each axis; all axes except the last are rows.
    ones = [(1,) * i + (n,) + (1,) * (len(shape) - i - 1) for i, n in enumerate(shape)]
    return dpoptax.extend.Diagonal(tuple(scale(*one) for one in ones))


def _factors(kind, params, spread=2.0):
    leaves, structure = jax.tree.flatten(params)
    found = [_factor(kind, p.shape, i, spread) for i, p in enumerate(leaves)]
    return jax.tree.unflatten(structure, found)


def _state(factors, params, **options):
    return dpoptax.extend.linear_map(factors, **options).init(params)


def _mapped(factor, g):
    """Maps one gradient in float64, by definition."""
    g = np.asarray(g, np.float64)
    if isinstance(factor, dpoptax.extend.Sides):
        rows, columns = np.asarray(factor.rows, float), np.asarray(factor.columns, float)
        return (rows @ g.reshape(-1, g.shape[-1]) @ columns).reshape(g.shape)
    for scale in factor.scales if isinstance(factor, dpoptax.extend.Diagonal) else (factor,):
        g = np.asarray(scale, float) * g
    return g


def _brute_force(loss, params, factors, batch, clip_norm):
    """Returns Σ clip(T g) from formed gradients, and its image under T⁻¹, Σ factor(‖T g‖) g."""
    gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
    given = jax.tree.structure(params).flatten_up_to(factors)
    leaves, structure = jax.tree.flatten(jax.tree.map(np.float64, gradients))
    size, mapped, plain = len(leaves[0]), 0, 0
    for i in range(size):
        g = [leaf[i] for leaf in leaves]
        t = [_mapped(f, x) for f, x in zip(given, g, strict=True)]
        scale = min(1.0, clip_norm / np.sqrt(sum(np.sum(x**2) for x in t)))
        mapped = [scale * x + (mapped[j] if i else 0) for j, x in enumerate(t)]
        plain = [scale * x + (plain[j] if i else 0) for j, x in enumerate(g)]
    return jax.tree.unflatten(structure, mapped), jax.tree.unflatten(structure, plain)


@pytest.mark.parametrize("kind", slow_but(("side and matrix",), ("side and matrix", *KINDS)))
def test_sum_and_inverse_map_match_brute_force(kind):
    params, batch = mlp_params(0), mlp_batch(0, 6)
    # The first layer has one kind of factors and the second another.
    kinds = kind.split(" and ") if " and " in kind else [kind] * 2
    factors = [_factors(each, [p])[0] for each, p in zip(kinds, params, strict=True)]
    points = dpoptax.gradient_points(_state(factors, params), params)
    mapped, plain = _brute_force(mlp_loss, params, factors, batch, 0.5)
    for method in ("auto", "vmap"):
        grad_fn = dpoptax.clipped_grad(mlp_loss, dpoptax.l2_clip(0.5), method=method)
        clipped = jax.jit(grad_fn)(points, batch)
        for got, want in ((clipped.sum, mapped), (clipped.decode(clipped.sum), plain)):
            _all_close(got, want)


def _all_close(got, want, tolerance=1e-4):
    largest = max(np.max(np.abs(x)) for x in jax.tree.leaves(want))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.slow
@pytest.mark.spread(9)
@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("name", NETWORKS)
def test_mapped_book_keeping_matches_per_example_gradients(name, kind):
    network = NETWORKS[name]
    points = points_of(network, 2, tangent=name == "mlp")
    state = jax.jit(_state)(_factors(kind, points.points[0]), points.points[0])
    points = dpoptax.GradientPoints(
        points.points, points.weights, points.tangent, reference=state.of(points.points[0])
    )
    close(*both(network, dpoptax.l2_clip(0.1), points, network.batch(0, 5)), tolerance=2e-4)


def _tied(lookup_first):
    def loss(params, example):
        token, x = example
        looked_up = jnp.sum(jnp.sin(params[token]) * x)
        contracted = jnp.sum((params @ x) ** 2)
        return looked_up + contracted if lookup_first else contracted + looked_up

    return loss


@pytest.mark.parametrize(
    ("lookup_first", "size"), [(True, 1e-20), pytest.param(False, 1.0, marks=pytest.mark.slow)]
)
def test_table_may_be_looked_up_and_contracted(lookup_first, size):
    """A product has one-hot and other factors, which share their powers of two."""
    params, rng = floats(np.full((6, 4), size)), np.random.default_rng(0)
    batch = jax.device_put(np.arange(5)), floats(rng.normal(size=(5, 4)))
    loss, factors = _tied(lookup_first), _factor("side", (6, 4), 0, 100.0)
    points = dpoptax.gradient_points(_state(factors, params), params)
    clipped = jax.jit(dpoptax.clipped_grad(loss, dpoptax.l2_clip(0.5)))(points, batch)
    _all_close(clipped.sum, _brute_force(loss, params, factors, batch, 0.5)[0])
    explained = dpoptax.explain(loss, params, (0, batch[1][0]), linear_map=points.linear_map)
    assert not explained.fallbacks


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gram", "form", "keep"])
def test_every_norm_method_uses_mapped_factors(way, monkeypatch):
    asked = []
    force_norm_method(monkeypatch, lambda: asked.append(way) or way)
    network = NETWORKS["convolution_over_time"]
    # A new function for each way, because `both` keeps compiled sums by their loss.
    network = network._replace(loss=functools.partial(network.loss))
    points = points_of(network, 1)
    state = _state(_factors("side", points.points[0]), points.points[0])
    points = dpoptax.GradientPoints(points.points, (1.0,), reference=state.of(points.points[0]))
    close(*both(network, dpoptax.l2_clip(0.1), points, network.batch(0, 5)), tolerance=2e-4)
    assert asked


@pytest.mark.slow
def test_matches_clipped_sum_of_reparametrized_loss():
    """The gradient by θ′ is s ⊙ ∇ℓ(θ) if θ = s ⊙ θ′."""
    params, batch = mlp_params(1), mlp_batch(1, 5)
    scales = jax.tree.map(
        lambda p: floats(1.0 + np.abs(np.sin(np.arange(p.size))).reshape(p.shape)), params
    )
    own = jax.tree.map(lambda p, s: floats(np.asarray(p) / np.asarray(s)), params, scales)

    def loss(own, example):
        return mlp_loss(jax.tree.map(jnp.multiply, own, scales), example)

    points = dpoptax.gradient_points(_state(scales, params), params)
    clip = dpoptax.l2_clip(0.7)
    got = jax.jit(dpoptax.clipped_grad(mlp_loss, clip))(points, batch)
    want = jax.jit(dpoptax.clipped_grad(loss, clip))(dpoptax.gradient_points((), own), batch)
    close(got.sum, want.sum, tolerance=1e-4)


CLIPS = {
    "l2": dpoptax.l2_clip(0.5),
    "automatic": dpoptax.automatic_clip(0.5),
    "psac": dpoptax.contrib.psac_clip(0.5),
    "normalized": dpoptax.normalized_clip(0.5),
    "per layer": dpoptax.per_layer_clip(0.5),
    "adaptive": dpoptax.contrib.adaptive_clip(0.5),
    "hyperspherical": dpoptax.contrib.hyperspherical_clip(0.5, angle_norm=9.0),
}


def _noise(clip, sigma=0.0, batch_size=5):
    release = {"noise_multiplier": sigma, "batch_size": batch_size, "key": jax.random.key(0)}
    if isinstance(clip, type(CLIPS["adaptive"])):
        return dpoptax.contrib.adaptive_gaussian_noise(clip, **release)
    return dpoptax.gaussian_noise(**release)


@pytest.mark.parametrize("name", slow_but(("hyperspherical",), CLIPS))
def test_every_clip_acts_on_mapped_gradient(name):
    """The release of one example is its mapped gradient, clipped and mapped back."""
    clip, params, batch = CLIPS[name], mlp_params(0, (4, 3)), mlp_batch(0, 1, (4, 3))
    tx = optax.chain(
        _noise(clip, batch_size=1), dpoptax.extend.linear_map(_factors("side", params))
    )
    state = tx.init(params)
    points = dpoptax.gradient_points(state, params)
    clipped = jax.jit(dpoptax.clipped_grad(mlp_loss, clip))(points, batch)
    released, _ = jax.jit(tx.update)(clipped, state, params)
    gradient = jax.grad(mlp_loss)
    mapped = jax.jit(lambda *of: points.linear_map.forward(gradient(*of)))(
        params, jax.tree.map(lambda x: np.asarray(x)[0], batch)
    )
    own = dataclasses.replace(points, reference=points.linear_map.reference)
    # The same geometry applied to the mapped gradient, written as the gradient of a linear loss.
    linear = lambda p, _: optax.tree.vdot(p, mapped)  # noqa: E731
    encoded = jax.jit(dpoptax.clipped_grad(linear, clip))(own, np.zeros(1, np.float32))
    want = points.linear_map.returned(encoded.decode(encoded.sum))
    close(released, want, tolerance=1e-3)


def test_reference_is_mapped_like_gradients():
    clip, params = CLIPS["hyperspherical"], mlp_params(0, (4, 3))
    batch = mlp_batch(0, 1, (4, 3))
    tx = optax.chain(
        _noise(clip, batch_size=1), dpoptax.extend.linear_map(_factors("entry", params)),
        dpoptax.extend.track_reference(),
    )  # fmt: skip
    state, grad_fn = tx.init(params), dpoptax.clipped_grad(mlp_loss, clip)

    @jax.jit
    def step(state):
        points = dpoptax.gradient_points(state, params)
        clipped = grad_fn(points, batch)
        mapped = points.linear_map.forward(state[2].reference)
        _, state = tx.update(clipped, state, params)
        return state, clipped.reference.reference, mapped

    for _ in range(2):
        state, reference, mapped = step(state)
    jax.tree.map(np.testing.assert_array_equal, reference, mapped)


def test_threshold_is_not_mapped():
    """A threshold is a number, and so may be the only parameter, whose gradient is mapped."""
    tx = optax.chain(_noise(CLIPS["adaptive"], batch_size=1), dpoptax.extend.linear_map(10.0))
    state, params = tx.init(jnp.zeros(())), jnp.zeros(())
    points = dpoptax.gradient_points(state, params)
    assert points.reference.reference == state[0].threshold.reference


def test_noise_is_isotropic_before_inverse_map():
    params = {"w": floats(np.zeros((60, 100)))}
    rows, columns = floats(np.geomspace(0.1, 10, 60)[:, None]), floats(np.geomspace(1, 4, 100))
    clip = dpoptax.l2_clip(0.5)
    tx = optax.chain(
        dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=8, key=jax.random.key(0)),
        dpoptax.extend.linear_map({"w": dpoptax.extend.Diagonal((rows, columns))}),
    )
    state = tx.init(params)
    points = dpoptax.gradient_points(state, params)
    nothing = dpoptax.extend.trust_clipped(params, clip, points.linear_map)
    noisy, _ = jax.jit(tx.update)(nothing, state, params)
    even = np.asarray(noisy["w"]) * rows * columns / (2.0 * 0.5 / 8)
    np.testing.assert_allclose(np.std(even, axis=1), 1.0, atol=0.4)
    np.testing.assert_allclose(np.std(even), 1.0, atol=0.05)
    assert dpoptax.ledgers(state)[0].mechanism.noise_multiplier == 2.0


NOISES = {
    "gaussian": dpoptax.gaussian_noise,
    "fixed point": functools.partial(dpoptax.gaussian_noise, fixed_point=True),
    "correlated": functools.partial(
        dpoptax.correlated_noise, dpoptax.matrix.BandedToeplitz((1.0, 0.5))
    ),
    "GeoDP": functools.partial(dpoptax.contrib.geodp, 0.1),
}


@pytest.mark.parametrize("name", slow_but(("gaussian", "correlated"), NOISES))
def test_every_noise_stage_maps_release_back(name):
    tx = NOISES[name](noise_multiplier=1.0, batch_size=4, key=jax.random.key(0))
    params = {"w": jnp.ones((3, 2))}
    linear_map = _state({"w": _factor("side", (3, 2), 0)}, params).of(params)
    clip, total = dpoptax.l2_clip(1.0), {"w": jnp.linspace(-1, 1, 6).reshape(3, 2)}

    @jax.jit
    def releases(begun):
        plain, _ = tx.update(dpoptax.extend.trust_clipped(total, clip), begun, params)
        mapped = dpoptax.extend.trust_clipped(total, clip, linear_map)
        return linear_map.returned(plain), *tx.update(mapped, begun, params)

    returned, released, state = releases(tx.init(params))
    np.testing.assert_array_equal(released["w"], returned["w"])
    assert dpoptax.ledgers(state)[0].releases == 1


def test_release_may_stay_mapped():
    params = {"w": jnp.ones((2, 2))}
    state = _state({"w": 4.0}, params, back=False)
    total = {"w": jnp.ones((2, 2))}
    for linear_map in (None, state.of(params)):
        clipped = dpoptax.extend.trust_clipped(total, CLIPS["l2"], linear_map)
        released, _ = _noise(None, batch_size=2).update(
            clipped, _noise(None, batch_size=2).init({})
        )
        np.testing.assert_array_equal(released["w"], 0.5)


# The bound applies to the sum after the map, for any data and any map.
ATTACKED = {
    **{(program, "side"): 1e4 for program in ("regression", "convolution", "scanned", "tied")},
    ("regression", "matrix"): 2.0,
    ("batched", "side"): 1e8,
    ("opaque", "entry"): 1e4,
    ("standardized kernel", "side"): 1e4,
    ("one position", "entry"): 1e8,
}


def _attack(program, kind, spread, effort, *, clip=CLIPS["l2"], **options):
    loss, shapes, data = programs.PROGRAMS[program]
    params = programs.parameters(shapes)
    if program == "regression":
        params = [jnp.zeros_like(p) for p in params]
    state = _state(_factors(kind, params, spread), params)
    points = dpoptax.gradient_points(state, params)
    total = adversary_test._total(loss, params, clip, points, **options)
    starts, steps = effort
    others = adversary_test._others(data)
    found, _ = adversary.climb(total, others, seed=0, starts=starts, steps=steps)
    return found / clip.sensitivity


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("program", "kind"),
    [pytest.param(*k, marks=[pytest.mark.slow] * (i > 0)) for i, k in enumerate(ATTACKED)],
)
def test_no_example_moves_mapped_sum_beyond_bound(program, kind):
    spread = ATTACKED[program, kind]
    for clip in (dpoptax.l2_clip(0.1), dpoptax.automatic_clip(0.1, gamma=0.0)):
        assert _attack(program, kind, spread, adversary_test.QUICK, clip=clip) <= 1 + 1e-4


@pytest.mark.spread(10)
@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("program", programs.PROGRAMS)
def test_long_search_does_not_move_mapped_sum_beyond_bound(program, kind):
    spread = 2.0 if kind == "matrix" else 1e8
    method = "vmap" if kind == "entry" else "auto"
    assert _attack(program, kind, spread, (28, 30), method=method) <= 1 + 1e-4


@pytest.mark.slow
@pytest.mark.optimized
def test_worst_example_stays_within_bound():
    params = {"kernel": jnp.zeros((4, 4))}
    scale = jnp.geomspace(1e-6, 1e6, 4)
    state = _state({"kernel": dpoptax.extend.Diagonal((scale[:, None], 1 / scale))}, params)
    batch = tuple(normal(i, (6, 16, 4)) for i in range(2))
    grad_fn = dpoptax.clipped_grad(adversary.regression_loss, dpoptax.l2_clip(0.1))
    points = dpoptax.gradient_points(state, params)
    assert worst_example(grad_fn, points, batch, starts=14, steps=10).ratio <= 1 + 1e-4


@pytest.mark.parametrize("value", slow_but((np.inf,), [np.inf, np.nan, 1e30]))
def test_out_of_range_map_keeps_contributions_bounded(value):
    """The factory refuses such maps; a map inserted by hand does not break the bound either."""
    params, batch = mlp_params(0, (4, 3)), mlp_batch(0, 4, (4, 3))
    leaves = len(jax.tree.leaves(params))
    hostile = dpoptax.extend.LinearMap(
        (dpoptax.extend.Diagonal((jnp.float32(value),) * 2),) * leaves
    )
    points = dpoptax.GradientPoints((params,), (1.0,), reference=hostile)
    for method in ("auto", "vmap"):
        grad_fn = jax.jit(dpoptax.clipped_grad(mlp_loss, dpoptax.l2_clip(0.5), method=method))
        for example in range(4):
            total = grad_fn(points, batch, np.arange(4) == example).sum
            assert global_norm(total) <= 0.5 * (1 + 1e-5)


def test_seal_covers_linear_map():
    params = {"w": jnp.zeros((2, 2))}
    first, second = (_state({"w": s}, params).of(params) for s in (1.0, 2.0))
    clipped = dpoptax.extend.trust_clipped(params, CLIPS["l2"], first, examples=2)
    changed = dataclasses.replace(clipped, reference=second)
    tx = _noise(None)
    released, _ = tx.update(changed, tx.init(params))
    assert np.isnan(released["w"]).all()
    with pytest.raises(ValueError, match="twice"):
        dpoptax.accumulate(clipped, clipped)
    other = dpoptax.extend.trust_clipped(params, CLIPS["l2"], second, examples=2)
    released, _ = tx.update(dpoptax.accumulate(clipped, other), tx.init(params))
    assert np.isnan(released["w"]).all()


@pytest.mark.parametrize(
    ("factor", "match"),
    [
        (0.0, "scale of 0"),
        (-1.0, "scale of 0"),
        (np.inf, "scale of 0"),
        (np.nan, "scale of 0"),
        (jnp.ones(3), "must broadcast"),
        (jnp.ones((1, 4, 2)), "must broadcast"),
        (dpoptax.extend.Sides(rows=jnp.ones((4, 4))), "invertible"),
        (dpoptax.extend.Sides(columns=jnp.eye(3)), "`columns` must have shape"),
        (dpoptax.extend.Sides(rows=jnp.eye(4), rows_inverse=2 * jnp.eye(4)), "invertible"),
    ],
)
def test_refuses_maps_that_are_not_invertible(factor, match):
    params = {"w": jnp.zeros((4, 2))}
    with pytest.raises(ValueError, match=match):
        _state({"w": factor}, params)
    with pytest.raises(ValueError, match=match):
        jax.jit(dpoptax.extend.linear_map({"w": factor}).init)(params)


def test_refuses_bad_arguments():
    with pytest.raises(ValueError, match="prefix of the parameters"):
        _state({"other": 1.0}, {"w": jnp.zeros(2)})
    with pytest.raises(ValueError, match="two axes"):
        _state(dpoptax.extend.Sides(columns=jnp.eye(2)), {"w": jnp.zeros(2)})
    with pytest.raises(ValueError, match="`every` must .* got 0"):
        dpoptax.extend.linear_map(1.0, every=0)
    bare = dpoptax.extend.LinearMap((dpoptax.extend.Sides(rows=jnp.eye(2)),))
    with pytest.raises(ValueError, match="must have inverses"):
        bare.returned(jnp.zeros((2, 2)))
    two = optax.chain(dpoptax.extend.linear_map(1.0), dpoptax.extend.linear_map(2.0))
    with pytest.raises(ValueError, match="at most one LinearMapState"):
        dpoptax.gradient_points(two.init({"w": jnp.zeros(2)}), {"w": jnp.zeros(2)})


def test_map_follows_parameters_while_invertible():
    tx = dpoptax.extend.linear_map(lambda params: jax.tree.map(lambda p: p, params), every=2)
    params, state = {"w": jnp.float32(1.0)}, tx.init({"w": jnp.float32(1.0)})
    seen = []
    for value in (2.0, 3.0, 0.0, 0.0, 5.0, 6.0):
        _, state = tx.update({"w": jnp.float32(0)}, state, {"w": jnp.float32(value)})
        seen.append(float(dpoptax.gradient_points(state, params).linear_map.forward(params)["w"]))
    assert seen == [1.0, 3.0, 3.0, 3.0, 3.0, 6.0]


@pytest.mark.slow
def test_explain_reports_maps_that_need_per_example_gradients():
    params = mlp_params(0, (5, 40, 30))
    example = jax.tree.map(lambda x: x[0], mlp_batch(0, 1, (5, 40, 30)))
    formed = {}
    for kind in KINDS:
        linear_map = _state(_factors(kind, params), params).of(params)
        found = dpoptax.explain(mlp_loss, params, example, linear_map=linear_map)
        formed[kind] = [row.why for row in found.fallbacks]
    why = "its linear map mixes the two sides of its products"
    assert formed == {"side": [], "matrix": [], "leaf": [], "entry": [why] * 2}


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"microbatch_size": 2}, 1e-5),
        pytest.param({"precision": "bfloat16"}, 3e-2, marks=pytest.mark.slow),
    ],
    ids=["microbatches", "bfloat16"],
)
def test_microbatches_and_bfloat16_factors_use_same_map(options, tolerance):
    params, batch = mlp_params(0, (4, 3)), mlp_batch(0, 6, (4, 3))
    points = dpoptax.gradient_points(_state(_factors("side", params), params), params)
    clip = dpoptax.l2_clip(0.5)

    def total(**options):
        grad_fn = dpoptax.clipped_grad(mlp_loss, clip, **options)
        return jax.jit(grad_fn)(points, batch).sum

    close(total(**options), total(), tolerance=tolerance)
