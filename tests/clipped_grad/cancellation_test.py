"""Tests gradients whose terms nearly cancel: they keep their length, and the bound still holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpoptax
from dpoptax._rounding import bounds
from dpoptax.auditing import _worst_example as adversary
from tests import helpers

POSITIONS, WIDTH = 4096, 64


def length(tree):
    return np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))


def clipped_sum(gradients, bound=1.0):
    """Returns the sum of gradients (B, …), each clipped to a bound, in float64."""
    gradients = np.asarray(gradients, np.float64)
    return sum(g * min(1.0, bound / length(g)) for g in gradients)


# Experts that `top_k` chooses have no common factor at two points, so differences do not help.


def routed(params, x):
    values, chosen = lax.top_k((x @ params["w"])[:, :3], 2)
    outputs = jnp.einsum("td,tjdf->tjf", x, params["experts"][chosen])
    return jnp.sum(jnp.einsum("tj,tjf->tf", jax.nn.softmax(values), outputs) ** 2) * 1e-4


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("weights", [(10.0, -9.0), (100.0, -99.0), (1.0, -1.0)])
def test_points_that_nearly_cancel_are_not_shortened(weights, method):
    """The terms are up to 1,000 times as long as their sum, which is at most 0.006 C."""
    params = {"w": helpers.normal(0, (4, 4)) / 2, "experts": helpers.normal(1, (3, 4, 4)) / 2}
    moved = jax.tree.map(lambda x: x + 1e-3 * helpers.normal(2, x.shape), params)
    batch = helpers.normal(3, (6, 8, 4))
    points = dpoptax.GradientPoints((params, moved), weights)
    found = dpoptax.clipped_grad(routed, 1.0, method=method)(points, batch).sum
    by_point = [jax.vmap(jax.grad(routed), (None, 0))(p, batch) for p in (params, moved)]
    true = jax.tree.map(
        lambda a, b: np.sum(weights[0] * np.float64(a) + weights[1] * np.float64(b), axis=0),
        *by_point,
    )
    assert length(true) < 0.01
    assert length(found) == pytest.approx(length(true), rel=2e-3)


def linear(params, example, scale=1.0):
    x, c = example
    return jnp.sum((x @ params) * c) * scale


def uncorrelated(positions=POSITIONS, width=WIDTH, examples=2):
    return tuple(helpers.normal(seed, (examples, positions, width)) for seed in (0, 1))


@pytest.mark.parametrize("scale", [1e-6, 1.0], ids=["short", "clipped"])
@pytest.mark.parametrize("way", ["auto", "vmap", "recompute", "streaming"])
def test_many_uncorrelated_positions_are_not_shortened(way, scale):
    """S is √4096 times the norm. Two turns once left half of a clipped gradient."""
    clip = 1.0 if way != "streaming" else dpoptax.per_layer_clip(1.0)
    x, c = uncorrelated()
    loss = functools.partial(linear, scale=scale)
    found = dpoptax.clipped_grad(loss, clip, method=way)(jnp.zeros((WIDTH, WIDTH)), (x, c)).sum
    gradients = np.einsum("btr,btd->brd", np.float64(x), np.float64(c)) * scale
    assert length(found) == pytest.approx(length(clipped_sum(gradients)), rel=2e-3)


@pytest.mark.parametrize(
    ("positions", "rows", "columns"),
    [(64, 768, 3072), (512, 768, 768), (1024, 256, 1024), (3000, 32, 4000)],
)
def test_no_chosen_norm_shortens_uncorrelated_positions(positions, rows, columns):
    """The default returns at least 0.95 of the clipped gradients."""
    x, c = helpers.normal(0, (1, positions, rows)), helpers.normal(1, (1, positions, columns))
    grad_fn = dpoptax.clipped_grad(linear, 1.0)
    found = length(jax.jit(grad_fn)(jnp.zeros((rows, columns)), (x, c)).sum)
    print(f"{positions} positions, ({rows}, {columns}): {found:.4f} C")
    assert 0.95 < found <= 1


@pytest.mark.parametrize("way", ["gram", "form", "keep"])
@pytest.mark.parametrize("method", ["auto", "recompute", "streaming"])
def test_bound_holds_for_long_examples(method, way, monkeypatch):
    """Positions cancel in pairs, exactly or except for one, next to examples that also cancel."""
    helpers.force_norm_method(monkeypatch, way)
    clip = dpoptax.automatic_clip(1.0, gamma=0.0)
    if method == "streaming":
        clip = dpoptax.per_layer_clip(clip)
    grad_fn = dpoptax.clipped_grad(linear, clip, method=method)
    total = jax.jit(lambda batch, mask: grad_fn(jnp.zeros((4, 4)), batch, mask).sum)
    rng = np.random.default_rng(0)
    batch = [rng.normal(size=(8, 300, 4)).astype(np.float32) for _ in range(2)]
    for x, sign in zip(batch, (1, -1), strict=True):
        x[:4, 150:] = sign * x[:4, :150]
    found = max(
        adversary.moved(total, tuple(batch), (size * one, size * other))
        for size in (1e-12, 1.0, 1e12)
        for one, other in (_canceling_pairs(rng, rest) for rest in (0.0, 2.0**-20, 1.0))
    )
    assert found <= 1


def _canceling_pairs(rng, rest):
    """Returns positions that cancel in pairs, except that one is changed by `rest`."""
    rows, columns = rng.normal(size=(2, 150, 4)).astype(np.float32)
    rows, columns = np.concatenate([rows, rows]), np.concatenate([columns, -columns])
    rows[0] += np.float32(rest)
    return rows, columns


@pytest.mark.parametrize("norm", [0.0, 1e-3, 1.0])
def test_worst_size_of_short_gradients_is_within_the_bound(norm):
    """Checks f S ≤ M C and f n ≤ C over all S, and that f is 1 where both allow it."""
    sizes = np.geomspace(max(norm, 1e-3), 1e6, 200).astype(np.float32)
    square = np.full_like(sizes, norm**2)
    piece = bounds.Piece(bounds.NormBounds(square, sizes), ratio=32.0)
    factors, *_ = bounds.clip_coefficients(
        dpoptax.l2_clip(1.0), [piece], np.ones(sizes.size, bool), groups=[0], tau=0.01
    )
    (factors,) = np.asarray(factors, np.float64)
    assert (factors * sizes * 1.01 <= 32).all()
    assert (factors * norm * 1.01 <= 1).all()
    np.testing.assert_allclose(
        factors, np.minimum(1, 1 / np.maximum(norm, sizes / 32) / 1.01), rtol=1e-4
    )
