"""Tests that `clipped_grad` equals a loop over examples for any micro-batch size, mask and key."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

import dpoptax
from tests import helpers

pytestmark = pytest.mark.usefixtures("no_room")

CLIP = dpoptax.l2_clip(0.5)
QUICK = {(3, 2, "auto"), (None, 1, "vmap")}


@functools.cache
def _gradient(loss_fn):
    return jax.jit(jax.grad(loss_fn))


def _loop(points, batch, mask=None, loss_fn=helpers.mlp_loss, keys=None):
    """Returns the sum computed example by example in float64."""
    gradient = _gradient(loss_fn)
    total = jax.tree.map(lambda p: np.zeros(p.shape), points.points[0])
    for i in range(len(batch[0])):
        if mask is not None and not mask[i]:
            continue
        example = jax.tree.map(lambda x, i=i: np.asarray(x)[i], batch)
        args = (example,) if keys is None else (example, keys[i])
        g = jax.tree.map(lambda p: np.zeros(p.shape), points.points[0])
        for x, w in zip(points.points, points.weights, strict=True):
            grad = gradient(x, *args)
            g = jax.tree.map(lambda t, d, w=w: t + float(w) * np.asarray(d, np.float64), g, grad)
        factor = min(1.0, CLIP.l2_clip_norm / helpers.global_norm(g))
        total = jax.tree.map(lambda t, d, f=factor: t + f * d, total, g)
    return total


def _close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


def _points(count):
    params = [helpers.mlp_params(i) for i in range(count)]
    return dpoptax.GradientPoints(tuple(params), tuple(float(2 - 3 * i) for i in range(count)))


@pytest.mark.parametrize(
    ("microbatch_size", "count", "method"),
    [
        pytest.param(*case, method, marks=[pytest.mark.slow] * ((*case, method) not in QUICK))
        for case in ((None, 1), (3, 2), (1, 1), (5, 3), (8, 1), (10, 2), (100, 3))
        for method in ("auto", "vmap")
    ],
)
def test_equals_loop_over_examples(microbatch_size, count, method):
    points, batch = _points(count), helpers.mlp_batch(0, 10)
    mask = np.arange(10) % 3 != 1
    grad_fn = dpoptax.clipped_grad(
        helpers.mlp_loss, CLIP, microbatch_size=microbatch_size, method=method
    )
    clipped = jax.jit(grad_fn)(points, batch, mask)
    assert clipped.clip == CLIP
    _close(clipped.sum, _loop(points, batch, mask))


@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 5, 10, 100])
def test_in_microbatches_accepts_any_sum(microbatch_size):
    (x, _), mask = helpers.mlp_batch(0, 10), jnp.arange(10) % 3 != 1

    def sums(batch, mask):
        return jnp.sum(jnp.where(mask[:, None], batch["x"], 0.0), axis=0), batch["x"] ** 2

    total, aux = dpoptax.extend.in_microbatches(sums, microbatch_size)({"x": x}, mask)
    _close(total, np.asarray(x)[np.asarray(mask)].sum(axis=0))
    _close(aux, np.asarray(x) ** 2)
    with pytest.raises(
        ValueError, match="`microbatch_size` must be an integer of at least 1, got 0"
    ):
        dpoptax.extend.in_microbatches(sums, 0)


def test_microbatches_do_not_retrace_the_loss():
    def times_traced(microbatch_size):
        traced = []

        def loss_fn(params, example):
            traced.append(example)
            return helpers.mlp_loss(params, example)

        grad_fn = dpoptax.clipped_grad(loss_fn, CLIP, microbatch_size=microbatch_size)
        jax.jit(grad_fn).trace(_points(2), helpers.mlp_batch(0, 6))
        return len(traced)

    assert times_traced(2) == times_traced(None)


def _noisy_loss(params, example, key):
    x, y = example
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return helpers.mlp_loss(params, (jnp.where(keep, 2 * x, 0), y))


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_keys_do_not_depend_on_position_in_batch(method):
    """Adding a record moves the sum by its clipped gradient and keeps the keys of others."""
    points, batch, key = _points(1), helpers.mlp_batch(2, 6), jax.random.key(7)
    ids = np.array([3, 8, 20, 21, 40, 70])
    grad_fn = jax.jit(dpoptax.clipped_grad(_noisy_loss, CLIP, method=method))

    def total(rows, mask=None):
        some = jax.tree.map(lambda x: np.asarray(x)[rows], batch)
        mask = np.ones(6, bool) if mask is None else mask
        return grad_fn(points, some, mask, key=key, ids=ids[rows]).sum

    whole = total([0, 1, 2, 3, 4, 5])
    _close(total([5, 3, 1, 0, 2, 4]), whole)
    # Without the first record, and with padding at the end.
    without = total([1, 2, 3, 4, 5, 1], np.arange(6) < 5)
    move = helpers.global_norm(jax.tree.map(np.subtract, whole, without))
    assert move <= CLIP.sensitivity * (1 + 1e-4)
    by_hand = _loop(
        points,
        batch,
        loss_fn=_noisy_loss,
        keys=[jax.random.fold_in(key, int(i)) for i in ids],
    )
    _close(whole, by_hand)


def test_key_and_ids_must_be_given_together():
    points, batch, key = _points(1), helpers.mlp_batch(2, 6), jax.random.key(7)
    grad_fn = dpoptax.clipped_grad(_noisy_loss, CLIP)
    with pytest.raises(ValueError, match="`ids` must be given with `key`.*sampler's indices"):
        grad_fn(points, batch, key=key)
    with pytest.raises(ValueError, match="`key` must be given with `ids`"):
        grad_fn(points, batch, ids=jnp.arange(6))
    with pytest.raises(ValueError, match=r"integers of shape \(6,\).*int32\[5\]"):
        grad_fn(points, batch, key=key, ids=jnp.arange(5))
    with pytest.raises(ValueError, match="float32"):
        grad_fn(points, batch, key=key, ids=jnp.arange(6.0))


def test_refuses_weights_as_mask():
    batch, weights = helpers.mlp_batch(0, 2), np.array([0.5, 0.0])
    with pytest.raises(TypeError, match="`mask` must .* got float.*into the loss"):
        dpoptax.clipped_grad(helpers.mlp_loss, CLIP)(_points(1), batch, weights)


@pytest.mark.slow
def test_number_is_accepted_as_l2_clip():
    options = {"noise_multiplier": 1.0, "batch_size": 2, "key": jax.random.key(0)}
    clip, points = dpoptax.l2_clip(2.0), dpoptax.gradient_points((), jnp.zeros(2))
    rows = jnp.array([[3.0, 4.0], [0.3, 0.4]])

    def both(of):
        jax.tree.map(np.testing.assert_array_equal, of(2), of(clip))

    both(lambda c: dpoptax.clipped_grad(lambda w, x: w @ x, c)(points, rows).sum)
    transform = dpoptax.extend.clip_per_example
    both(lambda c: transform(c).update(rows, optax.EmptyState(), jnp.zeros(2))[0].sum)
    both(lambda c: dpoptax.extend.trust_clipped(rows, c).sum)
    tx = dpoptax.clip_and_noise(np.float32(2.0), **options)
    want = dpoptax.clip_and_noise(clip, **options)
    state = tx.init(jnp.zeros(2))
    both(lambda c: (want if c is clip else tx).update(rows, state, jnp.zeros(2))[0])
    del options["key"]
    assert dpoptax.extend.noise_stddev(2, **options) == dpoptax.extend.noise_stddev(clip, **options)
    assert dpoptax.extend.fixed_point_grid(2, **options) == dpoptax.extend.fixed_point_grid(
        clip, **options
    )


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"`clip` must .* got '1\.0'"):
        dpoptax.clipped_grad(helpers.mlp_loss, "1.0")
    for wrong in (True, None):
        with pytest.raises(TypeError, match=f"`clip` must .* got {wrong}"):
            dpoptax.clipped_grad(helpers.mlp_loss, wrong)
    for wrong in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=f"`clip` must be a number in .* got {wrong}"):
            dpoptax.clipped_grad(helpers.mlp_loss, wrong)
    with pytest.raises(ValueError, match="`microbatch_size` must .* got 0"):
        dpoptax.clipped_grad(helpers.mlp_loss, CLIP, microbatch_size=0)
    with pytest.raises(ValueError, match="`microbatch_size` must .* got '8'"):
        dpoptax.clipped_grad(helpers.mlp_loss, CLIP, microbatch_size="8")
    with pytest.raises(TypeError, match=r"`mesh` must .* got a list\. .*jax\.make_mesh"):
        dpoptax.clipped_grad(helpers.mlp_loss, CLIP, mesh=jax.devices())
    with pytest.raises(ValueError, match="`method` must be .*'fast'"):
        dpoptax.clipped_grad(helpers.mlp_loss, CLIP, method="fast")
    grad_fn = dpoptax.clipped_grad(helpers.mlp_loss, CLIP)
    with pytest.raises(ValueError, match=r"`mask` must have shape .* got \(3,\)"):
        grad_fn(_points(1), helpers.mlp_batch(0, 2), jnp.ones(3, bool))
    with pytest.raises(ValueError, match="leading axis.*to one array with `np.stack`"):
        grad_fn(_points(1), [[1.0, 2.0], [3.0, 4.0]])


def _note(error):
    (note,) = (note for note in error.value.__notes__ if note.startswith("dpoptax"))
    return note


_ROWS = jnp.ones((4, 3))


@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize(
    ("loss", "params", "given", "options", "notes"),
    [
        (
            lambda w, batch: jnp.mean(batch["x"].reshape(batch["x"].shape[0], 6) @ w),
            *(jnp.ones(6), ({"x": jnp.ones((4, 2, 3))},), {}),
            ("one example", "ids=indices", "{'x': (2, 3)}"),  # a loss may also lack its key
        ),
        (
            lambda w, x: jnp.vdot(w, x),
            *(jnp.ones(3), (_ROWS,), {"key": jax.random.key(0), "ids": np.arange(4)}),
            ("`loss_fn(params, example, key)` gets one example",),
        ),
        (
            lambda w, example: jnp.sum(example[0] @ w - example[1]),
            *(jnp.ones((3, 2)), (_ROWS, jnp.ones(4, int)), {}),
            ("labels belong to the batch, as in `grad_fn(params, (x, y), mask)`",),
        ),
    ],
    ids=["a batch", "no key", "labels"],
)
def test_error_notes_what_the_loss_gets(loss, params, given, options, notes, method):
    with pytest.raises((TypeError, ValueError)) as raised:
        dpoptax.clipped_grad(loss, CLIP, method=method)(params, *given, **options)
    assert all(note in _note(raised) for note in notes)


@pytest.mark.parametrize("labels", [jnp.ones(4), jnp.ones((4, 2), int)], ids=str)
def test_refuses_labels_as_mask(labels):
    grad_fn = dpoptax.clipped_grad(lambda w, x: jnp.sum(x @ w), CLIP)
    with pytest.raises((TypeError, ValueError), match=r"Labels go into the batch: `grad_fn"):
        grad_fn(jnp.ones((3, 2)), _ROWS, labels)


@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_aux_and_values_are_those_of_the_first_point(microbatch_size):
    loss_fn = lambda params, example: (helpers.mlp_loss(params, example), example[1])  # noqa: E731
    points, batch = _points(2), helpers.mlp_batch(3, 6)
    options = {"microbatch_size": microbatch_size, "return_values": True}
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP, has_aux=True, **options)
    clipped, (values, aux) = jax.jit(grad_fn)(points, batch)
    _close(clipped.sum, _loop(points, batch))
    want = jax.jit(jax.vmap(helpers.mlp_loss, (None, 0)))(points.points[0], batch)
    np.testing.assert_allclose(values, want, rtol=1e-5)
    np.testing.assert_array_equal(aux, batch[1])
    with pytest.raises(TypeError, match="pair"):
        dpoptax.clipped_grad(helpers.mlp_loss, CLIP, has_aux=True)(points, batch)


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_sparse_rows_are_passed_as_arrays(method):
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)  # noqa: E731
    of_arrays = lambda w, e: loss(w, sparse.BCOO(e, shape=(5,)))  # noqa: E731
    dense = np.where(np.arange(20).reshape(4, 5) % 3, 0, helpers.normal(0, (4, 5)))
    rows, params = sparse.BCOO.fromdense(dense, n_batch=1), helpers.normal(1, (5, 2))
    with pytest.raises((TypeError, ValueError)) as raised:
        dpoptax.clipped_grad(loss, CLIP, method=method)(params, rows)
    assert "Pass its arrays, `(x.data, x.indices)`" in _note(raised)
    found = dpoptax.clipped_grad(of_arrays, CLIP, method=method)(params, (rows.data, rows.indices))
    want = dpoptax.clipped_grad(loss, CLIP, method=method)(params, dense)
    np.testing.assert_allclose(found.sum, want.sum, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("microbatch_size", [2, 64])
def test_gradient_norms_are_those_that_the_clip_sees(microbatch_size):
    params, batch = helpers.mlp_params(0), helpers.mlp_batch(0, 5)
    norms = dpoptax.gradient_norms(helpers.mlp_loss, params, batch, microbatch_size=microbatch_size)
    each = jax.vmap(jax.grad(helpers.mlp_loss), (None, 0))(params, batch)
    want = jax.vmap(optax.tree.norm)(each)
    np.testing.assert_allclose(norms, want, rtol=1e-5)
    grad_fn = dpoptax.clipped_grad(helpers.mlp_loss, float(np.median(norms)))
    kept = [grad_fn(params, batch, np.arange(5) == i).sum for i in range(5)]
    shortened = [float(optax.tree.norm(k)) < 0.999 * n for k, n in zip(kept, norms, strict=True)]
    assert shortened == list(norms > np.median(norms))


def test_gradient_norms_are_added_in_float32():
    large = dpoptax.gradient_norms(
        lambda w, x: w @ x, jnp.ones(2, jnp.float16), jnp.full((1, 2), 6e4)
    )
    np.testing.assert_allclose(large, [6e4 * 2**0.5], rtol=1e-3)
    with pytest.raises(ValueError, match="of one length"):
        dpoptax.gradient_norms(
            helpers.mlp_loss, helpers.mlp_params(0), (jnp.ones((3, 4)), jnp.ones(2))
        )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "vmap"])
@pytest.mark.parametrize("microbatch_size", [None, 6])
def test_dropped_examples_are_counted(method, microbatch_size):
    """The count reveals that a loss scaled by 2¹³ in float16 drops most of the batch."""
    size, scale = 16, 2.0**13
    params = {"w": jnp.ones((8, 4), jnp.float16)}
    batch = jnp.ones((size, 8), jnp.float16) * (jnp.arange(size) + 1)[:, None] / size
    batch = batch.astype(jnp.float16)

    def loss_fn(params, x):
        return scale * jnp.sum((x @ params["w"]).astype(jnp.float32) ** 2)

    options = {"method": method, "microbatch_size": microbatch_size}
    points = dpoptax.gradient_points((), params)
    grad_fn = jax.jit(dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(scale), **options))
    left_out = np.array(
        [not np.any(grad_fn(points, batch, np.arange(size) == i).sum["w"]) for i in range(size)]
    )
    assert 2 < left_out.sum() < size - 2
    assert dpoptax.dropped_examples(loss_fn, points, batch, **options) == left_out.sum()
    found = dpoptax.dropped_examples(loss_fn, points, batch, return_values=True, **options)
    assert found == left_out.sum()
    mask = np.arange(size) % 3 > 0
    found = dpoptax.dropped_examples(loss_fn, points, batch, mask, **options)
    assert found.dtype == jnp.int32
    assert found == (left_out & mask).sum()


def test_counts_dropped_examples_with_keys_and_aux():
    def loss_fn(params, x, key):
        return jnp.sum(params * x) + jax.random.normal(key), x

    batch = jnp.array([[1.0, 2.0], [jnp.inf, 0.0], [jnp.nan, 1.0], [0.0, 0.0]])
    points = dpoptax.gradient_points((), jnp.ones(2))
    given = {"key": jax.random.key(0), "ids": np.arange(4), "has_aux": True}
    assert dpoptax.dropped_examples(loss_fn, points, batch, **given) == 2


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_params_equal_their_gradient_points(method):
    params, batch = helpers.mlp_params(0), helpers.mlp_batch(0, 5)
    grad_fn = dpoptax.clipped_grad(helpers.mlp_loss, 0.5, method=method)
    plain, at_points = grad_fn(params, batch), grad_fn(dpoptax.gradient_points((), params), batch)
    chex.assert_trees_all_equal(plain, at_points)


def test_returned_losses_are_private():
    params, batch = helpers.mlp_params(0), helpers.mlp_batch(0, 4)
    grad_fn = dpoptax.clipped_grad(helpers.mlp_loss, 0.5, return_values=True)
    flow = dpoptax.information_flow(
        lambda params, batch: grad_fn(params, batch)[1], params, batch, private_argnums=1
    )
    assert flow.private


def test_mesh_keeps_precision_of_the_loss():
    def loss_fn(params, x):
        return jnp.sum((jnp.tanh(x @ params["a"]) @ params["b"]).astype(jnp.float32) ** 2)

    params = {"a": jnp.ones((8, 16), jnp.bfloat16), "b": jnp.ones((16, 4), jnp.bfloat16)}
    batch = jnp.ones((2, 3, 8), jnp.bfloat16)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))

    def contractions(mesh):
        traced = jax.make_jaxpr(dpoptax.clipped_grad(loss_fn, 1.0, mesh=mesh))(params, batch)
        dots = [e for e in helpers.equations(traced.jaxpr) if e.primitive.name == "dot_general"]
        return [tuple(str(x.aval.dtype) for x in dot.invars) for dot in dots]

    shared = contractions(mesh)
    assert shared == contractions(None)
    assert ("bfloat16", "bfloat16") in shared
