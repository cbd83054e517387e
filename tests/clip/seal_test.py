"""Tests the seal on the clipped sum: a sum cannot be changed between clip and noise."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax._clipped_sum.clipped_sum import check_clipped_sum
from tests import helpers

CLIP = dpoptax.l2_clip(1.0)
FAQ = pathlib.Path(__file__).parents[2] / "docs/faq.md"
PARAMS = {k: helpers.floats(np.zeros(shape)) for k, shape in dict(w=(2, 3), b=3, c=3).items()}


def loss_fn(params, example):
    x, y = example
    return 0.5 * jnp.sum((x @ params["w"] + params["b"] - 2 * params["c"] - y) ** 2)


def batch(seed=0, size=4):
    """Returns the batch of a seed. NumPy draws it, because compiling a generator is slow."""
    first, other = np.random.default_rng(0).normal(size=(2, size, 5)).astype(np.float32)
    rows = first + seed * other
    return rows[:, :2], rows[:, 2:]


@functools.cache
def compiled(clip):
    grad_fn = dpoptax.clipped_grad(loss_fn, clip, method="vmap")  # compiles faster
    points, mask = dpoptax.gradient_points((), PARAMS), np.ones(4, bool)
    return jax.jit(lambda seed: grad_fn(points, batch(seed), mask))


def clipped_sum(seed=0, clip=CLIP):
    return compiled(clip)(seed)


def noise(key=0):
    return dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=4, key=jax.random.key(key))


@functools.cache
def stage():
    """Returns a noise stage, compiled once for all releases, and its first state."""
    tx = noise()
    return jax.jit(tx.update), tx.init(PARAMS)


def released(clipped):
    update, state = stage()
    return update(clipped, state)


def trace(tx, **extra):
    """Traces an update with a clipped sum, and returns the shapes of its results."""
    return jax.eval_shape(lambda s: tx.update(s, tx.init(PARAMS), PARAMS, **extra), clipped_sum())


def assert_refused(clipped):
    """Checks that the noise stage refuses a sum while it is traced."""
    with pytest.raises(TypeError, match=r"those that were clipped.*trust_clipped"):
        jax.eval_shape(noise().update, clipped, stage()[1])


@pytest.mark.parametrize("jit", [True, False])
def test_unchanged_sums_are_released(jit):
    update, state = stage()
    if not jit:
        update = noise().update
    for seed in range(2):
        mean, state = update(clipped_sum(seed), state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(mean))
    assert dpoptax.ledgers(state)[0].releases == 2


def scale_floats(updates, _):
    return jax.tree.map(lambda x: 100 * x if jnp.issubdtype(x.dtype, jnp.floating) else x, updates)


IN_FRONT = {
    "scale": lambda: optax.scale(100.0),
    "scale by an integer": lambda: optax.scale(-1),
    "schedule": lambda: optax.scale_by_schedule(lambda count: 0.1 * count),
    "conditionally": lambda: optax.conditionally_transform(optax.scale(2.0), lambda *_, **__: True),
    "sign": lambda: optax.scale_by_sign(),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(1.0),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
    "normalize": optax.normalize_by_update_norm,
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(1.0),
    "centralize": optax.centralize,
    "add_noise": lambda: optax.add_noise(1.0, 0.5, key=0),
    "cast": lambda: optax.stateless(lambda u, _: optax.tree.cast(u, jnp.bfloat16)),
    "square": lambda: optax.stateless(lambda u, _: jax.tree.map(jnp.square, u)),
}


@pytest.mark.parametrize("name", IN_FRONT)
def test_error_of_transform_before_noise_says_where_it_belongs(name):
    message = r"private until the noise stage\. Place other"
    with pytest.raises((TypeError, ValueError), match=message):
        trace(optax.chain(IN_FRONT[name](), noise()))


UNCHANGED = {
    "identity": optax.identity,
    "zero_nans": optax.zero_nans,
    "floats only": lambda: optax.stateless(scale_floats),
    "stop_gradient": lambda: optax.stateless(lambda u, _: jax.lax.stop_gradient(u)),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_transforms_before_noise_leave_the_sum_unchanged(name):
    tx, clipped = UNCHANGED[name](), clipped_sum()
    passed, _ = jax.jit(lambda s: tx.update(s, tx.init(PARAMS), PARAMS))(clipped)
    jax.tree.map(np.testing.assert_array_equal, passed.sum, clipped.sum)
    jax.eval_shape(released, passed)


def test_set_to_zero_before_noise_releases_noise_alone():
    tx = optax.set_to_zero()
    assert not np.any(tx.update(clipped_sum(), tx.init(PARAMS))[0].sum["w"])


PUBLIC_FUNCTIONS = {
    "optax.tree.norm": optax.tree.norm,
    "optax.tree.sum": optax.tree.sum,
    "optax.tree.add": lambda s: optax.tree.add(s, s),
    "optax.tree.scale": lambda s: optax.tree.scale(2.0, s),
    "ravel_pytree": lambda s: jax.flatten_util.ravel_pytree(s)[0] + 1,
    **{
        f.__name__: lambda s, f=f: jax.tree.map(f, s)
        for f in (jnp.abs, jnp.sum, jnp.mean, jnp.sqrt, jnp.cumsum, jnp.sort, jnp.float32, jnp.max)
    },
    "add at": lambda s: jax.tree.map(lambda x: x.at[0].add(x[0]), s),
    "dot": lambda s: jax.tree.map(lambda x: jnp.vdot(x, x), s),
    "psum": lambda s: jax.vmap(
        lambda s: jax.lax.psum(s, "i"), axis_name="i", axis_size=2, in_axes=None
    )(s),
    "random bits": lambda s: jax.tree.map(lambda x: jax.random.bits(x.reshape(-1)[0]), s),
}


@pytest.mark.parametrize("name", PUBLIC_FUNCTIONS)
def test_functions_refuse_sealed_arrays(name):
    with pytest.raises((TypeError, ValueError, AssertionError), match="private until the noise"):
        jax.jit(PUBLIC_FUNCTIONS[name])(clipped_sum())
    with pytest.raises((TypeError, ValueError, AssertionError, NotImplementedError)):
        PUBLIC_FUNCTIONS[name](clipped_sum())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda s: s / 50,
        lambda s: 0.02 * s,
        lambda s: s + s,
        lambda s: optax.apply_updates(jnp.zeros(3), s),
        lambda s: np.ones(3) - s,
        lambda s: s @ np.ones(3),
        jnp.sum,
        lambda s: jnp.multiply(0.02, s),
    ],
)
def test_arithmetic_error_says_where_sum_belongs(wrong):
    with pytest.raises(TypeError, match=r"until the noise stage.*straight to.*accumulate"):
        wrong(clipped_sum())


def test_error_names_type_of_other_inputs():
    for wrong, name in ((jnp.ones(3), "an array"), ({"w": 1.0}, "a dict")):
        with pytest.raises(TypeError, match=f"needs a `ClippedSum`, got {name}"):
            jax.eval_shape(lambda u: noise().update(u, noise().init(PARAMS), PARAMS), wrong)


AROUND = {
    "adam": lambda: optax.chain(optax.scale_by_adam(), noise()),
    "trace": lambda: optax.chain(optax.trace(0.9), noise()),
    "ema": lambda: optax.chain(optax.ema(0.9), noise()),
    "MultiSteps": lambda: optax.MultiSteps(noise(), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(noise(), 2),
    "multi_transform": lambda: optax.multi_transform(
        {"noise": noise(), "sgd": optax.sgd(1.0)}, {"w": "noise", "b": "sgd", "c": "sgd"}
    ),
    "masked": lambda: optax.masked(noise(), {"w": True, "b": False, "c": False}),
    "weight decay": lambda: optax.chain(optax.add_decayed_weights(0.1), noise()),
}


@pytest.mark.parametrize("name", AROUND)
def test_errors_raised_inside_optax_name_clipped_sum(name):
    """JAX raises these errors inside optax. They name the class, and the FAQ quotes them."""
    with pytest.raises((TypeError, ValueError), match=r"clipped_sum\.ClippedSum") as raised:
        trace(AROUND[name]())
    assert str(raised.value).split(":")[0] in FAQ.read_text("utf-8")


BEHIND = {
    "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
    "lbfgs": optax.lbfgs,
    "plateau": optax.contrib.reduce_on_plateau,
}


@pytest.mark.parametrize("name", BEHIND)
def test_faq_quotes_errors_of_optimizers_behind_noise(name):
    with pytest.raises((AttributeError, TypeError)) as raised:
        trace(optax.chain(noise(), BEHIND[name]()))
    shown = str(raised.value).split("'dict' ")[-1].split("update_fn() ")[-1]
    assert shown in FAQ.read_text("utf-8")


@pytest.mark.parametrize("remedy", ["lbfgs", "MultiSteps", "plateau"])
def test_remedies_for_optimizers_behind_noise(remedy):
    tx, values = {
        "lbfgs": (optax.lbfgs(linesearch=None), {}),
        "MultiSteps": (optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), {}),
        "plateau": (optax.contrib.reduce_on_plateau(), {"value": jnp.ones(())}),
    }[remedy]
    updates, _ = trace(optax.chain(noise(), tx), **values)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


@pytest.mark.parametrize("params", [PARAMS, jnp.zeros(4)], ids=["a dict", "an array"])
def test_error_says_lookahead_belongs_around_the_chain(params):
    tx, both = optax.lookahead(optax.sgd(0.1), 2, 0.5), optax.LookaheadParams.init_synced(params)
    clipped = dpoptax.extend.trust_clipped(params, CLIP)
    chain = optax.chain(noise(), tx)
    with pytest.raises(TypeError, match=r"got a LookaheadParams.*lookahead\(optax.chain\(noise"):
        jax.eval_shape(chain.update, clipped, chain.init(both), both)
    around = optax.lookahead(optax.chain(noise(), optax.sgd(0.1)), 2, 0.5)
    jax.eval_shape(around.update, clipped, around.init(both), both)


FILTERS = {
    "low_pass": dpoptax.doppler(b=[1 / 11, 1 / 11], a=[-9 / 11]),
    "adaptive_kalman": dpoptax.adaptive_kalman(0.1),
    "disk": dpoptax.disk(0.7, 0.5),
}


@pytest.mark.parametrize("name", FILTERS)
def test_error_says_filter_belongs_after_noise(name):
    with pytest.raises(TypeError, match=f"`{name}` got a `ClippedSum`, .*after the noise stage"):
        trace(optax.chain(FILTERS[name], noise()))


def sums():
    """Returns a sum, and sums that differ from it in one of the terms."""
    trust = dpoptax.extend.trust_clipped
    grad_fn = jax.jit(dpoptax.clipped_grad(loss_fn, CLIP, method="vmap"))
    points = dpoptax.gradient_points(dpoptax.disk().init(PARAMS), PARAMS)
    return trust(PARAMS, CLIP, examples=4), {
        "bound": trust(PARAMS, dpoptax.l2_clip(100.0), examples=4),
        "kind": trust(PARAMS, dpoptax.automatic_clip(1.0), examples=4),
        "examples": trust(PARAMS, CLIP, examples=1),
        "mask": grad_fn(PARAMS, batch()),
        "points": grad_fn(points, batch(), np.ones(4, bool)),
        "dtype": trust(jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS), CLIP, examples=4),
        "grid": trust(jax.tree.map(lambda x: x.astype(int), PARAMS), CLIP, grid=1.0, examples=4),
    }


@pytest.mark.parametrize("name", ["bound", "kind", "examples", "mask", "points", "dtype", "grid"])
def test_refuses_arrays_under_other_terms(name):
    """A seal belongs to the clip, the number of examples, the points, and the dtype."""
    own, others = sums()
    other = others[name]
    check_clipped_sum(own), check_clipped_sum(other)
    assert_refused(jax.tree.unflatten(jax.tree.structure(own), jax.tree.leaves(other)))
    assert_refused(jax.tree.unflatten(jax.tree.structure(other), jax.tree.leaves(own)))
    assert_refused(dataclasses.replace(other, terms=own.terms, leaves=own.leaves))
    with pytest.raises(TypeError):
        jax.eval_shape(lambda: jax.lax.cond(True, lambda: own.sealed, lambda: other.sealed))
    with pytest.raises(TypeError):
        dataclasses.replace(own, clip=dpoptax.l2_clip(0.01))


def test_seal_belongs_to_the_module_of_the_clip():
    """Two classes may have the same name and fields."""

    def trusted(module):
        options = {"bases": (type(CLIP),), "frozen": True, "namespace": {"__module__": module}}
        kind = dataclasses.make_dataclass("Mine", [("bound", float)], **options)
        return dpoptax.extend.trust_clipped(PARAMS, kind(1.0, 1.0))

    one, other = map(trusted, ("one", "other"))
    assert repr(one.terms) == repr(other.terms)
    assert_refused(jax.tree.unflatten(jax.tree.structure(one), jax.tree.leaves(other)))


CHANGED = {
    "swapped": lambda x: {**x, "b": x["c"], "c": x["b"]},
    "repeated": lambda x: {**x, "b": x["c"]},
    "reshaped": lambda x: {**x, "w": x["w"].reshape(3, 2)},
    "concatenated": lambda x: {**x, "b": jnp.concatenate([x["b"], x["b"]])},
    "stacked": lambda x: jax.tree.map(lambda a: jnp.stack([a, a]), x),
    "left out": lambda x: {"w": x["w"], "b": x["b"]},
    "renamed": lambda x: {"w": x["w"], "b": x["b"], "d": x["c"]},
    "plain": lambda x: PARAMS,
    "random key": lambda x: {**x, "b": jax.random.split(jax.random.key(0), 3)},
}


@pytest.mark.parametrize("name", CHANGED)
def test_refuses_arrays_at_other_places(name):
    clipped = clipped_sum()
    total, reference = clipped.sealed
    assert_refused(dataclasses.replace(clipped, sealed=(CHANGED[name](total), reference)))


def test_refuses_stacked_sums_of_vmap():
    """Two sums in one release would have twice the sensitivity."""
    assert_refused(jax.vmap(clipped_sum)(jnp.arange(2)))


def test_containers_and_numpy_arrays_are_not_shared():
    clipped, reference = clipped_sum(), np.ones(3, np.float32)
    want = np.array(clipped.sum["w"])
    clipped.sum.update(w=100.0 * clipped.sum["w"])
    np.testing.assert_array_equal(clipped.sum["w"], want)
    trusted = dpoptax.extend.trust_clipped(PARAMS, CLIP, reference)
    jax.block_until_ready(trusted)
    reference *= 2
    np.testing.assert_array_equal(trusted.reference, 1.0)
    clipped.sealed[0].pop("b")
    assert_refused(clipped)


@pytest.mark.parametrize(
    "dtype", ["bool", "int32", "uint8", "bfloat16", "float16", "float32", "float64"]
)
@pytest.mark.parametrize("jit", [True, False])
def test_seal_keeps_every_bit(dtype, jit):
    with jax.enable_x64(dtype == "float64"):
        raw = np.random.default_rng(0).integers(0, 256, (3, 5, 8)).astype(np.uint8)
        values = jnp.asarray((raw % 2 == 1) if dtype == "bool" else raw.view(jnp.dtype(dtype)))
        function = lambda x: dpoptax.extend.trust_clipped({}, CLIP, x).reference  # noqa: E731
        found = np.asarray((jax.jit(function) if jit else function)(values))
    assert found.dtype == values.dtype
    assert found.tobytes() == np.asarray(values).tobytes()


def test_seal_costs_nothing_in_a_compiled_program():
    function = lambda x: 2.0 * dpoptax.extend.trust_clipped({}, CLIP, x).reference  # noqa: E731
    text = jax.jit(function).lower(np.ones((4, 3), np.float32)).compile().as_text()
    assert not re.search("u32|bitcast", text)


def test_refuses_padding_without_mask():
    draw = dpoptax.sampling.PoissonSampler(dataset_size=20, batch_size=4, seed=0).sample(0)
    data = np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)
    points = dpoptax.gradient_points((), jnp.zeros(3))
    grad_fn = jax.jit(dpoptax.clipped_grad(lambda w, x: w @ x, CLIP, method="vmap"))
    update, state = jax.jit(noise().update), noise().init(jnp.zeros(3))
    batch = data[draw.indices]
    assert np.isfinite(update(grad_fn(points, batch, draw.mask), state)[0]).all()
    part, rest = grad_fn(points, batch), grad_fn(points, batch[1:])
    for clipped in (part, dpoptax.accumulate(rest, part)):
        with pytest.raises(ValueError, match=r"Without a mask.*sampler's mask.*or `mask=jnp.ones"):
            update(clipped, state)
    # The expected number of examples is a whole batch, in one piece or in parts.
    halves = [grad_fn(points, data[:2]), grad_fn(points, data[2:4])]
    for clipped in (grad_fn(points, data[:4]), dpoptax.accumulate(*halves)):
        assert np.isfinite(update(clipped, state)[0]).all()


def test_clip_and_noise_refuses_padding_without_mask():
    """Padding repeats row 0, which would otherwise be added many times."""
    draw = dpoptax.sampling.PoissonSampler(dataset_size=20, batch_size=4, seed=0).sample(0)
    params = np.zeros(3, np.float32)
    data = np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)
    arguments = {"noise_multiplier": 1.0, "batch_size": 4, "key": jax.random.key(0)}
    tx = optax.chain(dpoptax.clip_and_noise(CLIP, **arguments), optax.sgd(1.0))
    state, grads, update = tx.init(params), data[draw.indices], jax.jit(tx.update)
    with pytest.raises(ValueError, match="Without a mask.*sampler's mask.*`clip_and_noise`"):
        update(grads, state, params)
    alone = jax.jit(dpoptax.extend.clip_per_example(CLIP).update)
    masked, _ = alone(grads, optax.EmptyState(), params, mask=draw.mask)
    without = np.where(draw.mask[:, None], grads, np.float32(0))
    np.testing.assert_array_equal(masked.sum, alone(without, optax.EmptyState(), params)[0].sum)
    noisy, _ = jax.jit(dpoptax.gaussian_noise(**arguments).update)(masked, state[0][1])
    updates, state = update(grads, state, params, mask=draw.mask)
    np.testing.assert_allclose(updates, -noisy, rtol=1e-6)
    with pytest.raises(ValueError, match="`mask` must have shape"):
        update(grads, state, params, mask=draw.mask[1:])
    assert np.isfinite(update(grads[:4], state, params)[0]).all()


def test_sum_on_grid_must_hold_integers():
    with pytest.raises(TypeError, match=r"must hold integers, got float32"):
        dpoptax.extend.trust_clipped(PARAMS, CLIP, grid=2.0**-20)


def test_hand_made_sum_needs_trust_clipped():
    terms = dpoptax.extend.trust_clipped(PARAMS, CLIP).terms
    assert_refused(dpoptax.ClippedSum((PARAMS, None), terms, ()))
    mean, _ = released(dpoptax.extend.trust_clipped(PARAMS, CLIP))
    assert np.isfinite(mean["w"]).all()
    with pytest.raises(TypeError, match=r"`clip` must .* got '1\.0'"):
        dpoptax.extend.trust_clipped(PARAMS, "1.0")


def test_refuses_complex_sums_even_if_trusted():
    """A complex normal of JAX has half of its variance in each part, so the noise would be σ/√2."""
    total = {"w": jnp.ones(2), "z": jnp.zeros(2, jnp.complex64)}
    with pytest.raises(TypeError, match=r"must be real.*'z'.*complex64"):
        dpoptax.extend.trust_clipped(total, CLIP)


def test_release_works_under_scan_vmap_and_donation():
    tx = noise()

    def step(state, seed):
        mean, state = tx.update(clipped_sum(seed), state)
        return state, mean

    state, means = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(3)), donate_argnums=0)(
        tx.init(PARAMS)
    )
    assert np.isfinite(means["w"]).all()
    assert dpoptax.ledgers(state)[0].releases == 3
    sums = jax.vmap(clipped_sum)(jnp.arange(3))
    means, _ = jax.jit(jax.vmap(tx.update, (0, None)))(sums, tx.init(PARAMS))
    assert np.isfinite(means["w"]).all()
    mean, _ = jax.jit(tx.update, donate_argnums=0)(clipped_sum(), tx.init(PARAMS))
    assert np.isfinite(mean["w"]).all()


def test_accumulated_parts_equal_the_batch():
    whole = clipped_sum()
    grad_fn = jax.jit(dpoptax.clipped_grad(loss_fn, CLIP))
    points = dpoptax.gradient_points((), PARAMS)
    parts = [grad_fn(points, jax.tree.map(lambda x, i=i: x[i : i + 2], batch())) for i in (0, 2)]
    total = jax.jit(dpoptax.accumulate)(*parts)
    # Each part leaves room for its rounding, about 2⁻²⁴ of the bound per example.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), total.sum, whole.sum)
    mean, state = released(total)
    assert np.isfinite(mean["w"]).all()
    assert dpoptax.ledgers(state)[0].releases == 1
    # One added example moves the total by at most the clipping bound.
    more = jax.tree.map(lambda x: np.concatenate([x[2:], np.float32(1e3) * x[:1]]), batch())
    moved = dpoptax.accumulate(parts[0], grad_fn(points, more))
    move = jax.tree.map(lambda x, y: np.float64(x) - np.float64(y), moved.sum, total.sum)
    assert helpers.global_norm(move) <= CLIP.sensitivity


def test_refuses_parts_of_too_many_examples():
    with pytest.raises(ValueError, match="Use smaller batches"):
        dpoptax.accumulate(
            *(dpoptax.extend.trust_clipped(np.ones(3), CLIP, examples=2**20) for _ in range(3))
        )


@pytest.mark.parametrize(("dtype", "large"), [("bfloat16", 256.0), ("float16", 2048.0)])
def test_narrow_floats_are_accumulated_in_float32(dtype, large):
    """Sums of narrow floats are added in float32. Narrow neighbors differ by 2, which is 2 C."""
    first, *others = (
        dpoptax.extend.trust_clipped(
            helpers.floats(np.array([x]), dtype), CLIP, examples=int(large)
        )
        for x in (large, 1.0, 2.0)
    )
    one, two = (np.float64(dpoptax.accumulate(first, x).sum[0]) for x in others)
    assert 0.999 < two - one <= CLIP.sensitivity


def test_accumulated_integers_do_not_wrap_around():
    """Integers do not wrap around: one of 16,384 examples once moved their total by 16,384 C."""
    mechanism = {"noise_multiplier": 0.5, "batch_size": 2_000}
    grid = dpoptax.extend.fixed_point_grid(CLIP, **mechanism)

    def part(examples):
        total = jnp.full(1, round(examples / grid), jnp.int32)
        return dpoptax.extend.trust_clipped(total, CLIP, grid=grid, examples=examples)

    tx = dpoptax.gaussian_noise(**mechanism, key=jax.random.key(0), fixed_point=True)
    mean, _ = tx.update(dpoptax.accumulate(part(5_000), part(3_000)), tx.init(PARAMS))
    assert abs(2_000 * mean[0] - 8_000) < 10
    with pytest.raises(ValueError, match=r"fit into int32.* 16384 examples"):
        dpoptax.accumulate(part(8_000), part(384), part(8_000))


def test_accumulate_refuses_incompatible_sums():
    one, two = clipped_sum(0), clipped_sum(1)
    with pytest.raises(ValueError, match=r"same clip and grid.*sums\[1\] with clip"):
        dpoptax.accumulate(one, clipped_sum(1, dpoptax.l2_clip(2.0)))
    with pytest.raises(ValueError, match="twice"):
        dpoptax.accumulate(one, two, one)
    with pytest.raises(ValueError, match="at least one `ClippedSum`"):
        dpoptax.accumulate()
    with pytest.raises(TypeError, match="needs a `ClippedSum`"):
        dpoptax.accumulate(one.sum)
    with pytest.raises(TypeError, match=r"got a list\. .*dpoptax.accumulate\(\*sums\)"):
        dpoptax.accumulate([one, two])
    changed = dataclasses.replace(two, sealed=one.sum)
    with pytest.raises(TypeError, match="those that were clipped"):
        dpoptax.accumulate(one, changed)
    with pytest.raises(ValueError, match=r"number of examples of sums\[1\] must be known"):
        dpoptax.accumulate(one, dpoptax.extend.trust_clipped(two.sum, CLIP))
