"""Tests that events meet only if their prices are about the same neighbors.

Users of two tables, neighboring relations, and hand-made events, in every way that composes.
"""

import dataclasses
import subprocess
import sys

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax import accounting, matrix, sampling, tables
from dpoptax.accounting import Guarantee, PrivacyEvent, selection
from dpoptax.users import UserTable
from tests.helpers import after_releases

DELTA = 1e-5
ACCOUNTS = [f"a{i}" for i in range(40)]
HOUSEHOLDS = [f"h{i // 2}" for i in range(40)]


def plan_of(sampler, **options):
    return dpoptax.PrivacyPlan(
        sampler=sampler, steps=2, **{"noise_multiplier": 4.0, "accountant": "rdp"} | options
    )


def plan_of_users(owners, records_per_user=2, seed=0):
    table = UserTable(owners, records_per_user, seed=seed)
    return plan_of(table.sampler(sampling.PoissonSampler, batch_size=10))


def state_of(plan, seed):
    return after_releases(plan.new_run(jax.random.key(seed)).noise(), jnp.zeros(3), 2)


def released_by(plan, seed):
    """Returns the guarantee of a run of the plan."""
    state = state_of(plan, seed)
    return plan.continue_run(state).guarantee(state)


def ways(plan, other):
    """Returns all ways to compose a plan with another plan's guarantee."""
    run = {"sampler": plan.sampler, "accountant": "rdp"}
    released = released_by(other, 1)
    random = {"mean": 3, "distribution": "geometric"}
    for also in (other.guarantee(), other.guarantee().event, released, released.event):
        more = {**run, "also": [also]}
        yield from {
            "replace": lambda also=also: dataclasses.replace(plan, also=[also]),
            "plan": lambda also=also: plan_of(plan.sampler, also=[also]),
            "target": lambda also=also: plan_of(
                plan.sampler, also=[also], noise_multiplier=None, epsilon=2.0, delta=DELTA
            ),
            "planned": lambda more=more: accounting.planned_guarantee(
                noise_multiplier=1.0, steps=2, **more
            ),
            "calibrate": lambda more=more: accounting.calibrate(
                epsilon=2.0, delta=DELTA, steps=2, **more
            ),
            "guarantee": lambda more=more: accounting.guarantee(state_of(plan, 2), **more),
            "run": lambda also=also: plan_of(plan.sampler, also=[also]).new_run(),
            "all_of": lambda also=also: selection.all_of([plan.guarantee(), also]),
            "among others": lambda also=also: plan_of(plan.sampler, also=[plan.guarantee(), also]),
            "selections": lambda: selection.all_of(
                [selection.best_of_random([p.guarantee()], **random) for p in (plan, other)]
            ),
            "best": lambda: selection.best_of_random(
                [plan.guarantee(), other.guarantee()], **random
            ),
        }.items()


def check_refused(plan, other, message):
    for way, compose in ways(plan, other):
        with pytest.raises(ValueError, match=message):
            pytest.fail(f"{way} gave {compose()}")


@pytest.mark.parametrize("pair", [(ACCOUNTS, HOUSEHOLDS), (HOUSEHOLDS, ACCOUNTS)])
def test_users_of_two_tables_are_refused(pair):
    one, other = map(plan_of_users, pair)
    check_refused(one, other, "same users.*different owners of the records.*UserTable.sampler")


def test_equal_assignments_are_equal_users():
    """Labels, bounds and seeds of a table do not change who owns which record."""
    plan = plan_of_users(HOUSEHOLDS)
    for owners, bound, seed in (
        (np.arange(40) // 2, 2, 0),
        (39 - np.arange(40) // 2, 1, 5),
        (jnp.arange(40) // 2 + 7, 3, 1),
        (HOUSEHOLDS, 2, 0),
    ):
        other = plan_of_users(owners, bound, seed)
        assert other.sampler.owners == plan.sampler.owners
        both = dataclasses.replace(plan, also=[other.guarantee()]).guarantee()
        assert both.event.owners == plan.sampler.owners
        assert both.stated_epsilon > plan.epsilon
    rest = UserTable(HOUSEHOLDS[:38], 2, seed=0)
    swapped = UserTable([HOUSEHOLDS[0], HOUSEHOLDS[2], HOUSEHOLDS[1], *HOUSEHOLDS[3:]], 2, seed=0)
    assert len({plan.sampler.owners, rest.owners, swapped.owners}) == 3


def test_owners_are_the_same_in_every_process():
    code = (
        "from dpoptax.users import UserTable\n"
        "print(UserTable([f'h{i // 2}' for i in range(40)], 2, seed=0).owners)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert found == UserTable(HOUSEHOLDS, 2, seed=0).owners


def test_hand_made_samplers_and_events_of_users():
    table = UserTable(HOUSEHOLDS, 2, seed=0)
    made = sampling.PoissonSampler(20, 10, unit="user")
    plan, unknown = plan_of_users(HOUSEHOLDS), plan_of(made)
    # Nobody knows which records these users own.
    check_refused(plan, unknown, "same users")
    with pytest.raises(ValueError, match="must draw the 20 users of this table.*unknown"):
        table.sample(dataclasses.replace(made, seed=0), 0)
    known = plan_of(dataclasses.replace(made, owners=table.owners))
    assert dataclasses.replace(plan, also=[known.guarantee()]).epsilon > plan.epsilon
    assert dataclasses.replace(unknown, also=[unknown.guarantee()]).epsilon > unknown.epsilon
    by_hand = PrivacyEvent(dpa.GaussianDpEvent(8.0))
    assert dataclasses.replace(plan, also=[by_hand]).guarantee().event.owners == table.owners
    with pytest.raises(ValueError, match="`unit` must be 'user' with `owners`"):
        sampling.PoissonSampler(20, 10, owners=table.owners)
    with pytest.raises(ValueError, match="must draw the .* users of this table"):
        table.sample(
            UserTable(ACCOUNTS[:20] * 2, 2, seed=0).sampler(
                sampling.PoissonSampler, batch_size=5, seed=0
            ),
            0,
        )


def test_owners_are_not_shown():
    plan = plan_of_users(HOUSEHOLDS)
    made = released_by(plan, 0)
    for text in (repr(made), str(made), str(made.to_dict()), repr(plan), str(plan)):
        assert plan.sampler.owners not in text
    assert plan.sampler.owners not in str(plan.sampler.describe())


SAMPLERS = {
    "add-or-remove-one": sampling.PoissonSampler(1000, 100),
    "replace-one": sampling.FixedSizeSampler(1000, 100),
    "replace-special": matrix.CyclicPoissonSampler(1000, 100, cycle_length=10),
}


@pytest.mark.parametrize("one", SAMPLERS)
@pytest.mark.parametrize("other", SAMPLERS)
def test_runs_of_two_neighboring_relations_are_refused(one, other):
    plan, second = plan_of(SAMPLERS[one]), plan_of(SAMPLERS[other])
    if one == other:
        both = dataclasses.replace(plan, also=[second.guarantee()]).guarantee()
        assert both.neighboring_relation == both.event.neighboring_relation == one
        return
    names = " and ".join(f"'{name}'" for name in sorted((one, other))).replace("'", "")
    check_refused(plan, second, f"same neighboring relation, got {names}.*with samplers of one")


def test_guarantee_states_the_relation_of_its_event():
    cyclic = plan_of(SAMPLERS["replace-special"]).guarantee()
    wrong = "add-or-remove-one"
    with pytest.raises(ValueError, match="`neighboring_relation` must be the event's"):
        Guarantee(cyclic.event, wrong)
    with pytest.raises(ValueError, match="`neighboring_relation` must be the event's"):
        dataclasses.replace(cyclic, neighboring_relation=wrong)
    # An event that was priced by hand has no relation, and its author is responsible.
    by_hand = PrivacyEvent(cyclic.event.dp_event)
    for relation in SAMPLERS:
        assert Guarantee(by_hand, relation).neighboring_relation == relation


def test_events_without_a_relation_take_that_of_the_run():
    lookups = jnp.arange(3000) % 3
    vocabulary = tables.select_rows(
        lookups,
        table_size=100,
        vocabulary_size=10,
        noise_multiplier=20.0,
        key=jax.random.key(3),
    )
    for relation, sampler in SAMPLERS.items():
        plan = plan_of(sampler)
        for also in (vocabulary.event, dpa.GaussianDpEvent(20.0)):
            both = dataclasses.replace(plan, also=[also]).guarantee()
            assert both.neighboring_relation == relation
            assert both.stated_epsilon > plan.epsilon
