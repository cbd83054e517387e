"""Tests with the compiler as an adversary that moves constants in front of the clipped values.

XLA's algebraic simplifier knows the constants that a program is closed over, and moves them through
products. No order of these products may move a clipped sum by more than the bound, or make it
non-finite.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax._support.xla import check_settings
from tests import helpers, programs

pytestmark = pytest.mark.optimized

CLIP = dpoptax.l2_clip(0.1)
EVERY = programs.PROGRAMS | programs.MODELS
CONSTANTS = (2.0**20, 10.0, 2.0**-20, 512**0.5, 3.0)
METHODS = ("auto", "vmap")
STREAM = {"clip": dpoptax.per_layer_clip(0.1), "method": "streaming"}
# Ways to sum besides `method="auto"`, as options of `clipped_grad`.
SUMS = {
    "vmap": {"method": "vmap"},
    "recompute": {"method": "recompute"},
    "streaming": STREAM,
    "in parts": {"microbatch_size": 2},
    "bfloat16": {"precision": "bfloat16"},
    "recompute in bfloat16": {"method": "recompute", "precision": "bfloat16"},
    "streaming in bfloat16": STREAM | {"precision": "bfloat16"},
}
SIZE = 4


def _numbers(shapes, count=SIZE):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(count, *s)).astype(np.float32) for s in shapes]


# The last example of a batch, next to ordinary examples.
EXAMPLES = {
    "blank": lambda x, d: (0 * x, 0 * d),
    "zero cotangent": lambda x, d: (1e4 * x, 0 * d),
    "zero data": lambda x, d: (0 * x, 1e4 * d),
    "subnormal cotangent": lambda x, d: (x, 1e-41 * d),
    "subnormal product": lambda x, d: (2.0**-70 * x, 2.0**-70 * d),
    "large cotangent": lambda x, d: (x, 1e4 * d),
    "outlier": lambda x, d: (1e4 * x, 1e4 * d),
    "one entry": lambda x, d: (1e4 * x, np.where(np.arange(d.size).reshape(d.shape) == 0, 1e4, 0)),
}


def largest_move(total, shapes, names=tuple(EXAMPLES)):
    """Returns the largest move by an example, relative to the bound, and the example's name.

    The second-to-last row is the same example, masked, so it also meets sums that exclude it.
    """
    worst = 0.0, "none"
    for name in names:
        example = [np.float32(e) for e in EXAMPLES[name](*(x[-1] for x in _numbers(shapes)))]
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
    """Multiplies each leaf of the parameters by a public constant."""
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten([x * c for x, c in zip(leaves, constants, strict=True)])


def _stacked(*sums):
    return jax.tree.map(lambda *x: jnp.stack(x), *sums)


def compiled(name, way, turn=0, weights=None, clip=CLIP, **options):
    """Compiles the sums of a program whose parameters are multiplied by constants.

    Args:
      name: the program.
      way: the way to compile it.
      turn: the rotation that assigns constants to parameters.
      weights: the weights of gradient points; one point with weight 1 by default.
      clip: the clip, of the same sensitivity as `CLIP`.
      options: options of `clipped_grad`.
    """
    loss, shapes, _ = EVERY[name]
    params = programs.parameters(shapes)
    count = len(jax.tree.leaves(params))
    constants = [CONSTANTS[(turn + i) % len(CONSTANTS)] for i in range(count)]
    # The effective parameters are ordinary.
    params = _times(params, [1 / c for c in constants])
    nearby = jax.tree.map(lambda p: p * 1.001, params)

    def total(params, batch, mask, *, constants=tuple(constants), weights=weights):
        def scaled(params, example):
            return loss(_times(params, constants), example)

        there = (params,) if weights is None else (params, *[nearby] * (len(weights) - 1))
        points = dpoptax.GradientPoints(there, weights or (1.0,))
        return dpoptax.clipped_grad(scaled, clip, **options)(points, batch, mask).sum

    def one(batch, mask):
        return _stacked(total(params, batch, mask))

    def with_arguments(constants, batch, mask):
        return _stacked(total(params, batch, mask, constants=constants))

    def init_inside(batch, mask):
        points = dpoptax.gradient_points(dpoptax.disk(kappa=0.7, gamma=0.1).init(params), params)
        return _stacked(total(points.points[0], batch, mask, weights=points.weights))

    def unrolled(batch, mask):
        return _stacked(total(params, batch, mask), total(nearby, batch, mask))

    def scan(batch, mask):
        step = lambda _, params: (None, total(params, batch, mask))  # noqa: E731
        return jax.lax.scan(step, None, several)[1]

    def vmapped(batch, mask):
        return jax.vmap(lambda params: total(params, batch, mask))(several)

    several = _stacked(params, nearby)
    return {
        "constants": jax.jit(one),
        "eager": one,
        "arguments": functools.partial(
            jax.jit(with_arguments), [jnp.float32(c) for c in constants]
        ),
        "init inside": jax.jit(init_inside),
        "unrolled": jax.jit(unrolled),
        "scan": jax.jit(scan),
        "vmapped": jax.jit(vmapped),
    }[way]


WAYS = ("constants", "eager", "arguments", "init inside", "unrolled", "scan", "vmapped")
_OF_MODELS = ("constants", "init inside", "unrolled")  # slow to compile
_QUICK = {
    ("regression", "constants"), ("long", "init inside"), ("tied", "unrolled"),
    ("elementwise", "arguments"), ("standardized", "constants"), ("merged", "scan"),
    ("one position", "vmapped"), ("token", "arguments"), ("LoRA", "constants"),
    ("experts", "init inside"), ("graph", "unrolled"), ("short", "eager"),
    ("convolution", "constants"),
}  # fmt: skip


@pytest.mark.spread(26)
@pytest.mark.parametrize(
    ("program", "way"),
    [
        pytest.param(program, way, marks=[pytest.mark.slow] * ((program, way) not in _QUICK))
        for program in EVERY
        for way in (_OF_MODELS if program in programs.MODELS else WAYS)
    ],
)
def test_bound_holds_for_any_constants(program, way):
    quick = (program, way) in _QUICK or program in programs.MODELS
    # Without jit, each sum takes half a second.
    names = ("zero cotangent", "outlier") if quick and way == "eager" else tuple(EXAMPLES)
    for turn in (0,) if quick else (0, 1):
        move, example = largest_move(compiled(program, way, turn), EVERY[program][2], names)
        print(f"| {program} | auto, {way} | {move:.5f} | {example} |")
        assert move <= 1, (turn, example)


WEIGHTS = [(2.0**20, 1 - 2.0**20), (2.0**-20, 3.0), (10.0, 512**0.5)]


@pytest.mark.spread(20)
@pytest.mark.parametrize(
    ("program", "way", "weights"),
    [
        *helpers.covering(["regression", "LoRA"], ["constants", "arguments"], WEIGHTS, strength=1),
        *(
            pytest.param(program, way, weights, marks=pytest.mark.slow)
            for program in sorted(programs.PROGRAMS.keys() - {"regression"})
            for way in ("constants", "arguments")
            for weights in WEIGHTS
        ),
    ],
)
def test_bound_holds_for_any_point_weights(program, way, weights):
    move, example = largest_move(compiled(program, way, weights=weights), EVERY[program][2])
    assert move <= 1, example


_QUICK_SUMS = {("scanned", "recompute", "unrolled"), ("tied", "streaming", "vmapped")}


def _other_sums():
    """Returns each program, with each way to sum it, and ways to compile it."""
    for program, kind in itertools.product(EVERY, SUMS):
        by_use = kind.startswith(("recompute", "streaming"))
        if by_use and program in programs.COMPUTED_KERNELS:
            continue  # refused
        more = kind in ("recompute", "streaming") and program in programs.PROGRAMS
        for way in ("constants", *(("unrolled", "scan", "vmapped") if more else ())):
            quick = (program, kind, way) in _QUICK_SUMS
            yield pytest.param(program, kind, way, marks=[pytest.mark.slow] * (not quick))


@pytest.mark.spread(40)
@pytest.mark.parametrize(("program", "kind", "way"), list(_other_sums()))
def test_bound_holds_for_any_constants_in_other_sums(program, kind, way):
    move, example = largest_move(compiled(program, way, **SUMS[kind]), EVERY[program][2])
    print(f"| {program} | {kind}, {way} | {move:.5f} | {example} |")
    assert move <= 1, example


@pytest.mark.slow
@pytest.mark.parametrize("program", programs.MODELS)
def test_bound_holds_for_constants_next_to_aux(program):
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


# In these programs a finite example made the sum NaN. Its cotangent at a use of a scaled parameter
# is exactly zero, because tanh, the softmax or a hinge is saturated.
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


# The scale is in front of another product, or of an operation that other quick tests also scale.
_SLOW_TRIGGERS = {
    "x @ (w / 0.1)", "(w.T * 8) @ x", "tied", "cast", "negation", "concatenation", "slice",
}  # fmt: skip
_OPTIONS = {"whole": {}} | SUMS
_QUICK_OPTIONS = ("whole", "in parts", "bfloat16", "recompute", "streaming")
# The kernel is concatenated before it meets data.
_REFUSED = {("concatenation", kind) for kind in SUMS if kind.startswith(("recompute", "streaming"))}


@pytest.mark.spread(18)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, _OPTIONS[kind], marks=[pytest.mark.slow] * slow, id=f"{name}-{kind}")
        for i, name in enumerate(TRIGGERS)
        for kind in _OPTIONS
        if (name, kind) not in _REFUSED
        for quick in [kind == "whole" or (i == 0 and kind in _QUICK_OPTIONS)]
        for slow in [name in _SLOW_TRIGGERS or not quick]
    ],
)
def test_finite_example_leaves_sum_finite(name, options):
    params, batch, masked = _outlier()
    grad_fn = dpoptax.clipped_grad(TRIGGERS[name], **{"clip": CLIP} | options)
    total = jax.jit(lambda p, b, m: grad_fn(dpoptax.gradient_points((), p), b, m).sum)
    # Parameters in a closure are also constants.
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

    if way == "init inside":
        return jax.jit(init_inside)(batch)
    if way == "unrolled":
        return jax.jit(unrolled)(params, tx.init(params), batch)
    points = dpoptax.GradientPoints((params, params), tx.init(params)[1][0].weights)
    return jax.jit(lambda b: grad_fn(points, b, mask[0]).sum)(row)


@pytest.mark.parametrize(
    "way",
    helpers.slow_but(("init inside", "closed over"), ("init inside", "unrolled", "closed over")),
)
def test_finite_example_leaves_disk_run_finite(way):
    _assert_finite(_disk_run(way))


@pytest.mark.parametrize(
    "options",
    [
        {"xla_cpu_enable_fast_math": True},
        {"xla_cpu_enable_fast_math": True, "xla_cpu_fast_math_honor_nans": False},
    ],
    ids=["reordered sums", "no NaN"],
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the options are for XLA on CPU")
def test_sum_is_zero_if_compiler_reorders_sums(options):
    """The options of such a compiler are not in the environment, so an error cannot report them."""
    params, batch, _ = _outlier()
    for method in METHODS:
        grad_fn = dpoptax.clipped_grad(TRIGGERS["x @ (w * 8)"], CLIP, method=method)
        total = lambda b, f=grad_fn: f(dpoptax.gradient_points((), params), b).sum  # noqa: E731
        for leaf in jax.tree.leaves(jax.jit(total, compiler_options=options)(batch)):
            np.testing.assert_array_equal(leaf, 0.0)
        assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(jax.jit(total)(batch))) > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_FLAGS", "--xla_dump_to=x --xla_cpu_enable_fast_math=true"),
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math"),
        ("XLA_FLAGS", "--xla_gpu_default_to_alg_dot_bf16_bf16_f32=true"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
    ],
)
def test_refuses_settings_that_break_the_bound(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    grad_fn = dpoptax.clipped_grad(lambda w, x: jnp.sum(w * x), CLIP)
    with pytest.raises(RuntimeError, match="restart Python"):
        grad_fn(dpoptax.gradient_points((), jnp.ones(3)), jnp.ones((2, 3)))


def test_refuses_flags_from_a_file(tmp_path, monkeypatch):
    """XLA reads the file that `XLA_FLAGS` names."""
    (tmp_path / "flags").write_text("--xla_dump_to=x\n--xla_cpu_enable_fast_math=true\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    with pytest.raises(RuntimeError, match="sets `--xla_cpu_enable_fast_math=true`"):
        check_settings()


_COMPILERS = {
    "excess precision": {"xla_allow_excess_precision": False},
    "maxima without NaN": {"xla_cpu_enable_fast_min_max": True},
    "no simplification": {"xla_disable_hlo_passes": "algsimp"},
    "no fusion": {"xla_disable_hlo_passes": "fusion"},
}


@pytest.mark.spread(8)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "vmap", "recompute", "streaming"])
@pytest.mark.parametrize("name", _COMPILERS)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the options are for XLA on CPU")
def test_bound_holds_under_covered_compiler_options(name, kind):
    loss, shapes, data = programs.MODELS["LoRA"]
    params = programs.parameters(shapes)
    grad_fn = dpoptax.clipped_grad(
        lambda p, e: loss(jax.tree.map(lambda x: x * 8.0, p), e), **{"clip": CLIP} | _OPTIONS[kind]
    )
    total = jax.jit(
        lambda batch, mask: _stacked(grad_fn(params, batch, mask).sum),
        compiler_options=_COMPILERS[name],
    )
    move, example = largest_move(total, data)
    assert move <= 1, example


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=false --xla_allow_excess_precision=true"),
        ("NVIDIA_TF32_OVERRIDE", "0"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "strict"),
    ],
)
def test_accepts_settings_that_keep_the_bound(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    check_settings()
