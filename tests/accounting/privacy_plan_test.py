"""Tests that a plan states each number once and agrees with its parts."""

import copy
import dataclasses
import functools
import pickle
from contextlib import nullcontext

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax import accounting, matrix, runs, sampling, users
from dpoptax._support.rounded import round_up
from tests.helpers import after_releases, planned_epsilon, slow_but

pytestmark = pytest.mark.usefixtures("coarse_prices")

CLIP = dpoptax.l2_clip(1.0)
SIZES = {"dataset_size": 1000, "batch_size": 50, "steps": 20}
STRATEGY = matrix.BandedToeplitz((1.0, 0.5))
SAMPLERS = {
    "poisson": sampling.PoissonSampler,
    "grouped": functools.partial(
        sampling.GroupedPoissonSampler, group_sizes=(900, 100), weights=(1, 2)
    ),
    "fixed_size": sampling.FixedSizeSampler,
    "random_allocation": sampling.RandomAllocationSampler,
    "cyclic": functools.partial(matrix.CyclicPoissonSampler, cycle_length=2),
}


def state_of(plan, steps, clip=None):
    """Returns the state of a run of the plan after some steps."""
    return after_releases(plan.new_run().noise(clip=clip), jnp.zeros(3), steps)


def spent(plan, state):
    return plan.continue_run(state).guarantee(state)


@pytest.mark.parametrize("name", slow_but(("poisson", "cyclic"), SAMPLERS))
def test_plan_equals_its_parts(name):
    sampler = SAMPLERS[name]
    accounted = {"accountant": "pld" if name == "random_allocation" else "rdp"}
    plan = dpoptax.PrivacyPlan(**SIZES, epsilon=2.0, delta=1e-5, sampler=sampler, **accounted)
    by_hand = sampler(dataset_size=1000, batch_size=50)
    assert plan.sampler == by_hand
    run = {"delta": 1e-5, "steps": 20, "sampler": by_hand, **accounted}
    sigma = accounting.calibrate(epsilon=2.0, **run)
    assert plan.noise_multiplier == sigma
    assert plan.epsilon == planned_epsilon(noise_multiplier=sigma, **run)
    assert plan.epsilon <= 2.0
    key = jax.random.key(3)
    seeded = runs.seeded(by_hand, key)
    drawn = list(plan.new_run(key).draws())
    assert [step for step, *_ in drawn] == list(range(20))
    for step, indices, mask in drawn:
        np.testing.assert_array_equal(indices, seeded.sample(step).indices)
        np.testing.assert_array_equal(mask, seeded.sample(step).mask)
    tx = dpoptax.gaussian_noise(noise_multiplier=sigma, batch_size=50, key=key, sampler=by_hand)
    if name == "poisson":
        sums = dpoptax.extend.trust_clipped(jnp.zeros(3), CLIP, examples=50)
        noise = plan.new_run(key).noise()
        mine, _ = jax.jit(noise.update)(sums, noise.init(jnp.zeros(3)))
        theirs, _ = jax.jit(tx.update)(sums, tx.init(jnp.zeros(3)))
        np.testing.assert_array_equal(mine, theirs)
    state = after_releases(plan.new_run(key).noise(), jnp.zeros(3), 1)
    other = after_releases(tx, jnp.zeros(3), 1)
    assert dpoptax.ledgers(state) == dpoptax.ledgers(other)
    made = spent(plan, state)
    assert made.event == accounting.guarantee(other, seeded).event
    assert made.epsilon(1e-5) == accounting.guarantee(state, by_hand, **accounted).epsilon(1e-5)


def test_plan_costs_as_much_as_all_its_releases():
    plan = dpoptax.PrivacyPlan(**{**SIZES, "steps": 3}, noise_multiplier=6.0, delta=1e-6)
    made = spent(plan, state_of(plan, 3))
    assert plan.guarantee().event.dp_event == made.event.dp_event
    assert made.stated_delta == 1e-6
    assert plan.epsilon == made.epsilon(1e-6)
    assert "3 of the Gaussian mechanism" in str(made)


def test_refuses_other_events_that_leave_no_budget():
    terms = {**SIZES, "delta": 1e-5}
    first = dpoptax.PrivacyPlan(**terms, epsilon=3.0).guarantee()
    assert dpoptax.PrivacyPlan(**terms, epsilon=3.5, also=[first]).noise_multiplier < 10
    with pytest.raises(ValueError, match="must leave a budget to the run, got 3.0"):
        dpoptax.PrivacyPlan(**terms, epsilon=3.0, also=[first])
    with pytest.raises(ValueError, match="which includes the events in `also`"):
        dpoptax.PrivacyPlan(**terms, epsilon=2.9, also=[first])


def test_plan_says_what_cut_draws_cost():
    terms = {"steps": 30, "noise_multiplier": 0.5, "delta": 1e-5}
    sampler = sampling.PoissonSampler(dataset_size=6400, batch_size=64)
    cut, hardly_cut = (dataclasses.replace(sampler, max_batch_size=most) for most in (80, 126))
    plan = dpoptax.PrivacyPlan(sampler=sampler, **terms)
    hint = f"which costs privacy: without `max_batch_size`, ε = {round_up(plan.epsilon)}"
    assert hint in str(dpoptax.PrivacyPlan(sampler=cut, **terms))
    for cheap in (sampler, hardly_cut):
        assert "cut" not in str(dpoptax.PrivacyPlan(sampler=cheap, **terms))


def test_schedule_is_calibrated_or_given():
    relative = {0: 2.0, 10: 1.0}
    plan = dpoptax.PrivacyPlan(
        **SIZES, epsilon=2.0, delta=1e-5, noise_multiplier=relative, accountant="rdp"
    )
    sigma = accounting.calibrate(
        epsilon=2.0,
        delta=1e-5,
        steps=20,
        sampler=plan.sampler,
        schedule=relative,
        accountant="rdp",
    )
    assert plan.noise_multiplier == {0: 2 * sigma, 10: sigma}
    given = dpoptax.PrivacyPlan(**SIZES, noise_multiplier={0: 8.0, 10: 4.0})
    (ledger,) = dpoptax.ledgers(state_of(given, 1))
    assert ledger.mechanism.schedule == ((0, 8.0), (10, 4.0))
    assert "8 from step 0 on, 4 from step 10 on, σC/B = 0.16 C to 0.08 C" in str(given)


def test_schedule_is_a_copy_that_cannot_change():
    given = {0: 8.0, 10: 4.0}
    plan = dpoptax.PrivacyPlan(**SIZES, noise_multiplier=given, accountant="rdp")
    before = plan.epsilon
    given[0] = 50.0
    assert plan.epsilon == before
    assert plan.noise_multiplier == {0: 8.0, 10: 4.0}
    with pytest.raises(TypeError, match="item assignment"):
        plan.noise_multiplier[0] = 50.0
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == plan
    assert hash(plan) == hash(dataclasses.replace(plan))


@pytest.mark.parametrize(
    "noise",
    [
        {"noise_multiplier": {0: 8.0, 10: 4.0}},
        {"noise_multiplier": 1.0, "strategy": STRATEGY, "sampler": SAMPLERS["cyclic"]},
    ],
    ids=["schedule", "strategy"],
)
def test_adaptive_clip_needs_independent_noise_of_one_multiplier(noise):
    plan = dpoptax.PrivacyPlan(**SIZES, **noise)
    with pytest.raises(ValueError, match="`clip` must not be adaptive under a schedule"):
        plan.new_run().noise(clip=dpoptax.contrib.adaptive_clip(1.0))


def test_budget_allows_as_many_steps_as_it_pays():
    plan = dpoptax.PrivacyPlan(**SIZES, noise_multiplier=1.0, delta=1e-5, accountant="rdp")
    costs = [dataclasses.replace(plan, steps=steps).epsilon for steps in (1, 7, 8)]
    assert plan.steps_within(costs[0]) == 1
    assert plan.steps_within(costs[1]) == plan.steps_within((costs[1] + costs[2]) / 2) == 7
    assert plan.steps_within(plan.epsilon) == plan.steps_within(1e3) == SIZES["steps"]
    with pytest.raises(ValueError, match=f"One step spends ε = {costs[0]:.4g}, more than"):
        plan.steps_within(costs[0] * 0.999)


def test_supports_correlated_noise():
    options = {**SIZES, "sampler": SAMPLERS["cyclic"], "strategy": STRATEGY}
    plan = dpoptax.PrivacyPlan(**options, epsilon=0.5, delta=1e-5)
    priced = STRATEGY.under(plan.sampler)
    sigma = accounting.calibrate(epsilon=0.5, delta=1e-5, steps=20, sampler=priced)
    assert plan.noise_multiplier == sigma
    for fixed_point in (False, True):
        planned = dataclasses.replace(plan, fixed_point=fixed_point)
        (ledger,) = dpoptax.ledgers(state := state_of(planned, 2, clip=CLIP))
        assert ledger.mechanism.strategy == STRATEGY
        assert ledger.mechanism.fixed_point == fixed_point
        assert spent(planned, state).epsilon(1e-5) < plan.epsilon
    assert f"correlated by {STRATEGY}" in str(plan)
    with pytest.raises(ValueError, match="`clip` must be the clip of all sums"):
        planned.new_run().noise()
    with pytest.raises(ValueError, match="`strategy` must be None under a schedule"):
        dpoptax.PrivacyPlan(**options, noise_multiplier={0: 2.0, 1: 1.0})
    with pytest.raises(ValueError, match="no ε is known"):
        dpoptax.PrivacyPlan(**SIZES, strategy=STRATEGY, noise_multiplier=1.0)


def test_supports_fixed_point_noise():
    plan = dpoptax.PrivacyPlan(**SIZES, noise_multiplier=6.0, fixed_point=True)
    assert "in fixed point" in str(plan)
    tx = plan.new_run().noise()
    assert "for every bit of a release" in str(spent(plan, state_of(plan, 1)))
    # Sums on the plan's grid fit its noise, and no others.
    batch, mask = jnp.ones((64, 3)), jnp.ones(64, bool)
    for grid, refused in ((plan.grid(CLIP), False), (plan.grid(CLIP) / 2, True)):
        grad_fn = dpoptax.clipped_grad(lambda p, x: jnp.sum(p * x), CLIP, grid=grid)
        clipped, params = grad_fn(jnp.zeros(3), batch, mask), jnp.zeros(3)
        with pytest.raises(ValueError, match="`grid` .* must be") if refused else nullcontext():
            tx.update(clipped, tx.init(params), params)
    assert dataclasses.replace(plan, fixed_point=False).grid(CLIP) is None
    turns = SAMPLERS["cyclic"](1000, 500, cycle_length=2)
    wide = dpoptax.matrix.BandedToeplitz((1.0, 0.5, 0.2))
    with pytest.raises(ValueError, match="Correlated noise in fixed point must have"):
        dpoptax.PrivacyPlan(
            sampler=turns, steps=4, strategy=wide, noise_multiplier=9.0, fixed_point=True
        )


def test_unit_is_user_if_sampler_draws_users():
    table = users.UserTable(np.arange(3000) % 1000, records_per_user=2, seed=0)
    sampler = table.sampler(sampling.PoissonSampler, batch_size=50)
    plan = dpoptax.PrivacyPlan(sampler=sampler, steps=20, noise_multiplier=6.0)
    assert plan.sampler is sampler
    assert "N = 1,000 users" in str(plan)
    assert "for one user with all of its records more or less" in str(plan)
    assert spent(plan, state_of(plan, 1)).unit == "user"


def test_guarantee_includes_other_events():
    other = dpa.GaussianDpEvent(3.0)
    alone, both = (
        dpoptax.PrivacyPlan(**SIZES, epsilon=2.0, delta=1e-5, accountant="rdp", also=also)
        for also in ([], [other])
    )
    assert both.noise_multiplier > alone.noise_multiplier
    assert both.epsilon <= 2.0
    assert spent(both, state_of(both, 1)).event.dp_event == dpa.ComposedDpEvent(
        [both.sampler.dp_event(both.noise_multiplier, 1), other]
    )


def test_replacing_steps_keeps_sampler_and_noise():
    plan = dpoptax.PrivacyPlan(**SIZES, epsilon=2.0, delta=1e-5, accountant="rdp")
    longer = dataclasses.replace(plan, steps=40)
    assert longer.sampler == plan.sampler
    assert longer.noise_multiplier == plan.noise_multiplier
    assert longer.epsilon > plan.epsilon
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.steps = 40


def test_str_describes_plan():
    plan = dpoptax.PrivacyPlan(**SIZES, noise_multiplier=4.5, delta=1e-6)
    assert plan.expected_epochs == 1.0
    for part in (
        "N = 1,000 examples",
        "B = 50 expected, q = B/N = 0.05, drawn by PoissonSampler",
        "T = 20, 1 expected epochs",
        "multiplier 4.5, σC/B = 0.09 C in each coordinate of a mean",
        ", 1e-06)-differentially private for one example more or less",
    ):
        assert part in str(plan)


POISSON = sampling.PoissonSampler(1000, 50)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"noise_multiplier": None}, ValueError, "Pass `epsilon` or `noise_multiplier`"),
        ({"epsilon": 1.0, "delta": 1e-5}, ValueError, "must be None or a relative schedule"),
        ({"noise_multiplier": None, "epsilon": 1.0}, ValueError, "`delta` must be given"),
        ({"dataset_size": None}, ValueError, "`dataset_size` must be given"),
        ({"batch_size": None}, ValueError, "`batch_size` must be given"),
        ({"batch_size": -3}, ValueError, "batch_size"),
        ({"batch_size": 2000}, ValueError, "batch_size"),
        ({"steps": -1}, ValueError, "steps"),
        ({"delta": 2.0}, ValueError, "delta"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"sampler": POISSON, "batch_size": 49}, ValueError, "`batch_size` must be .* 50, got 49"),
        ({"sampler": POISSON, "dataset_size": 9}, ValueError, "`dataset_size` must be"),
        ({"sampler": "poisson"}, TypeError, "`sampler` must be a sampler"),
        (
            {"sampler": STRATEGY.under(SAMPLERS["cyclic"](100, 10))},
            TypeError,
            "as `strategy`",
        ),
        ({"sampler": dict}, TypeError, "`sampler` must make a sampler"),
        ({"sampler": sampling.ShuffledSampler}, ValueError, "no privacy event"),
        ({"accountant": "gdp"}, ValueError, "accountant"),
    ],
)
def test_refuses_bad_plans(changes, error, match):
    with pytest.raises(error, match=match):
        dpoptax.PrivacyPlan(**{**SIZES, "noise_multiplier": 1.0, **changes})
