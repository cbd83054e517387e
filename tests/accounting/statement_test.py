"""Tests that the statement of a run's guarantee follows from its ledgers and sampler."""

import dataclasses
import json
import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import pytest
from scipy import stats

import dpoptax
from dpoptax import accounting, matrix, sampling, users
from dpoptax._support import rounded
from tests.helpers import after_releases, event_epsilon, planned_epsilon

PARAMS = jnp.zeros(3)
DELTA = 1e-5
SAMPLER = sampling.PoissonSampler(dataset_size=1000, batch_size=10, seed=0)


def spent(tx, steps=3):
    """Returns the state after a number of releases."""
    return after_releases(tx, PARAMS, steps)


def gaussian(noise_multiplier=4.0, **options):
    return dpoptax.gaussian_noise(
        noise_multiplier=noise_multiplier, batch_size=10, key=jax.random.key(0), **options
    )


def test_statement_agrees_with_accounting():
    state = spent(gaussian())
    found = accounting.guarantee(state, SAMPLER, delta=DELTA)
    values, text = found.to_dict(), str(found)
    assert values["epsilon"] == accounting.guarantee(state, SAMPLER).epsilon(DELTA)
    assert values["gdp_mu"] == found.gdp_mu(DELTA)
    assert values["attack_success"] == 1 - found.trade_off(0.01)
    for part in (
        "for one example more or less",
        "3 of the Gaussian mechanism, noise multiplier 4",
        "10 expected of 1,000 examples, drawn by PoissonSampler",
        "noise by threefry, batches by PCG64",
        "by privacy loss distributions",
        f"true-positive rate at most {rounded.round_up(100 * values['attack_success'])} %",
        f"false-positive rate of 1 %; μ = {rounded.round_up(values['gdp_mu'])}",
        "not for the last bits of a release",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fixed_point": True}, "for every bit of a release"),
        (
            {"noise_multiplier": {0: 6.0, 1: 4.5}},
            "s 6 from step 0 on, 4.5 from step 1 on",
        ),
        (
            {"noise_multiplier": {t: 4.0 + t for t in range(9)}},
            "4 from step 0 on, 5 from step 1 on, 6 from step 2 on, …, 12 from step 8 on",
        ),
    ],
)
def test_statement_describes_noise(options, match):
    assert match in str(accounting.guarantee(spent(gaussian(**options)), SAMPLER))


def test_statement_names_unit_and_neighboring_relation():
    """The sampler of a table of users is stated per user, not per example."""
    table = users.UserTable(range(1000), records_per_user=1, seed=0)
    state = spent(gaussian())
    poisson = table.sampler(sampling.PoissonSampler, batch_size=10, seed=0)
    found = accounting.guarantee(state, poisson)
    assert found.unit == "user"
    assert "for one user with all of its records more or less" in str(found)
    fixed = table.sampler(sampling.FixedSizeSampler, batch_size=10, seed=0)
    found = accounting.guarantee(state, fixed, accountant="rdp")
    assert "for one user with all of its records replaced by another" in str(found)
    assert "of 1,000 users, drawn by FixedSizeSampler" in str(found)
    assert "by Rényi divergences" in str(found)
    with pytest.raises(ValueError, match="`unit` must be one of"):
        dataclasses.replace(fixed, unit="record")


def test_statement_describes_correlated_noise():
    strategy = matrix.BandedToeplitz((1.0, 0.5))
    tx = dpoptax.correlated_noise(
        strategy, noise_multiplier=4.0, batch_size=10, key=jax.random.key(0)
    )
    cyclic = matrix.CyclicPoissonSampler(1000, 10, seed=0, cycle_length=2)
    found = accounting.guarantee(spent(tx), cyclic)
    assert f"correlated by {strategy}" in str(found)
    assert "one example replaced by one that adds nothing" in str(found)


def test_guarantee_includes_other_events():
    other = dpa.GaussianDpEvent(8.0)
    state = spent(gaussian())
    found = accounting.guarantee(state, SAMPLER, delta=DELTA, also=[other])
    both = dpa.ComposedDpEvent([SAMPLER.dp_event(4.0, 3), other])
    assert found.epsilon(DELTA) == event_epsilon(both, DELTA)
    assert found.gdp_mu(DELTA) == accounting.Guarantee(both).gdp_mu(DELTA)
    assert "with 1 other event on the data" in str(found)
    # The other event is present from the start.
    before, after = found.epsilon_curve([0, 3], DELTA)
    assert after == found.epsilon(DELTA) > before > event_epsilon(other, DELTA) * (1 - 1e-9)


def test_statement_without_noise_is_not_private():
    found = accounting.guarantee(spent(gaussian(0.0)), SAMPLER, delta=1.0000001e-5)
    assert found.epsilon(DELTA) == math.inf
    assert str(found).startswith("not private: no ε holds at δ = 1.00001e-05")


def test_to_dict_is_json_without_seed():
    strategy = matrix.BandedToeplitz((1.0, 0.5))
    tx = dpoptax.correlated_noise(
        strategy, noise_multiplier=4.0, batch_size=10, key=jax.random.key(0)
    )
    cyclic = matrix.CyclicPoissonSampler(1000, 10, seed=12345, cycle_length=2)
    text = json.dumps(accounting.guarantee(spent(tx), cyclic).to_dict())
    (stage,) = json.loads(text)["releases"]
    assert stage == {
        "number": 3,
        "phases": [[0, 4.0]],
        "strategy": repr(strategy),
        "fixed_point": False,
        "generator": "threefry",
    }
    assert "12345" not in text


def test_statement_rounds_conservatively():
    """The statement rounds δ up and σ down."""
    noise = {0: 5.23456789, 2: 5.9999999}
    for multiplier, said in ((noise, "5.23456 from step 0 on, 5.99999"), (5.2345678, "5.23456")):
        found = accounting.guarantee(spent(gaussian(multiplier)), SAMPLER, delta=1.0000001e-5)
        assert f"multiplier{'s' * (multiplier is noise)} {said}" in str(found)
        assert ", 1.00001e-05)-differentially" in str(found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.2811, "1.29"),
        (1.28, "1.28"),
        (0.0012341, "0.00124"),
        (9.999, "10"),
        (123.4, "124"),
        (1234.5, "1235"),
        (1e5, "100000"),
        (math.inf, "inf"),
    ],
)
def test_rounds_up(value, text):
    assert rounded.round_up(value) == text


@pytest.mark.parametrize("also", [iter([dpa.GaussianDpEvent(8.0)]), filter(None, []), {}])
def test_refuses_other_events_that_are_not_a_sequence(also):
    """An iterator of other events is refused: the check would use it up and drop their cost."""
    with pytest.raises(TypeError, match="must be a sequence"):
        accounting.guarantee(spent(gaussian()), SAMPLER, also=also).epsilon(DELTA)
    with pytest.raises(TypeError, match="must be a sequence"):
        accounting.calibrate(epsilon=9.0, delta=DELTA, steps=5, sampler=SAMPLER, also=also)


def test_refuses_composition_of_an_iterator():
    """A composition from an iterator is refused: pricing it a second time would give ε = 0."""
    once = dpa.ComposedDpEvent(dpa.GaussianDpEvent(8.0) for _ in range(2))
    for accountant in ("pld", "rdp"):
        with pytest.raises(TypeError, match="must be a list or a tuple"):
            event_epsilon(once, DELTA, accountant=accountant)
    with pytest.raises(TypeError, match="must be a list or a tuple"):
        accounting.guarantee(spent(gaussian()), SAMPLER, also=[once]).gdp_mu(DELTA)


def test_planned_guarantee_equals_later_guarantee():
    made = accounting.guarantee(spent(gaussian()), SAMPLER)
    planned = accounting.planned_guarantee(noise_multiplier=4.0, steps=3, sampler=SAMPLER)
    assert planned.event.dp_event == made.event.dp_event
    assert planned.event.seeds == made.event.seeds
    assert "3 planned, of the Gaussian mechanism" in str(planned)
    assert str(planned).splitlines()[0] == str(made).splitlines()[0]
    assert "holds" in str(made)
    assert "holds" not in str(planned)
    described = accounting.planned_guarantee(
        noise_multiplier=6.0, steps=3, sampling_probability=0.1
    )
    assert "Poisson samples with probability 0.1" in str(described)
    strategy = matrix.BandedToeplitz((1.0, 0.5))
    table = users.UserTable(range(1000), records_per_user=1, seed=0)
    cyclic = table.sampler(matrix.CyclicPoissonSampler, batch_size=10, seed=0, cycle_length=2)
    priced = strategy.under(cyclic)
    correlated = accounting.planned_guarantee(noise_multiplier=6.0, steps=3, sampler=priced)
    assert correlated.unit == "user"
    assert f"correlated by {strategy}" in str(correlated)


@pytest.mark.parametrize(("size", "delta"), [(50, 1e-5), (99_999, 1e-5), (10**6, 1e-7)])
def test_stated_delta_is_below_one_over_n(size, delta):
    sampler = sampling.PoissonSampler(size, 10, seed=0)
    planned = accounting.planned_guarantee(noise_multiplier=1.0, steps=1, sampler=sampler)
    assert planned.stated_delta == pytest.approx(delta)
    with pytest.warns(UserWarning, match="not below 1/N") as caught:
        accounting.planned_guarantee(noise_multiplier=1.0, steps=1, sampler=sampler, delta=1 / size)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("sampler", "accountant"),
    [
        (SAMPLER, "pld"),
        (sampling.PoissonSampler(1000, 10, seed=0, max_batch_size=40), "rdp"),
        (sampling.FixedSizeSampler(1000, 10, seed=0), "rdp"),
        (sampling.RandomAllocationSampler(1000, 10, seed=0), "pld"),
        pytest.param(
            *(sampling.PoissonSampler(1000, 10, seed=0, max_batch_size=14), "pld"),
            marks=pytest.mark.slow,
        ),
        pytest.param(sampling.FixedSizeSampler(1000, 10, seed=0), "pld", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_delta_inverts_epsilon(sampler, accountant):
    planned = accounting.planned_guarantee(
        noise_multiplier=4.0, steps=20, sampler=sampler, accountant=accountant
    )
    for delta in (1e-4, 1e-6):
        found = planned.delta(planned.epsilon(delta))
        assert found == pytest.approx(delta, rel=2e-3)


def test_delta_at_zero_and_without_privacy():
    gaussian_event = accounting.Guarantee(dpa.GaussianDpEvent(4.0))
    exact = stats.norm.cdf(1 / 8) - stats.norm.cdf(-1 / 8)
    assert exact <= gaussian_event.delta(0.0) <= exact + 1e-4
    assert accounting.Guarantee(dpa.NonPrivateDpEvent()).delta(3.0) == 1.0
    assert accounting.Guarantee(dpa.NoOpDpEvent()).delta(0.0) < 1e-9
    with pytest.raises(ValueError, match="`epsilon` must be at least 0, got -1"):
        gaussian_event.delta(-1)


def test_epsilon_curve_ends_with_its_run():
    made = accounting.guarantee(spent(gaussian()), SAMPLER)
    assert made.epsilon_curve([3], DELTA) == made.epsilon(DELTA)
    assert made.epsilon_curve([2], DELTA) == planned_epsilon(
        noise_multiplier=4.0, steps=2, sampler=SAMPLER
    )
    with pytest.raises(ValueError, match="`steps` must be at most the 3 steps of the run, got 4"):
        made.epsilon_curve([4], DELTA)
    turns = (
        spent(gaussian()),
        spent(dpoptax.gaussian_noise(noise_multiplier=4.0, batch_size=10, key=jax.random.key(1))),
    )
    with pytest.raises(ValueError, match="no sequence of steps"):
        accounting.guarantee(turns, SAMPLER, same_batches=False).epsilon_curve([1], DELTA)
    with pytest.raises(ValueError, match="no sequence of steps"):
        accounting.Guarantee(dpa.GaussianDpEvent(1.0)).epsilon_curve([1], DELTA)
