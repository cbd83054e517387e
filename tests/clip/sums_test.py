"""Tests sums over examples: blocks, pairs, and the bound on rounding errors."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax.tables
from dpoptax._ghost_clipping import factor_products
from dpoptax._ghost_clipping.factor_products import FactoredGradients, MeasuredTerm
from dpoptax._ghost_clipping.sums import product_sums
from dpoptax._rounding import block_sums, bounds, integer_sums
from tests import helpers
from tests.helpers import floats


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 96, 140, 283, 1000, 4099])
def test_blocked_sum_adds_every_term_once(size):
    weights = np.arange(size) % 7 - 3.0
    values = np.stack([np.arange(size) % 5, np.ones(size)], axis=1)  # all sums are exact
    found = jax.jit(block_sums.sum_weighted)(floats(weights), floats(values))
    np.testing.assert_array_equal(found, weights @ values)


def test_narrow_values_are_widened_before_the_product():
    program = jax.make_jaxpr(block_sums.sum_weighted)(floats([1.0]), floats([[1.0]], jnp.bfloat16))
    (product,) = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert [x.aval.dtype for x in product.invars] == [jnp.float32, jnp.float32]


ALONE = {"products": 1, "ratio": 1.0, "largest_summand": 1.0}


def _lookups(size):
    rows = np.arange(size) % 3
    values = np.random.default_rng(0).normal(size=(size, 2)).astype(np.float32)
    values[:, 1] = 0.0
    return floats(rows).astype(int), floats(values / np.abs(values).max())


@pytest.mark.parametrize("size", [8, 1000])
def test_lookups_are_added_as_integers(size):
    rows, values = _lookups(size)

    def total(*lookup):
        zeros = jnp.zeros((4, 2))
        return integer_sums.add_lookups(zeros, [lookup], bound=1.0, **ALONE, examples=size)

    exact = np.zeros((4, 2))
    np.add.at(exact, np.asarray(rows), np.float64(values))
    found = jax.jit(total)(rows, values)
    np.testing.assert_allclose(found, exact, rtol=3e-7, atol=1e-9)
    if size > 8:  # equal in any order
        np.testing.assert_array_equal(total(rows[::-1], values[::-1]), found)


@pytest.mark.parametrize(("size", "table"), [(8, 4), (1000, 4), (1000, 2000)])
def test_table_is_added_after_lookups(size, table):
    rows, values = _lookups(size)
    start = floats(np.random.default_rng(1).normal(size=(table, 2)))
    options = {"bound": 1.0, **ALONE, "examples": size}
    total = integer_sums.add_lookups(jnp.zeros_like(start), [(rows, values)], **options)
    found = integer_sums.add_lookups(start, [(rows, values)], **options)
    np.testing.assert_array_equal(found, start + total)


def test_lookups_far_below_bound_keep_float_precision():
    """Checks a clip that cuts nothing, as in a first run without noise."""
    rows, values = _lookups(256)
    exact = np.zeros((4, 2))
    np.add.at(exact, np.asarray(rows), np.float64(values))
    zeros = jnp.zeros((4, 2))
    found = integer_sums.add_lookups(zeros, [(rows, values)], bound=1e4, **ALONE, examples=256)
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)


def test_integer_overflow_of_parts_cancels():
    """Checks two lookups per example, each of 32 times the bound, that almost cancel."""
    size, large = 1000, 32.0
    rows = jnp.zeros(size, int)
    parts = [(rows, jnp.full((size, 1), v, jnp.float32)) for v in (large, 1.0 - large)]
    kind = {"products": 2, "ratio": large, "largest_summand": 1.0, "examples": size}
    zero = jnp.zeros((1, 1))
    assert float(integer_sums.add_lookups(zero, parts, bound=1.0, **kind)[0, 0]) == size
    with pytest.raises(ValueError, match="Scale the loss"):
        integer_sums.add_lookups(zero, parts, bound=1e-38, **kind)


def test_joining_steps_rounds_once():
    """Checks large fine steps that remain from many numbers and almost cancel whole steps."""
    rng, steps = np.random.default_rng(0), integer_sums.make_steps(1.0, 2**21)
    fine = rng.integers(-(2**29), 2**29, 1000)
    whole = rng.integers(-(2**10), 2**10, 1000) - (fine >> steps.finer)
    exact = whole + fine * 2.0**-steps.finer
    found = jax.jit(steps.join)(jnp.int32(whole), jnp.int32(fine))
    error = np.abs(np.float64(found) * 2.0**steps.exponent - exact)
    assert (error <= bounds.UNIT_ROUNDOFF * (np.abs(exact) + 2.0**12)).all()


def test_step_rounding_counts_every_changed_entry():
    rows, columns, size = 4, 2**12, 16
    found = integer_sums.step_rounding(rows * size, rows, columns, size, size)
    low = 2.0**12 * 2.0**-29 * size * math.sqrt(rows * columns)
    assert found.own >= 2 * bounds.UNIT_ROUNDOFF * low


def test_steps_follow_bound_of_the_gradient(monkeypatch):
    """Steps follow the gradient's clipping bound, not the joint bound with a count."""
    found, sum_products = [], product_sums.sum_products

    def seen(*args, bound, **options):
        found.append(bound)
        return sum_products(*args, bound=bound, **options)

    monkeypatch.setattr(product_sums, "sum_products", seen)
    points = dpoptax.GradientPoints((jnp.zeros(2),), (1.0,), reference=jnp.float32(1.0))
    grad_fn = dpoptax.clipped_grad(jnp.dot, dpoptax.contrib.adaptive_clip(1.0, count_share=0.75))
    jax.eval_shape(lambda x: grad_fn(points, x).sum, jax.ShapeDtypeStruct((4, 2), jnp.float32))
    assert found == [pytest.approx(0.5, abs=0.01)]  # to eight bits


def test_lookups_that_a_product_cancels_fit_into_integers():
    """Parts of a tied embedding, each many times as large as the gradient, fit into integers."""
    size, large = 64, 31.0
    tokens, one = jnp.zeros((size, 1, 1), int), jnp.ones((size, 1, 1, 1))
    unit = jnp.zeros((size, 1, 1, 4)).at[..., 0].set(1.0)
    segments = [
        factor_products.Segment(tokens, large * one),
        factor_products.Segment(unit, (1 - large) * one),
    ]
    found = product_sums.sum_products(
        FactoredGradients(segments, (1, 4, 1)), jnp.ones(size), bound=6.0, examples=size
    )
    np.testing.assert_array_equal(found[0, :, 0], [size, 0, 0, 0])


@pytest.mark.parametrize(
    ("positions", "side", "examples"), [(1, 8, 128), (1, 256, 256), (4, 256, 32), (64, 256, 4)]
)
def test_matrix_products_are_cut_into_blocks(positions, side, examples):
    """The rounding that one example changes in a blocked product does not grow with the batch."""
    factor = jax.ShapeDtypeStruct((1024, 1, positions, side), jnp.float32)
    total = lambda x, w: product_sums.sum_products(  # noqa: E731
        FactoredGradients([factor_products.Segment(x, x)], (1, side, side)),
        w,
        bound=1.0,
        examples=1024,
    )
    weights = jax.ShapeDtypeStruct((1024,), jnp.float32)
    lengths = set()
    for eqn in helpers.equations(jax.make_jaxpr(total)(factor, weights).jaxpr):
        if eqn.primitive.name == "dot_general":
            axes, shape = eqn.params["dimension_numbers"][0][0], eqn.invars[0].aval.shape
            lengths.add(np.prod([shape[axis] for axis in axes]))
    assert lengths == {examples * positions}


@pytest.mark.parametrize(
    ("examples", "products", "entries", "ratio", "length"),
    [
        (256, 1, 2**18, 1.0, 256),  # like a wide layer with one position
        (256, 1, 64, 1.0, 128),
        (256, 64, 2**18, 32.0, 5),
        (256, 2048, 2**18, 32.0, 1),
        (256, 2, 2**18, bounds.largest_ratio(2), 53),
    ],
)
def test_blocks_have_longest_allowed_length(examples, products, entries, ratio, length):
    assert block_sums.block_length(examples, products, entries, ratio) == length
    block = block_sums.block_rounding(length, length, products=products, ratio=ratio)
    assert block_sums.combine_roundings([block]) <= block_sums.ROUNDING_LIMIT * (1 + 1e-3)


def test_tau_combines_several_sums():
    one, two = block_sums.Rounding(4, 3e-3, joined=1e-4), block_sums.Rounding(8, 1e-3, own=1e-5)
    terms = [block_sums.Rounding(4, joined=joined, termwise=True) for joined in (3e-4, 2e-4)]
    sums = [one, two, block_sums.Rounding(4, 1e-3), *terms]
    found = block_sums.combine_roundings(sums)
    assert found == pytest.approx(math.hypot(3e-3, 1e-3) + math.hypot(1e-4, 3e-4) + 1e-5)
    shared = block_sums.combine_roundings(sums, shared=True)  # without the root of squares
    assert shared == pytest.approx(3e-3 + 1e-3 + 1e-4 + 3e-4 + 1e-5)


def test_roundings_of_tied_uses_add_up():
    """One parameter multiplies a matrix and a vector, in blocks of different lengths."""

    def loss(w, example):
        matrix, vector = example
        return jnp.sum(matrix @ w) ** 2 + jnp.sum(vector @ w) ** 2

    found = []
    real = block_sums.combine_roundings

    def spy(roundings, **options):
        found.append((real(list(roundings := list(roundings)), **options), real(roundings)))
        return found[-1][0]

    shapes = [jax.ShapeDtypeStruct((256, *shape), jnp.float32) for shape in ((64, 8), (8,))]
    grad_fn = dpoptax.clipped_grad(loss, 1.0, method="recompute")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sums, "combine_roundings", spy)
        jax.eval_shape(grad_fn, jax.ShapeDtypeStruct((8, 4), jnp.float32), tuple(shapes))
    used, apart = found[-1]
    assert used > 1.02 * apart


def test_tau_covers_termwise_and_whole_rounding():
    """Checks a sum of 64 positions in short blocks and one of two points in one block."""

    def of(positions, points):
        factor = jax.ShapeDtypeStruct((64, 1, positions, 8), jnp.float32)
        return product_sums.product_rounding(
            FactoredGradients([factor_products.Segment(factor, factor)] * points, (1, 8, 8)), 64
        )

    whole, parts = of(64, 1), of(1, 2)
    assert (whole.termwise, parts.termwise) == (False, True)
    shares = math.hypot(whole.joined, parts.joined * math.sqrt(1 - 1 / 32**2))
    blocks = math.hypot(whole.blocks, parts.blocks)
    assert block_sums.combine_roundings([whole, parts]) >= blocks + shares


def test_fixed_arrays_add_one_rounding():
    factor = jax.ShapeDtypeStruct((16, 1, 1, 8), jnp.float32)
    alone = FactoredGradients([factor_products.Segment(factor, factor)], (1, 8, 8))
    term = MeasuredTerm(*[jnp.ones((16, 1, 8, 8))] * 3)
    beside = FactoredGradients(alone.segments, alone.sizes, [term])
    with_it, without = (product_sums.product_rounding(x, 16).joined for x in (beside, alone))
    ratio = product_sums.absolute_ratio(beside)
    assert (
        with_it - without >= 2 * 2 * ratio * 16 * bounds.UNIT_ROUNDOFF
    )  # an addition and a product


@pytest.mark.parametrize(("examples", "most"), [(256, 0.011), (4096, 0.0145), (65536, 0.0735)])
def test_tau_is_small_for_usual_batches(examples, most):
    for terms in (1, 4, 16, 64, 256, 1024):
        kind = {"products": terms, "ratio": bounds.largest_ratio(terms)}
        block = block_sums.block_length(examples, entries=2**20, **kind)
        tau = block_sums.combine_roundings([block_sums.block_rounding(examples, block, **kind)])
        assert 0 < tau + block_sums.layout_rounding(block_sums.WholeBatch(examples)) <= most


def test_large_sums_over_many_devices_use_integers():
    assert not block_sums.uses_integer_totals(block_sums.WholeBatch(10**5, 8))
    assert not block_sums.uses_integer_totals(block_sums.WholeBatch(4096, 16))
    assert block_sums.uses_integer_totals(block_sums.WholeBatch(65536, 64))
    few, many = (block_sums.layout_rounding(block_sums.WholeBatch(65536, n)) for n in (8, 4096))
    assert few == many < 0.04


def test_layout_rounding_covers_all_layouts():
    """τ covers all sums that include an example, over micro-batches and devices."""
    for devices, part, size in itertools.product((*range(1, 12), 64), range(1, 70), range(1, 70)):
        count, whole = -(-part // size), block_sums.WholeBatch(devices * part, devices)
        inside = sum(min(j * size, part) for j in range(2, count + 1)) if count <= 8 else part
        over = sum(j * part for j in range(2, devices + 1))
        if block_sums.uses_integer_totals(whole):
            over = whole.examples
        assert 2 * bounds.UNIT_ROUNDOFF * (inside + over) <= block_sums.layout_rounding(whole)


def test_refuses_batches_too_large_for_float32():
    grad_fn = dpoptax.clipped_grad(lambda w, x: jnp.sum(w * x), dpoptax.l2_clip(1.0))
    points = dpoptax.gradient_points((), jnp.zeros(2))
    batch = jax.ShapeDtypeStruct((10**6, 2), jnp.float32)
    with pytest.raises(ValueError, match="Use smaller batches"):
        jax.eval_shape(lambda batch: grad_fn(points, batch).sum, batch)


def test_two_sum_is_exact_when_compiled():
    a, b = np.random.default_rng(0).normal(size=(2, 1000)) * 2.0 ** np.arange(-30, 30, 0.06)[:1000]
    a, b = floats(a), floats(b[::-1])
    total, lost = jax.jit(block_sums.two_sum)(a, b)
    exact = np.float64(a) + np.float64(b)
    np.testing.assert_array_equal(np.float64(total) + np.float64(lost), exact)
    assert np.any(np.asarray(lost) != 0)


def test_compensated_add_is_exact_over_many_terms():
    """Errors that were summed separately, next to a large total, would be rounded themselves."""
    value, count = np.float32(1.0 + 2.0**-22), 2**15

    def step(carry, _):
        return block_sums.compensated_add(carry, value), None

    start = jnp.complex64(2.0**23)
    total = jax.jit(lambda: jax.lax.scan(step, start, None, count)[0])()
    exact = 2.0**23 + count * np.float64(value)
    assert abs(total.imag) <= 0.5
    assert np.float64(total.real) + np.float64(total.imag) == exact


def test_many_microbatches_round_as_one_addition():
    values = floats(np.concatenate([[1.0], np.full(999, 2.0**-25)]))
    total = jax.jit(
        dpoptax.extend.in_microbatches(lambda x, mask: (jnp.sum(x, where=mask), None), 1)
    )
    found, _ = total(values, np.ones(1000, bool))
    assert float(found) == np.float32(1 + 999 * 2.0**-25)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_many_microbatches_of_a_small_dtype_round_once(dtype):
    total = dpoptax.extend.in_microbatches(lambda x, mask: (jnp.sum(x, where=mask), None), 1)
    found, _ = total(jnp.full(2**13, 0.25, dtype), np.ones(2**13, bool))
    assert (found.dtype, float(found)) == (dtype, 2048.0)


@pytest.mark.parametrize("size", [1, 4])
def test_microbatches_keep_imaginary_parts(size):
    total = dpoptax.extend.in_microbatches(lambda x, mask: (jnp.sum(x, where=mask), None), size)
    found, _ = total(jnp.full(20, 1 + 2j), np.ones(20, bool))
    assert (found.dtype, complex(found)) == (jnp.complex64, 20 + 40j)


def test_groups_one_after_the_other_give_the_same(monkeypatch):
    """Checks products of stacked layers in the order of TPUs."""
    rng, sizes = np.random.default_rng(0), (3, 256, 8)
    rows, columns = (floats(rng.uniform(-1, 1, (6, 3, 4, n))) for n in sizes[1:])
    segments = [factor_products.Segment(rows, columns)]

    def results(coefficients):
        total = product_sums.sum_products(
            FactoredGradients(segments, sizes), coefficients, bound=1.0, examples=6
        )
        return factor_products.measure(segments, sizes, "gram"), total

    coefficients = floats(rng.uniform(0, 1, 6))
    together = results(coefficients)
    monkeypatch.setattr(factor_products, "_LARGE_MATRIX", 0)
    pick = lambda *args, tpu=None, default, **_: (tpu or default)(*args)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", pick)
    assert str(jax.make_jaxpr(results)(coefficients)).count("scan[") == 2
    close = lambda *x: np.testing.assert_allclose(*x, rtol=1e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(close, results(coefficients), together)
