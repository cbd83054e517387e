"""Tests scheduled noise: each release has the noise of its phase and is priced with it."""

import functools
from fractions import Fraction

import chex
import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax import accounting, matrix, sampling
from dpoptax._pricing import events, privacy_losses
from tests.helpers import event_epsilon, normal, planned_epsilon, slow_but

CLIP = dpoptax.l2_clip(2.0)
KEY = jax.random.key(0)
SCHEDULE = {0: 1.9, 3: 1.1, 5: 1.5}
SIGMAS = [1.9, 1.9, 1.9, 1.1, 1.1, 1.5, 1.5]
SAMPLER = sampling.PoissonSampler(dataset_size=1000, batch_size=10, seed=0)
DELTA = 1e-5
PARAMS = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(5)}


def stage(noise_multiplier=SCHEDULE, batch_size=10, key=KEY, **options):
    return dpoptax.gaussian_noise(
        noise_multiplier=noise_multiplier, batch_size=batch_size, key=key, **options
    )


@functools.cache
def clipped():
    sums = {"w": normal(0, (3, 4)), "b": normal(1, 5)}
    return dpoptax.extend.trust_clipped(sums, CLIP, examples=10)


STAGE = stage()


@functools.cache
def _compiled(tx):
    return jax.jit(lambda total, state: tx.update(total, state, PARAMS))


def releases(tx, steps):
    """Returns the releases of `steps` updates, and the last state."""
    update, total, state, found = _compiled(tx), clipped(), tx.init(PARAMS), []
    for _ in range(steps):
        mean, state = update(total, state)
        found.append(mean)
    return found, state


def after(tx, steps):
    return releases(tx, steps)[1]


def composed(*parts):
    """Returns the event with a number of steps at each noise multiplier."""
    return dpa.ComposedDpEvent([SAMPLER.dp_event(*part) for part in parts if part[1]])


@pytest.mark.parametrize("fixed_point", [False, True])
def test_each_release_uses_multiplier_of_its_phase(fixed_point):
    found, _ = releases(stage(fixed_point=fixed_point), len(SIGMAS))
    # All of these multipliers share one grid.
    constant = {
        sigma: releases(stage(sigma, fixed_point=fixed_point), len(SIGMAS))[0]
        for sigma in set(SIGMAS)
    }
    for step, (mean, sigma) in enumerate(zip(found, SIGMAS, strict=True)):
        rtol = 0 if fixed_point else 1e-6
        chex.assert_trees_all_close(mean, constant[sigma][step], rtol=rtol)


def test_noisiest_phase_keeps_its_noise_on_the_grid():
    params = jnp.zeros(50_000)
    tx = stage({0: 8.0, 1: 1.0}, fixed_point=True)
    state = tx.init(params)
    for sigma in (8.0, 1.0):
        total = dpoptax.extend.trust_clipped(params, CLIP, examples=10)
        mean, state = jax.jit(tx.update)(total, state)
        assert float(jnp.std(mean)) == pytest.approx(sigma * CLIP.sensitivity / 10, rel=0.02)


def test_noise_has_dtype_of_the_sum():
    with jax.enable_x64(True):
        total = dpoptax.extend.trust_clipped(jnp.zeros(3, jnp.float32), CLIP, examples=10)
        tx = stage()
        released, _ = jax.eval_shape(tx.update, total, tx.init(jnp.zeros(3)))
        assert released.dtype == jnp.float32


@pytest.mark.parametrize(
    ("accountant", "steps"),
    [("pld", 7), *(("rdp", steps) for steps in (0, 1, 3, 4, 7))]
    + [pytest.param("pld", steps, marks=pytest.mark.slow) for steps in (0, 1, 3, 4)],
)
def test_epsilon_composes_the_phases(accountant, steps):
    parts = (1.9, min(steps, 3)), (1.1, min(max(steps - 3, 0), 2)), (1.5, max(steps - 5, 0))
    want = event_epsilon(composed(*parts), DELTA, accountant=accountant)
    state = after(STAGE, steps)
    spent = accounting.guarantee(state, SAMPLER, accountant=accountant).epsilon(DELTA)
    assert spent == pytest.approx(want, rel=1e-9)
    described = planned_epsilon(
        noise_multiplier=SCHEDULE, steps=steps, sampler=SAMPLER, accountant=accountant
    )
    assert described == spent
    planned = accounting.planned_guarantee(
        noise_multiplier=SCHEDULE, steps=steps, sampler=SAMPLER, accountant=accountant
    )
    (curve,) = planned.epsilon_curve([steps], DELTA)
    assert curve == pytest.approx(want, rel=1e-9)


def test_full_batches_compose_to_one_mu():
    # Four times the noise of the other tests, whose loss distribution takes seconds.
    schedule = {first: 4 * sigma for first, sigma in SCHEDULE.items()}
    mu = sum(1 / sigma**2 for sigma in SIGMAS) ** 0.5 / 4
    state = after(stage(schedule), 7)
    whole = sampling.PoissonSampler(dataset_size=10, batch_size=10, seed=0)
    gaussian = dpa.GaussianDpEvent(1 / mu)
    spent = accounting.guarantee(state, whole).epsilon(DELTA)
    one = event_epsilon(gaussian, DELTA)
    assert one <= spent == pytest.approx(one, rel=1e-9)
    made = accounting.guarantee(state, whole)
    planned = accounting.planned_guarantee(noise_multiplier=schedule, steps=7, sampler=whole)
    found = made.gdp_mu(DELTA)
    assert found == pytest.approx(mu, rel=1e-2)
    assert found == planned.gdp_mu(DELTA)
    assert made.trade_off(0.1) == planned.trade_off(0.1)


@pytest.mark.parametrize("relation", events.RELATIONS)
def test_full_batch_phases_join_to_one_gaussian(relation, monkeypatch):
    """Full-batch phases are joined. A pair for each phase took 10 ms per calibration query."""
    sigmas = np.linspace(300, 100, 300)
    # The phases are also composed with a sampled release.
    other = dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(2.0))
    whole = [dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(sigma), 3) for sigma in sigmas]
    joined = dpa.GaussianDpEvent(float((3 * sigmas**-2.0).sum() ** -0.5))
    built, loss_of = [], privacy_losses.loss_of
    monkeypatch.setattr(
        privacy_losses, "loss_of", lambda *args: built.append(args) or loss_of(*args)
    )
    for beside in ([], [other]):
        built.clear()
        found, want = (
            event_epsilon(
                dpa.ComposedDpEvent([*parts, *beside]), DELTA, neighboring_relation=relation
            )
            for parts in (whole, [joined])
        )
        assert found == pytest.approx(want, rel=1e-9)
        assert len(built) == 2 * (1 + len(beside))
        (priced,) = {event for event, *_ in built} - {joined, other}
        exact = sum(3 / Fraction(sigma) ** 2 for sigma in sigmas.tolist())
        assert Fraction(priced.noise_multiplier) ** 2 * exact <= 1  # the noise is not overstated


def test_nearly_noiseless_phases_have_infinite_epsilon():
    little = dpa.ComposedDpEvent([dpa.GaussianDpEvent(1.2e-3), dpa.GaussianDpEvent(1.1e-3)])
    assert event_epsilon(little, DELTA) == np.inf


def test_stages_on_the_same_batches_are_priced_as_privacy_losses():
    state = after(STAGE, 6), after(stage(1.5, key=jax.random.key(1)), 4)
    both = lambda sigma: (sigma**-2 + 1.5**-2) ** -0.5  # noqa: E731
    parts = (both(1.9), 3), (both(1.1), 1), (1.1, 1), (1.5, 1)
    spent = functools.partial(accounting.guarantee, state, SAMPLER, accountant="rdp")
    want = event_epsilon(composed(*parts), DELTA, accountant="rdp")
    assert spent().epsilon(DELTA) == pytest.approx(want, rel=1e-9)
    want = event_epsilon(composed((1.9, 3), (1.1, 2), (1.5, 1), (1.5, 4)), DELTA, accountant="rdp")
    turns = spent(same_batches=False).epsilon(DELTA)
    assert turns == pytest.approx(want, rel=1e-9)


def test_dependent_steps_use_smallest_multiplier():
    cyclic = matrix.CyclicPoissonSampler(1000, 10, seed=0, cycle_length=4)
    least = planned_epsilon(noise_multiplier=1.1, steps=7, sampler=cyclic)
    assert accounting.guarantee(after(STAGE, 7), cyclic).epsilon(DELTA) == least
    described = dict(steps=7, sampler=cyclic, delta=DELTA)
    assert planned_epsilon(noise_multiplier=SCHEDULE, **described) == least
    first = planned_epsilon(noise_multiplier=SCHEDULE, **{**described, "steps": 3})
    assert first == planned_epsilon(noise_multiplier=1.9, **{**described, "steps": 3})


@pytest.mark.parametrize("accountant", slow_but(("rdp",), ("pld", "rdp")))
def test_calibration_finds_factor_of_schedule(accountant):
    run = dict(sampler=SAMPLER, delta=DELTA, accountant=accountant)
    factor = accounting.calibrate(epsilon=1, steps=7, schedule=SCHEDULE, **run)
    noise = {first: factor * each for first, each in SCHEDULE.items()}
    spent = planned_epsilon(noise_multiplier=noise, steps=7, **run)
    assert 0.9998 <= spent <= 1
    assert accounting.calibrate(noise_multiplier=noise, epsilon=1.0, **run) == 7


def test_constant_schedule_equals_its_multiplier():
    assert stage({0: 2.0, 5: 2.0}).init(PARAMS).mechanism == stage(2.0).init(PARAMS).mechanism


def test_ledger_has_smallest_multiplier():
    """The stage derives its grid from it, and checks it for underflow in float32."""
    assert after(STAGE, 0).mechanism.noise_multiplier == 1.1
    with pytest.raises(ValueError, match="flushed to zero"):
        after(stage({0: 1.0, 5: 1e-40}), 1)


def test_ledger_distinguishes_schedules():
    other = stage({0: 1.9, 4: 1.1, 5: 1.5})
    state = after(STAGE, 4)
    with pytest.raises(ValueError, match="was made for"):
        other.update(clipped(), state, PARAMS)
    arrays = jax.tree.unflatten(jax.tree.structure(other.init(PARAMS)), jax.tree.leaves(state))
    with pytest.raises(ValueError, match="belong to another mechanism"):
        accounting.guarantee(arrays, SAMPLER).epsilon(DELTA)
    assert np.isnan(other.update(clipped(), arrays, PARAMS)[0]["b"]).all()


def test_grid_follows_smallest_multiplier():
    def describe(noise):
        return dpoptax.extend.fixed_point_grid(CLIP, noise_multiplier=noise, batch_size=10)

    assert describe({0: 4.0, 2: 2.0}) == describe(2.0) < describe(4.0)


@pytest.mark.parametrize(
    ("schedule", "match"),
    [
        ({}, "from step 0 on"),
        ({1: 2.0}, "from step 0 on"),
        ({0: 2.0, 5: 0.0}, "from step 5 on must be .* got 0.0"),
        ({0: float("inf")}, "from step 0 on must be .* got inf"),
        ({0: float("nan")}, "must be a real number, got nan"),
        ({0: 2.0, -1: 1.0}, "at least 0"),
        ({0: 2.0, 1.5: 1.0}, "integer"),
        ({0: 2.0, "5": 1.0}, "integer"),
        ({0: 2.0, 2**31: 1.0}, "at most 2147483647"),
    ],
)
def test_refuses_invalid_schedules(schedule, match):
    with pytest.raises(ValueError, match=match):
        stage(schedule)
    with pytest.raises(ValueError, match=match):
        planned_epsilon(noise_multiplier=schedule, steps=7, sampler=SAMPLER)


def test_schedule_errors_say_what_to_pass():
    with pytest.raises(TypeError, match="a dict from step to multiplier"):
        stage(optax.linear_schedule(2.0, 1.0, 7))
    strategy = matrix.BandedToeplitz((1.0, 0.5))
    with pytest.raises(TypeError, match="must be a Python number"):
        dpoptax.correlated_noise(strategy, noise_multiplier=SCHEDULE, batch_size=10, key=KEY)
