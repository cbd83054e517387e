"""Tests that the statement in plain language agrees with the guarantee and its assumptions."""

import dataclasses
import functools
import math
import re

import dp_accounting as dpa
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax import accounting, matrix, sampling, users
from dpoptax._support import rounded
from dpoptax.accounting import _plain_statement, _statement
from tests.helpers import after_releases

OPTIONS = {"dataset_size": 2000, "batch_size": 100, "steps": 4, "noise_multiplier": 1.0}


def guarantee_of(plan):
    """Returns the guarantee of a run that followed a plan, with batches drawn elsewhere."""
    state = after_releases(plan.new_run().noise(), jnp.zeros(3), plan.steps)
    return plan.continue_run(state).guarantee(state)


@pytest.fixture
def quick(monkeypatch):
    """Replaces the trade-off function and μ, which take most of the time of a statement."""
    monkeypatch.setattr(accounting.Guarantee, "trade_off", lambda self, rate: 0.96)
    monkeypatch.setattr(accounting.Guarantee, "gdp_mu", lambda self, delta: 1.0)


def sections(guarantee, **answers):
    """Returns the sections of the statement by their headings, and checks the table."""
    plain, table = guarantee.statement(**answers).strip().split("\n\nFor experts:\n\n")
    assert table == str(guarantee)
    first, *parts = re.split(r"(?m)^(What this .*|What is .*|How strong .*|What it .*)\n\n", plain)
    assert not first or not parts
    found = dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))
    return found or {"": first}


def paragraphs(guarantee, **answers):
    """Returns the sections on the unit, the strength and the assumptions."""
    found = sections(guarantee, **answers)
    return [found[k] for k in list(found)[1:]] if len(found) > 1 else list(found.values())


def test_sections_agree_with_the_guarantee():
    found = guarantee_of(dpoptax.PrivacyPlan(**OPTIONS))
    unit, strength, assumptions = paragraphs(found)
    assert "one row of the training data" in unit
    assert "depend on whether or not this example was part of the data" in unit
    factor, chance, right = re.search(
        r"(?s)at most ([\d.]+) times as large with this example as without it, and the other way "
        r"round, plus at most 1 in ([\d,]+)\.\s.* names at most (\d+) on",
        strength,
    ).groups()
    assert math.exp(found.stated_epsilon) <= float(factor) <= 1.01 * math.exp(found.stated_epsilon)
    assert chance == "100,000"
    assert found.stated_delta == 1e-5
    most = 1000 * (1 - float(found.trade_off(0.01)))
    assert most <= int(right) < most + 1
    for part in (
        "in 4 training steps",
        "Key and seed must have been drawn at random",
        "about 100 of 2,000 examples, chosen at random",
        "by PoissonSampler",
        '"holds for real numbers"',
    ):
        assert part in assumptions


@pytest.mark.usefixtures("quick")
def test_blanks_can_be_filled():
    found = guarantee_of(dpoptax.PrivacyPlan(**OPTIONS))
    answers = ("owners", "public_data", "settings", "publications", "batches", "model", "signature")
    assert "".join(sections(found).values()).count(_statement.BLANK) == len(answers)
    filled = "".join(sections(found, **{name: f"<{name}>" for name in answers}).values())
    assert _statement.BLANK not in filled
    assert all(f": <{name}>" in filled for name in answers)


@pytest.mark.usefixtures("quick")
def test_says_what_it_is_about():
    name = "What this statement is about"
    plan = dpoptax.PrivacyPlan(**OPTIONS)
    assert sections(guarantee_of(plan))[name].startswith("It is about a finished training.")
    assert sections(plan.guarantee())[name].startswith("It is about the plan of a training")
    both = accounting.selection.all_of([guarantee_of(plan), dpa.GaussianDpEvent(4.0)])
    text = sections(accounting.Guarantee(both))[name]
    assert text.startswith("It is about one or several uses of the data together.")


@pytest.mark.usefixtures("quick")
def test_statistics_alone_are_not_called_a_training():
    statistics = [
        accounting.PrivacyEvent(dpa.GaussianDpEvent(20.0)),
        accounting.StatedDpEvent(0.5, 1e-7),
    ]
    found = accounting.Guarantee(statistics, stated_delta=1e-6)
    composed = accounting.selection.all_of(statistics)
    assert found.stated_epsilon == accounting.Guarantee(composed).epsilon(1e-6)
    text = found.statement()
    assert text.startswith("What this statement is about\n\nIt is about one or several uses of the")
    assert "Results, with their files: ____" in text
    assert "The random numbers that hide the data in each use" in text
    for training in ("training used", "training steps", "each training", "Gaussian mechanism"):
        assert training not in text
    assert "secret     the random numbers of each release" in str(found)
    with pytest.raises(ValueError, match="`event` must not be an empty list"):
        accounting.Guarantee([])


@pytest.mark.usefixtures("quick")
def test_events_alone_have_the_price_of_dp_accounting_and_their_own_unit():
    mechanisms = [dpa.GaussianDpEvent(20.0), dpa.LaplaceDpEvent(10.0)]
    released = accounting.PrivacyEvent(mechanisms[0], unit="user")
    found = accounting.Guarantee([released, mechanisms[1]], stated_delta=1e-6)
    accountant = dpa.pld.PLDAccountant()
    for mechanism in mechanisms:
        accountant.compose(mechanism)
    assert found.stated_epsilon == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-3)
    assert found.unit == "user"
    assert "-differentially private for one user with all of its records" in str(found)
    assert "one user, with all rows" in found.statement()
    with pytest.raises(ValueError, match="`unit` must be the event's, 'user', got 'example'"):
        accounting.Guarantee([released], unit="example")


@pytest.mark.usefixtures("quick")
def test_says_that_the_choice_of_the_best_is_included():
    trial = dpa.GaussianDpEvent(4.0)
    best = accounting.selection.best_of_random([trial], mean=20, distribution="geometric")
    found = accounting.Guarantee(best)
    subject, *_, assumptions = sections(found).values()
    assert "best of several trainings" in subject
    assert "on average it is 20." in subject
    assert "all of them except the best must stay secret" in assumptions
    assert "The numbers above include the choice of the best training." in assumptions
    assert "A computer rounds." in assumptions
    assert "  selected   the best of a geometric number of trials with mean 20\n" in str(found)
    assert "left out   other settings chosen by private results" in str(found)
    both = accounting.selection.all_of([best, trial])
    assert (
        "include the choice of the best" in sections(accounting.Guarantee(both))["What it assumes"]
    )
    one = sections(accounting.Guarantee(trial))["What it assumes"]
    assert "do not include this, unless" in one
    assert "except the best" not in one


@pytest.mark.usefixtures("quick")
def test_has_no_wall_of_text():
    for text in sections(guarantee_of(dpoptax.PrivacyPlan(**OPTIONS))).values():
        assert max(map(len, text.splitlines())) < 600


@pytest.mark.usefixtures("quick")
def test_says_which_check_of_batches_was_made():
    found = guarantee_of(dpoptax.PrivacyPlan(**OPTIONS))
    assert "did not see whether the program did so" in paragraphs(found)[2]
    run = dpoptax.PrivacyPlan(**OPTIONS).new_run()
    made, steps = run.noise(), list(run.batches(np.zeros((2000, 1))))
    by_run = run.guarantee(after_releases(made, jnp.zeros(3), len(steps)))
    for each in (dataclasses.replace(found, drawn=True), by_run):
        assert "chose them itself, and checked" in paragraphs(each)[2]
        assert "did not see" not in paragraphs(each)[2]


@pytest.mark.usefixtures("quick")
def test_names_users_and_groups():
    table = users.UserTable([n % 500 for n in range(2000)], records_per_user=2, seed=0)
    sampler = table.sampler(sampling.PoissonSampler, batch_size=50)
    plan = dpoptax.PrivacyPlan(sampler=sampler, steps=4, noise_multiplier=1.0)
    unit, strength, assumptions = paragraphs(guarantee_of(plan))
    assert "one user, with all rows of that user together" in unit
    assert "users that were part of the data. Of 1,000 that were not part of the data" in strength
    assert "about 50 of 500 users" in assumptions

    fixed = dpoptax.PrivacyPlan(**OPTIONS, sampler=sampling.FixedSizeSampler, accountant="rdp")
    unit, strength, _ = paragraphs(guarantee_of(fixed))
    assert "depend on the values of this example" in unit
    assert "with one set of values of this example as with another" in strength
    assert "in the data with other values" in strength

    groups = sampling.GroupedPoissonSampler(1000, 48, group_sizes=(900, 100), weights=(1, 3))
    plan = dpoptax.PrivacyPlan(sampler=groups, steps=4, noise_multiplier=1.0)
    text = paragraphs(guarantee_of(plan))[2]
    assert "about 48 of 1,000 examples" in text
    assert "which example belongs to which group are treated as public" in text


@pytest.mark.usefixtures("quick")
def test_says_whether_rounding_is_covered():
    exact = guarantee_of(dpoptax.PrivacyPlan(**OPTIONS, fixed_point=True))
    assert "down to the last digit" in paragraphs(exact)[2]
    assert "real numbers" not in paragraphs(exact)[2]
    planned = dpoptax.PrivacyPlan(**OPTIONS).guarantee()
    assert "digit" not in paragraphs(planned)[2]


@pytest.mark.usefixtures("quick")
def test_counts_other_uses_of_the_data():
    first = guarantee_of(dpoptax.PrivacyPlan(**OPTIONS))
    both = dpoptax.PrivacyPlan(**OPTIONS, also=[first, dpa.GaussianDpEvent(9.0)])
    assert "numbers above include 2 other uses of the data" in paragraphs(guarantee_of(both))[2]
    assert "numbers above include" not in paragraphs(first)[2]


@pytest.mark.usefixtures("quick")
def test_correlated_noise_and_several_stages_have_a_statement():
    strategy = matrix.BandedToeplitz((1.0, 0.5))
    plan = dpoptax.PrivacyPlan(
        **OPTIONS,
        strategy=strategy,
        sampler=functools.partial(matrix.CyclicPoissonSampler, cycle_length=2),
    )
    unit, strength, _ = paragraphs(guarantee_of(plan))
    assert "whether or not this example contributed" in unit
    assert "if this example contributes as if it does not" in strength
    assert "examples that were used for training. Of 1,000 that were left out" in strength


@pytest.mark.usefixtures("quick")
def test_event_alone_and_missing_noise_state_no_more_than_they_know():
    one_release = accounting.Guarantee(dpa.GaussianDpEvent(4.0))
    assert "training steps" not in paragraphs(one_release)[2]
    assert "chosen at random" not in paragraphs(one_release)[2]
    without = guarantee_of(dpoptax.PrivacyPlan(**OPTIONS | {"noise_multiplier": 0.0}))
    (nothing,) = paragraphs(without)
    assert nothing.startswith("There is no protection.")


def test_numbers_are_rounded_against_the_claim():
    assert rounded.one_in(1e-5) == "1 in 100,000"
    assert rounded.one_in(1.0000001e-5) == "1 in 99,999"
    assert _plain_statement._factor(math.log(20.0)) in ("20", "20.1")
    assert _plain_statement._factor(math.log(65_000.5)) == "65,001"
    assert _plain_statement._factor(230.3) == "10^101"


@pytest.mark.parametrize("success", [0.0100001, 0.02])
def test_attack_is_rounded_up(success):
    text = _plain_statement._strength(1.0, 1e-5, success, "example", "add-or-remove-one")
    assert f"at most {math.ceil(1000 * success)} on average" in text
    assert "excludes nothing" not in text


def test_says_that_an_attack_is_not_limited():
    text = _plain_statement._strength(20.0, 1e-5, 0.9991, "example", "add-or-remove-one")
    assert "at most 1,000 on average" in text
    assert text.endswith("So in this example, the guarantee excludes nothing.")
