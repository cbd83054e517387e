"""Tests that noise on eight virtual devices equals that on one, bit for bit, in every layout."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats

import dpoptax
from tests.helpers import floats, normal, slow_but
from tests.multidevice.problem import KINDS, make_mesh, put

pytestmark = pytest.mark.optimized

CLIP = dpoptax.l2_clip(0.5)
SHAPES = {"w": (8, 512, 80), "v": (16, 8), "b": (16,)}
LAYOUTS = {
    "replicated": {"w": P(), "v": P(), "b": P()},
    "first axis": {"w": P("data"), "v": P("data"), "b": P("data")},
    "last axis": {"w": P(None, None, "data"), "v": P(None, "data"), "b": P()},
}
COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|[a-z-]*permute)\(")


def collectives(text):
    """Returns a program's lines with collectives."""
    return [line for line in text.splitlines() if COLLECTIVE.search(line)]


def noise_on(total):
    """Returns the noisy mean of a sum."""
    tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=4, key=jax.random.key(5))
    return tx.update(dpoptax.extend.trust_clipped(total, CLIP), tx.init(total))[0]


def released(total):
    """Returns the compiled noisy mean, and the text of its program."""
    program = jax.jit(noise_on).lower(total).compile()
    return program(total), program.as_text()


def zeros():
    return {name: floats(np.zeros(shape)) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def alone():
    """Returns the noise on one device."""
    return released(zeros())[0]


@pytest.mark.parametrize("spec", [P(), P("data")], ids=["whole", "part"])
def test_refuses_part_of_a_sum_inside_shard_map(spec):
    """Positions refer to the whole array, so each device would add the same noise to its part."""
    mesh = make_mesh((8,), ("data",), KINDS[0])
    total = floats(np.zeros((8, 4)))
    tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=4, key=jax.random.key(5))
    specs = jax.tree.map(lambda _: spec, dpoptax.extend.trust_clipped(total, CLIP))
    state = tx.init(total)
    mapped = jax.shard_map(
        tx.update,
        mesh=mesh,
        in_specs=(specs, jax.tree.map(lambda _: P(), state)),
        out_specs=(spec, jax.tree.map(lambda _: P(), state)),
        check_vma=False,
    )
    clipped = dpoptax.extend.trust_clipped(total, CLIP)
    if spec == P("data"):
        with pytest.raises(TypeError, match="places and shapes"):
            jax.eval_shape(mapped, clipped, state)
        return
    mean, state = jax.jit(mapped)(clipped, state)
    assert np.isfinite(mean).all()
    assert dpoptax.ledgers(state)[0].releases == 1


RELEASE = {"noise_multiplier": 2.0, "batch_size": 4, "key": jax.random.key(5)}


@pytest.mark.parametrize("correlated", slow_but((False,), (False, True)))
@pytest.mark.parametrize("kind", slow_but(KINDS[:1], KINDS))
def test_fixed_point_noise_equals_one_device(correlated, kind):
    noise = dpoptax.gaussian_noise(**RELEASE, fixed_point=True)
    if correlated:
        strategy = dpoptax.matrix.BandedToeplitz((1.0, 0.5))
        noise = dpoptax.correlated_noise(strategy, **RELEASE, fixed_point_clip=CLIP)

    @jax.jit
    def release(total):
        first, state = noise.update(dpoptax.extend.trust_clipped(total, CLIP), noise.init(total))
        second, _ = noise.update(dpoptax.extend.trust_clipped(total, CLIP), state)
        return first, second

    total = put(zeros(), make_mesh((8,), ("data",), kind), LAYOUTS["first axis"])
    jax.tree.map(np.testing.assert_array_equal, release(total), release(zeros()))
    assert not collectives(release.lower(total).compile().as_text())


QUICK = [(kind, 8, "first axis") for kind in KINDS] + [(KINDS[0], 8, "replicated")]


@pytest.mark.parametrize(
    ("kind", "devices", "layout"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(KINDS, (2, 8), LAYOUTS)
    ],
    ids=str,
)
def test_noise_has_same_bits_without_collectives(kind, devices, layout, alone):
    mesh = make_mesh((devices,), ("data",), kind)
    total = put(zeros(), mesh, LAYOUTS[layout])
    noisy, text = released(total)
    jax.tree.map(np.testing.assert_array_equal, noisy, alone)
    assert not collectives(text)
    if layout != "replicated":
        # Each device draws only its part of a large array: its program has none of the full size.
        assert not re.search(r"(u32|f32)\[8,512,80\]", text)
        assert noisy["w"].sharding.is_equivalent_to(total["w"].sharding, 3)


SPLIT = [(KINDS[0], "first axis"), (KINDS[1], "last axis")]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(*case, marks=() if case in SPLIT else pytest.mark.slow)
        for case in itertools.product(KINDS, ["first axis", "last axis"])
    ],
    ids=str,
)
def test_sharded_sum_of_one_program_is_released_by_another(kind, layout):
    mesh = make_mesh((8,), ("data",), kind)
    rng = np.random.default_rng(0)
    whole = {name: floats(rng.normal(size=s)) for name, s in SHAPES.items()}
    split = put(whole, mesh, LAYOUTS[layout])
    seal = jax.jit(lambda total: dpoptax.extend.trust_clipped(total, CLIP))
    jax.tree.map(np.testing.assert_array_equal, seal(split).sum, whole)
    tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=4, key=jax.random.key(5))
    update = jax.jit(lambda clipped: tx.update(clipped, tx.init(whole))[0])
    assert np.isfinite(update(seal(split))["w"]).all()
    assert not re.search(r"f32\[8,512,80\]", update.lower(seal(split)).compile().as_text())


def test_sharded_noise_has_the_stated_stddev():
    mesh = make_mesh((8,), ("data",), AxisType.Auto)
    total = put(zeros(), mesh, LAYOUTS["first axis"])
    stddev = dpoptax.extend.noise_stddev(CLIP, noise_multiplier=2.0, batch_size=4)

    def pvalue(sample, scale):
        return stats.kstest(np.ravel(sample) / scale, "norm").pvalue

    noisy = released(total)[0]["w"]
    assert pvalue(noisy, stddev) > 1e-3
    assert pvalue(noisy, stddev * 2 / 3) < 1e-6
    assert pvalue(noisy, stddev * 3 / 2) < 1e-6

    def before_the_sum(x):
        return lax.psum(noise_on(x)["w"], "data")

    naive = jax.jit(
        jax.shard_map(before_the_sum, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    )(zeros())
    assert pvalue(naive, stddev) < 1e-6
    assert abs(np.std(naive) / stddev - 8) < 0.1


METHODS = {
    "doppler": dpoptax.doppler(b=[1 / 11, 1 / 11], a=[-9 / 11]),
    "disk": dpoptax.disk(0.7, 0.5),
    "pmlf": dpoptax.pmlf(2, 0.1, b=[0.5, 0.5], a=[]),
}


def training_loss(params, example):
    return jnp.sum(jnp.tanh(example @ params["w"]))


@functools.cache
def trained_alone(method):
    """Returns the parameters after three steps on one device."""
    noise = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=16, key=jax.random.key(2))
    tx, params = optax.chain(noise, METHODS[method]), {"w": normal(0, (8, 4))}
    return train(tx, dpoptax.clipped_grad(training_loss, CLIP), params, tx.init(params))[0]


def train(tx, grad_fn, params, state):
    """Takes three steps on a fixed batch."""
    batch = normal(1, (16, 8))

    @jax.jit
    def step(params, state):
        grads = grad_fn(dpoptax.gradient_points(state, params), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(3):
        params, state = step(params, state)
    return params, state


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_state_stays_sharded_like_the_parameters(method, kind):
    noise = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=16, key=jax.random.key(2))
    tx = optax.chain(noise, METHODS[method])
    params = {"w": normal(0, (8, 4))}
    want = trained_alone(method)
    mesh = make_mesh((8,), ("data",), kind)
    specs = {"w": P("data")}
    with jax.set_mesh(mesh):
        params = put(params, mesh, specs)
        shardings = optax.tree.map_params(
            tx,
            lambda _, spec: NamedSharding(mesh, spec),
            jax.eval_shape(tx.init, params),
            specs,
            transform_non_params=lambda _: NamedSharding(mesh, P()),
        )
        state = jax.jit(tx.init, out_shardings=shardings)(params)
        grad_fn = dpoptax.clipped_grad(training_loss, CLIP, mesh=mesh, param_specs=specs)
        got, state = train(tx, grad_fn, params, state)
    np.testing.assert_allclose(got["w"], want["w"], atol=1e-6)
    buffers = [x for x in jax.tree.leaves((got, state)) if jnp.shape(x) == (8, 4)]
    assert len(buffers) > 1
    for leaf in buffers:
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
