"""Tests the methods "recompute" and "streaming", which sum during the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax._ghost_clipping.backward import part_sums, recomputed_sum
from tests import helpers
from tests.clipped_grad.adversary_test import CLIPS, QUICK, WAYS, _attack

BOUND = 2.0
EXAMPLES = 12
MASK = np.arange(EXAMPLES) % 5 != 2
STREAMED = dpoptax.per_layer_clip(1.0)
METHODS = {
    "recompute": {"clip": BOUND, "method": "recompute"},
    "streaming": {"clip": STREAMED, "method": "streaming"},
}
# The clips of the search for the worst example.
ATTACKED = {
    "recompute": {"l2": CLIPS["l2"], "AUTO-V": CLIPS["AUTO-V"]},
    "streaming": {
        "per layer": CLIPS["per layer"],
        "AUTO-V": dpoptax.per_layer_clip(CLIPS["AUTO-V"]),
    },
}
PROGRAMS = (
    "regression", "short", "long", "one position", "convolution", "batched", "scanned",
    "elementwise", "token", "tied", "experts", "graph", "linen", "custom_vjp",
)  # fmt: skip


def attacks(method):
    """Returns all programs and clips as parameters. A few programs are quick, with one clip."""
    few, clips = PROGRAMS[:6] + ("tied",), list(ATTACKED[method])
    quick = helpers.covering([method], few, clips, strength=1)
    return quick + [
        pytest.param(method, program, clip, id=f"{method}-{program}-{clip}", marks=pytest.mark.slow)
        for program in PROGRAMS
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


def tied(params, example):
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


def gradients_by_use(params, batch):
    """Returns gradients of both uses of the table, and of the other parameters."""
    table = params["embed"]
    gradient = jax.grad(two_uses, argnums=(0, 1, 2))
    return jax.vmap(gradient, (None, None, None, 0))(table, table, params, batch)


def clipped_sum(grads, bound):
    norms = jnp.sqrt(jnp.sum(grads.reshape(EXAMPLES, -1) ** 2, axis=1))
    return jnp.einsum("b,b...->...", MASK * jnp.minimum(1.0, bound / norms), grads)


def streamed(params, batch, clip_of):
    """Returns the sum of parts that are clipped separately, with bound `clip_of[leaf]`."""
    *tables, others = gradients_by_use(params, batch)
    steps = others["layers"]["w"]
    return {
        "embed": sum(clipped_sum(each, clip_of["embed"] / 2) for each in tables),
        "shift": clipped_sum(others["shift"], clip_of["shift"]),
        "layers": {
            "w": jnp.stack([clipped_sum(steps[:, i], clip_of["w"] / 3**0.5) for i in range(3)]),
            "b": clipped_sum(others["layers"]["b"], clip_of["b"]),
        },
    }


@pytest.mark.parametrize("microbatch_size", helpers.slow_but((5,), (None, 5)))
def test_streaming_clips_each_use_to_its_share_of_the_bound(microbatch_size, no_room):
    params, batch = make_problem()
    grad_fn = dpoptax.clipped_grad(
        tied, STREAMED, method="streaming", microbatch_size=microbatch_size
    )
    found = jax.jit(grad_fn)(params, batch, MASK)
    assert found.clip.sensitivity == 1.0
    want = streamed(params, batch, dict.fromkeys(("embed", "shift", "w", "b"), 0.5))
    assert_close(found.sum, want, rtol=2e-4)


def test_streamed_parameters_of_one_layer_share_its_bound(no_room):
    params, batch = make_problem()
    clip = dpoptax.per_layer_clip({"embed": 0.2, "shift": 0.1, "layers": 0.4})
    found = jax.jit(dpoptax.clipped_grad(tied, clip, method="streaming"))(params, batch, MASK).sum
    bounds = {"embed": 0.2, "shift": 0.1, "w": 0.4 / 2**0.5, "b": 0.4 / 2**0.5}
    assert_close(found, streamed(params, batch, bounds), rtol=2e-4)


def test_recomputed_norms_of_tied_uses_are_added(no_room):
    params, batch = make_problem()
    found = jax.jit(dpoptax.clipped_grad(tied, BOUND, method="recompute"))(params, batch, MASK)
    first, second, others = gradients_by_use(params, batch)
    norm = jax.vmap(optax.tree.norm)
    factor = MASK * jnp.minimum(1.0, BOUND / norm(others | {"embed": norm(first) + norm(second)}))
    want = others | {"embed": first + second}
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


@pytest.mark.parametrize("options", [{"clip": BOUND}, *METHODS.values()])
def test_sums_in_bfloat16_can_be_transposed(options, no_room):
    """Tests sums that XLA joins with a transpose, of a tied weight or by the caller."""

    def loss(params, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ params["w"]) @ params["w"].T) @ params["v"])

    params = {"w": helpers.normal(0, (6, 6)), "v": helpers.normal(1, (6, 2))}
    batch = helpers.normal(2, (4, 3, 6))
    found, want = (
        jax.jit(
            lambda grad_fn: jax.tree.map(jnp.transpose, grad_fn(params, batch).sum),
            static_argnums=0,
        )(dpoptax.clipped_grad(loss, precision=precision, **options))
        for precision in ("bfloat16", "float32")
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(x - y) <= 2**-6 * np.linalg.norm(y)


@pytest.mark.spread(8)
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("method", "program", "clip"), [*attacks("recompute"), *attacks("streaming")]
)
def test_example_moves_sum_by_at_most_the_bound(method, program, clip):
    assert _attack(program, ATTACKED[method][clip], QUICK, method=method) <= 1


@pytest.mark.optimized
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("program", "way"),
    helpers.covering(["regression", "batched"], WAYS, strength=1),
)
def test_example_moves_bfloat16_sum_by_at_most_the_bound(program, way, method, monkeypatch):
    helpers.force_norm_method(monkeypatch, way)
    clip, options = ATTACKED[method]["AUTO-V"], {"method": method}
    assert _attack(program, clip, QUICK, precision="bfloat16", **options) <= 1
    assert _attack(program, clip, QUICK, dtype="bfloat16", **options) <= 1


@pytest.mark.parametrize("limited", [True, False])
def test_bound_holds_if_passes_disagree(limited, monkeypatch):
    """The second pass sums gradients that are four times as long as the measured ones."""
    measure = part_sums.part_length
    monkeypatch.setattr(part_sums, "part_length", lambda piece: measure(piece) / 4)
    if not limited:
        monkeypatch.setattr(
            recomputed_sum, "limited_coefficients", lambda limits, length: limits.factor
        )
    found = _attack("regression", CLIPS["AUTO-V"], QUICK, method="recompute")
    assert found <= 1 if limited else found > 3


@pytest.mark.slow
def test_stores_no_activations():
    """The memory of a checkpointed step does not grow with the number of layers."""

    def loss(params, x):
        layer = lambda h, w: (jnp.tanh(jnp.tanh(h @ w) @ w.T), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    def memory(options, layers):
        shapes = (layers, 16, 16), (64, 128, 16)
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        grad_fn = dpoptax.clipped_grad(loss, **options)
        step = jax.jit(lambda w, x: grad_fn(w, x).sum)
        return step.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    carry = 64 * 128 * 16 * 4
    ways = METHODS | {"auto": {"clip": 1.0, "microbatch_size": 64}}
    grown = {way: memory(options, 30) - memory(options, 10) for way, options in ways.items()}
    assert max(grown[method] for method in METHODS) < 1.5 * 20 * carry
    assert grown["auto"] > 3.5 * 20 * carry


def computed(params, x):
    return jnp.sum((x @ (params / jnp.linalg.norm(params))) ** 2)


def repeated(params, x):
    return jnp.sum(jax.lax.scan(lambda h, _: (jnp.tanh(h @ params), None), x, None, length=2)[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (computed, {}, "and the parameter is computed on before dot_general"),
        (repeated, {}, "all steps use the whole of the parameter"),
        (computed, {"grid": 2.0**-10}, "without per-example gradients, got grid=0.0009"),
    ],
)
def test_refuses_losses_and_grids(loss, options, message, method):
    with pytest.raises(ValueError, match=f"`method='{method}'` must .*{message}"):
        dpoptax.clipped_grad(loss, **METHODS[method], **options)(jnp.eye(4), jnp.ones((3, 4)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weights", [(0.5, 0.5), (2.0,)])
def test_refuses_several_points_and_weights(weights, method):
    points = dpoptax.GradientPoints((jnp.eye(4),) * len(weights), weights)
    with pytest.raises(ValueError, match=f"`method='{method}'` must have one gradient point"):
        dpoptax.clipped_grad(repeated, **METHODS[method])(points, jnp.ones((3, 4)))


@pytest.mark.parametrize(
    "clip", [1.0, dpoptax.per_layer_clip({"a": dpoptax.normalized_clip(1.0)})], ids=["l2", "layers"]
)
def test_streaming_refuses_clips_that_cannot_be_split(clip):
    with pytest.raises(ValueError, match="`per_layer_clip` of bounds that can be split"):
        dpoptax.clipped_grad(computed, clip, method="streaming")


@jax.custom_jvp
def chosen(x):
    return jnp.where(x > 0, 2.0 * x, jnp.sin(x))


@chosen.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return chosen(x), jax.lax.cond(x.sum() > 0, lambda t: 2.0 * t, lambda t: jnp.cos(x) * t, t)


@pytest.mark.parametrize("method", METHODS)
def test_names_condition_in_the_derivative_of_a_rule(method, no_room):
    """JAX says only that the transpose rule of 'stop_gradient' is not implemented."""
    loss, batch = lambda w, x: jnp.sum(chosen(x @ w)), helpers.normal(0, (3, 5, 4))
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        jax.grad(lambda w: jnp.sum(jax.vmap(loss, (None, 0))(w, batch)))(jnp.eye(4))
    with pytest.raises(ValueError, match=r"jax.custom_jvp.*use `method='auto'`"):
        dpoptax.clipped_grad(loss, **METHODS[method])(jnp.eye(4), batch)
    found = [dpoptax.clipped_grad(loss, 1.0, method=m)(jnp.eye(4), batch) for m in ("auto", "vmap")]
    np.testing.assert_allclose(*(each.sum for each in found), rtol=1e-4)
