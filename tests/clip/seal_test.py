"""Tests the seal on the clipped sum: a sum changed after clipping is refused."""

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
from dpoptax._gradients.clip.checksum import checksum, checksum_leaves
from dpoptax._gradients.clip.clipped_sum import is_intact
from tests import helpers

CLIP = dpoptax.l2_clip(1.0)
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


def assert_refused(mean, state, reason="clipped sum was changed"):
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(mean))
    with pytest.raises(ValueError, match=reason):
        dpoptax.ledgers(state)
    sampler = dpoptax.sampling.PoissonSampler(dataset_size=100, batch_size=4, seed=0)
    with pytest.raises(ValueError, match=reason):
        dpoptax.accounting.guarantee(state, sampler).epsilon(1e-5)


@pytest.mark.parametrize("jit", [True, False])
def test_unchanged_sums_are_released(jit):
    update, state = stage()
    if not jit:
        update = noise().update
    for seed in range(2):
        mean, state = update(clipped_sum(seed), state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(mean))
    assert dpoptax.ledgers(state)[0].releases == 2


IN_FRONT_RUN_TIME = {
    "scale by an integer": lambda: optax.scale(100),
    "scale by minus one": lambda: optax.scale(-1),
    "schedule of integers": lambda: optax.scale_by_schedule(lambda count: 100),
    "schedule": lambda: optax.scale_by_schedule(lambda count: 0.1 * count),
    "sign": lambda: optax.scale_by_sign(),
    "stateless": lambda: optax.stateless(
        lambda updates, _: dataclasses.replace(
            updates, sum=jax.tree.map(lambda x: 100 * x, updates.sum)
        )
    ),
}


@pytest.mark.parametrize("name", IN_FRONT_RUN_TIME)
def test_refuses_transform_before_noise_at_run_time(name):
    tx = IN_FRONT_RUN_TIME[name]()
    changed, _ = jax.jit(lambda s: tx.update(s, tx.init(PARAMS), PARAMS))(clipped_sum())
    assert_refused(*released(changed))


def test_refuses_transform_compiled_with_noise():
    tx = optax.chain(optax.scale(100), noise(), optax.scale(-0.1))
    mean, state = jax.jit(lambda s: tx.update(s, tx.init(PARAMS), PARAMS))(clipped_sum())
    assert_refused(mean, state)


IN_FRONT_TRACE_TIME = {
    "scale": lambda: optax.scale(100.0),
    "sgd": lambda: optax.sgd(0.1),
    "learning rate": lambda: optax.scale_by_learning_rate(0.1),
    "cast": lambda: optax.stateless(lambda u, _: jax.tree.map(lambda x: x.astype(jnp.bfloat16), u)),
}


@pytest.mark.parametrize("name", IN_FRONT_TRACE_TIME)
def test_refuses_transform_before_noise_when_traced(name):
    tx = optax.chain(IN_FRONT_TRACE_TIME[name](), noise())
    with pytest.raises(TypeError, match=r"seal of the `ClippedSum` must be.*straight to"):
        jax.eval_shape(tx.update, clipped_sum(), tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("transform", "error"),
    [
        (
            optax.clip_by_global_norm(1.0),
            "lax.select requires arguments to have the same dtypes, got float32, uint32",
        ),
        (
            optax.add_noise(1.0, 0.5, key=0),
            "dtype argument to `normal` must be a float or complex dtype, got uint32",
        ),
    ],
)
def test_faq_quotes_errors_raised_inside_optax(transform, error):
    """The FAQ contains the exact messages of transforms that fail inside optax."""
    tx = optax.chain(transform, noise())
    with pytest.raises((TypeError, ValueError), match=re.escape(error)):
        jax.eval_shape(tx.update, clipped_sum(), tx.init(PARAMS), PARAMS)
    assert error in (pathlib.Path(__file__).parents[2] / "docs/faq.md").read_text("utf-8")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda s: s / 50,
        lambda s: 0.02 * s,
        lambda s: s + s,
        lambda s: optax.apply_updates(jnp.zeros(3), s),
        lambda s: np.ones(3) - s,
        lambda s: -s,
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


@pytest.mark.parametrize("make", [optax.clip_by_global_norm, optax.clip, optax.clip_by_block_rms])
def test_refuses_clipping_the_sum_before_noise(make):
    """Optax's clips fail with their own error (docs/faq.md) or with that of the noise stage."""
    tx = optax.chain(make(1.0), noise())
    with pytest.raises(TypeError, match=r"seal of the `ClippedSum`|uint32"):
        jax.eval_shape(tx.update, clipped_sum(), tx.init(PARAMS), PARAMS)


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
    tx, faq = AROUND[name](), pathlib.Path(__file__).parents[2] / "docs/faq.md"
    with pytest.raises((TypeError, ValueError), match=r"clipped_sum\.ClippedSum") as raised:
        jax.eval_shape(lambda s: tx.update(s, tx.init(PARAMS), PARAMS), clipped_sum())
    assert str(raised.value).split(":")[0] in faq.read_text("utf-8")


BEHIND = {
    "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
    "lbfgs": optax.lbfgs,
    "plateau": optax.contrib.reduce_on_plateau,
}


@pytest.mark.parametrize("name", BEHIND)
def test_faq_quotes_errors_of_optimizers_behind_noise(name):
    tx, faq = (
        optax.chain(noise(), BEHIND[name]()),
        pathlib.Path(__file__).parents[2] / "docs/faq.md",
    )
    with pytest.raises((AttributeError, TypeError)) as raised:
        jax.eval_shape(lambda s: tx.update(s, tx.init(PARAMS), PARAMS), clipped_sum())
    shown = str(raised.value).split("'dict' ")[-1].split("update_fn() ")[-1]
    assert shown in faq.read_text("utf-8")


@pytest.mark.parametrize("remedy", ["lbfgs", "MultiSteps", "plateau"])
def test_remedies_for_optimizers_behind_noise(remedy):
    tx, values = {
        "lbfgs": (optax.lbfgs(linesearch=None), {}),
        "MultiSteps": (optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), {}),
        "plateau": (optax.contrib.reduce_on_plateau(), {"value": jnp.ones(())}),
    }[remedy]
    tx = optax.chain(noise(), tx)
    updates, _ = jax.eval_shape(
        lambda s: tx.update(s, tx.init(PARAMS), PARAMS, **values), clipped_sum()
    )
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
    "adaptive_fir": dpoptax.contrib.adaptive_fir(3, 0.1),
    "adaptive_kalman": dpoptax.adaptive_kalman(0.1),
    "disk": dpoptax.disk(0.7, 0.5),
}


@pytest.mark.parametrize("name", FILTERS)
def test_error_says_filter_belongs_after_noise(name):
    tx = optax.chain(FILTERS[name], noise())
    with pytest.raises(TypeError, match=f"`{name}` got a `ClippedSum`, .*after the noise stage"):
        jax.eval_shape(lambda s: tx.update(s, tx.init(PARAMS), PARAMS), clipped_sum())


def test_refuses_modified_containers():
    for change in (
        lambda sums: sums.update(w=100.0 * sums["w"]),
        lambda sums: sums.update(b=sums["c"], c=sums["b"]),
        lambda sums: sums.pop("b"),
    ):
        clipped = clipped_sum()
        change(clipped.sum)
        assert_refused(*released(clipped))
    reference = np.ones(3, np.float32)
    clipped = dpoptax.extend.trust_clipped(PARAMS, CLIP, reference)
    assert bool(is_intact(clipped))
    reference[0] = 7.0
    assert not is_intact(clipped)


@pytest.mark.parametrize("same_object", [True, False])
def test_only_another_object_is_compared_with_its_seal(same_object):
    tx, grad_fn = noise(), dpoptax.clipped_grad(loss_fn, CLIP, method="vmap")

    def release(seed, state):
        clipped = grad_fn(PARAMS, batch(seed))
        return tx.update(clipped if same_object else jax.tree.map(lambda x: x, clipped), state)

    text = jax.jit(release).lower(0, tx.init(PARAMS)).compile().as_text()
    assert ("_sum_of_mixed" in text) != same_object


def test_numpy_arrays_are_compared_with_the_seal():
    reference = np.ones(3, np.float32)
    clipped = dpoptax.extend.trust_clipped(PARAMS, CLIP, reference)
    reference *= 2
    assert_refused(*released(clipped))


def test_refuses_sums_added_by_hand():
    """Each of two losses or batches has the clipping bound, but their sum does not."""
    both = jax.tree.map(jnp.add, clipped_sum(0), clipped_sum(1))
    assert_refused(*released(both))


def test_refuses_replaced_clip():
    other = dataclasses.replace(clipped_sum(), clip=dpoptax.l2_clip(0.01))
    assert_refused(*released(other))
    kind = dataclasses.replace(clipped_sum(), clip=dpoptax.automatic_clip(1.0))
    assert_refused(*released(kind))


def test_detects_clip_written_into_frozen_sum():
    clipped = dpoptax.extend.trust_clipped(PARAMS, CLIP)
    assert is_intact(clipped)
    object.__setattr__(clipped, "clip", dpoptax.l2_clip(0.1))
    assert not is_intact(clipped)


def test_refuses_replaced_grid():
    """The integers count grid steps, so doubling the grid would double the sum."""
    mechanism = {"noise_multiplier": 1.0, "batch_size": 4}
    grid = dpoptax.extend.fixed_point_grid(CLIP, **mechanism)
    tx = dpoptax.gaussian_noise(**mechanism, key=jax.random.key(0), fixed_point=True)
    total = jax.tree.map(lambda x: x.astype(jnp.int32), PARAMS)
    fine = dpoptax.extend.trust_clipped(total, CLIP, grid=grid / 4)
    assert_refused(*tx.update(dataclasses.replace(fine, grid=grid), tx.init(PARAMS)))


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


def test_seal_covers_number_of_examples():
    """The seal covers the count of examples, on which the room for rounding depends."""
    fewer = [dataclasses.replace(clipped_sum(seed), examples=1) for seed in range(2)]
    assert_refused(*released(dpoptax.accumulate(*fewer)))


def test_refuses_replaced_reference():
    clipped = dpoptax.extend.trust_clipped(PARAMS, CLIP, {"direction": jnp.ones(3)})
    assert bool(is_intact(clipped))
    other = dataclasses.replace(clipped, reference={"direction": jnp.array([1.0, 1.0, -1.0])})
    assert_refused(*released(other))
    assert_refused(*released(dataclasses.replace(clipped, reference=None)))


def test_refuses_swapped_entries_and_leaves():
    clipped = clipped_sum()
    total = clipped.sum
    swapped = {**total, "b": total["c"], "c": total["b"]}
    assert_refused(*released(dataclasses.replace(clipped, sum=swapped)))
    reversed_ = {**total, "w": total["w"][:, ::-1]}
    assert_refused(*released(dataclasses.replace(clipped, sum=reversed_)))


def test_hand_made_sum_needs_trust_clipped():
    by_hand = dpoptax.ClippedSum(PARAMS, CLIP)
    with pytest.raises(TypeError, match=r"has no seal.*dpoptax\.extend\.trust_clipped"):
        released(by_hand)
    mean, _ = released(dpoptax.extend.trust_clipped(PARAMS, CLIP))
    assert np.isfinite(mean["w"]).all()
    with pytest.raises(TypeError, match=r"`clip` must .* got '1\.0'"):
        dpoptax.extend.trust_clipped(PARAMS, "1.0")


def test_refuses_complex_sums_even_if_trusted():
    """A complex normal of JAX has half of its variance in each part, so the noise would be σ/√2."""
    total = {"w": jnp.ones(2), "z": jnp.zeros(2, jnp.complex64)}
    with pytest.raises(TypeError, match=r"must be real.*'z'.*complex64"):
        released(dpoptax.extend.trust_clipped(total, CLIP))


@pytest.mark.parametrize("make", ["gaussian", "fixed point", "geodp", "correlated", "adaptive"])
def test_noise_stages_keep_refusing_after_changed_sum(make):
    options = {"noise_multiplier": 1.0, "batch_size": 4, "key": jax.random.key(0)}
    clip, adaptive = CLIP, dpoptax.contrib.adaptive_clip(1.0)
    total, reference = PARAMS, None
    if make == "adaptive":
        clip, reference = adaptive, jnp.float32(1.0)
        total = dpoptax.extend.CountedGradient(PARAMS, jnp.float32(0.1))
    tx = {
        "gaussian": lambda: dpoptax.gaussian_noise(**options),
        "fixed point": lambda: dpoptax.gaussian_noise(**options, fixed_point=True),
        "geodp": lambda: dpoptax.contrib.geodp(0.1, **options),
        "correlated": lambda: dpoptax.correlated_noise(
            dpoptax.matrix.BandedToeplitz((1.0, 0.5)), **options
        ),
        "adaptive": lambda: dpoptax.contrib.adaptive_gaussian_noise(adaptive, **options),
    }[make]()
    good = dpoptax.extend.trust_clipped(total, clip, reference)
    bad = dataclasses.replace(good, sum=jax.tree.map(lambda x: x + 1, good.sum))
    update = jax.jit(tx.update)
    _, state = update(bad, jax.jit(tx.init)(PARAMS), PARAMS)
    mean, state = update(good, state, PARAMS)
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(mean))
    with pytest.raises(ValueError, match="clipped sum was changed"):
        dpoptax.ledgers(state)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_seal_covers_every_bit_of_every_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(0)
        values = helpers.floats(rng.normal(size=(3, 4)), jnp.dtype(dtype))
        hashed = jax.jit(lambda values: checksum(values, CLIP, None))
        want = hashed(values)
        raw = np.asarray(values).view(np.uint8)
        for place in range(raw.size):
            flipped = raw.copy()
            flipped.reshape(-1)[place] ^= 1 << (place % 8)
            changed = jax.device_put(flipped.view(np.asarray(values).dtype))
            assert hashed(changed) != want
        assert hashed(values.T) != want
        assert hashed([values, values]) != hashed([values])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "complex64"])
def test_seal_covers_large_arrays_of_every_dtype(dtype):
    """Large arrays are read in blocks, the last of which overlaps the one before."""
    with jax.enable_x64(dtype == "float64"):
        values = helpers.floats(np.random.default_rng(0).normal(size=70_000), jnp.dtype(dtype))
        hashed = jax.jit(lambda values: checksum(values, CLIP, None))
        want, words = hashed(values), np.asarray(values).view(np.uint16)
        for place in (0, 1, words.size // 2, -4, -3, -2, -1):
            flipped = words.copy()
            flipped[place] ^= 1
            assert hashed(jax.device_put(flipped.view(np.asarray(values).dtype))) != want
        assert hashed(values[::-1]) != want


def test_seal_does_not_depend_on_the_platform(monkeypatch):
    """The order of the words differs: CPU sums in blocks, other platforms array by array."""
    normal = np.random.default_rng(0).normal
    tree = [helpers.floats(normal(size=shape)) for shape in ((300, 400), (3, 4), 70_000, 5)]
    want = checksum_leaves(tree, 5)
    pick = lambda *args, default, cpu: default(*args)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", pick)
    jax.clear_caches()
    assert checksum_leaves(tree, 5) == want
    jax.clear_caches()


def test_seal_detects_signs_scales_and_permutations():
    """Checks changes whose differences would cancel in a sum of products."""
    rows = np.random.default_rng(0).normal(size=(2000, 4)).astype(np.float32)
    rows = np.concatenate([rows, -rows], axis=1)
    seal = jax.jit(jax.vmap(lambda x: checksum(x, CLIP, None)))
    before = np.asarray(seal(rows))
    for change in (np.negative, lambda x: 2 * x, lambda x: x[:, ::-1], lambda x: x / 2, np.sign):
        assert not (np.asarray(seal(change(rows))) == before).any()


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


def test_example_moves_accumulated_parts_by_at_most_the_bound():
    """One of 2²⁰ examples in 128 parts moves the total by the bound.

    The total was once multiplied by −15.
    """
    count, size = 128, 8192
    sums = [np.full(3, size / 2, np.float32)] * count
    more = [*sums[:-1], sums[-1] + np.array([1, 0, 0], np.float32)]
    totals = [
        np.float64(
            dpoptax.accumulate(
                *(dpoptax.extend.trust_clipped(x, CLIP, examples=size) for x in each)
            ).sum
        )
        for each in (more, sums)
    ]
    assert 0.5 < np.linalg.norm(totals[0] - totals[1]) <= CLIP.sensitivity
    with pytest.raises(ValueError, match="Use smaller batches"):
        dpoptax.accumulate(
            *(dpoptax.extend.trust_clipped(x, CLIP, examples=2**20) for x in sums[:3])
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


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other compilers fuse the words")
def test_checksum_stores_no_words_of_a_large_array():
    """A second array of the size of the sum would make a third of a step's temporary memory."""
    total = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    compiled = jax.jit(lambda total: checksum({"w": total}, CLIP, None)).lower(total).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < total.size  # a quarter of its bytes


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
    broken = jax.tree.map(lambda x: 3 * x, two)
    assert_refused(*released(dpoptax.accumulate(one, broken)))
    first, second = (
        dpoptax.extend.trust_clipped(PARAMS, CLIP, jnp.float32(r), examples=4) for r in (1.0, 2.0)
    )
    assert_refused(*released(dpoptax.accumulate(first, second)))
    with pytest.raises(ValueError, match=r"number of examples of sums\[1\] must be known"):
        dpoptax.accumulate(one, dpoptax.extend.trust_clipped(two.sum, CLIP))


def test_joint_loss_is_clipped_as_one_gradient():
    """An example moves the sum by C if one loss function returns the sum of all losses."""

    def other_loss(params, example):
        return jnp.sum(jnp.sin(params["w"])) * example[0][0]

    def joint(params, example):
        return loss_fn(params, example) + 100.0 * other_loss(params, example)

    grad_fn = jax.jit(dpoptax.clipped_grad(joint, CLIP))
    alone = grad_fn(dpoptax.gradient_points((), PARAMS), batch(size=1), np.ones(1, bool))
    np.testing.assert_allclose(helpers.global_norm(alone.sum), 1.0, rtol=1e-5)
    mean, _ = released(alone)
    assert np.isfinite(mean["w"]).all()


@pytest.mark.parametrize("bit", [0, 31, 32, 33, 63])
def test_seal_depends_on_each_bit_of_float64(bit):
    with jax.enable_x64(True):
        changed = np.array([np.pi]).view(np.uint64) ^ np.uint64(1 << bit)
        seals = [
            dpoptax.extend.trust_clipped(jnp.asarray(x), dpoptax.l2_clip(1.0)).seal
            for x in (np.array([np.pi]), changed.view(np.float64))
        ]
    assert seals[0] != seals[1]
