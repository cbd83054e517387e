"""Tests that each margin for rounding in the proof of the bound holds, and is needed.

Each case is an inequality of docs/developers/bound.md, "left ≤ right", for data at which rounding
matters most. `rounding_interpreter` searches for the roundings that make left/right largest. With
the margins of the library it must be at most 1, and close to it. With one of them shortened it must
exceed 1.
"""

import math
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._clipped_sum import accumulate as accumulate_module
from dpoptax._ghost_clipping import factor_products
from dpoptax._ghost_clipping.factor_products import (
    FactoredGradients,
    MeasuredTerm,
    Segment,
)
from dpoptax._ghost_clipping.sums import product_sums
from dpoptax._ghost_clipping.transformed import cotangents, pulled_back_norms
from dpoptax._losses.rules import FactorLayout
from dpoptax._rounding import block_sums, bounds, part_limits
from dpoptax._rounding.bounds import NormBounds, Piece
from dpoptax._rounding.part_limits import PartLimits
from tests.clip.rounding_interpreter import largest

C = 0.3
TAU = 0.01
# Not a power of two, so that products are rounded.
ENTRY = np.float32(0.7)


def full(*shape):
    return np.full(shape, ENTRY)


def norm(x):
    return np.sqrt(np.sum(np.square(np.float64(x))))


# Norms.


def formed(machine, size):
    """‖x‖² of 384 numbers is summed in one block, and of 1,536 in three."""
    x = full(1, size)
    return norm(x) ** 2 / machine.run(bounds.upper_square, x)[0]


def factors(positions=1, rows=1, columns=1, stacks=1, segments=1):
    kinds = [Segment(full(1, stacks, positions, rows), full(1, stacks, positions, columns))]
    return kinds * segments, (stacks, rows, columns)


def measured(machine, segments, sizes, method):
    if method == "form":
        measure = lambda *x: factor_products.measure_formed(list(x), sizes)  # noqa: E731
    else:
        measure = lambda *x: factor_products.measure(list(x), sizes, method)  # noqa: E731
    return machine.run(measure, *segments)


def absolute_size(machine, **shape):
    """S of equal positions."""
    segments, sizes = factors(**shape)
    stacks, rows, columns = sizes
    positions = sum(s.rows.shape[2] for s in segments)
    exact = positions * math.sqrt(stacks * rows * columns) * np.float64(ENTRY) ** 2
    return exact / measured(machine, segments, sizes, "outer").absolute[0]


def square_of_products(machine, method, **shape):
    """‖G‖² of equal positions."""
    segments, sizes = factors(**shape)
    positions = sum(s.rows.shape[2] for s in segments)
    exact = positions**2 * math.prod(sizes) * np.float64(ENTRY) ** 4
    return exact / measured(machine, segments, sizes, method).square[0]


def underflowing_size(machine):
    """S for two positions, each a product of a large and a tiny number."""
    tiny = np.float32(2.0**-70)
    rows, columns = np.array([1, tiny]), np.array([tiny, 1])
    segments = [Segment(rows.reshape(1, 1, 2, 1), columns.reshape(1, 1, 2, 1))]
    bound = measured(machine, segments, (1, 1, 1), "outer")
    return 2.0 * tiny / np.maximum(bound.absolute[0], 1e-99)


def underflowing_square(machine, method):
    """‖G‖² for equal positions, whose rows are tiny and whose columns are large."""
    tiny, large, length = np.float32(2.0**-63.5), np.float32(2.0**30), 2
    segments = [Segment(tiny * full(1, 1, 2, length), large * full(1, 1, 2, length))]
    exact = (2.0 * length * np.float64(ENTRY) ** 2 * tiny * large) ** 2
    bound = measured(machine, segments, (1, length, length), method)
    return exact / np.maximum(bound.square[0], 1e-99)


def square_with_term(machine, positions, rows, columns):
    """‖Σ_t r_t ⊗ c_t + V w‖² of equal positions and one fixed term."""
    segment = Segment(full(1, 1, positions, rows), full(1, 1, positions, columns))
    basis, weights = 2 * full(rows, columns), full(1, 1, 1, 1)

    def measure(segment, basis, weights):
        layout = FactorLayout((rows, columns), (), (0,), (1,))
        outer = cotangents.OuterSum(segment, layout)
        inner = outer.inner_product(basis, (0, 1))
        term = MeasuredTerm(basis[None], weights, inner)
        return pulled_back_norms.measure_terms(FactoredGradients([segment], layout.sizes, [term]))

    entry = (positions + 2) * np.float64(ENTRY) ** 2
    return rows * columns * entry**2 / machine.run(measure, segment, basis, weights).square[0]


def absolute_size_with_term(machine, rows, columns):
    """S of one position and one fixed term, which is larger."""
    segment, sizes = factors(rows=rows, columns=columns)
    (segment,) = segment
    basis, weights = full(1, rows, columns), 64 * full(1, 1, 1, 1)

    def measure(segment, basis, weights):
        term = MeasuredTerm(basis, weights, weights)
        return pulled_back_norms.measure_terms(FactoredGradients([segment], sizes, [term]))

    exact = 65 * math.sqrt(rows * columns) * np.float64(ENTRY) ** 2
    return exact / machine.run(measure, segment, basis, weights).absolute[0]


def underflowing_term(machine):
    """S of a fixed term whose squares underflow."""
    tiny = np.float32(2.0**-70)
    basis, weights = np.ones((1, 2, 2), np.float32), tiny * np.ones((1, 1, 1, 1), np.float32)
    sizes = lambda *x: pulled_back_norms._term_sizes([MeasuredTerm(*x)], (1, 2, 2))  # noqa: E731
    return 2.0 * tiny / np.maximum(machine.run(sizes, basis, weights, weights)[0][0], 1e-99)


# The factor of an example.


def coefficient(machine, clip, pieces=1, absolute=0.0, ratio=1.0, error=0.0, room_for=0.0):
    """(1 + τ) ‖f G‖/C, with the error of weighted factors."""

    def coefficients(squares, absolutes):
        measured = [
            Piece(NormBounds(*size), ratio=ratio, sum_error=error)
            for size in zip(squares, absolutes, strict=True)
        ]
        mask = np.ones(1, bool)
        found, *_ = bounds.clip_coefficients(clip, measured, mask, groups=[0], tau=TAU)
        return jnp.stack(found)

    squares = full(pieces, 1)
    sizes = absolute * np.sqrt(squares)
    found = machine.run(coefficients, squares, sizes)
    lengths = np.sqrt(np.float64(squares)) + room_for * np.float64(sizes)
    return np.sqrt(np.sum((found * lengths) ** 2)) * (1 + TAU) / clip.sensitivity


def absolute_coefficient(machine, ratio=8.0, absolute=100.0):
    """(1 + τ) f S/(M C) for terms that cancel."""

    def coefficients(square, size):
        piece = Piece(NormBounds(square, size), ratio=ratio)
        (found,), *_ = bounds.clip_coefficients(
            dpoptax.l2_clip(C), [piece], np.ones(1, bool), groups=[0], tau=TAU
        )
        return found

    square, size = full(1), absolute * full(1)
    found = machine.run(coefficients, square, size)
    return found[0] * np.float64(size[0]) * (1 + TAU) / (ratio * C)


def part_length(machine, error=2.0**-8):
    """n + e S of a part that is measured in two turns."""
    square, size = full(1), 3 * full(1)
    part = lambda *x: part_limits.part_length(  # noqa: E731
        Piece(NormBounds(*x), ratio=8.0, sum_error=error)
    )
    exact = np.sqrt(np.float64(square)) + error * np.float64(size)
    return exact[0] / machine.run(part, square, size)[0]


def joined_length(machine, parts=1, steps=1):
    """The norm of a gradient from the lengths of its parts."""
    given = [full(1, steps)] * parts
    found = machine.run(lambda *x: part_limits.join_lengths(list(x)), *given)
    return parts * norm(given[0]) / found.absolute[0]


def limited(machine, quantity, ratio=8.0, error=2.0**-23):
    """The length, or the absolute size, of a part that is summed within part_limits."""
    given = PartLimits(full(1), full(1) / 3)
    square, size = full(1), (100 if quantity == "size" else 1) * full(1)

    def weigh(limit, *size):
        piece = Piece(NormBounds(*size), ratio=ratio, sum_error=error)
        return part_limits.limited_coefficients(limit, part_limits.part_length(piece))

    weight = machine.run(weigh, given, square, size)[0]
    most = np.float64(given.factor) * np.float64(given.length)
    if quantity == "size":
        return weight * (1 + error) * np.float64(size)[0] / (ratio * most[0])
    return weight * np.sqrt(np.float64(square))[0] / most[0]


# The sum.


def moved(machine, total, weights, tau, *, summand=1.0):
    """How much the first example moves a sum, relative to C, if its summand is C/(1 + τ)."""
    others = weights.copy()
    others[(0,) * weights.ndim] = 0
    change = machine.run(total, weights) - machine.run(total, others, again=True)
    return abs(np.ravel(change)[0]) / (summand * (1 + tau))


def formed_sum(machine, examples):
    """A sum of formed gradients in blocks and pairs, without micro-batches and devices."""
    rounding = block_sums.block_rounding(examples, block_sums.BLOCK_LENGTH)
    total = lambda w: block_sums.sum_weighted(w, full(examples, 1))  # noqa: E731
    tau = block_sums.combine_roundings([rounding])
    return moved(machine, total, np.ones(examples, np.float32), tau, summand=float(ENTRY))


def layout_sum(machine):
    """Formed gradients of eight micro-batches on each of eight devices."""
    each, devices = 32, 8
    examples = each * devices**2
    part = lambda w: block_sums.sum_weighted(w, full(each, 1))  # noqa: E731

    def total(weights):
        parts = jax.vmap(jax.vmap(part))(weights)
        return sum(sum(list(of_device)) for of_device in parts)

    whole = block_sums.WholeBatch(examples, devices)
    one_block = block_sums.block_rounding(each, block_sums.BLOCK_LENGTH)
    tau = block_sums.combine_roundings([one_block]) + block_sums.layout_rounding(whole)
    weights = np.ones((devices, devices, each), np.float32)
    return moved(machine, total, weights, tau, summand=float(ENTRY))


def product_sum(machine, factored, blocks=1, examples=None):
    """Gradients whose parts are together M times as large as their sum."""
    if examples is None:
        examples = blocks * product_sums.split_sum(factored(1), 1).block
    given = factored(examples)
    total = lambda w: product_sums.sum_products(  # noqa: E731
        given, w, bound=1.0, examples=examples
    )
    tau = block_sums.combine_roundings([product_sums.product_rounding(given, examples)])
    return moved(machine, total, np.ones(examples, np.float32), tau)


def accumulated(machine, parts=3, examples=64):
    """The sum of a batch in parts, to which all other examples add as much as allowed."""

    def total(*values):
        sums = [
            dpoptax.extend.trust_clipped(value, dpoptax.l2_clip(1.0), examples=examples)
            for value in values
        ]
        return dpoptax.accumulate(*sums).sum

    values = [np.float32(examples)] * parts
    change = machine.run(total, *values)
    change -= machine.run(total, values[0] - np.float32(1), *values[1:], again=True)
    return change


def canceling(parts):
    """Returns numbers with sum 1 whose magnitudes have the sum M, positive ones first."""
    ratio = bounds.largest_ratio(parts)
    positive = (parts + 1) // 2
    signs = np.where(np.arange(parts) < positive, 1, -1)
    each = np.where(signs > 0, (ratio + 1) / 2 / positive, (ratio - 1) / 2 / (parts - positive))
    return np.float32(signs * each)


def positions(examples):
    columns = np.broadcast_to(canceling(16).reshape(16, 1), (examples, 1, 16, 1))
    return FactoredGradients([Segment(np.ones_like(columns), columns)], (1, 1, 1))


def points(examples):
    columns = [np.full((examples, 1, 1, 1), part) for part in canceling(3)]
    return FactoredGradients([Segment(np.ones_like(c), c) for c in columns], (1, 1, 1))


def fixed_term(examples):
    positive, negative = canceling(2)
    ones = np.ones((examples, 1, 1, 1), np.float32)
    weights = np.float32(positive / ENTRY) * ones
    term = MeasuredTerm(full(1, 1, 1), weights, weights)
    return FactoredGradients([Segment(ones, negative * ones)], (1, 1, 1), [term])


def lookups(examples):
    columns = np.broadcast_to(canceling(2).reshape(2, 1), (examples, 1, 2, 1))
    rows = np.zeros((examples, 1, 2), np.int32)
    return FactoredGradients([Segment(rows, columns)], (1, 4, 1))


# The table of margins.


def shorter_gamma(module, *functions, kind=lambda operations: True):
    """Shortens the γ that functions take from a module, all or those of some kind."""

    def shorten(patch, share):
        exact = module.gamma

        def gamma(operations):
            caller = sys._getframe(1).f_code.co_name
            return exact(
                operations * share if caller in functions and kind(operations) else operations
            )

        patch.setattr(module, "gamma", gamma)

    return shorten


def shorter(module, *names):
    """Multiplies numbers of a module, or the results of its functions, by a share."""

    def shorten(patch, share):
        for name in names:
            exact = getattr(module, name)
            less = (lambda *args, e=exact: share * e(*args)) if callable(exact) else share * exact
            patch.setattr(module, name, less)

    return shorten


ROOM = shorter_gamma(factor_products, "_length_room")
INNER = shorter_gamma(factor_products, "_inner_errors", "_chain_error")
FORMED = shorter_gamma(factor_products, "measure_formed")
COEFFICIENT = shorter_gamma(bounds, "clip_coefficients")
JOINED = shorter_gamma(part_limits, "join_lengths")
PART = shorter_gamma(part_limits, "part_length")
FLOOR = shorter(factor_products, "_VECTOR_FLOOR")
TERMS = shorter_gamma(bounds, "measure_terms", kind=lambda operations: operations > 8)
BLOCK = shorter_gamma(block_sums, "block_rounding")
ABOVE = shorter(block_sums, "_rounding_above")
PARTS = shorter(block_sums, "parts_rounding")
L2, AUTO = dpoptax.l2_clip(C), dpoptax.automatic_clip(C, gamma=0.0)
E32, E16 = bounds.FLOAT32_ERROR, product_sums.BFLOAT16_ERROR
# The error of a product in float32, and of a second rounding, to bfloat16.
ONCE, TWICE = 2.0**-24, (1 + 2.0**-24) * (1 + 2.0**-8) - 1
MOST = bounds.largest_ratio(64)

# Name: inequality, margin, and a share of the margin that is not enough.
MARGINS = {
    "upper_square": (partial(formed, size=1536), shorter_gamma(bounds, "upper_square"), 0.97),
    "upper_square, one block": (
        partial(formed, size=384), shorter_gamma(bounds, "upper_square"), 0.97
    ),
    "S, rows": (partial(absolute_size, rows=500), ROOM, 0.97),
    "S, columns": (partial(absolute_size, columns=500), ROOM, 0.97),
    "S, positions": (partial(absolute_size, positions=500), ROOM, 0.97),
    "S, stacks": (partial(absolute_size, stacks=500), ROOM, 0.95),
    "S, segments": (partial(absolute_size, segments=6), ROOM, 0.4),
    "S, one number": (absolute_size, ROOM, 0.6),
    "S, underflow": (underflowing_size, FLOOR, 0.0),
    "inner products, rows": (partial(square_of_products, method="gram", rows=500), INNER, 0.95),
    "inner products, columns": (
        partial(square_of_products, method="gram", columns=500), INNER, 0.95
    ),
    "inner products, positions": (
        partial(square_of_products, method="gram", positions=50), INNER, 0.8
    ),
    "inner products, in parts": (
        partial(square_of_products, method="gram", rows=5000), INNER, 0.9
    ),
    "inner products, stacks": (partial(square_of_products, method="gram", stacks=500), INNER, 0.95),
    "inner products, segments": (
        partial(square_of_products, method="gram", segments=3), INNER, 0.2
    ),
    "inner products, underflow": (partial(underflowing_square, method="gram"), FLOOR, 0.0),
    "formed, positions": (partial(square_of_products, method="form", positions=500), FORMED, 0.97),
    "formed, segments": (partial(square_of_products, method="form", segments=6), FORMED, 0.2),
    "fixed terms": (partial(square_with_term, positions=1, rows=40, columns=50), TERMS, 0.6),
    "fixed terms, S": (
        partial(absolute_size_with_term, rows=40, columns=50),
        shorter_gamma(bounds, "_term_sizes"), 0.0
    ),
    "fixed terms, underflow": (
        underflowing_term, shorter(pulled_back_norms, "_TERM_FLOOR"), 0.0
    ),
    "coefficient of L2": (partial(coefficient, clip=L2), COEFFICIENT, 0.5),
    "coefficient of AUTO-V": (partial(coefficient, clip=AUTO), COEFFICIENT, 0.5),
    "coefficient of PSAC": (
        partial(coefficient, clip=dpoptax.contrib.psac_clip(C, 1e-9)), COEFFICIENT, 0.5
    ),
    "coefficient of many pieces": (partial(coefficient, clip=L2, pieces=100), COEFFICIENT, 0.8),
    "coefficient by S": (absolute_coefficient, COEFFICIENT, 0.3),
    "part": (part_length, PART, 0.0),
    "joined parts": (partial(joined_length, parts=60), JOINED, 0.3),
    "joined steps": (partial(joined_length, steps=500), JOINED, 0.4),
    "limited norm": (partial(limited, quantity="norm"), PART, 0.0),
    "limited S": (partial(limited, quantity="size"), PART, 0.1),
    "block": (partial(formed_sum, examples=32), BLOCK, 0.97),
    "levels": (partial(formed_sum, examples=33 * 32), ABOVE, 0.5),
    "layout": (layout_sum, shorter(block_sums, "_device_rounding"), 0.3),
    "block of positions": (partial(product_sum, factored=positions), BLOCK, 0.9),
    "block of points": (partial(product_sum, factored=points), BLOCK, 0.97),
    "levels of points": (partial(product_sum, factored=points, blocks=9), ABOVE, 0.1),
    "points": (partial(product_sum, factored=points), PARTS, 0.0),
    "fixed terms, sum": (partial(product_sum, factored=fixed_term), PARTS, 0.0),
    "lookups": (partial(product_sum, factored=lookups, examples=16), BLOCK, 0.9),
    "accumulate": (accumulated, shorter(accumulate_module, "parts_rounding"), 0.97),
}  # fmt: skip


@pytest.fixture(autouse=True)
def exact_checks(monkeypatch):
    """Replaces what holds for rounding to nearest only, and is not a number of a bound."""

    def two_sum(total, value):
        found = total + value
        return found, jax.jit(lost_by_addition)(total, value, found)

    monkeypatch.setattr(bounds, "keeps_order", lambda values: np.bool_(True))
    monkeypatch.setattr(block_sums, "two_sum", two_sum)


def lost_by_addition(total, value, found):
    return (total - found) + value


@pytest.mark.parametrize("name", MARGINS)
def test_margin_holds_and_is_needed(name, monkeypatch):
    ratio, shorten, share = MARGINS[name]
    with_it = largest(ratio)
    shorten(monkeypatch, share)
    without = largest(ratio)
    unit = bounds.UNIT_ROUNDOFF
    print(f"{name}: 1 {(with_it - 1) / unit:+.2f} u, {share}: 1 {(without - 1) / unit:+.2f} u")
    assert with_it <= 1 < without
    assert with_it > 0.99 or "underflow" in name


@pytest.mark.parametrize(("error", "rounding"), [(E32, ONCE), (E16, TWICE)], ids=["32", "16"])
def test_error_of_weighted_factors_holds_and_is_needed(error, rounding):
    """The weighted factor is rounded, which changes a summand by f S times the rounding."""
    case = partial(coefficient, clip=L2, absolute=MOST, ratio=MOST, room_for=rounding)
    assert largest(partial(case, error=error)) <= 1
    assert largest(partial(case, error=error / 4)) > 1


def test_underflow_of_formed_gradients_is_covered_twice(monkeypatch):
    """Entries of a formed gradient underflow; the room of its squares or of S is enough."""
    case = partial(underflowing_formed, method="form")
    with monkeypatch.context() as patch:
        FLOOR(patch, 0.0)
        assert largest(case) <= 1
    monkeypatch.setattr(bounds, "_LOST_SQUARE", 0.0)
    assert largest(case) <= 1
    FLOOR(monkeypatch, 0.0)
    assert largest(case) > 1


def underflowing_formed(machine, method):
    """‖G‖² for two positions, each a product of a large and a tiny number."""
    tiny = np.float32(2.0**-70)
    rows, columns = np.array([1, tiny]), np.array([tiny, 1])
    segments = [Segment(rows.reshape(1, 1, 2, 1), columns.reshape(1, 1, 2, 1))]
    bound = measured(machine, segments, (1, 1, 1), method)
    return (2.0 * tiny) ** 2 / np.maximum(bound.square[0], 1e-99)
