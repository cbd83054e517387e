"""Tests that the clipped sum equals other implementations and is bounded for any input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_privacy import clipping as peer

import dpoptax
from dpoptax._clipped_sum.clip_per_example import sum_clipped
from dpoptax._rounding import bounds, part_limits
from tests import helpers

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("no_room")]


def _per_example(seed, batch=7, scale=1.0):
    rng = np.random.default_rng(seed)

    def make(*shape):
        return np.float32(scale * rng.normal(size=(batch, *shape)))

    return {"a": make(3, 2), "b": {"c": make(4), "d": make()}}


@functools.cache
def _summed(clip):
    """Runs as one program, because dozens of separate operations are slow to compile."""
    return jax.jit(lambda *of: sum_clipped(clip, *of))


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")  # jax_privacy calls it
def test_equals_optax_contrib_and_jax_privacy():
    grads = _per_example(1)
    params = jax.tree.map(lambda g: g[0], grads)
    key = jax.random.key(0)
    ours = dpoptax.clip_and_noise(dpoptax.l2_clip(0.7), noise_multiplier=0.0, batch_size=7, key=key)
    theirs = optax.contrib.differentially_private_aggregate(
        l2_norm_clip=0.7, noise_multiplier=0.0, key=0
    )
    a, _ = jax.jit(ours.update)(grads, ours.init(params), params)
    b, _ = jax.jit(theirs.update)(grads, theirs.init(params))
    room = bounds.gamma(bounds.COEFFICIENT_ROUNDINGS)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=room, atol=1e-7), a, b)

    params, batch = helpers.mlp_params(0), helpers.mlp_batch(0, 6)
    theirs = peer.clipped_grad(
        lambda p, batch: helpers.mlp_loss(p, jax.tree.map(lambda x: x[0], batch)),
        l2_clip_norm=0.3,
        batch_argnums=1,
        keep_batch_dim=True,
    )
    theirs = jax.jit(theirs)(params, batch)
    ours = jax.jit(dpoptax.clipped_grad(helpers.mlp_loss, dpoptax.l2_clip(0.3)))
    ours = ours(dpoptax.gradient_points((), params), batch).sum
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), ours, theirs)


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-15, 1e10, 5e10, 1e12, 1e15, 1e30, 3e38])
def test_gradients_are_clipped_in_the_working_range_and_add_zero_beyond(scale):
    rng = np.random.default_rng(0)
    unit = rng.uniform(0.5, 1.0, size=(1, 64)) * np.sign(rng.normal(size=(1, 64)))
    grads = helpers.floats(unit * scale)
    exact = np.asarray(grads, np.float64)[0]
    norm = np.linalg.norm(exact)
    want = exact * min(1.0, 1.0 / norm) if norm < 2.0**39 else 0 * exact
    np.testing.assert_allclose(_summed(dpoptax.l2_clip(1.0))(grads), want, rtol=1e-5)


def test_zero_gradients_and_empty_batches_sum_to_zero():
    total, zeros = _summed(dpoptax.l2_clip(1.0)), np.zeros((3, 2), np.float32)
    for found in (total(zeros), total(zeros[:0]), total(zeros + np.nan, np.zeros(3, bool))):
        assert (np.asarray(found) == 0).all()


def test_leaf_without_entries_takes_no_part():
    grads = np.ones((64, 3), np.float32)
    found = _summed(dpoptax.l2_clip(1.0))({"a": grads, "empty": np.zeros((64, 0, 2), np.float32)})
    assert found["empty"].shape == (0, 2)
    np.testing.assert_array_equal(found["a"], _summed(dpoptax.l2_clip(1.0))({"a": grads})["a"])


def test_low_precision_gradients_are_summed_in_float32():
    grads = jnp.full((512, 2), 0.001, jnp.bfloat16)
    total = _summed(dpoptax.l2_clip(1.0))(grads)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, 512 * float(jnp.bfloat16(0.001)), rtol=1e-5)


def test_error_names_leaves_with_different_batch_axes():
    tx = dpoptax.extend.clip_per_example(dpoptax.l2_clip(1.0))
    params = {"a": jnp.ones(1), "b": jnp.ones(1)}
    with pytest.raises(ValueError, match=r"'a'.*\(2,\).*'b'.*\(3,\)"):
        tx.update({"a": jnp.ones((2, 1)), "b": jnp.ones((3, 1))}, tx.init(params), params)
    with pytest.raises(ValueError, match="leading axis"):
        tx.update({"a": jnp.ones(())}, tx.init(params), {"a": jnp.ones(())})


def test_clipped_sum_is_a_pytree_with_a_static_clip():
    clipped = dpoptax.extend.trust_clipped({"w": jnp.ones(2)}, dpoptax.l2_clip(1.0))
    passed = jax.jit(lambda c: c)(clipped)
    assert passed.clip == clipped.clip
    assert len(jax.tree.leaves(clipped)) == 1
    assert "w" in clipped
    assert "v" not in clipped


@pytest.mark.parametrize("params", [np.ones((4, 2)), {"w": np.ones((4, 2)), "b": np.ones(4)}])
def test_refuses_gradient_of_whole_batch(params):
    tx = dpoptax.clip_and_noise(
        dpoptax.l2_clip(1.0), noise_multiplier=1.0, batch_size=4, key=jax.random.key(0)
    )
    with pytest.raises(ValueError, match=r"one gradient for each of B examples"):
        tx.update(params, tx.init(params), params)
    # Four rows of parameters would be clipped as four examples, and their sum would be broadcast.
    with pytest.raises(ValueError, match="clip of per-example gradients needs `params`"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match=r"structure of the parameters.*'c'"):
        tx.update({"c": jnp.ones((4, 2))}, tx.init(params), params)
    per_example = jax.tree.map(lambda p: np.ones((4, *p.shape)), params)
    released, _ = jax.eval_shape(tx.update, per_example, tx.init(params), params)
    assert jax.tree.map(jnp.shape, released) == jax.tree.map(jnp.shape, params)


def test_axis_error_lists_only_a_few_leaves():
    points = dpoptax.gradient_points((), jnp.ones(2))
    grad_fn = dpoptax.clipped_grad(lambda w, x: jnp.sum(w), dpoptax.l2_clip(1.0))
    with pytest.raises(ValueError, match=r"one length, got .*…\. .* a list .*`np.stack`") as raised:
        grad_fn(points, [[1.0] * 2] * 500)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("way", ["pieces", "steps"])
def test_norm_includes_parts_whose_squares_underflow(way):
    count, size = 100, jnp.float32(2.0**-64)

    @jax.jit
    def measured(norms):
        if way == "steps":
            return part_limits.join_lengths([norms[None]]).absolute
        return bounds.clip_coefficients(
            dpoptax.l2_clip(1.0),
            [bounds.Piece(bounds.NormBounds(jnp.square(n)[None], n[None])) for n in norms],
            jnp.ones(1, bool),
            groups=[0],
            tau=0.0,
        )[1]

    assert measured(jnp.full(count, size)) >= count**0.5 * size
