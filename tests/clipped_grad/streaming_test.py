"""Tests per-layer clips that are applied during the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from tests import helpers
from tests.clipped_grad import adversary_test
from tests.clipped_grad.adversary_test import QUICK, WAYS, _attack

CLIP = dpoptax.per_layer_clip(1.0, streaming=True)
EXAMPLES = 12
MASK = np.arange(EXAMPLES) % 5 != 2
AUTO = dpoptax.per_layer_clip(dpoptax.automatic_clip(0.1, gamma=0.0), streaming=True)
STREAMS = (
    "regression", "short", "long", "one position", "convolution", "batched", "scanned",
    "elementwise", "token", "tied", "experts", "graph", "linen", "custom_vjp",
)  # fmt: skip


def attacks(clips):
    """Returns all programs and clips as parameters. A few programs are quick, with one clip."""
    few = STREAMS[:6] + ("tied",)
    quick = helpers.covering(few, clips, strength=1)
    return quick + [
        pytest.param(program, clip, id=f"{program}-{clip}", marks=pytest.mark.slow)
        for program in STREAMS
        if program not in few
        for clip in clips
    ]


def two_uses(embed, head, others, example):
    """Returns the loss of a table used in lookups and in a product, like tied embeddings."""
    tokens, targets = example
    h = embed[tokens] + others["shift"]

    def layer(h, inputs):
        return jnp.tanh(h @ inputs["w"] + inputs["b"]), None

    h, _ = jax.lax.scan(jax.checkpoint(layer), h, others["layers"])
    return jnp.mean((h @ (head.T * 8.0) - targets) ** 2)


def loss_fn(params, example):
    return two_uses(params["embed"], params["embed"], params, example)


def make_problem():
    rng = np.random.default_rng(0)
    normal = lambda *shape: helpers.floats(rng.normal(size=shape))  # noqa: E731
    params = {
        "embed": normal(11, 6),
        "shift": normal(6),
        "layers": {"w": normal(3, 6, 6) / 2, "b": normal(3, 6)},
    }
    return params, (jnp.array(rng.integers(0, 11, (EXAMPLES, 5))), normal(EXAMPLES, 5, 11))


def assert_close(found, want, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, **tolerance), found, want)


def clipped_sum(grads, bound):
    norms = jnp.sqrt(jnp.sum(grads.reshape(EXAMPLES, -1) ** 2, axis=1))
    return jnp.einsum("b,b...->...", MASK * jnp.minimum(1.0, bound / norms), grads)


def expected(params, batch, clip_of):
    """Returns the sum of parts that are clipped separately, with bound `clip_of[leaf]`."""
    table = params["embed"]
    grads = jax.vmap(jax.grad(two_uses, argnums=(0, 1, 2)), (None, None, None, 0))(
        table, table, params, batch
    )
    steps = grads[2]["layers"]["w"]
    return {
        "embed": sum(clipped_sum(each, clip_of["embed"] / 2) for each in grads[:2]),
        "shift": clipped_sum(grads[2]["shift"], clip_of["shift"]),
        "layers": {
            "w": jnp.stack([clipped_sum(steps[:, i], clip_of["w"] / 3**0.5) for i in range(3)]),
            "b": clipped_sum(grads[2]["layers"]["b"], clip_of["b"]),
        },
    }


@pytest.mark.parametrize("microbatch_size", helpers.slow_but((5,), (None, 5)))
def test_each_use_is_clipped_to_its_share_of_the_bound(microbatch_size, no_room):
    params, batch = make_problem()
    grad_fn = dpoptax.clipped_grad(loss_fn, CLIP, microbatch_size=microbatch_size)
    found = jax.jit(grad_fn)(params, batch, MASK)
    assert found.clip.sensitivity == 1.0
    want = expected(params, batch, dict.fromkeys(("embed", "shift", "w", "b"), 0.5))
    assert_close(found.sum, want, rtol=2e-4)


def test_parameters_of_one_layer_share_its_bound(no_room):
    params, batch = make_problem()
    clip = dpoptax.per_layer_clip({"embed": 0.2, "shift": 0.1, "layers": 0.4}, streaming=True)
    found = jax.jit(dpoptax.clipped_grad(loss_fn, clip))(params, batch, MASK).sum
    bounds = {"embed": 0.2, "shift": 0.1, "w": 0.4 / 2**0.5, "b": 0.4 / 2**0.5}
    assert_close(found, expected(params, batch, bounds), rtol=2e-4)


def test_aux_and_keys_match_their_examples():
    params, batch = make_problem()

    def loss(params, example, key):
        value = loss_fn(params, example)
        return value * jax.random.uniform(key), value

    grad_fn = dpoptax.clipped_grad(loss, CLIP, has_aux=True, return_values=True)
    key, ids = jax.random.key(0), np.arange(EXAMPLES) + 7
    _, (values, aux) = jax.jit(grad_fn)(params, batch, key=key, ids=ids)
    want = jax.vmap(loss_fn, (None, 0))(params, batch)
    drawn = [jax.random.uniform(jax.random.fold_in(key, i)) for i in ids]
    np.testing.assert_allclose(aux, want, rtol=1e-5)
    np.testing.assert_allclose(values, want * jnp.array(drawn), rtol=1e-5)


@pytest.mark.spread(8)
@pytest.mark.optimized
@pytest.mark.parametrize(("program", "clip"), attacks(["per layer", "AUTO-V"]))
def test_example_moves_sum_by_at_most_the_bound(program, clip):
    clip = AUTO if clip == "AUTO-V" else adversary_test.CLIPS[clip]
    clip = dpoptax.per_layer_clip(clip.clips[0], streaming=True)
    assert _attack(program, clip, QUICK) <= 1


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("program", "way"),
    helpers.covering(["regression", "batched"], WAYS, strength=1),
)
def test_example_moves_bfloat16_sum_by_at_most_the_bound(program, way, monkeypatch):
    helpers.force_norm_method(monkeypatch, way)
    assert _attack(program, AUTO, QUICK, precision="bfloat16") <= 1
    assert _attack(program, AUTO, QUICK, dtype="bfloat16") <= 1


def test_non_finite_example_adds_zero():
    params, (x, y) = helpers.mlp_params(0), helpers.mlp_batch(0, EXAMPLES)
    grad_fn = jax.jit(dpoptax.clipped_grad(helpers.mlp_loss, CLIP))
    want = grad_fn(params, (x, y), np.arange(EXAMPLES) != 3).sum
    found = grad_fn(params, (x.at[3].set(jnp.inf), y), np.ones(EXAMPLES, bool)).sum
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.slow
def test_stores_no_activations_for_second_pass():
    """The memory of a checkpointed step does not grow with the number of layers."""

    def loss(params, x):
        layer = lambda h, w: (jnp.tanh(jnp.tanh(h @ w) @ w.T), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    def memory(clip, layers):
        shapes = (layers, 16, 16), (64, 128, 16)
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        grad_fn = dpoptax.clipped_grad(loss, clip)
        step = jax.jit(lambda w, x: grad_fn(w, x).sum)
        return step.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    carry = 64 * 128 * 16 * 4
    streamed, whole = (memory(clip, 30) - memory(clip, 10) for clip in (CLIP, 1.0))
    assert streamed < 1.5 * 20 * carry
    assert whole > 3.5 * 20 * carry


def computed(params, x):
    return jnp.sum((x @ (params / jnp.linalg.norm(params))) ** 2)


def repeated(params, x):
    return jnp.sum(jax.lax.scan(lambda h, _: (jnp.tanh(h @ params), None), x, None, length=2)[0])


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (computed, {}, "computed on before dot_general"),
        (repeated, {}, "all steps use the whole"),
        (computed, {"method": "vmap"}, "without per-example gradients, got method='vmap'"),
        (computed, {"grid": 2.0**-10}, "got method='auto', grid=0.0009"),
    ],
)
def test_refuses_losses_that_cannot_stream(loss, options, message):
    with pytest.raises(ValueError, match=message):
        dpoptax.clipped_grad(loss, CLIP, **options)(jnp.eye(4), jnp.ones((3, 4)))


@pytest.mark.parametrize("weights", [(0.5, 0.5), (2.0,)])
def test_refuses_several_points_and_weights(weights):
    points = dpoptax.GradientPoints((jnp.eye(4),) * len(weights), weights)
    with pytest.raises(ValueError, match="must have one gradient point"):
        dpoptax.clipped_grad(repeated, CLIP)(points, jnp.ones((3, 4)))


def test_refuses_clip_that_cannot_be_split():
    with pytest.raises(ValueError, match="can be split"):
        dpoptax.per_layer_clip({"a": dpoptax.normalized_clip(1.0)}, streaming=True)
