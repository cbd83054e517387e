"""The compiler as an adversary: constants in front of what is clipped may be moved anywhere.

XLA's algebraic simplifier knows numbers that a program is closed over, and moves them through
products. No order of products with constants may move a clipped sum by more than the bound, and
none may make it other than finite.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax._maps import Diagonal, LinearMap
from tests import helpers, programs

pytestmark = pytest.mark.optimized

CLIP = dpoptax.l2_clip(0.1)
EVERY = programs.PROGRAMS | programs.MODELS
CONSTANTS = (2.0**20, 10.0, 2.0**-20, 512**0.5, 3.0)
SIZE = 4


def _numbers(shapes, count=SIZE):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(count, *s)).astype(np.float32) for s in shapes]


# What the last example of a batch is, next to ordinary ones.
EXAMPLES = {
    "blank": lambda x, d: (0 * x, 0 * d),
    "zero cotangent": lambda x, d: (1e4 * x, 0 * d),
    "zero data": lambda x, d: (0 * x, 1e4 * d),
    "subnormal cotangent": lambda x, d: (x, 1e-41 * d),
    "subnormal product": lambda x, d: (2.0**-70 * x, 2.0**-70 * d),
    "outlier": lambda x, d: (1e4 * x, 1e4 * d),
    "one entry": lambda x, d: (1e4 * x, np.where(np.arange(d.size).reshape(d.shape) == 0, 1e4, 0)),
}


def largest_move(total, shapes):
    """How far any of the examples moves any of several sums, over the bound, and which.

    The last but one is masked: the same example, so that it also meets sums that it is not in.
    """
    worst = 0.0, "none"
    for name, make in EXAMPLES.items():
        example = [np.float32(e) for e in make(*(x[-1] for x in _numbers(shapes)))]
        batch = tuple(_numbers(shapes))
        for x, e in zip(batch, example, strict=True):
            x[-2:] = e
        found = [total(batch, np.array([True] * (SIZE - 2) + [False, m])) for m in (True, False)]
        with np.errstate(all="ignore"):
            changes = [
                np.subtract(*(np.float64(x).reshape(len(x), -1) for x in pair))
                for pair in zip(*map(jax.tree.leaves, found), strict=True)
            ]
            moves = np.sqrt(sum(np.sum(change**2, axis=1) for change in changes))
        move = float(np.max(np.where(np.isfinite(moves), moves, np.inf))) / CLIP.sensitivity
        worst = max(worst, (move, name))
    return worst


def _times(params, constants):
    """Parameters times public constants, one for each leaf."""
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten([x * c for x, c in zip(leaves, constants, strict=True)])


def _stacked(*sums):
    return jax.tree.map(lambda *x: jnp.stack(x), *sums)


def compiled(name, way, turn=0, weights=None, **options):
    """The sums of a program whose parameters are multiplied by constants, compiled in one way.

    Args:
      name: the program.
      way: how it is compiled.
      turn: which parameter has which constant.
      weights: those of gradient points; one point with weight 1 by default.
      options: of `clipped_grad`.
    """
    loss, shapes, _ = EVERY[name]
    params = programs.parameters(shapes)
    size = len(jax.tree.leaves(params))
    constants = [CONSTANTS[(turn + i) % len(CONSTANTS)] for i in range(size)]
    # The effective parameters are ordinary ones.
    params = _times(params, [1 / c for c in constants])
    nearby = jax.tree.map(lambda p: p * 1.001, params)

    def scaled(constants):
        return lambda params, example: loss(_times(params, constants), example)

    def total(params, batch, mask, *, loss=scaled(constants), weights=weights):
        grad_fn = dpoptax.clipped_grad(loss, CLIP, **options)
        there = (params,) if weights is None else (params, *[nearby] * (len(weights) - 1))
        points = dpoptax.GradientPoints(there, weights or (1.0,))
        found = grad_fn(points, batch, mask)
        return found[0].sum if options.get("has_aux") else found.sum

    def init_inside(batch, mask):
        tx = dpoptax.disk(kappa=0.7, gamma=0.1)
        grad_fn = dpoptax.clipped_grad(scaled(constants), CLIP, **options)
        return _stacked(grad_fn(dpoptax.gradient_points(tx.init(params), params), batch, mask).sum)

    def mapped(batch, mask):
        three = Diagonal(tuple(jnp.full(1, c) for c in (1e8, 1e8, 3e7)))
        points = dpoptax.GradientPoints((params,), (1.0,), linear_map=LinearMap((three,) * size))
        grad_fn = dpoptax.clipped_grad(scaled(constants), CLIP, **options)
        return _stacked(grad_fn(points, batch, mask).sum)

    def with_arguments(constants, weights, batch, mask):
        return _stacked(total(params, batch, mask, loss=scaled(constants), weights=weights))

    one = lambda batch, mask: _stacked(total(params, batch, mask))  # noqa: E731
    both = lambda batch, mask: _stacked(  # noqa: E731
        total(params, batch, mask), total(nearby, batch, mask)
    )
    several = jax.tree.map(lambda *x: jnp.stack(x), params, nearby)
    ways = {
        "constants": jax.jit(one),
        "eager": one,
        "arguments": functools.partial(
            jax.jit(with_arguments),
            [jnp.float32(c) for c in constants],
            None if weights is None else tuple(map(jnp.float32, weights)),
        ),
        "init inside": jax.jit(init_inside),
        "linear map": jax.jit(mapped),
        "unrolled": jax.jit(both),
        "scan": jax.jit(
            lambda batch, mask: jax.lax.scan(
                lambda _, params: (None, total(params, batch, mask)), None, several
            )[1]
        ),
        "vmapped": jax.jit(
            lambda batch, mask: jax.vmap(lambda params: total(params, batch, mask))(several)
        ),
    }
    return ways[way]


WAYS = (
    "constants", "eager", "arguments", "init inside", "linear map", "unrolled", "scan", "vmapped",
)  # fmt: skip
_QUICK = {
    ("regression", "constants"), ("long", "init inside"), ("tied", "unrolled"),
    ("elementwise", "linear map"), ("standardised", "constants"), ("merged", "scan"),
    ("one position", "vmapped"), ("token", "arguments"), ("LoRA", "constants"),
    ("experts", "init inside"), ("graph", "unrolled"), ("convolution", "eager"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "way"),
    [
        pytest.param(program, way, marks=[pytest.mark.slow] * ((program, way) not in _QUICK))
        for program in EVERY
        for way in WAYS
    ],
)
def test_no_constant_moves_a_sum_by_more_than_the_bound(program, way):
    turns = (0,) if (program, way) in _QUICK else (0, 1, 2)
    for turn in turns:
        move, example = largest_move(compiled(program, way, turn), EVERY[program][2])
        assert move <= 1, (turn, example)


@pytest.mark.parametrize("weights", [(2.0**20, 1 - 2.0**20), (2.0**-20, 3.0), (10.0, 512**0.5)])
@pytest.mark.parametrize("way", ["constants", "arguments", "unrolled"])
@pytest.mark.parametrize(
    "program",
    helpers.slow_but(("regression", "LoRA"), EVERY),
)
def test_no_weight_of_a_point_moves_a_sum_by_more_than_the_bound(program, way, weights):
    move, example = largest_move(compiled(program, way, weights=weights), EVERY[program][2])
    assert move <= 1, example


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"microbatch_size": 2}, {"precision": "bfloat16"}], ids=str)
@pytest.mark.parametrize("program", EVERY)
def test_no_constant_does_in_parts_or_with_narrow_factors(program, options):
    move, example = largest_move(compiled(program, "constants", **options), EVERY[program][2])
    assert move <= 1, example


@pytest.mark.slow
@pytest.mark.parametrize("program", programs.MODELS)
def test_no_constant_does_beside_auxiliary_outputs(program):
    loss, shapes, data = EVERY[program]
    params = programs.parameters(shapes)

    def with_aux(params, example):
        value = loss(jax.tree.map(lambda p: p * 8.0, params), example)
        return value, {"loss": value}

    @jax.jit
    def total(batch, mask):
        grad_fn = dpoptax.clipped_grad(with_aux, CLIP, has_aux=True)
        return _stacked(grad_fn(dpoptax.gradient_points((), params), batch, mask)[0].sum)

    move, example = largest_move(total, data)
    assert move <= 1, example


@pytest.mark.parametrize("program", helpers.slow_but(("LoRA", "tied", "experts"), EVERY))
def test_both_methods_give_the_same_sum(program, no_room):
    """In value, next to examples without a gradient."""
    _, _, shapes = EVERY[program]
    batch = tuple(_numbers(shapes, 6))
    for x, d in (batch,):
        x[1], d[1] = 0, 0
        x[2], d[2] = 1e4 * x[2], 0
        d[3] *= 1e-3
    mask = np.arange(6) != 5
    sums = [compiled(program, "constants", method=method)(batch, mask) for method in METHODS]
    scale = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(sums[1]))
    for a, b in zip(*map(jax.tree.leaves, sums), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4 * scale)


METHODS = ("auto", "vmap")


# Programs in which a finite example made the sum NaN: an example whose cotangent at a use of a
# scaled parameter is exactly zero, as tanh, the softmax or a hinge is saturated.
_TABLE = lambda p: p["w"].T  # noqa: E731
_hidden = lambda p, x: jax.nn.relu(x @ p["v"])  # noqa: E731
_squashed = lambda x: jnp.sum(jnp.tanh(x) ** 2)  # noqa: E731
_tokens = lambda x: (jnp.abs(x[:3]) > 1).astype(int)  # noqa: E731
TRIGGERS = {
    "x @ (w * 8)": lambda p, x: _squashed(_hidden(p, x) @ (p["w"] * 8.0)),
    "x @ (w / 0.1)": lambda p, x: _squashed(_hidden(p, x) @ (p["w"] / 0.1)),
    "(w.T * 8) @ x": lambda p, x: _squashed((p["w"].T * 8.0) @ _hidden(p, x)),
    "hinge": lambda p, x: jnp.sum(jax.nn.relu(1 - jnp.abs(x @ (p["v"] * 8.0)))),
    "softmax": lambda p, x: (
        -jax.nn.log_softmax(_hidden(p, x) @ (p["w"] * 8.0))[
            jnp.argmax(_hidden(p, x) @ (p["w"] * 8.0))
        ]
    ),
    "(emb * sqrt(512))[tokens]": lambda p, x: _squashed(
        jnp.sum(x**2) * (_TABLE(p) * 512**0.5)[_tokens(x)]
    ),
    "tied": lambda p, x: _squashed(
        jnp.sum(x**2) * (_TABLE(p) * 8.0)[_tokens(x)] @ (_TABLE(p) * 8.0).T
    ),
    "LoRA": lambda p, x: _squashed(x @ jnp.ones((8, 4)) + (x @ p["v"]) @ (p["w"] * 16.0)),
    "cast": lambda p, x: _squashed(
        _hidden(p, x) @ (p["w"] * 8.0).astype(jnp.bfloat16).astype(jnp.float32)
    ),
    "negation": lambda p, x: _squashed(_hidden(p, x) @ -(p["w"] * 8.0)),
    "concatenation": lambda p, x: _squashed(
        _hidden(p, x) @ jnp.concatenate([p["w"] * 8.0, p["w"] * 4.0], axis=1)
    ),
    "slice": lambda p, x: _squashed(_hidden(p, x) @ (p["w"] * 8.0)[:, 1:3]),
    "loss weight of zero": lambda p, x: (
        jnp.where(jnp.max(x) > 1e3, 0.0, 1.0) * jnp.sum((x @ p["v"] @ (p["w"] * 8.0)) ** 2)
    ),
}
_TRIGGERS_PARAMS = {"v": (8, 16), "w": (16, 4)}


def _outlier(count=SIZE):
    rng = np.random.default_rng(0)
    params = {n: helpers.floats(rng.normal(size=s) / 4) for n, s in _TRIGGERS_PARAMS.items()}
    batch = rng.normal(size=(count, 8)).astype(np.float32)
    batch[-1] *= 1e4
    return params, batch, np.arange(count) < count - 1


def _assert_finite(*trees):
    for leaf in jax.tree.leaves(trees):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize(
    "options", [{}, {"microbatch_size": 2}, {"precision": "bfloat16"}], ids=lambda o: str(o) or "-"
)
@pytest.mark.parametrize("name", TRIGGERS)
def test_a_finite_example_leaves_the_sum_finite(name, options):
    params, batch, masked = _outlier()
    grad_fn = dpoptax.clipped_grad(TRIGGERS[name], CLIP, **options)
    total = jax.jit(lambda p, b, m: grad_fn(dpoptax.gradient_points((), p), b, m).sum)
    # Closed over, parameters are constants too.
    known = jax.jit(lambda b, m: grad_fn(dpoptax.gradient_points((), params), b, m).sum)
    for mask in (np.ones(len(batch), bool), masked):
        _assert_finite(total(params, batch, mask), known(batch, mask))
    blank = np.where(masked[:, None], batch, 0)
    want = total(params, blank, masked)
    for a, b in zip(*map(jax.tree.leaves, (total(params, batch, masked), want)), strict=True):
        np.testing.assert_array_equal(a, b)


_DISK = {"kappa": 0.7, "gamma": 0.1}  # weights of 5.29 and -4.29


def _disk_run(way):
    params, row, _ = _outlier(8)
    batch, mask = np.stack([row, row]), np.ones((2, 8), bool)
    grad_fn = dpoptax.clipped_grad(
        lambda p, x: jnp.sum(jnp.tanh(jax.nn.relu(x @ p["v"]) @ p["w"]) ** 2), CLIP
    )
    tx = optax.chain(
        dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=8, key=jax.random.key(0)),
        dpoptax.disk(**_DISK),
        optax.sgd(0.1),
    )

    def step(carry, inputs):
        params, state = carry
        grads = grad_fn(dpoptax.gradient_points(state, params), *inputs)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def init_inside(batch):
        return jax.lax.scan(step, (params, tx.init(params)), (batch, mask))[0][0]

    def unrolled(params, state, batch):
        for t in range(2):
            (params, state), _ = step((params, state), (batch[t], mask[t]))
        return params

    def at_points(weights):
        points = dpoptax.GradientPoints((params, params), weights)
        return jax.jit(lambda b: grad_fn(points, b, mask[0]).sum)(row)

    if way == "init inside":
        return jax.jit(init_inside)(batch)
    if way == "unrolled":
        return jax.jit(unrolled)(params, tx.init(params), batch)
    weights = tx.init(params)[1][0].weights if way == "closed over" else (5.285714, -4.285714)
    return at_points(tuple(weights))


@pytest.mark.parametrize("way", ["init inside", "unrolled", "closed over", "Python floats"])
def test_a_finite_example_leaves_a_run_of_disk_finite(way):
    _assert_finite(_disk_run(way))


def test_three_scales_of_a_linear_map_leave_the_sum_finite():
    params, batch, _ = _outlier()
    three = Diagonal(tuple(jnp.full((1, 1), c) for c in (3.0, 3.0, 3.0)))
    points = dpoptax.GradientPoints((params,), (1.0,), linear_map=LinearMap((three, three)))
    grad_fn = dpoptax.clipped_grad(TRIGGERS["x @ (w * 8)"], CLIP)
    _assert_finite(jax.jit(lambda b: grad_fn(points, b).sum)(batch))


def test_a_kernel_made_of_a_zero_parameter_trains():
    """A fixed array of zeros was divided by 2^-126, next to a constant: inf · 0."""
    params = {"a": helpers.normal(0, (4, 2)), "b": jnp.zeros((2, 4))}
    loss = lambda p, x: jnp.sum((x @ (p["a"] @ (p["b"] * 16.0))) * x)  # noqa: E731
    batch = helpers.normal(1, (4, 6, 4))
    sums = [
        jax.jit(
            lambda b, method=method: (
                dpoptax.clipped_grad(loss, CLIP, method=method)(
                    dpoptax.gradient_points((), params), b
                ).sum
            )
        )(batch)
        for method in METHODS
    ]
    for name in params:
        np.testing.assert_allclose(sums[0][name], sums[1][name], atol=1e-3)
    assert float(jnp.max(jnp.abs(sums[0]["b"]))) > 0.01
