"""Tests of the price of the best of several runs against dp_accounting, theory and simulation."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import rdp
from dp_accounting.rdp import rdp_privacy_accountant

import dpoptax
from dpoptax import accounting, sampling
from dpoptax._pricing import events
from dpoptax.accounting import selection
from dpoptax.sampling import PoissonSampler
from tests.helpers import divergences, event_epsilon

DELTA = 1e-5
RUN = dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.05, dpa.GaussianDpEvent(1.5)), 100)
CHEAPER = dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.05, dpa.GaussianDpEvent(3.0)), 100)


def epsilon(event, accountant="rdp"):
    return event_epsilon(event, DELTA, accountant=accountant)


@pytest.mark.parametrize("distribution", selection.SHAPES)
@pytest.mark.parametrize("mean", [1.5, 10.0, 300.0])
def test_single_candidate_matches_dp_accounting(distribution, mean):
    # Uses our divergences of a run, because dp_accounting's are wrong at non-integer orders.
    orders = rdp.RdpAccountant().orders
    run = divergences(RUN, orders)
    best = rdp_privacy_accountant._compute_rdp_repeat_and_select(
        orders, run, mean, selection.SHAPES[distribution]
    )
    expected, _ = rdp.compute_epsilon(orders, best, DELTA)
    event = selection.best_of_random([RUN, RUN], mean=mean, distribution=distribution)
    assert epsilon(event) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("distribution", selection.SHAPES)
def test_expected_truncations_are_subtracted_from_delta(distribution):
    cut = PoissonSampler(1000, 50, seed=0, max_batch_size=90).dp_event(1.5, 100)
    parts, paid, _ = events.without_truncation(events.parts_of(cut))
    plain = events.composition_of(parts)
    assert 1e-2 * DELTA < 10 * paid < DELTA
    found, want = (
        event_epsilon(
            selection.best_of_random([run], mean=10, distribution=distribution),
            delta,
            accountant="rdp",
        )
        for run, delta in ((cut, DELTA), (plain, DELTA - 10 * paid))
    )
    assert found == pytest.approx(want, rel=1e-12)


def test_best_of_random_is_cheaper_than_all_of():
    for mean, share in ((10, 0.7), (100, 0.3)):
        best = selection.best_of_random([RUN], mean=mean, distribution="geometric")
        assert epsilon(RUN) < epsilon(best) < 4 * epsilon(RUN)
        assert epsilon(best) < share * epsilon(selection.all_of([RUN] * mean))


def test_all_of_is_composition():
    event = selection.all_of([RUN, CHEAPER, RUN])
    expected = dpa.ComposedDpEvent([RUN, RUN, CHEAPER])
    for accountant in ("rdp", "pld"):
        assert epsilon(event, accountant) == pytest.approx(epsilon(expected, accountant), rel=1e-6)


def test_default_truncation_barely_changes_best_of_random():
    event = PoissonSampler(10_000, 200, seed=0).dp_event(2.0, 50)
    plain = dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.02, dpa.GaussianDpEvent(2.0)), 50)
    found, without = (
        epsilon(selection.best_of_random([one], mean=20, distribution="geometric"))
        for one in (event, plain)
    )
    assert without <= found < 1.001 * without


def test_replace_one_doubles_sensitivity_of_trials():
    def priced(multiplier, relation):
        one = dpa.GaussianDpEvent(multiplier)
        event = selection.best_of_random([one], mean=5, distribution="geometric")
        return event_epsilon(event, DELTA, accountant="rdp", neighboring_relation=relation)

    assert priced(6.0, "replace-one") == priced(3.0, "add-or-remove-one")


@pytest.mark.parametrize("distribution", selection.SHAPES)
@pytest.mark.parametrize("mean", [1.0, 2.0, 30.0])
def test_drawn_numbers_have_requested_mean(distribution, mean):
    draws = np.array([selection.draw_number(mean, distribution, seed) for seed in range(3000)])
    assert abs(draws.mean() - mean) < 5 * max(draws.std(), 1e-9) / math.sqrt(draws.size)
    assert draws.min() == (0 if distribution == "poisson" and mean < 10 else draws.min())
    assert distribution == "poisson" or draws.min() >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mean": 0.5, "distribution": "geometric"}, "`mean` must be .* got 0.5"),
        ({"mean": math.nan, "distribution": "geometric"}, "`mean` must be .* got nan"),
        ({"mean": 2, "distribution": "uniform"}, "`distribution` must be .* got 'uniform'"),
    ],
)
def test_refuses_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        selection.best_of_random([RUN], **arguments)
    with pytest.raises(ValueError, match=message):
        selection.draw_number(arguments["mean"], arguments["distribution"], 0)
    with pytest.raises(ValueError, match="must not be empty"):
        selection.all_of([])


def test_refuses_trials_that_are_not_events():
    with pytest.raises(TypeError, match="must be an event of dp_accounting, got 3.0"):
        selection.all_of([3.0, 3.0])
    with pytest.raises(TypeError, match="must be a list"):
        selection.best_of_random(RUN, mean=2, distribution="geometric")


@pytest.mark.parametrize("kind", [list, tuple])
def test_trial_may_be_a_composition(kind):
    """Compositions of dp_accounting hold an unhashable list and must still be counted."""
    trial = dpa.SelfComposedDpEvent(dpa.ComposedDpEvent(kind([RUN, CHEAPER])), 2)
    flat = [RUN, CHEAPER] * 4
    assert epsilon(selection.all_of([trial, trial])) == pytest.approx(
        epsilon(selection.all_of(flat)), rel=1e-9
    )
    best = selection.best_of_random([trial, RUN], mean=2, distribution="geometric")
    assert epsilon(best) > epsilon(RUN)


def test_prices_iterator_of_trials():
    """The check does not use up an iterator of trials; an empty one would give ε = 0."""
    assert selection.all_of(iter([RUN, RUN])) == selection.all_of([RUN, RUN])
    among = {"mean": 2, "distribution": "geometric"}
    found = selection.best_of_random(iter([RUN]), **among)
    assert found == selection.best_of_random([RUN], **among)


def test_guarantee_of_composition_has_the_relation_of_its_runs():
    def planned(kind):
        plan = dpoptax.PrivacyPlan(
            sampler=kind(1000, 100), steps=5, noise_multiplier=1.5, delta=1e-4, accountant="rdp"
        )
        return plan.guarantee()

    fixed, poisson = planned(sampling.FixedSizeSampler), planned(sampling.PoissonSampler)
    for runs, relation in (([fixed] * 2, "replace-one"), ([poisson] * 2, "add-or-remove-one")):
        best = selection.best_of_random(runs, mean=2, distribution="geometric")
        for event in (selection.all_of(runs), best):
            assert accounting.Guarantee(event).neighboring_relation == relation
    with pytest.raises(ValueError, match="same neighboring relation"):
        selection.all_of([fixed, poisson])
