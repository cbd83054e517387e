"""Tests the clipping bound under attack: chosen data move the sum by at most the bound."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._ghost_clipping import factor_products
from dpoptax._ghost_clipping.sums import product_sums
from dpoptax._losses import entry_rules
from dpoptax._release import fixed_point
from dpoptax._rounding import bounds
from dpoptax.auditing import _worst_example as adversary
from tests import helpers, programs
from tests.programs import MODELS, PROGRAMS

pytestmark = pytest.mark.optimized

DTYPES = ("float32", "bfloat16", "float16")
OTHERS = 7


CLIPS = {
    "l2": dpoptax.l2_clip(0.1),
    "l2, small": dpoptax.l2_clip(1e-3),
    "AUTO-V": dpoptax.automatic_clip(0.1, gamma=0.0),
    "AUTO-S": dpoptax.automatic_clip(0.1),
    "psac": dpoptax.contrib.psac_clip(0.1),
    "per layer": dpoptax.per_layer_clip(0.1),
}
WAYS = ("gram", "form", "keep")
_SUMS_OF_PRODUCTS = (
    "regression", "short", "long", "batched", "convolution", "standardized", "standardized kernel",
    "weight norm", "norm of all", "merged",
)  # fmt: skip


def _total(loss, params, clip, points=None, **options):
    grad_fn = dpoptax.clipped_grad(loss, clip, **options)
    points = dpoptax.GradientPoints((params,), (1.0,)) if points is None else points
    return jax.jit(lambda batch, mask: grad_fn(points, batch, mask).sum)


@functools.cache
def _compiled(program, clip, method="auto"):
    """Compiles the sum of a program at fixed parameters, once for all tests that use it."""
    loss, params, _ = PROGRAMS[program]
    return _total(loss, programs.parameters(params), clip, method=method)


def _others(shapes, dtype=jnp.float32, count=OTHERS):
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=(count + 1, *s)).astype(dtype) for s in shapes)


def _with(x, places, value):
    """Returns a copy of a host array with another value in some places."""
    x = x.copy()
    x[places] = value
    return x


def _attack(program, clip, effort, dtype="float32", seed=0, **options):
    loss, params, shapes = (PROGRAMS | MODELS)[program]
    params = jax.tree.map(lambda p: helpers.floats(p, dtype), programs.parameters(params))
    if loss is programs.regression:  # so that the pairs of the search cancel
        params = [programs.zeros(*p.shape, dtype=dtype) for p in params]
    total = _total(loss, params, clip, **options)
    starts, steps = effort
    found, _ = adversary.climb(total, _others(shapes, dtype), seed=seed, starts=starts, steps=steps)
    return found / clip.sensitivity


QUICK, LONG = (14, 10), (40, 400)


@pytest.mark.parametrize(
    "program", [*PROGRAMS, *helpers.slow_but(("LoRA", "experts", "graph"), MODELS)]
)
def test_example_moves_sum_by_at_most_the_bound(program):
    assert _attack(program, CLIPS["l2"], QUICK) <= 1


@pytest.mark.spread(8)
@pytest.mark.slow
@pytest.mark.parametrize("clip", ["l2", "AUTO-V"])
@pytest.mark.parametrize("program", MODELS)
def test_longer_search_of_models(program, clip):
    assert _attack(program, CLIPS[clip], (14, 40), seed=1) <= 1


@pytest.mark.parametrize(
    ("program", "way"),
    helpers.covering(["regression", "batched", "standardized"], WAYS, strength=1),
)
def test_bound_holds_for_each_norm_method(program, way, monkeypatch):
    asked = []
    helpers.force_norm_method(monkeypatch, lambda: asked.append(way) or way)
    assert _attack(program, CLIPS["AUTO-V"], QUICK) <= 1
    assert asked


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_bound_holds_for_each_clip(clip):
    assert _attack("regression", clip, QUICK) <= 1


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_norm_and_sum_use_same_rounded_gradient(method):
    """XLA computed the gradient in two kernels that rounded differently: 1.4 C, or not finite."""
    loss, params, shapes = PROGRAMS["standardized kernel"]
    total = _total(loss, programs.parameters(params), CLIPS["l2"], method=method)
    for value in (1e-5, 1.0146534e-5, 1.0):
        d = np.zeros((8, 4))
        d[1, 0] = value
        found = adversary.moved(total, _others(shapes), (np.full((8, 2), 1e17), d))
        assert found <= CLIPS["l2"].sensitivity


@pytest.mark.spread(24)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_longer_search(program, clip, method):
    effort = (LONG[0], LONG[1] // 10)
    assert _attack(program, clip, effort, seed=1, method=method) <= 1


@pytest.mark.spread(12)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", _SUMS_OF_PRODUCTS)
def test_longer_search_of_each_norm_method(program, way, dtype, monkeypatch):
    helpers.force_norm_method(monkeypatch, way)
    for clip in (CLIPS["l2"], CLIPS["AUTO-V"]):
        assert _attack(program, clip, (20, 100), dtype, seed=2) <= 1


def _canceling(b, dtype=jnp.float32):
    """Returns two positions whose gradients cancel exactly, and a third with norm 1."""
    x, y = np.zeros((2, 16, 4))
    x[0], y[0], x[1], y[1] = 7 * b, 11 * b, 11 * b, -7 * b
    x[2, 0] = y[2, 0] = 1
    return x.astype(dtype), y.astype(dtype)


@pytest.mark.parametrize(
    ("clip", "size"), helpers.covering(CLIPS, [8, 65536 // 16 + 8], strength=1)
)
def test_bound_holds_if_large_terms_cancel(clip, size):
    """The norm once came from the formed gradient and the sum from another contraction."""
    shapes = [(16, 4), (16, 4)]
    total = _total(programs.regression, [programs.zeros(4, 4)], clip)
    for b in (2.0**8, 2.0**10, 2.0**14, 2.0**40):
        found = adversary.moved(total, _others(shapes, count=size - 1), _canceling(b))
        assert found <= clip.sensitivity


@pytest.mark.spread(10)
@pytest.mark.parametrize(
    ("program", "size", "microbatch_size"),
    helpers.covering(
        ["vector", "column", "lookup", "matrix"], [256, 1024, 4096], [None, 64, 4], strength=1
    ),
)
def test_bound_holds_if_others_exploit_rounding(program, size, microbatch_size):
    """Gradients are clipped to C/(1 + τ), where τ covers all rounding that others can change."""
    loss, shape = LONG_SUMS[program]
    total = _total(
        loss, [programs.zeros(*shape)], dpoptax.l2_clip(1.0), microbatch_size=microbatch_size
    )
    found = max(_rounded_moves(total, shape, size, microbatch_size or 1))
    print(f"{program}, {size} examples, microbatch_size={microbatch_size}: moved by {found:.5f} C")
    assert 0.98 < found <= 1


@pytest.mark.parametrize(
    ("room", "way"),
    [
        (True, "gram"),
        (True, "form"),
        pytest.param(False, "gram"),
        pytest.param(False, "form", marks=pytest.mark.slow),
    ],
)
def test_bound_holds_if_sums_have_largest_allowed_error(room, way, monkeypatch, request):
    """Sums err upward with the example and downward without it, next to canceling terms."""
    if not room:
        request.getfixturevalue("no_room")
    helpers.force_norm_method(monkeypatch, way)
    exact, clip, (size, positions) = factor_products.contract, dpoptax.l2_clip(1.0), (16, 8)

    def contract_off_by(sign, axes, a, b):
        inputs, kept = axes.split("->")
        lengths = dict(zip(inputs.replace(",", ""), (*a.shape, *b.shape), strict=True))
        terms = math.prod(n for axis, n in lengths.items() if axis not in kept)
        off = 0.95 * bounds.gamma(terms) * exact(axes, jnp.abs(a), jnp.abs(b))
        return exact(axes, a, b) + sign * off

    def total(sign):
        monkeypatch.setattr(factor_products, "contract", functools.partial(contract_off_by, sign))
        jax.clear_caches()  # of the branches of platforms, with the other sign
        total = _total(programs.linear, [programs.zeros(4, 4)], clip)
        return lambda mask: np.float64(total((x, d), mask)[0])

    x, d = np.ones((2, size, positions, 4), np.float32)
    d[:, 1::2] = -1.0  # so S is many times the norm
    d[:, 0] += positions / bounds.largest_ratio(positions)
    x[-1], d[-1] = 10.0, 10.0
    others = np.arange(size) < size - 1
    with_it, without = total(1.0)(others | True), total(-1.0)(others)
    found = np.linalg.norm(with_it - without)
    assert 0.999 < found <= 1 if room else found > 1.004


@pytest.mark.parametrize(
    ("method", "bits"), [("auto", None), ("vmap", None), ("vmap", 16)], ids=str
)
def test_refuses_bound_whose_sums_flush_to_zero(method, bits):
    """Bounds below 1e-12 are refused. With 2^-126 √d, an example moved the sum by 1.22 C.

    Half of the move came from another example. On a grid with steps that were flushed to zero, each
    entry of the sum was infinite.
    """
    size = 4096
    batch = (np.stack([np.arange(size) < size // 2, np.full(size, -1)]).astype(np.float32),)

    def move(bound):
        program = lambda p, x: jnp.vdot(p[0], x[0])  # noqa: E731
        grid = bits and 2.0 ** (math.floor(math.log2(bound)) - bits)
        total = _total(
            program, [programs.zeros(size)], dpoptax.l2_clip(bound), method=method, grid=grid
        )
        with_it, without = (np.float64(total(batch, np.array([True, m]))[0]) for m in (1, 0))
        moved = np.linalg.norm(with_it - without) * (grid or 1.0)
        return moved / (bound + math.sqrt(size) * (grid or 0.0) / 2)

    assert move(1e-12) <= 1
    with pytest.raises(ValueError, match="Scale the loss"):
        move(1e-13)


LONG_SUMS = {
    "vector": (lambda p, x: jnp.sum(p[0] * x[0]), (8,)),
    "column": (lambda p, x: jnp.vdot(x[0] @ p[0], jnp.ones(1)), (8, 1)),
    "lookup": (lambda p, x: jnp.vdot(p[0][(x[0][7] > 0).astype(int)], x[0][:4]), (8, 4)),
    "matrix": (lambda p, x: jnp.vdot(x[0] @ p[0], jnp.eye(1, 16)[0]), (32, 16)),
}


def _rounded_moves(total, shape, size, part):
    """Returns how far an example moves a sum that is just above a power of two.

    Small examples follow: above the power of two their terms are lost, below it they are rounded
    up. With n parts, each part takes every n-th example. A second search draws other examples of
    equal size, with random last bits in one direction.
    """
    above = 2.0 ** math.ceil(math.log2(size / 2) - 1)
    place = above * 2.0**-24  # spacing of numbers below the power of two
    first, parts = math.ceil(1.02 * above / part), size // part
    rng, draws = np.random.default_rng(0), []
    for over in (2, 8, 16, 32, 64):
        for share in (0.55, 0.75, 0.95):
            x = np.zeros((part, parts), np.float32)
            x[:, :first] = (above + over * place) / (first * part)
            x[0, first] = -10.0
            x[0, first + 1 :] = -share * place
            draws.append(x.reshape(size))
    for _ in range(15):
        x = rng.uniform(0.99, 1.0, size).astype(np.float32)
        x[first] = rng.choice([-10.0, 10.0])
        draws.append(x)
    others = np.arange(size) != first
    for x in draws:
        batch = (x[:, None] * np.eye(1, shape[0], dtype=np.float32),)
        with_it, without = total(batch, others | True), total(batch, others)
        yield float(np.linalg.norm(np.float64(with_it[0]) - np.float64(without[0])))


@pytest.mark.parametrize(
    ("program", "clip"),
    helpers.covering(
        ["depthwise", "batched", "scanned"],
        {name: CLIPS[name] for name in ("l2, small", "AUTO-V")},
        strength=1,
    ),
)
def test_bound_holds_if_squares_of_one_group_underflow(program, clip):
    shapes = PROGRAMS[program][2]
    x, d = (np.ones(shape) for shape in shapes)
    axis = {"depthwise": 1, "batched": 1, "scanned": 0}[program]
    np.moveaxis(x, axis, 0)[0], np.moveaxis(d, axis, 0)[0] = 1e-19, 1e17
    found = adversary.moved(_compiled(program, clip), _others(shapes), (x, d))
    assert found <= clip.sensitivity * (1 + 1e-5)


@pytest.mark.parametrize("others", [6e17, 1e30, np.nan, np.inf])
@pytest.mark.parametrize(
    ("program", "method"),
    [
        ("regression", "auto"),
        ("one position", "auto"),
        ("convolution", "auto"),
        ("opaque", "auto"),
        ("short", "auto"),
        ("short", "vmap"),  # enough entries for XLA's maximum on CPU to lose NaN
    ],
)
def test_example_does_not_change_what_others_add(program, method, others):
    """One example could once select the summation method for all others."""
    shapes = PROGRAMS[program][2]
    total = _compiled(program, dpoptax.l2_clip(1e-3), method)
    batch = _others(shapes, count=15)
    ordinary = total(batch, np.arange(16) < 15)
    strange = tuple(_with(x, -1, others) for x in batch)
    for a, b in zip(ordinary, total(strange, np.arange(16) < 15), strict=True):
        np.testing.assert_array_equal(a, b)  # masked
    if not np.isfinite(others):
        for a, b in zip(ordinary, total(strange, np.ones(16, bool)), strict=True):
            np.testing.assert_array_equal(a, b)  # not masked
    # Next to others of that magnitude, a small example contributes the same as without them.
    crowd = tuple(_with(x, slice(8), others) for x in batch)
    small = tuple(1e-3 * np.ones(shape) for shape in shapes)
    assert adversary.moved(total, crowd, small) <= 1e-3 * (1 + 1e-4)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_one_non_finite_leaf_drops_the_example(method):
    """The gradient of the other leaf is finite, with a norm far above the bound."""
    loss, params, shapes = PROGRAMS["elementwise"]
    total = _total(loss, programs.parameters(params), CLIPS["l2"], method=method)
    batch = _others(shapes)
    batch = (_with(batch[0], (-1, 0, 0), np.nan), batch[1])
    used, masked = total(batch, np.ones(8, bool)), total(batch, np.arange(8) < 7)
    for a, b in zip(used, masked, strict=True):
        np.testing.assert_array_equal(a, b)


def test_float16_sum_neither_overflows_nor_underflows():
    def loss(params, example):
        x, d = example
        return jnp.sum((x @ params[0]) * d)

    params, clip = [programs.zeros(4, 4, dtype=jnp.float16)], dpoptax.l2_clip(1e-4)
    total = _total(loss, params, clip)
    for large, small in ((6e4, 1e-7), (1e-7, 6e4), (6e4, 6e4), (1e-7, 1e-7)):
        batch = _others([(3, 4), (3, 4)], jnp.float16)
        example = (np.full((3, 4), large), np.full((3, 4), small))
        assert adversary.moved(total, batch, example) <= 1e-4


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize(
    ("layers", "shortest"), [(16, -90), pytest.param(120, -100, marks=pytest.mark.slow)]
)
def test_bound_holds_for_many_layers(method, layers, shortest):
    """With a common scale, squares of short layers would underflow. Layers at 2^-100 add zero."""

    def loss(params, example):
        x, d = example
        return sum(jnp.sum((x * s) @ w) for s, w in zip(d, params, strict=True))

    params = [programs.zeros(3, 2)] * layers
    clip = dpoptax.per_layer_clip(dpoptax.automatic_clip(1.0, gamma=0.0))
    powers = 2.0 ** np.linspace(shortest, 60, layers)
    example = (np.ones((2, 3)), powers)
    total = _total(loss, params, clip, method=method)
    found = adversary.moved(total, _others([(2, 3), (layers,)], count=3), example)
    assert found <= 1


def _layered(params, example):
    """Uses products, lookups, a vector, a scalar, a computed kernel, and an unused parameter."""
    x, d = example
    w = params["made"] - params["made"].mean(0)
    hidden = x @ params["dense"] + params["scalar"] * (x @ (w * jax.lax.rsqrt(jnp.mean(w**2, 0))))
    rows = params["table"][jnp.array([0, 2, 1, 2])] * params["vector"]
    return jnp.sum(hidden * d) + jnp.sum(rows * x[:4, :3] * d[:4])


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        pytest.param(options, weights, marks=[pytest.mark.slow] * (not quick))
        for options, few in (
            ({}, 2),
            ({"method": "vmap"}, 2),
            ({"precision": "bfloat16"}, 1),
            ({"microbatch_size": 3}, 0),
        )
        for weights in [(1.0,), (43.0, -42.0)]
        for quick in [len(weights) == few]
    ],
    ids=str,
)
def test_each_layer_moves_by_at_most_its_bound(options, weights):
    """Checks bounds from 2^-36 to 2^29, each with a geometry that reaches its bound."""
    make = functools.partial(dpoptax.automatic_clip, gamma=0.0)
    layers = {
        "dense": make(2.0**-36), "made": make(2.0**29), "scalar": dpoptax.contrib.psac_clip(1.0),
        "table": make(2.0**-20), "unused": 1.0, "vector": dpoptax.normalized_clip(2.0**-36),
    }  # fmt: skip
    shapes = [(4, 3), (4, 3), (), (3, 3), (2,), (3,)]
    rng = np.random.default_rng(0)
    params = {n: helpers.floats(rng.normal(size=s)) for n, s in zip(layers, shapes, strict=True)}
    nearby = [jax.tree.map(lambda p, j=j: p + 1e-3 * j, params) for j in range(len(weights))]
    clip, points = dpoptax.per_layer_clip(layers), dpoptax.GradientPoints(tuple(nearby), weights)
    total = _total(_layered, params, clip, points, **options)
    own = dict(zip(layers, (each.sensitivity for each in clip.clips), strict=True))

    def relative(batch, mask):
        return {name: leaf / own[name] for name, leaf in total(batch, mask).items()}

    others = _others([(5, 4), (5, 3)])
    _, example = adversary.climb(relative, others, seed=0, starts=14, steps=10)
    moves = adversary.moves(relative, others, example)
    found = {name: np.linalg.norm(move) for name, move in moves.items()}
    assert all(move <= 1 for move in found.values())  # also fails for NaN
    assert min(found["dense"], found["made"], found["table"]) > 0.9


def test_refuses_complex_gradients():
    tx = dpoptax.extend.clip_per_example(dpoptax.l2_clip(1.0))
    params = {"w": jnp.ones(3, jnp.complex64)}
    with pytest.raises(TypeError, match=r"\['w'\] is complex64"):
        tx.update({"w": jnp.ones((2, 3), jnp.complex64)}, tx.init(params), params)


@pytest.mark.parametrize(
    ("weights", "method"),
    [((43.0, -42.0), "auto"), ((1e4, 1.0 - 1e4), "vmap"), ((3.0, -2.0), "auto")],
)
def test_bound_holds_for_points_with_large_weights(weights, method):
    loss, params, shapes = PROGRAMS["regression"]
    params = programs.parameters(params)
    other = [helpers.floats(np.asarray(p) + 0.1) for p in params]
    points = dpoptax.GradientPoints((params, other), weights)
    clip = CLIPS["l2"]
    total = _total(loss, params, clip, points, method=method)
    found, _ = adversary.climb(total, _others(shapes), seed=0, starts=7, steps=10)
    assert found <= clip.sensitivity


# Weights, distance between points, and the sign of the second point. In the first four, the weights
# cancel. In the last two, the gradients of an even loss cancel.
POINTS = {
    "the same": ((3.0, -3.0), 0.0, 1),
    "all but the same": ((1.0, -1.0), 1e-6, 1),
    "near, large weights": ((43.0, -42.0), 1e-3, 1),
    "second differences": ((1.0, -2.0, 1.0), 1e-3, 1),
    "apart": ((0.7, 0.3), 0.1, 1),
    "opposite": ((1.0, 1.0), 0.0, -1),
    "all but opposite": ((1.0, 1.0), 1e-6, -1),
}
_DATA = [(16, 4), (16, 4)]
DERIVED = {name: PROGRAMS[name] for name in programs.COMPUTED_KERNELS if name in PROGRAMS} | {
    "tied and standardized": (programs.tied_and_standardized, [(4, 4), (4,)], _DATA),
    "standardized, squared": (programs.standardized_squared, [(4, 4)], _DATA),
    "merged, squared": (programs.merged_squared, [(4, 4), (4, 2), (2, 4)], _DATA),
}


def _attack_points(program, points, clip, effort, dtype="float32", **options):
    loss, params, shapes = DERIVED[program]
    params = [p.astype(dtype) for p in programs.parameters(params)]
    weights, apart, sign = POINTS[points]
    keys = jax.random.split(jax.random.key(2), len(weights))

    def moved(j):
        there = [p if i > 1 else p * sign**j for i, p in enumerate(params)]
        return [p + (apart * j * jax.random.normal(keys[j], p.shape)).astype(dtype) for p in there]

    points = dpoptax.GradientPoints(tuple(moved(j) for j in range(len(weights))), weights)
    total = _total(loss, params, clip, points, **options)
    starts, steps = effort
    found, _ = adversary.climb(total, _others(shapes, dtype), seed=3, starts=starts, steps=steps)
    return found / clip.sensitivity


@pytest.mark.parametrize(
    ("program", "points"),
    [
        pytest.param("standardized", "near, large weights", marks=pytest.mark.slow),
        pytest.param("standardized, squared", "opposite", marks=pytest.mark.slow),
        ("merged, squared", "all but opposite"),
    ],
)
def test_bound_holds_if_gradients_cancel_between_points(program, points, monkeypatch):
    helpers.force_norm_method(monkeypatch, "gram")
    assert _attack_points(program, points, CLIPS["AUTO-V"], QUICK) <= 1


def test_search_at_several_points_finds_rounding_errors(monkeypatch):
    exact = factor_products.contract

    def rounded(axes, a, b):
        return exact(axes, *(jax.lax.reduce_precision(x, 8, 7) for x in (a, b)))

    monkeypatch.setattr(factor_products, "contract", rounded)
    helpers.force_norm_method(monkeypatch, "gram")
    found = _attack_points("merged, squared", "all but opposite", CLIPS["AUTO-V"], QUICK)
    assert found > 1


_SQUARED = ("standardized, squared", "merged, squared")
# Program, points, method of the norms, and options.
SEARCHES = [
    *itertools.product(DERIVED, POINTS, ["gram"], [{}]),
    *itertools.product(
        _SQUARED, ("near, large weights", "all but opposite"), ["form", "keep"], [{}]
    ),
    *itertools.product(
        _SQUARED,
        ("near, large weights", "second differences", "opposite"),
        ["gram"],
        [{"precision": "bfloat16"}, {"microbatch_size": 3}],
    ),
]


@pytest.mark.spread(10)
@pytest.mark.slow
@pytest.mark.parametrize(("program", "points", "way", "options"), SEARCHES, ids=str)
def test_longer_search_at_several_points(program, points, way, options, monkeypatch):
    helpers.force_norm_method(monkeypatch, way)
    clip = CLIPS["AUTO-V" if way == "gram" else "l2"]
    assert _attack_points(program, points, clip, (20, 40), **options) <= 1


def test_bound_holds_for_microbatches_and_masks():
    loss, params, shapes = PROGRAMS["regression"]
    clip = CLIPS["AUTO-V"]
    total = _total(loss, [programs.zeros(4, 4)], clip, microbatch_size=3)
    found, _ = adversary.climb(
        total, _others(shapes), seed=0, starts=14, steps=10,
        mask=np.arange(OTHERS + 1) % 2 == 1,
    )  # fmt: skip
    assert found <= clip.sensitivity


def _precisions(jaxpr):
    for eqn in helpers.equations(jaxpr):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            yield eqn.params["precision"]


@pytest.mark.parametrize("way", WAYS)
def test_norms_and_sums_contract_at_full_precision(way, monkeypatch):
    """The platform's default does not matter. By default, TPUs and GPUs round operands."""
    helpers.force_norm_method(monkeypatch, way)
    loss, params, shapes = PROGRAMS["regression"]
    total = _total(loss, programs.parameters(params), CLIPS["l2"])
    jaxpr = jax.make_jaxpr(total)(_others(shapes), np.ones(OTHERS + 1, bool))
    found = list(_precisions(jaxpr.jaxpr))
    highest = (jax.lax.Precision.HIGHEST,) * 2
    inherited = [p for p in found if p != highest]
    assert len(found) > len(inherited) >= 1  # the loss keeps its own precision


def test_sum_over_positions_is_stored_before_its_norm():
    """Norm and sum read one stored sum, because recomputed sums may differ if terms cancel."""
    part, cotangent = (jax.ShapeDtypeStruct((n, 3), jnp.float32) for n in (1, 4))
    (added,) = jax.make_jaxpr(jax.lax.add)(part, cotangent).eqns
    shift = entry_rules.EntryUse.build(added, 0)
    jaxpr = jax.make_jaxpr(shift.factorize)(cotangent, cotangent)
    names = [eqn.primitive.name for eqn in helpers.equations(jaxpr.jaxpr)]
    assert names.index("reduce_sum") < names.index("cond")


@pytest.mark.parametrize("way", WAYS)
def test_norm_and_sum_read_same_bfloat16_factors(way, monkeypatch):
    """XLA on GPU removes round-trip conversions. Norm and sum must still use the same numbers."""
    helpers.force_norm_method(monkeypatch, way)
    loss, params, shapes = PROGRAMS["regression"]
    total = _total(loss, programs.parameters(params), CLIPS["l2"], precision="bfloat16")
    jaxpr = jax.make_jaxpr(total)(_others(shapes), np.ones(OTHERS + 1, bool))
    program = list(helpers.equations(jaxpr.jaxpr))
    made = {id(out): eqn.primitive.name for eqn in program for out in eqn.outvars}
    found = [
        made.get(id(eqn.invars[0]))
        for eqn in program
        if eqn.primitive.name == "convert_element_type"
        and eqn.outvars[0].aval.dtype == jnp.bfloat16
        and eqn.outvars[0].aval.ndim  # not a constant
    ]
    assert len(found) >= 2
    assert set(found) == {"reduce_precision"}


@pytest.mark.parametrize("bits", [7, pytest.param(10, marks=pytest.mark.slow)])
def test_rounded_operands_would_break_the_bound(bits, monkeypatch, no_room):
    """Emulates bfloat16 passes and TF32, to show that full precision is needed."""
    exact = factor_products.contract

    def rounded(axes, a, b):
        return exact(axes, *(jax.lax.reduce_precision(x, 8, bits) for x in (a, b)))

    monkeypatch.setattr(factor_products, "contract", rounded)
    helpers.force_norm_method(monkeypatch, "gram")
    assert _attack("regression", CLIPS["AUTO-V"], (14, 40)) > 1


def test_integers_on_grid_keep_bound_in_any_order():
    """The proven move is at most C + √d g/2, because each term is rounded but the sum is exact."""
    loss, params, shapes = PROGRAMS["regression"]
    clip, mechanism = CLIPS["l2"], {"noise_multiplier": 1.0, "batch_size": 64}
    grid = dpoptax.extend.fixed_point_grid(clip, **mechanism)
    bound = clip.sensitivity + 4 * grid / 2
    params = [programs.zeros(4, 4)]
    others = _others(shapes, count=63)
    totals = [_total(loss, params, clip, grid=grid, microbatch_size=m) for m in (None, 5)]
    for size in (1.0, 2.0**8, 2.0**14, 1e30, np.nan):
        assert adversary.moved(totals[0], others, _canceling(size)) * grid <= bound
    found, _ = adversary.climb(totals[0], others, seed=0, starts=14, steps=10)
    assert 0.99 * clip.sensitivity < found * grid <= bound
    mask = np.ones(64, bool)
    order = np.random.default_rng(0).permutation(64)
    sums = [total(others, mask) for total in totals]
    sums.append(totals[0](jax.tree.map(lambda x: x[order], others), mask))
    for other in sums[1:]:
        np.testing.assert_array_equal(sums[0][0], other[0])
    assert sums[0][0].dtype == jnp.int32
    plain = _total(loss, params, clip)(others, mask)
    np.testing.assert_allclose(grid * sums[0][0], plain[0], rtol=1e-3, atol=64 * grid)


def test_grid_must_match_noise_stage(no_room):
    loss, _, shapes = PROGRAMS["regression"]
    clip, mechanism = CLIPS["l2"], {"noise_multiplier": 1.0, "batch_size": 64}
    params, batch, key = [programs.zeros(4, 4)], _others(shapes, count=63), jax.random.key(0)
    grid = dpoptax.extend.fixed_point_grid(clip, **mechanism)
    points = dpoptax.gradient_points((), params)
    clipped = dpoptax.clipped_grad(loss, clip, grid=grid)(points, batch)

    def release(clipped, fixed_point=True, **changes):
        tx = dpoptax.gaussian_noise(**mechanism | changes, key=key, fixed_point=fixed_point)
        return jax.jit(lambda clipped: tx.update(clipped, tx.init(params), params)[0])(clipped)

    got, want = release(clipped), release(dpoptax.clipped_grad(loss, clip)(points, batch))
    np.testing.assert_allclose(got[0], want[0], atol=20 * grid / 64)
    assert got[0].dtype == jnp.float32
    half = clip.sensitivity + math.sqrt(16) * grid / 2
    assert fixed_point.sensitivity_on_grid(clipped, grid) == pytest.approx(half, rel=1e-12)
    rounded = fixed_point.sensitivity_on_grid(dpoptax.extend.trust_clipped(params, clip), grid)
    assert rounded == pytest.approx(half + math.sqrt(16) * grid / 2, rel=1e-12)
    with pytest.raises(TypeError, match="fixed_point=True"):
        release(clipped, fixed_point=False)
    with pytest.raises(ValueError, match="fixed_point_grid` returns for this stage's"):
        release(clipped, noise_multiplier=9.0)
    with pytest.raises(ValueError, match="size of the padded batch"):
        dpoptax.clipped_grad(loss, clip, grid=2.0**-29)(points, batch)
    with pytest.raises(ValueError, match="a power of two"):
        dpoptax.clipped_grad(loss, clip, grid=1e-6)
    with pytest.raises(ValueError, match="`noise_multiplier` must be positive"):
        dpoptax.extend.fixed_point_grid(clip, noise_multiplier=0.0, batch_size=64)


def test_bfloat16_factors_keep_bound_and_approximate_sum():
    loss, params, shapes = PROGRAMS["regression"]
    clip = CLIPS["AUTO-V"]
    params = [programs.zeros(4, 4)]
    total = _total(loss, params, clip, precision="bfloat16")
    others = _others(shapes)
    found, _ = adversary.climb(total, others, seed=0, starts=14, steps=10)
    assert found <= clip.sensitivity
    plain = _total(loss, params, clip)(others, np.ones(OTHERS + 1, bool))
    np.testing.assert_allclose(total(others, np.ones(OTHERS + 1, bool))[0], plain[0], atol=0.01)
    with pytest.raises(ValueError, match="`precision` must be 'float32'.*got 'bfloat16'"):
        dpoptax.clipped_grad(loss, clip, precision="bfloat16", method="vmap")


def test_attack_finds_weighted_rounding_without_room(monkeypatch, no_room):
    helpers.force_norm_method(monkeypatch, "gram")
    assert _attack("short", CLIPS["AUTO-V"], (14, 40), precision="bfloat16") <= 1
    monkeypatch.setattr(product_sums, "BFLOAT16_ERROR", 0.0)
    assert _attack("short", CLIPS["AUTO-V"], (14, 40), precision="bfloat16") > 1
