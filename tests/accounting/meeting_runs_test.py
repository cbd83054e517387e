"""Tests of runs that meet: shared seeds and keys, fresh seeds, more steps, and an audit."""

import dataclasses
import functools
import math
import pickle

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax import accounting, matrix, sampling, tables
from dpoptax._support.fingerprints import key_fingerprint, seed_fingerprint
from dpoptax.users import UserTable, per_user_loss
from tests.accounting.same_neighbors_test import check_refused
from tests.helpers import after_releases, planned_epsilon

DELTA = 1e-5
SIZES = {"dataset_size": 1000, "batch_size": 50, "steps": 3, "noise_multiplier": 6.0}
KEYS = jax.random.split(jax.random.key(0), 4)
SAME_SEED = "must not have the same sampler seed"
SAME_KEY = "must not have the same noise key"


SAMPLER = sampling.PoissonSampler(1000, 50, seed=7)


def plan_of(**options):
    return dpoptax.PrivacyPlan(**SIZES | {"accountant": "rdp"} | options)


def state_of(plan, key=KEYS[0], steps=3):
    """Returns the state of a run of the plan after some steps."""
    return after_releases(plan.new_run(key).noise(), jnp.zeros(3), steps)


def spent(plan, key=KEYS[0], steps=3):
    """Returns the guarantee of a run of the plan after some steps."""
    state = state_of(plan, key, steps)
    return plan.continue_run(state).guarantee(state)


def planned(sampler, **options):
    run = {"noise_multiplier": 6.0, "steps": 3, "accountant": "rdp"}
    return accounting.planned_guarantee(sampler=sampler, **run | options)


DEPENDENT = {  # runs whose batches depend on those of `SAMPLER`
    "same sampler": planned(SAMPLER),
    "event": planned(SAMPLER).event,
    "other batch size": planned(sampling.PoissonSampler(1000, 20, seed=7)),
    "other kind": planned(matrix.CyclicPoissonSampler(1000, 50, seed=7, cycle_length=2)),
    "released": accounting.guarantee(state_of(plan_of(), KEYS[1]), SAMPLER),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_equal_seeds_are_refused_wherever_events_meet(name):
    other, own, state = DEPENDENT[name], planned(SAMPLER), state_of(plan_of())
    run = {"sampler": SAMPLER, "delta": DELTA, "also": [other], "accountant": "rdp"}
    target = {"noise_multiplier": None, "epsilon": 2.0, "delta": DELTA}
    ways = {
        "replace": lambda: dataclasses.replace(plan_of(), also=[own, other]),
        "plan": lambda: plan_of(also=[own, other]),
        "target": lambda: plan_of(also=[own, other], **target),
        "planned": lambda: planned(**run),
        "calibrate": lambda: accounting.calibrate(epsilon=2.0, steps=2, **run),
        "guarantee": lambda: accounting.guarantee(state, **run),
        "spent": lambda: accounting.guarantee(state, **run).stated_epsilon,
        "all_of": lambda: accounting.selection.all_of([own, other]),
    }
    for way, compose in ways.items():
        with pytest.raises(ValueError, match=f"{SAME_SEED}.*new_run"):
            pytest.fail(f"{way} gave {compose()}")


def test_equal_keys_are_refused_wherever_events_meet():
    plan = plan_of()
    first = spent(plan, KEYS[0])
    again = plan_of(also=[first])
    assert spent(again, KEYS[1]).epsilon(DELTA) > spent(plan, KEYS[1]).epsilon(DELTA)
    state = state_of(plan, KEYS[0])
    for compose in (
        lambda: again.new_run(KEYS[0]),  # before the first release
        lambda: again.continue_run(state),
        lambda: accounting.selection.all_of([first, accounting.guarantee(state, SAMPLER)]),
        lambda: accounting.guarantee(state, SAMPLER, also=[first.event]),
        # A new `tx.init` starts again at step 0 with the same noise.
        lambda: accounting.selection.all_of([first, spent(plan, KEYS[0], steps=2)]),
    ):
        with pytest.raises(ValueError, match=f"{SAME_KEY}.*random_key_from_os"):
            compose()


def test_vocabulary_and_run_need_different_keys():
    lookups = jnp.arange(3000) % 3
    choose = functools.partial(
        tables.select_rows, lookups, table_size=100, vocabulary_size=10, noise_multiplier=20.0
    )
    plan = plan_of()
    for key, fine in ((KEYS[0], False), (KEYS[1], True)):
        with_vocabulary = plan_of(also=[choose(key=key).event])
        if fine:
            assert plan.epsilon < spent(with_vocabulary).epsilon(DELTA)
        else:
            with pytest.raises(ValueError, match=SAME_KEY):
                with_vocabulary.new_run(KEYS[0])
            with pytest.raises(ValueError, match=SAME_KEY):
                accounting.guarantee(state_of(plan), SAMPLER, also=with_vocabulary.also)


def test_runs_of_a_plan_are_independent():
    plan = plan_of()
    first, second, third = (spent(plan, key=None) for _ in range(3))
    assert len({*first.event.seeds, *second.event.seeds, *third.event.seeds}) == 3
    both = plan_of(also=[first])
    twice = {"steps": 6, "sampler": plan.sampler, "delta": DELTA, "accountant": "rdp"}
    assert both.epsilon == pytest.approx(planned_epsilon(noise_multiplier=6.0, **twice))
    assert spent(both, key=None).stated_epsilon == pytest.approx(both.epsilon)
    # A plan has no seed, so each of its runs will draw its own.
    assert plan_of(also=[plan.guarantee()]).epsilon == pytest.approx(both.epsilon)
    # A later run with all earlier ones.
    all_three = accounting.selection.all_of([first, second, third])
    assert all_three.seeds == first.event.seeds | second.event.seeds | third.event.seeds
    with pytest.raises(ValueError, match=SAME_KEY):
        plan_of(also=[all_three, first])


def test_more_steps_of_one_run_are_one_run():
    plan, longer = plan_of(), plan_of(steps=9)
    assert spent(longer, steps=9).event.dp_event == longer.guarantee().event.dp_event
    # The later guarantee includes the earlier one, so they must not be added.
    for earlier in (spent(plan), spent(plan, steps=1)):
        with pytest.raises(ValueError, match="pass only the later one"):
            accounting.selection.all_of([spent(longer, steps=9), earlier])
        with pytest.raises(ValueError, match="pass only the later one"):
            plan_of(also=[earlier], steps=9).continue_run(state_of(longer, steps=9))


def test_several_stages_and_ensembles_are_one_event():
    stages = [state_of(plan_of(), key) for key in KEYS[:2]]
    for same in (True, False):
        found = accounting.guarantee(stages, SAMPLER, same_batches=same).event
        assert len(found.keys) == 2
        assert len(found.seeds) == 1
    noise = functools.partial(dpoptax.gaussian_noise, noise_multiplier=6.0, batch_size=50)
    runs = jax.vmap(lambda key: noise(key=key).init(jnp.zeros(3)))(KEYS)
    found = accounting.guarantee(runs, SAMPLER, same_batches=True).event
    assert found.keys == {
        key_fingerprint(np.asarray(jax.random.key_data(k)).tobytes()) for k in KEYS
    }
    with pytest.raises(ValueError, match=SAME_KEY):
        accounting.selection.all_of([found, spent(plan_of())])


def test_candidates_of_a_random_number_of_trials_have_no_seed():
    options = {"mean": 3, "distribution": "geometric"}
    event = accounting.selection.best_of_random([plan_of().guarantee()], **options)
    assert math.isfinite(accounting.Guarantee(event, accountant="rdp").epsilon(DELTA))
    for candidate in (planned(SAMPLER), spent(plan_of())):
        with pytest.raises(ValueError, match="must not have a sampler seed or a noise key"):
            accounting.selection.best_of_random([candidate], **options)


def test_fingerprints_differ_by_use_and_are_not_shown():
    seeds = [0, 1, 255, 256, 2**128, bytes(32), b"\1" + bytes(31)]
    prints = [seed_fingerprint(seed) for seed in seeds]
    prints += [key_fingerprint(bytes(32)), key_fingerprint(bytes(8))]
    assert len(set(prints)) == len(prints)
    assert {len(each) for each in prints} == {32}
    seeded = sampling.PoissonSampler(1000, 50, seed=271828)
    made = accounting.guarantee(state_of(plan_of()), seeded)
    (seed,), (key,) = made.event.seeds, made.event.keys
    for text in (repr(made), str(made), str(made.to_dict())):
        assert not any(part in text for part in (seed, key, "271828"))


def test_event_converts_both_ways():
    gaussian = dpa.GaussianDpEvent(8.0)
    event = accounting.PrivacyEvent(gaussian)
    assert event.dp_event is gaussian
    assert accounting.Guarantee(gaussian).event == accounting.Guarantee(event).event == event
    state = state_of(plan_of())
    prices = {
        accounting.guarantee(state, SAMPLER, also=[other]).epsilon(DELTA)
        for other in (gaussian, event, accounting.Guarantee(event))
    }
    assert len(prices) == 1
    with pytest.raises(TypeError, match="must be an event of dp_accounting, got 3"):
        accounting.PrivacyEvent(3)
    with pytest.raises(TypeError, match="must be an event of dp_accounting, got 3.0"):
        accounting.guarantee(state, SAMPLER, also=[3.0])


class TestUnits:
    """A price for one example does not cover a user, and one for a user does not cover a change."""

    TABLE = UserTable(np.arange(1000) // 10, 10, seed=1)

    def plan_of_unit(self, unit, **options):
        if unit == "example":
            return plan_of(**options)
        sampler = self.TABLE.sampler(sampling.PoissonSampler, batch_size=5)
        return plan_of(dataset_size=None, batch_size=None, sampler=sampler, **options)

    @pytest.mark.parametrize("units", [("user", "example"), ("example", "user")])
    def test_events_of_two_units_are_refused(self, units):
        one, other = map(self.plan_of_unit, units)
        check_refused(one, other, "same unit, got 'example' and 'user'")

    @pytest.mark.parametrize("unit", ["user", "example"])
    def test_events_of_one_unit_keep_it(self, unit):
        plan = self.plan_of_unit(unit)
        priced_by_hand = dpa.GaussianDpEvent(8.0)
        both = dataclasses.replace(plan, also=[plan.guarantee(), priced_by_hand])
        assert both.guarantee().event.unit == both.guarantee().unit == unit
        trials = accounting.selection.all_of([priced_by_hand, plan.guarantee()])
        assert accounting.Guarantee(trials, unit=unit).unit == unit
        other = {"user": "example", "example": "user"}[unit]
        with pytest.raises(ValueError, match=f"`unit` must be the event's, '{unit}', got"):
            accounting.Guarantee(trials, unit=other)

    def test_example_of_a_user_moves_the_sum_by_twice_the_bound(self):
        """Shows why a price for users does not cover one example more or less."""
        clipped = dpoptax.clipped_grad(per_user_loss(lambda p, x: jnp.sum(p * x)), 1.0)
        records = np.array([[[1.0], [-3.0]]], np.float32)

        def total(weights):
            user = (records, np.array([weights], bool))
            return float(clipped(jnp.zeros(1), user, np.ones(1, bool)).sum[0])

        assert total([True, False]) - total([True, True]) == pytest.approx(2, abs=1e-4)


def test_a_pickled_guarantee_keeps_its_fingerprints():
    """Without pickles, people would store `event.dp_event`, which has none."""
    stored = pickle.loads(pickle.dumps(spent(plan_of())))
    assert stored == spent(plan_of())
    with pytest.raises(ValueError, match=SAME_KEY):
        plan_of(also=[stored]).new_run(KEYS[0])
    with pytest.raises(ValueError, match="no sequence of steps.*of a pickle"):
        stored.epsilon_curve([1], DELTA)
