"""Tests that scatters on GPUs do not depend on the order in which updates arrive.

Programs are lowered for CUDA, where their scatters are searched, and then compiled for this CPU.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

import dpoptax
from dpoptax._clipped_grad.rewrites import rewriting, scatter_order
from dpoptax._support.marks import ANY_ORDER
from tests import helpers, programs
from tests.clipped_grad.engines_test import ENGINES
from tests.clipped_grad.platforms_test import exported
from tests.networks import NETWORKS

SIZE, LENGTH, WIDTH, ROWS = 6, 24, 4, 5
_EXACT = ("stablehlo.maximum", "stablehlo.minimum")


def order_dependent(fn, *args, platform="cuda"):
    """Returns the scatters of a lowered program whose result may depend on an order."""
    found = []

    def visit(op):
        if _depends_on_order(op):
            found.append(str(op.location))
        return ir.WalkResult.ADVANCE

    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,))
    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return found


def _depends_on_order(op):
    if op.name == "stablehlo.select_and_scatter":
        windows, strides = (list(op.attributes[f"window_{x}"]) for x in ("dimensions", "strides"))
        return any(map(int.__gt__, windows, strides))
    if op.name != "stablehlo.scatter":
        return False
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    shape = ir.RankedTensorType(op.operands[1].type).shape
    skipped = {numbers.index_vector_dim, *numbers.scatter_indices_batching_dims}
    several = math.prod(n for i, n in enumerate(shape) if i not in skipped) > 1
    combines = [x.name for x in op.regions[0].blocks[0] if x.name != "stablehlo.return"]
    kind = str(ir.RankedTensorType(op.results[0].type).element_type)
    exact = bool(combines) and (kind[0] in "iu" or set(combines) <= set(_EXACT))
    return several and not exact and ANY_ORDER not in str(op.location)


def _values(x, places):
    return x[places % LENGTH]


def _pooled(h, places):
    del places
    return lax.reduce_window(h, -jnp.inf, lax.max, (5, 1), (2, 1), "SAME")


def _in_scan(h, places):
    step = jax.checkpoint(lambda total, i: (total + jnp.sin(_values(h, places + i)), None))
    return lax.scan(step, jnp.zeros_like(h), jnp.arange(3))[0]


def _slices(h, places):
    return jax.vmap(lambda i: lax.dynamic_slice_in_dim(h, i, 3))(places)


def _by_branch(h, places):
    return lax.cond(places[0] > 2, lambda h: _values(h, places), lambda h: h, h)


def _experts(h, places):
    del places
    gates, chosen = lax.top_k(h, 2)
    return gates * jnp.take_along_axis(h[:, ::-1], chosen, axis=1)


def _multiplied(h, places):
    factors = jnp.ones((ROWS, 1)).at[places].multiply(1.0 + 1e-3 * places[:, None])
    return h[:ROWS] * factors


OPERATIONS = {
    "segment sum": lambda h, i: jax.ops.segment_sum(h, i, ROWS),
    "sorted segment sum": lambda h, i: jax.ops.segment_sum(
        h, jnp.sort(i), ROWS, indices_are_sorted=True
    ),
    "subtract": lambda h, i: jnp.ones((ROWS, WIDTH)).at[i].subtract(h),
    "gather": _values,
    "promised to be unique": lambda h, i: (
        jnp.zeros((ROWS, WIDTH)).at[i].add(h, unique_indices=True)
    ),
    "set": lambda h, i: jnp.zeros((ROWS, WIDTH)).at[i].set(h),
    "segment maximum": lambda h, i: jnp.maximum(jax.ops.segment_max(h, i, ROWS), -9.0),
    "multiply": _multiplied,
    "slices": _slices,
    "pooling": _pooled,
    "scan": _in_scan,
    "branch": _by_branch,
    "experts": _experts,
    "sort": lambda h, i: jnp.sort(h, axis=0),
    "labels of constant rows": lambda h, i: h[jnp.arange(LENGTH) // 2, i % WIDTH],
}
# The rows of a lookup, one index for each position, and constant indices.
SAFE = {
    "label": lambda h, i: h[i[0]],
    "take along axis": lambda h, i: jnp.take_along_axis(h, (i % WIDTH)[:, None], axis=1),
    "labels of each row": lambda h, i: h[jnp.arange(LENGTH), i % WIDTH],
    "labels, numpy": lambda h, i: h[np.arange(LENGTH), i % WIDTH],
    "slice": lambda h, i: lax.dynamic_slice_in_dim(h, i[0], 3),
    "constant rows": lambda h, i: h[np.array([3, 1, 2])],
    "disjoint windows": lambda h, i: lax.reduce_window(
        h, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID"
    ),
    "maximum of data": lambda h, i: h[:ROWS] * jnp.zeros(ROWS, int).at[i].max(i)[:, None],
}


def problem(operation):
    """Returns a loss with an operation on activations, its parameters and a batch."""

    def loss(params, example):
        x, places = example
        out = operation(jnp.tanh(x @ params["w"]), places)
        return jnp.sum(jnp.sin(out)) + jnp.sum((x @ params["v"]) ** 2)

    params = {"w": helpers.normal(0, (3, WIDTH)), "v": helpers.normal(1, (3, 2))}
    places = np.random.default_rng(2).integers(0, ROWS, (SIZE, LENGTH))
    return loss, params, (helpers.normal(3, (SIZE, LENGTH, 3)), jnp.asarray(places))


def total_of(loss, clip=1.0, **options):
    grad_fn = dpoptax.clipped_grad(loss, options.pop("clip", clip), **options)
    return lambda params, *batch: grad_fn(params, batch, jnp.arange(len(batch[0])) != 2).sum


@pytest.mark.parametrize(
    ("operation", "engine"), helpers.covering(list(OPERATIONS), list(ENGINES), strength=1)
)
def test_no_scatter_of_a_program_for_gpus_depends_on_an_order(operation, engine):
    loss, params, batch = problem(OPERATIONS[operation])
    total = total_of(loss, **ENGINES[engine][0])
    assert not order_dependent(total, params, *batch)
    # CPUs and TPUs run the operations as they are.
    for platform in ("cpu", "tpu"):
        assert order_dependent(total, params, *batch, platform=platform)


@pytest.mark.parametrize(
    ("operation", "method"), helpers.covering(list(OPERATIONS), ["auto", "vmap"], strength=1)
)
def test_sum_for_gpus_equals_that_for_cpus(operation, method):
    loss, params, batch = problem(OPERATIONS[operation])
    total = total_of(loss, method=method)
    expected = jax.jit(total)(params, *batch)
    found = jax.jit(exported(total, params, *batch, platform="cuda").call)(params, *batch)
    for name, x in found.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operation", SAFE)
def test_indices_that_cannot_repeat_are_left_alone(operation):
    loss, params, batch = problem(SAFE[operation])
    traced = jax.jit(total_of(loss)).trace(params, *batch)
    texts = [traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "cpu")]
    assert texts[0].count("stablehlo.scatter") == texts[1].count("stablehlo.scatter")


@pytest.mark.parametrize(
    ("rows", "safe"),
    [([0, 1, 2], True), ([0, 1, 1], False), ([0, 1, -1], False), ([0, 1, LENGTH], False)],
)
def test_constant_rows_are_compared_within_the_array(rows, safe):
    def at(x, columns):
        where = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
        indices = jnp.stack([jnp.array(rows), columns], -1)
        return lax.gather(x, indices, where, (1, 1), mode="clip")

    gradient = jax.grad(lambda x, columns: jnp.sum(at(x, columns) ** 2))
    program = jax.make_jaxpr(gradient)(jnp.ones((LENGTH, WIDTH)), jnp.zeros(3, int))
    assert rewriting.applies(scatter_order.rule, program) == (not safe)


@pytest.mark.parametrize(
    ("clip", "scale"),
    helpers.covering(
        {"l2": dpoptax.l2_clip(0.3), "automatic": dpoptax.automatic_clip(0.3, gamma=0.0)},
        {"1": 1.0, "10,000": 1e4},
        strength=1,
    ),
)
def test_order_inside_other_examples_does_not_move_the_sum(clip, scale):
    """On a GPU, the contention of all examples changes the order of additions inside each."""
    rng, n = np.random.default_rng(1), 64
    x = rng.normal(size=(8, n, 4)).astype(np.float32) * scale
    x[:, 1::2] = -x[:, ::2] + rng.normal(size=(8, n // 2, 4)).astype(np.float32) * 1e-4
    mask = np.arange(8) < 7

    def loss(params, example):
        return jnp.sum(jax.ops.segment_sum(*example, 1) @ params)

    def total(x):
        grad_fn = dpoptax.clipped_grad(loss, clip)
        return grad_fn(jnp.ones((4, 3)), (x, jnp.zeros((8, n), int)), mask).sum

    orders = [np.arange(n), *(np.random.default_rng(5).permutation(n) for _ in range(3))]
    on_gpu = jax.jit(exported(total, x, platform="cuda").call)
    sums = [np.asarray(on_gpu(x[:, order])) for order in orders]
    assert all(np.array_equal(sums[0], each) for each in sums)
    here = [np.asarray(jax.jit(total)(x[:, order])) for order in orders]
    if scale > 1:  # the sum of this CPU moves
        assert max(np.linalg.norm(here[0] - each) for each in here) > 0.05 * clip.sensitivity


def on_gpu(fn, *args):
    """Runs a function as rewritten for a GPU."""

    def run(*args):
        program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        assert rewriting.applies(scatter_order.rule, program)
        found = rewriting.evaluate(program, scatter_order.rule, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return jax.jit(exported(run, *args, platform="cuda").call)(*args)


def summed(values, at, rows=3):
    return jnp.zeros((rows, *values.shape[1:]), values.dtype).at[at].add(values)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("count", [2, 1000, 300_000])
def test_sums_are_accurate_in_any_order(count, dtype):
    rng = np.random.default_rng(count)
    values = rng.normal(size=count) * 10.0 ** rng.uniform(-4, 3, count)
    values[count // 2 :] = -values[: count - count // 2] * (1 + 2.0**-9 * rng.normal())
    values, at = jnp.asarray(values).astype(dtype), jnp.asarray(rng.integers(-1, 4, count))
    values = values * (1 + 0.5j) if dtype == jnp.complex64 else values
    found = np.asarray(on_gpu(summed, values, at))
    order = rng.permutation(count)
    assert np.array_equal(found, on_gpu(summed, values[order], at[order]))
    where = np.where(np.asarray(at) < 0, np.asarray(at) + 3, at)
    for row in range(3):
        chosen = np.asarray(values)[where == row].astype(np.complex128)
        exact = complex(math.fsum(chosen.real), math.fsum(chosen.imag))
        error = float(jnp.finfo(dtype).eps) * abs(exact)
        error += 2.0**-26 * np.max(np.abs(chosen), initial=0.0)
        assert abs(complex(found[row]) - exact) <= error


def test_sums_in_float64_are_accurate():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        values, at = jnp.asarray(rng.normal(size=1000)), jnp.zeros(1000, int)
        found = float(on_gpu(summed, values, at)[0])
        again = float(on_gpu(summed, values[::-1], at)[0])
    assert found == again == pytest.approx(math.fsum(np.asarray(values)), rel=1e-15)


def test_sums_of_special_values_are_those_of_floats():
    inf, nan, big = math.inf, math.nan, 3e38
    cases = [
        [inf, 1.0], [-inf, 1.0], [inf, -inf], [nan, 1.0], [inf, inf], [big, big], [-big, -big],
        [1e-45, 1.0], [0.0, -0.0], [2.0**-126, 2.0**-126], [1.0, -1.0], [big, -1.0],
    ]  # fmt: skip
    values = jnp.asarray(cases, jnp.float32).ravel()
    at = jnp.repeat(jnp.arange(len(cases)), 2)
    found = on_gpu(lambda values, at: summed(values, at, len(cases)), values, at)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(found, np.asarray(cases, np.float32).sum(1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, bool])
def test_the_last_value_that_is_set_stays(dtype):
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.integers(-9, 9, (200, 2))).astype(dtype)
    at = jnp.asarray(rng.integers(-3, 8, 200))
    put = lambda values, at: jnp.ones((7, 2), dtype).at[at].set(values)  # noqa: E731
    np.testing.assert_array_equal(on_gpu(put, values, at), put(values, at))


def test_functions_are_applied_as_often_as_on_cpu():
    at = jnp.asarray(np.random.default_rng(0).integers(0, 4, (3, 5)))
    doubled = lambda at: jnp.ones(4).at[at].apply(lambda x: 1.5 * x + 1.0)  # noqa: E731
    np.testing.assert_array_equal(on_gpu(doubled, at), doubled(at))


def test_sparse_arrays_are_refused_on_gpus(monkeypatch):
    matrix = sparse.BCOO.fromdense(jnp.eye(LENGTH))
    loss, params, batch = problem(lambda h, places: matrix @ h)
    total = total_of(loss)
    assert all(np.any(x) for x in total(params, *batch).values())
    there = jax.jit(exported(total, params, *batch, platform="cuda").call)(params, *batch)
    assert not any(np.any(x) for x in there.values())
    assert not order_dependent(total, params, *batch)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(TypeError, match="segment_sum"):
        jax.make_jaxpr(total_of(loss))(params, *batch)


QUICK = ("transformer", "lookups", "cnn")


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("name", helpers.slow_but(QUICK, NETWORKS))
def test_networks_for_gpus_do_not_depend_on_an_order(name, method):
    network = NETWORKS[name]
    key = {"key": jax.random.key(3), "ids": jnp.arange(SIZE)} if network.keyed else {}
    grad_fn = dpoptax.clipped_grad(network.loss, 1.0, method=method)
    total = lambda params, batch: grad_fn(params, batch, **key).sum  # noqa: E731
    assert not order_dependent(total, network.params(0), network.batch(1, SIZE))


@pytest.mark.parametrize(
    "name", helpers.slow_but(("experts", "graph"), programs.PROGRAMS | programs.MODELS)
)
def test_programs_for_gpus_do_not_depend_on_an_order(name):
    loss, shapes, data = (programs.PROGRAMS | programs.MODELS)[name]
    batch = [jax.ShapeDtypeStruct((SIZE, *shape), jnp.float32) for shape in data]
    for method in ("auto", "vmap"):
        total = total_of(loss, method=method)
        assert not order_dependent(total, programs.parameters(shapes), *batch)
