"""Tests sums of integers, whose bound does not depend on rounding."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._ghost_clipping import cost_model
from dpoptax._ghost_clipping.integers import integer_norms, integer_products, integer_sum
from dpoptax._rounding import bounds, wide_integers
from dpoptax.auditing import _worst_example as adversary
from tests import helpers, programs
from tests.multidevice import problem

EXAMPLES = 12
CLIP = dpoptax.l2_clip(1.0)
GRID = 2.0**-16
# Programs whose gradients are products, of every kind: loss, shapes of parameters and of data.
PROGRAMS = {
    "one position": (programs.linear, [(5, 3)], [(1, 5), (1, 3)]),
    "positions": (programs.linear, [(5, 3)], [(7, 5), (7, 3)]),
    "groups": (programs.batched, [(4, 5, 3)], [(7, 4, 5), (7, 4, 3)]),
    "scanned": (programs.scanned, [(2, 5, 3)], [(2, 4, 5), (2, 4, 3)]),
    "convolution": (functools.partial(programs.convolution, 1), [(3, 4, 5)], [(9, 4), (9, 5)]),
    "tied": (programs.tied, [(6, 5)], [(4, 5), (4, 5)]),
    "lookup": (programs.linear, [(6, 5)], [(4, 6), (4, 5)]),
    "formed": (programs.elementwise, [(5,), (5,)], [(5,), (5,)]),
    "formed matrix": (lambda w, e: jnp.sum(w[0] * e[0] * e[1]), [(4, 5)], [(4, 5), (4, 5)]),
}


def _one_hot_lookup(params, example):
    """Looks up tokens, with repetitions and negative ones."""
    x, d = example
    tokens = jnp.argmax(x, axis=-1)
    return jnp.sum(params[0][tokens - 6 * (tokens > 3)] * d)


PROGRAMS["lookup"] = (_one_hot_lookup, *PROGRAMS["lookup"][1:])


@pytest.fixture(autouse=True)
def _products(monkeypatch):
    """Keeps small gradients from being formed."""
    monkeypatch.setattr(
        cost_model,
        "choose_method",
        lambda examples, positions, rows, columns, *, segments, **_: (
            "outer" if positions == segments == 1 else "gram"
        ),
    )


def _make(name, method="integers", grid=GRID, **options):
    loss, shapes, _ = PROGRAMS[name]
    params = [helpers.floats(np.random.default_rng(0).normal(size=s)) for s in shapes]
    grad_fn = dpoptax.clipped_grad(loss, CLIP, method=method, grid=grid, **options)
    return jax.jit(lambda batch, mask: grad_fn(params, batch, mask).sum)


def _batch(name, seed=0, examples=EXAMPLES):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(examples, *s)).astype(np.float32) for s in PROGRAMS[name][2])


def _limit(name, grid=GRID):
    """Returns C/g + √d/2."""
    entries = sum(math.prod(s) for s in PROGRAMS[name][1])
    return CLIP.sensitivity / grid + math.sqrt(entries) / 2


def _vector(total):
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(total)]).astype(object)


def _contributions(total, batch):
    """Returns the integers that each example contributes to the sum, (B, d)."""
    return np.stack([_vector(total(batch, row)) for row in np.eye(len(batch[0]), dtype=bool)])


def _norms(contributions):
    return np.sqrt((contributions**2).sum(1).astype(float))


@pytest.mark.parametrize("name", PROGRAMS)
def test_sum_is_close_to_sum_of_rounded_gradients(name):
    batch, mask = _batch(name), np.arange(EXAMPLES) % 4 != 1
    total, want = (
        _make(name, method, grid=2.0**-20)(batch, mask) for method in ("integers", "vmap")
    )
    assert {x.dtype for x in total} == {jnp.dtype("int32")}
    total, want = _vector(total), _vector(want)
    error, size = (np.linalg.norm(x.astype(float)) for x in (total - want, want))
    assert error < 0.05 * size


@pytest.mark.parametrize("positions", [1, 16, 128])
def test_rounding_is_small_next_to_noise(positions):
    """Prints the numbers of docs/developers/exact-sums.md, for σ = 1."""
    size, width = 64, 128
    rng = np.random.default_rng(0)
    batch = tuple(rng.standard_normal((size, positions, width), np.float32) for _ in range(2))
    grid = dpoptax.extend.fixed_point_grid(CLIP, noise_multiplier=1.0, batch_size=size)
    got, want = (
        dpoptax.clipped_grad(programs.linear, CLIP, method=method, grid=grid)(
            [programs.zeros(width, width)], batch
        ).sum[0]
        for method in ("integers", "vmap")
    )
    got, want = (np.asarray(x, np.float64).ravel() * grid for x in (got, want))
    error = float(np.linalg.norm(got - want))
    shorter = 1 - float(got @ want) / float(want @ want)
    print(
        f"{positions} positions: error {error / width:.1e} of the noise, "
        f"{error / np.linalg.norm(want):.1%} of the sum, {shorter:.1%} shorter"
    )
    assert error / width < 5e-3
    assert shorter < 0.05


@pytest.mark.parametrize("name", PROGRAMS)
def test_sum_is_exactly_the_sum_of_contributions_within_the_limit(name):
    total, batch = _make(name), _batch(name)
    added = _contributions(total, batch)
    assert (_vector(total(batch, np.ones(EXAMPLES, bool))) == added.sum(0)).all()
    limit = _limit(name)
    # All gradients are much longer than the bound, and are shortened almost exactly to it.
    assert (_norms(added) <= limit).all()
    assert (_norms(added) > 0.93 * limit).all()


def _extreme(name):
    """Returns examples with heavy tails, equal positions, cancellations and non-finite numbers."""
    rng = np.random.default_rng(3)
    scales = [1e-45, 1e-30, 1e-3, 1.0, 1e5, 1e18, 3e38]
    found = []
    for scale in scales:
        heavy = _batch(name, 4, 3)
        found += [tuple(np.sign(x) * np.abs(x) ** 9 * np.float32(scale) for x in heavy)]
        equal = tuple(np.broadcast_to(x[:, :1], x.shape) for x in _batch(name, 5, 3))
        found += [tuple(x * np.float32(scale) for x in equal)]
        half = tuple(np.rint(4 * x) + np.float32(0.5) for x in _batch(name, 6, 3))
        found += [(half[0], half[1] * np.float32(scale))]
    broken = _batch(name, 7, 6)
    for i, value in enumerate((np.nan, np.inf, -np.inf)):
        broken[0].reshape(6, -1)[i, rng.integers(2)] = value
        broken[1].reshape(6, -1)[3 + i, rng.integers(2)] = value
    sparse = tuple(x * (rng.random(x.shape) < 0.15) for x in _batch(name, 8, 6))
    alternate = _batch(name, 9, 6)
    alternate[0][:] = 1.0
    if alternate[1].ndim > 2:
        alternate[1][:, 1::2] = -alternate[1][:, : alternate[1].shape[1] // 2 * 2 : 2]
    found += [broken, sparse, alternate]
    return tuple(np.concatenate(x).astype(np.float32) for x in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("grid", helpers.slow_but([2.0**-13], [2.0**-6, 2.0**-13, 2.0**-20]))
@pytest.mark.parametrize("name", PROGRAMS)
def test_extreme_examples_stay_within_the_limit(name, grid):
    batch = _extreme(name)
    added = _contributions(_make(name, grid=grid), batch)
    assert (_norms(added) <= _limit(name, grid=grid)).all()
    read = batch[name == "lookup" :]  # a lookup's rows are one-hot, whatever the data
    finite = np.all([np.isfinite(x).reshape(len(x), -1).all(1) for x in read], axis=0)
    assert not added[~finite].any()
    assert added.any() or grid > 2.0**-10


@pytest.mark.parametrize("factor", helpers.slow_but([1.5], [1.03, 1.5, 1e30, np.nan]))
@pytest.mark.parametrize("name", PROGRAMS)
def test_bound_does_not_depend_on_coefficients(name, factor, monkeypatch):
    """Whatever the arithmetic in floats returns, a contribution that is too long is zero."""
    real = bounds.clip_coefficients

    def wrong(*args, **kwargs):
        coefficients, *rest = real(*args, **kwargs)
        return coefficients * factor, *rest

    monkeypatch.setattr(bounds, "clip_coefficients", wrong)
    monkeypatch.setattr(integer_sum, "_room", lambda *_: jnp.float32(1.0))
    added = _contributions(_make(name), _batch(name))
    assert (_norms(added) <= _limit(name)).all()
    assert not added.any() or factor < 2
    # Without the certificate, the same examples exceed the limit.
    monkeypatch.setattr(wide_integers, "at_most", lambda x, bound: jnp.ones(x.shape[1:], bool))
    without = _contributions(_make(name), _batch(name))
    assert np.isnan(factor) or (_norms(without) > _limit(name)).any()


@pytest.mark.parametrize("name", ["one position", "positions", "tied"])
def test_search_finds_no_example_above_the_limit(name):
    total, others = _make(name), _batch(name)
    found, _ = adversary.climb(total, others, seed=0, starts=14, steps=20)
    assert 0.9 * _limit(name) < found <= _limit(name)


def test_integers_are_equal_in_every_layout():
    """Factors are multiples of 1/4, so that the passes are exact in every layout."""
    batch = tuple(np.rint(4 * x) / 4 for x in _batch("positions", examples=16))
    mask = np.arange(16) % 5 != 2
    want = _make("positions")(batch, mask)
    for size in (1, 3, 8):
        got = _make("positions", microbatch_size=size)(batch, mask)
        np.testing.assert_array_equal(got[0], want[0])
    order = np.random.default_rng(0).permutation(16)
    got = _make("positions")(tuple(x[order] for x in batch), mask[order])
    np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize(
    ("positions", "kind", "length"),
    [(1000, jnp.float32, 1024), (2500, jnp.float32, 1024), (2500, jnp.int32, 2**16)],
)
def test_products_of_integers_are_exact(positions, kind, length, monkeypatch):
    rng = np.random.default_rng(0)
    rows = rng.choice([-127, 127, 126], (1, 2, positions, 3)).astype(np.int8)
    columns = np.abs(rng.choice([-32512, 32512, 32511, 5], (1, 2, positions, 4))).astype(np.int16)
    rows[..., 0], columns[..., 0] = 127, 32512  # the largest sum
    product = functools.partial(integer_products._multiply_in_blocks, kind=kind, length=length)
    monkeypatch.setattr(
        integer_products, "multiply_digits", lambda a, b: product(a, b.astype(jnp.int8))
    )
    got = np.asarray(jax.jit(integer_products._multiply)(rows, columns))
    want = np.einsum("bktr,bktd->bkrd", rows.astype(np.int64), columns.astype(np.int64))
    np.testing.assert_array_equal(got, want.astype(np.uint64).astype(np.uint32).view(np.int32))


def _uses(kinds, sizes=(2, 6, 5), examples=4, positions=3):
    """Returns random factors, and the contributions of the examples by definition."""
    rng = np.random.default_rng(len(kinds))
    groups, rows, columns = sizes
    uses, total = [], 0
    for kind in kinds:
        swapped, one_hot = kind == "one-hot columns", kind != "dense"
        size, width = (columns, rows) if swapped else (rows, columns)
        shape = (examples, groups, positions)
        weighted = rng.integers(-32512, 32513, (*shape, width))
        scale = 2 ** rng.integers(0, 7, examples)
        if one_hot:
            index = rng.integers(0, size + 1, shape)  # one index is beyond the end
            index[0] = index[0, :, :1] % size
            dense = (index[..., None] == np.arange(size)) * scale[:, None, None, None]
        else:
            index = dense = rng.choice([-127, -1, 3, 127], (*shape, size))
        found = np.einsum("bktr,bktd->bkrd", dense.astype(object), weighted.astype(object))
        total = total + (found.swapaxes(-1, -2) if swapped else found)
        arrays = (index, np.int32 if one_hot else np.int8), (weighted, np.int16), (scale, np.int32)
        uses.append(
            integer_products.IntegerFactors(
                *(jnp.asarray(x.astype(kind)) for x, kind in arrays), size, swapped
            )
        )
    return uses, total


@pytest.mark.parametrize("method", ["gram", "form"])
@pytest.mark.parametrize(
    "kinds",
    [
        ["dense"], ["one-hot rows"], ["one-hot columns"], ["dense", "dense"],
        ["dense", "one-hot rows"], ["one-hot columns", "dense", "one-hot rows"],
    ],
    ids=" and ".join,
)  # fmt: skip
def test_certificate_is_the_exact_norm(kinds, method):
    uses, contributions = _uses(kinds)
    terms = integer_norms.square_norms(uses, (2, 6, 5), method)
    want = (contributions**2).reshape(4, -1).sum(1)
    for bound in want:
        for off in (-1, 0):
            kept = integer_norms.certify(terms, int(bound) + off)
            at_most = want <= bound + off
            # Indices beyond the end may increase the norm. The first example has none.
            assert not (np.asarray(kept) & ~at_most).any()
            assert kept[0] == at_most[0]
            if kinds == ["dense"] * len(kinds) or method == "form":
                np.testing.assert_array_equal(kept, at_most)
    got = sum(
        np.asarray(integer_products.sum_kept(use, np.ones(4, bool))).astype(object) for use in uses
    )
    np.testing.assert_array_equal(got, contributions.sum(0))


def test_gradients_of_large_tables_are_not_formed(monkeypatch):
    uses, contributions = _uses(["one-hot rows"])
    monkeypatch.setattr(integer_norms, "form", None)
    monkeypatch.setattr(integer_norms, "INTEGER_TERMS", 5)  # a row has 5 entries, the table 6 rows
    terms = integer_norms.square_norms(uses, (2, 6, 5), "gram")
    square = int((contributions[0] ** 2).sum())
    assert [bool(integer_norms.certify(terms, square + off)[0]) for off in (-1, 0)] == [False, True]


@pytest.mark.parametrize(
    "clip", [dpoptax.per_layer_clip(1.0), dpoptax.automatic_clip(1.0)], ids=str
)
def test_all_layers_at_several_points(clip):
    """Embeddings, convolutions, attention and biases, of DiSK's two points."""
    points = dpoptax.GradientPoints((problem.make_params(0), problem.make_params(1)), (1.5, -0.5))
    batch, grid = problem.make_batch(0, 16), clip.sensitivity * 2.0**-18
    sums = [
        dpoptax.clipped_grad(problem.loss_fn, clip, method=method, grid=grid)(points, batch)
        for method in ("integers", "vmap")
    ]
    got, want = (_vector(x.sum).astype(float) for x in sums)
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize("bits", [6, 12, 20])
def test_lookups_are_rounded_to_the_grid(bits):
    batch = _batch("lookup")
    got, want = (
        _contributions(_make("lookup", method, grid=2.0**-bits), batch).astype(float)
        for method in ("integers", "vmap")
    )
    # Each of at most 20 entries is rounded twice.
    room = 4 * math.sqrt(20) * max(1, 2.0 ** (bits - 14))
    assert np.linalg.norm(got - want, axis=1).max() < room


@pytest.mark.parametrize("bits", [9, 3])
def test_grid_below_the_rounding_warns(bits):
    """The rounding of 64 positions and 16 × 16 parameters may be 2⁷ grid steps."""
    rng = np.random.default_rng(0)
    batch = tuple(rng.standard_normal((EXAMPLES, 64, 16), np.float32) for _ in range(2))
    grad_fn = dpoptax.clipped_grad(programs.linear, CLIP, method="integers", grid=2.0**-bits)
    with contextlib.nullcontext() if bits == 9 else pytest.warns(UserWarning, match="drop them"):
        grad_fn([programs.zeros(16, 16)], batch)


def test_points_that_nearly_agree_have_accurate_differences():
    """As for DiSK with small gamma, large weights multiply small differences of rows."""
    rng = np.random.default_rng(0)
    first = [helpers.floats(rng.normal(size=s)) for s in ((5, 4), (4, 3))]
    other = [x + 1e-4 * helpers.floats(rng.normal(size=x.shape)) for x in first]
    points = dpoptax.GradientPoints((first, other), (101.0, -100.0))
    batch = rng.normal(size=(EXAMPLES, 7, 5)).astype(np.float32)

    def loss(params, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]))

    got, want = (
        _vector(
            dpoptax.clipped_grad(loss, CLIP, method=method, grid=2.0**-18)(points, batch).sum
        ).astype(float)
        for method in ("integers", "vmap")
    )
    assert np.linalg.norm(got - want) < 0.04 * np.linalg.norm(want)


def test_noise_in_fixed_point_accepts_the_sum():
    mechanism = {"noise_multiplier": 1.0, "batch_size": EXAMPLES}
    grid = dpoptax.extend.fixed_point_grid(CLIP, **mechanism)
    loss, shapes, _ = PROGRAMS["positions"]
    params = [programs.zeros(*s) for s in shapes]
    clipped = dpoptax.clipped_grad(loss, CLIP, method="integers", grid=grid)(
        params, _batch("positions")
    )
    tx = dpoptax.gaussian_noise(**mechanism, key=jax.random.key(0), fixed_point=True)
    noisy, _ = jax.jit(tx.update)(clipped, tx.init(params), params)
    steps = np.asarray(noisy[0], np.float64) * EXAMPLES / grid
    np.testing.assert_allclose(steps, np.rint(steps), atol=0.1)


def test_options_that_exclude_integers_are_refused():
    with pytest.raises(ValueError, match="needs a `grid`"):
        dpoptax.clipped_grad(programs.linear, 1.0, method="integers")
    with pytest.raises(ValueError, match="does not encode"):
        dpoptax.clipped_grad(
            programs.linear, dpoptax.contrib.adaptive_clip(1.0), method="integers", grid=GRID
        )

    def standardized(params, example):
        kernel = params[0] - params[0].mean(0)
        return programs.linear([kernel], example)

    batch = _batch("positions")
    grad_fn = dpoptax.clipped_grad(standardized, CLIP, method="integers", grid=GRID)
    with pytest.raises(ValueError, match="method='vmap'"):
        grad_fn([jnp.ones((5, 3))], batch)
    with pytest.raises(ValueError, match="`noise_multiplier` of at least 1/4"):
        _make("positions", grid=2.0**-21)(batch, np.ones(EXAMPLES, bool))
