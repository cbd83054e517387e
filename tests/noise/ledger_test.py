"""Tests that the ledger follows the arrays of a state in any structure."""

import dataclasses
import functools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import dpoptax
from dpoptax import accounting, sampling
from dpoptax._release.ledger import count_releases
from tests.helpers import planned_epsilon

CLIP = dpoptax.l2_clip(1.0)
PARAMS = jnp.zeros(3)
SAMPLER = sampling.PoissonSampler(dataset_size=1000, batch_size=10, seed=0)
DELTA = 1e-5


@functools.cache
def chain(noise_multiplier=1.0, batch_size=10, key=0):
    return optax.chain(
        dpoptax.gaussian_noise(
            noise_multiplier=noise_multiplier, batch_size=batch_size, key=jax.random.key(key)
        ),
        optax.sgd(0.1),
    )


def clipped():
    return dpoptax.extend.trust_clipped(PARAMS, CLIP)


@functools.cache
def _compiled(tx):
    return jax.jit(lambda state: tx.update(clipped(), state, PARAMS))


def after(tx, steps, state=None):
    state = tx.init(PARAMS) if state is None else state
    mean = None
    for _ in range(steps):
        mean, state = _compiled(tx)(state)
    return mean, state


def spent(state):
    return accounting.guarantee(state, SAMPLER, accountant="rdp").epsilon(DELTA)


def put_into(arrays_of, structure_of):
    """Returns the arrays of one state in the structure of another, as a restore does."""
    return jax.tree.unflatten(jax.tree.structure(structure_of), jax.tree.leaves(arrays_of))


def assert_refused(tx, state, match):
    with pytest.raises(ValueError, match=match):
        spent(state)
    mean, state = after(tx, 2, state)
    assert np.isnan(mean).all()
    with pytest.raises(ValueError, match=match):
        dpoptax.ledgers(state)


def gaussian(**changes):
    options = {"noise_multiplier": 1.0, "batch_size": 10, "key": jax.random.key(0)}
    return dpoptax.gaussian_noise(**options | changes)


def correlated(*coefficients):
    options = {"noise_multiplier": 1.0, "batch_size": 10, "key": jax.random.key(0)}
    return dpoptax.correlated_noise(dpoptax.matrix.BandedToeplitz(coefficients), **options)


@pytest.mark.parametrize(
    ("begun", "other", "match"),
    [
        (
            *(gaussian(), gaussian(noise_multiplier=10.0)),
            "another mechanism.*noise_multiplier=1, batch_size=10.*noise_multiplier=10, batch_size",
        ),
        (gaussian(), gaussian(batch_size=20), "batch_size=10.*batch_size=20"),
        (correlated(1.0, 0.5), correlated(1.0, 0.25), "another mechanism"),
        # Otherwise a repeated step would be released with two kinds of noise.
        (gaussian(), gaussian(fixed_point=True), "another mechanism"),
        (gaussian(fixed_point=True), gaussian(), "another mechanism"),
    ],
    ids=["noise multiplier", "batch size", "strategy", "to fixed point", "from fixed point"],
)
def test_refuses_arrays_of_another_stage(begun, other, match):
    _, state = after(begun, 2)
    restored = put_into(state, other.init(PARAMS))
    assert np.isnan(after(other, 2, restored)[0]).all()
    for arrays in (restored, after(other, 2, restored)[1]):
        with pytest.raises(ValueError, match=match):
            dpoptax.ledgers(arrays)


def test_refuses_state_of_another_chain_when_traced():
    _, state = after(chain(1.0), 1)
    with pytest.raises(ValueError, match=r"noise_multiplier=1\.0.*noise_multiplier=2\.0"):
        chain(2.0).update(clipped(), state, PARAMS)


@pytest.mark.parametrize(
    "read", [dpoptax.ledgers, lambda s: accounting.guarantee(s, SAMPLER).epsilon(DELTA)]
)
def test_ledger_must_be_read_outside_jit(read):
    with pytest.raises(TypeError, match="outside `jit`"):
        jax.jit(read)(chain().init(PARAMS))


def test_refuses_replaced_key_during_a_run():
    tx = chain()
    _, (noise, rest) = after(tx, 2)
    other = (dataclasses.replace(noise, key=jax.random.key(9)), rest)
    assert_refused(tx, other, r"epsilon: its key is not the key that it was created with\. All")


def test_refuses_edited_count():
    tx = chain()
    _, (noise, rest) = after(tx, 3)
    assert_refused(tx, (dataclasses.replace(noise, count=jnp.int32(0)), rest), "inconsistent")


def test_releases_stop_at_largest_count():
    """Releases stop at the largest int32, beyond which count, key and noise would repeat."""
    tx = chain()
    noise, rest = tx.init(PARAMS)
    mean, state = after(tx, 1, (count_releases(noise, 2**31 - 2, 0), rest))
    assert np.isfinite(mean).all()
    assert dpoptax.ledgers(state)[0].releases == 2**31 - 1
    for _ in range(2):
        mean, state = after(tx, 1, state)
        assert np.isnan(mean).all()
        with pytest.raises(ValueError, match="at most 2³¹ − 1 releases"):
            dpoptax.ledgers(state)


def test_refuses_averaged_states():
    tx = chain()
    (_, first), (_, second) = after(tx, 1), after(tx, 4)

    def mean(x, y, cast=False):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return ((x + y) / 2).astype(x.dtype) if cast else (x + y) / 2

    with pytest.raises(ValueError, match="must be int32, got float32. The state was averaged"):
        spent(jax.tree.map(mean, first, second))
    whole = jax.tree.map(lambda x, y: mean(x, y, cast=True), first, second)
    with pytest.raises(ValueError, match="averaged with another"):
        spent(whole)


def test_refuses_two_stages_with_one_key():
    """With one key, sums of equal shape get equal noise, which cancels in their difference."""
    _, first = after(chain(1.0), 2)
    _, second = after(chain(2.0), 2)
    with pytest.raises(
        ValueError, match="Noise stages 0 and 1 of the state must have different keys"
    ):
        spent((first, second))
    _, other = after(chain(2.0, key=1), 2)
    assert spent((first, other)) > spent(first)


def ensemble(keys, steps=3):
    def run(key):
        tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=10, key=key)
        update = lambda state, _: (tx.update(clipped(), state)[1], None)  # noqa: E731
        return jax.lax.scan(update, tx.init(PARAMS), length=steps)[0]

    return jax.jit(jax.vmap(run))(keys)


def test_ensemble_is_priced_together():
    state = ensemble(jax.random.split(jax.random.key(0), 4))
    with pytest.raises(ValueError, match="`same_batches` must be True or False"):
        spent(state)

    def price(same_batches, sampler=SAMPLER):
        return accounting.guarantee(
            (state, ()), sampler, same_batches=same_batches, accountant="rdp"
        ).epsilon(DELTA)

    def alone(noise_multiplier, steps):
        return planned_epsilon(
            noise_multiplier=noise_multiplier, sampler=SAMPLER, steps=steps, accountant="rdp"
        )

    assert price(True) == pytest.approx(alone(2.0 / math.sqrt(4), 3), rel=1e-9)
    seedless = dataclasses.replace(SAMPLER, seed=None)
    assert price(False, seedless) == pytest.approx(alone(2.0, 12), rel=1e-9)
    with pytest.raises(ValueError, match="must be True for an ensemble whose sampler has a seed"):
        price(False)  # independent draws need several seeds, and there is one
    together = accounting.guarantee(state, SAMPLER, same_batches=True, delta=DELTA)
    assert "releases   4 × 3 of the Gaussian mechanism" in str(together)
    assert together.epsilon_curve([3], DELTA) == together.epsilon(DELTA)


def test_refuses_ensemble_with_one_key():
    state = ensemble(jnp.stack([jax.random.key(0)] * 3))
    with pytest.raises(ValueError, match="must have different keys"):
        accounting.guarantee(state, SAMPLER, same_batches=True).epsilon(DELTA)


STAGES = {
    "gaussian_noise": lambda s: dpoptax.gaussian_noise(
        noise_multiplier=s, batch_size=10, key=jax.random.key(3)
    ),
    "correlated_noise": lambda s: dpoptax.correlated_noise(
        dpoptax.matrix.BandedToeplitz((1.0, 0.5)),
        noise_multiplier=s,
        batch_size=10,
        key=jax.random.key(3),
    ),
    "adaptive_gaussian_noise": lambda s: dpoptax.contrib.adaptive_gaussian_noise(
        dpoptax.contrib.adaptive_clip(0.1), noise_multiplier=s, batch_size=10, key=jax.random.key(3)
    ),
    "with iterates": lambda s: optax.chain(STAGES["gaussian_noise"](s), dpoptax.disk(0.7, 0.5)),
}


@pytest.mark.parametrize("name", STAGES)
def test_flax_serializes_the_state(name):
    tx = STAGES[name](1.0)
    state = tx.init(PARAMS)
    stored = serialization.to_bytes(state)
    back = serialization.from_bytes(tx.init(jnp.ones(3)), stored)
    assert jax.tree.structure(back) == jax.tree.structure(state)

    def same(x, y):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)

    jax.tree.map(same, back, state)
    assert dpoptax.ledgers(back) == dpoptax.ledgers(state)
    with pytest.raises(ValueError, match="another mechanism"):
        dpoptax.ledgers(serialization.from_bytes(STAGES[name](5.0).init(PARAMS), stored))


IMPORT = {
    "dpoptax": "import jax, jax.numpy as jnp, optax, dpoptax",
    "flax": "from flax import serialization",
}
STATE = """
tx = optax.chain(
    dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=4, key=jax.random.key(0)),
    dpoptax.disk(0.7, 0.5),
)
state = tx.init(jnp.zeros(3))
"""
ROUND_TRIP = """
back = serialization.from_bytes(state, serialization.to_bytes(state))
assert dpoptax.ledgers(back)[0].releases == 0
assert jax.tree.structure(back) == jax.tree.structure(state)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        (IMPORT["flax"], IMPORT["dpoptax"], STATE, ROUND_TRIP),
        (IMPORT["dpoptax"], IMPORT["flax"], STATE, ROUND_TRIP),
        (IMPORT["dpoptax"], STATE, IMPORT["flax"], ROUND_TRIP),
    ],
    ids=["flax first", "dpoptax first", "flax after the states"],
)
def test_flax_serializes_states_for_any_import_order(program):
    subprocess.run([sys.executable, "-c", "\n".join(program)], check=True, timeout=300)


ADAPTED = dpoptax.extend.trust_clipped(
    dpoptax.extend.CountedGradient(PARAMS, jnp.zeros(())),
    dpoptax.contrib.adaptive_clip(0.1),
    jnp.float32(0.1),
)


@pytest.mark.parametrize("name", STAGES)
def test_state_restored_without_target_names_remedy(name):
    """An orbax restore without a target returns dicts and lists."""
    tx = STAGES[name](1.0)
    arrays = serialization.to_state_dict(tx.init(PARAMS))
    state = (arrays, arrays) if name == "with iterates" else arrays
    with pytest.raises(TypeError, match=r"got a dict.*into `tx\.init\(params\)`"):
        jax.eval_shape(lambda: tx.update(ADAPTED if "adaptive" in name else clipped(), state))


def test_refuses_flax_state_without_imprint():
    state = STAGES["gaussian_noise"](1.0).init(PARAMS)
    stored = serialization.to_state_dict(state)
    del stored["imprint"]
    with pytest.raises(ValueError, match="Finish the run with the version that started it"):
        serialization.from_state_dict(state, stored)
