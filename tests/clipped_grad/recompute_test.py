"""Tests `clipped_grad(method="recompute")`, which measures and sums in two passes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax._ghost_clipping import cost_model
from dpoptax._ghost_clipping.two_turns import recomputed_sum
from tests import helpers
from tests.clipped_grad import streaming_test
from tests.clipped_grad.adversary_test import CLIPS, QUICK, WAYS, _attack
from tests.clipped_grad.streaming_test import (
    EXAMPLES,
    MASK,
    assert_close,
    attacks,
    computed,
    make_problem,
    repeated,
    two_uses,
)

BOUND = 2.0


def untied(params, example):
    return two_uses(params["embed"], params["head"], params, example)


def make_untied():
    params, batch = make_problem()
    return params | {"head": params["embed"][::-1]}, batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip", "microbatch_size"),
    [(BOUND, 5), (dpoptax.per_layer_clip(0.5), None)],
)
def test_sum_equals_default_method(clip, microbatch_size, no_room):
    params, batch = make_untied()
    found, want = (
        jax.jit(dpoptax.clipped_grad(untied, clip, **options))(params, batch, MASK).sum
        for options in ({"method": "recompute", "microbatch_size": microbatch_size}, {})
    )
    assert_close(found, want, rtol=1e-4)


def test_norm_count_is_added_once(no_room):
    params, x = jnp.eye(4), helpers.normal(0, (6, 4))
    tx = dpoptax.contrib.adaptive_gaussian_noise(
        dpoptax.contrib.adaptive_clip(0.5),
        noise_multiplier=1.0,
        batch_size=6,
        key=jax.random.key(0),
    )
    state = tx.init(params)

    def total(method):
        loss = lambda w, x: jnp.sum((x @ w) ** 2)  # noqa: E731
        grad_fn = dpoptax.clipped_grad(loss, dpoptax.contrib.adaptive_clip(0.5), method=method)
        return jax.jit(lambda w: grad_fn(dpoptax.gradient_points(state, w), x).sum)(params)

    assert_close(total("recompute"), total("auto"), rtol=1e-5)


def test_norms_of_tied_uses_are_added(no_room):
    params, batch = make_problem()
    found = jax.jit(dpoptax.clipped_grad(streaming_test.loss_fn, BOUND, method="recompute"))(
        params, batch, MASK
    )
    table = params["embed"]
    grads = jax.vmap(jax.grad(two_uses, argnums=(0, 1, 2)), (None, None, None, 0))(
        table, table, params, batch
    )
    norm = jax.vmap(optax.tree.norm)
    whole = grads[2] | {"embed": norm(grads[0]) + norm(grads[1])}
    factor = MASK * jnp.minimum(1.0, BOUND / norm(whole))
    want = grads[2] | {"embed": grads[0] + grads[1]}
    assert_close(
        found.sum, jax.tree.map(lambda g: jnp.einsum("b,b...->...", factor, g), want), rtol=2e-4
    )


@pytest.mark.parametrize(("scale", "share"), [(1.0, 2**-0.5), (1e-6, 1.0)])
def test_clipped_gradients_of_tied_uses_are_shorter(scale, share):
    """The gradients of the two uses of a table are orthogonal and have the same norm."""

    def loss(table, x):
        return scale * (jnp.sum(table[0] @ x) + jnp.sum(x @ table[1]))

    def norm(method):
        found = dpoptax.clipped_grad(loss, 1.0, method=method)(jnp.ones((2, 4, 4)), batch).sum
        return float(optax.tree.norm(found))

    batch = 10.0 * jnp.ones((1, 4, 4))
    ratio = norm("recompute") / norm("auto")
    print(f"tied uses, scale {scale}: {ratio:.3f} of the default's sum")
    assert ratio == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize(
    ("clip", "options"),
    [
        (BOUND, {}),
        (BOUND, {"method": "recompute"}),
        (dpoptax.per_layer_clip(BOUND, streaming=True), {}),
    ],
)
def test_sums_in_bfloat16_can_be_transposed(clip, options, no_room):
    """Tests sums that XLA joins with a transpose, of a tied weight or by the caller."""

    def loss(params, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ params["w"]) @ params["w"].T) @ params["v"])

    params = {"w": helpers.normal(0, (6, 6)), "v": helpers.normal(1, (6, 2))}
    batch = helpers.normal(2, (4, 3, 6))
    found, want = (
        jax.jit(
            lambda grad_fn: jax.tree.map(jnp.transpose, grad_fn(params, batch).sum),
            static_argnums=0,
        )(dpoptax.clipped_grad(loss, clip, precision=precision, **options))
        for precision in ("bfloat16", "float32")
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(x - y) <= 2**-6 * np.linalg.norm(y)


def test_aux_and_keys_match_their_examples():
    params, batch = helpers.mlp_params(0), helpers.mlp_batch(0, EXAMPLES)

    def loss(params, example, key):
        value = helpers.mlp_loss(params, example)
        return value * jax.random.uniform(key), key

    key, ids = jax.random.key(0), np.arange(EXAMPLES) + 7
    grad_fn = dpoptax.clipped_grad(
        loss, BOUND, has_aux=True, return_values=True, method="recompute"
    )
    _, (values, keys) = jax.jit(grad_fn)(params, batch, key=key, ids=ids)
    want = jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(want))
    losses = jax.jit(jax.vmap(helpers.mlp_loss, (None, 0)))(params, batch)
    losses *= jax.vmap(jax.random.uniform)(want)
    np.testing.assert_allclose(values, losses, rtol=1e-5)


@pytest.mark.spread(8)
@pytest.mark.optimized
@pytest.mark.parametrize(("program", "clip"), attacks(["l2", "AUTO-V"]))
def test_example_moves_sum_by_at_most_the_bound(program, clip):
    assert _attack(program, CLIPS[clip], QUICK, method="recompute") <= 1


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("program", "way"),
    helpers.covering(["regression", "batched"], WAYS, strength=1),
)
def test_example_moves_bfloat16_sum_by_at_most_the_bound(program, way, monkeypatch):
    helpers.force_norm_method(monkeypatch, way)
    options = {"method": "recompute"}
    assert _attack(program, CLIPS["AUTO-V"], QUICK, precision="bfloat16", **options) <= 1
    assert _attack(program, CLIPS["AUTO-V"], QUICK, dtype="bfloat16", **options) <= 1


@pytest.mark.parametrize("limited", [True, False])
def test_bound_holds_if_passes_disagree(limited, monkeypatch):
    """The second pass sums gradients that are four times as long as the measured ones."""
    measure = recomputed_sum._LimitedUse.norms

    def short(use, operand, cotangent):
        return measure(use, operand, cotangent) / 4

    monkeypatch.setattr(recomputed_sum._LimitedUse, "norms", short)
    if not limited:
        monkeypatch.setattr(
            recomputed_sum, "limited_coefficients", lambda limits, length: limits.factor
        )
    found = _attack("regression", CLIPS["AUTO-V"], QUICK, method="recompute")
    assert found <= 1 if limited else found > 3


def test_non_finite_example_adds_zero():
    params, (x, y) = helpers.mlp_params(0), helpers.mlp_batch(0, EXAMPLES)
    grad_fn = jax.jit(dpoptax.clipped_grad(helpers.mlp_loss, BOUND, method="recompute"))
    want = grad_fn(params, (x, y), np.arange(EXAMPLES) != 3).sum
    found = grad_fn(params, (x.at[3].set(jnp.inf), y), np.ones(EXAMPLES, bool)).sum
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.slow
def test_stores_no_activations_between_passes():
    """The memory of a checkpointed step does not grow with the number of layers."""

    def loss(params, x):
        layer = lambda h, w: (jnp.tanh(jnp.tanh(h @ w) @ w.T), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    def memory(layers):
        shapes = (layers, 16, 16), (64, 128, 16)
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        grad_fn = dpoptax.clipped_grad(loss, 1.0, method="recompute")
        step = jax.jit(lambda w, x: grad_fn(w, x).sum)
        return step.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    carry = 64 * 128 * 16 * 4
    assert memory(30) - memory(10) < 1.5 * 20 * carry


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (computed, {}, "and the parameter is computed on before dot_general"),
        (repeated, {}, "all steps use the whole of the parameter"),
        (computed, {"grid": 2.0**-10}, "without per-example gradients"),
        (computed, {"clip": streaming_test.CLIP}, "Streaming needs no second turn"),
    ],
)
def test_refuses_losses_and_options_without_two_passes(loss, options, message):
    with pytest.raises(ValueError, match=message):
        dpoptax.clipped_grad(loss, **{"clip": 1.0, "method": "recompute"} | options)(
            jnp.eye(4), jnp.ones((3, 4))
        )


@jax.custom_jvp
def chosen(x):
    return jnp.where(x > 0, 2.0 * x, jnp.sin(x))


@chosen.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return chosen(x), jax.lax.cond(x.sum() > 0, lambda t: 2.0 * t, lambda t: jnp.cos(x) * t, t)


@pytest.mark.parametrize(
    "options", [{"clip": 1.0, "method": "recompute"}, {"clip": streaming_test.CLIP}], ids=str
)
def test_names_condition_in_the_derivative_of_a_rule(options, no_room):
    """JAX says only that the transpose rule of 'stop_gradient' is not implemented."""
    loss, batch = lambda w, x: jnp.sum(chosen(x @ w)), helpers.normal(0, (3, 5, 4))
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        jax.grad(lambda w: jnp.sum(jax.vmap(loss, (None, 0))(w, batch)))(jnp.eye(4))
    with pytest.raises(ValueError, match=r"jax.custom_jvp.*use `method='auto'`"):
        dpoptax.clipped_grad(loss, **options)(jnp.eye(4), batch)
    found = [dpoptax.clipped_grad(loss, 1.0, method=m)(jnp.eye(4), batch) for m in ("auto", "vmap")]
    np.testing.assert_allclose(*(each.sum for each in found), rtol=1e-4)


def test_refuses_several_points():
    points = dpoptax.GradientPoints((jnp.eye(4), jnp.eye(4)), (0.5, 0.5))
    with pytest.raises(ValueError, match="`method='recompute'` must have one gradient point"):
        dpoptax.clipped_grad(repeated, 1.0, method="recompute")(points, jnp.ones((3, 4)))


def _deep_loss(params, example):
    block = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    h, _ = jax.lax.scan(block, example, params["layers"])
    return jnp.sum((h @ params["head"]) ** 2)


def _deep_problem(examples):
    params = {"layers": helpers.normal(0, (3, 8, 8)), "head": helpers.normal(1, (8, 4))}
    return params, helpers.normal(2, (examples, 6, 8))


# Operand and cotangent of each of 3 layers have 6 positions of 8 features, in float32.
_DISCARDED = 3 * 2 * 6 * 8 * 4


@pytest.mark.parametrize(
    ("limit", "microbatch_size", "passes"),
    [(_DISCARDED - 1, 1, 2), (_DISCARDED, 1, 1), (0, 2, 1)],
)
def test_large_single_example_is_recomputed(limit, microbatch_size, passes, monkeypatch, no_room):
    params, batch = _deep_problem(4)
    want = jax.jit(dpoptax.clipped_grad(_deep_loss, BOUND, method="vmap"))(params, batch).sum
    _set_limit(monkeypatch, limit)
    step = jax.jit(dpoptax.clipped_grad(_deep_loss, BOUND, microbatch_size=microbatch_size))
    # One scan over the layers forward and one backward in each pass, and one over micro-batches.
    assert str(jax.make_jaxpr(step)(params, batch)).count(" scan[") == 2 * passes + 1
    assert_close(step(params, batch).sum, want, rtol=1e-4)


def _tied_loss(params, example):
    return _deep_loss(params | {"head": params["layers"][0]}, example)


def test_default_method_does_not_recompute_tied_parameters(monkeypatch):
    params, batch = _deep_problem(1)
    _set_limit(monkeypatch, 0)
    grad_fn = dpoptax.clipped_grad(_tied_loss, BOUND)
    assert str(jax.make_jaxpr(grad_fn)(params, batch)).count(" scan[") == 2


def _set_limit(monkeypatch, discarded_bytes):
    costs = cost_model.COSTS._replace(discarded_bytes=discarded_bytes)
    monkeypatch.setattr(recomputed_sum, "COSTS", costs)
