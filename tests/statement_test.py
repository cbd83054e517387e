"""A run's guarantee in words: from its ledgers and its sampler, and never too little."""

import dataclasses
import json
import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import pytest

import dpoptax
from dpoptax import accounting, matrix, sampling, users
from dpoptax.accounting import _statement

CLIP = dpoptax.l2_clip(1.0)
PARAMS = jnp.zeros(3)
DELTA = 1e-5
SAMPLER = sampling.PoissonSampler(dataset_size=1000, batch_size=10, seed=0)


def spent(tx, steps=3):
    """The state after so many releases."""
    state = tx.init(PARAMS)
    for _ in range(steps):
        _, state = jax.jit(tx.update)(dpoptax.assert_clipped(PARAMS, CLIP, examples=10), state)
    return state


def gaussian(noise_multiplier=4.0, **options):
    return dpoptax.gaussian_noise(
        noise_multiplier=noise_multiplier, batch_size=10, key=jax.random.key(0), **options
    )


def test_it_says_what_the_accounting_says():
    state = spent(gaussian())
    found = accounting.statement(state, SAMPLER, DELTA)
    assert found.epsilon == accounting.epsilon_spent(state, SAMPLER, DELTA)
    assert found.mu == accounting.gdp_spent(state, SAMPLER, DELTA)
    assert found.found == 1 - accounting.trade_off_spent(state, SAMPLER)(0.01)
    assert found.ledgers == dpoptax.ledgers(state)
    text = str(found)
    for part in (
        "for one example more or less",
        "3 of the Gaussian mechanism, noise multiplier 4",
        "10 expected of 1,000 examples, drawn by PoissonSampler",
        "by privacy loss distributions",
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
def test_it_says_how_there_is_noise(options, match):
    assert match in str(accounting.statement(spent(gaussian(**options)), SAMPLER, DELTA))


def test_it_says_whose_data_and_which_neighbours():
    """The sampler of a table of users was stated to be about one example."""
    table = users.UserTable(range(1000), records_per_user=1, seed=0)
    state = spent(gaussian())
    poisson = table.sampler(sampling.PoissonSampler, batch_size=10, seed=0)
    found = accounting.statement(state, poisson, DELTA)
    assert found.unit == "user"
    assert "for one user with all of its records more or less" in str(found)
    fixed = table.sampler(sampling.FixedSizeSampler, batch_size=10, seed=0)
    found = accounting.statement(state, fixed, DELTA, accountant="rdp")
    assert "for one user with all of its records replaced by another" in str(found)
    assert "of 1,000 users, drawn by FixedSizeSampler" in str(found)
    assert "by Rényi divergences" in str(found)
    with pytest.raises(ValueError, match="`unit` must be one of"):
        dataclasses.replace(fixed, unit="record")


def test_it_says_how_noise_is_correlated():
    strategy = matrix.BandedToeplitz((1.0, 0.5))
    tx = dpoptax.correlated_noise(
        strategy, noise_multiplier=4.0, batch_size=10, key=jax.random.key(0)
    )
    cyclic = matrix.CyclicPoissonSampler(1000, 10, seed=0, cycle_length=2)
    found = accounting.statement(spent(tx), cyclic, DELTA)
    assert f"correlated by {strategy}" in str(found)
    assert "one example replaced by one that adds nothing" in str(found)


def test_what_else_was_released_is_part_of_it():
    other = dpa.GaussianDpEvent(8.0)
    state = spent(gaussian())
    found = accounting.statement(state, SAMPLER, DELTA, also=[other])
    assert found.epsilon == accounting.epsilon_spent(state, SAMPLER, DELTA, also=[other])
    assert found.mu == accounting.gdp_spent(state, SAMPLER, DELTA, also=[other])
    assert "with 1 other releases of the data" in str(found)


def test_what_can_be_read_but_once_is_no_list_of_releases():
    """It was empty after a first look, and the releases in it cost nothing."""
    for price in (accounting.statement, accounting.epsilon_spent, accounting.trade_off_spent):
        delta = {} if price is accounting.trade_off_spent else {"delta": DELTA}
        with pytest.raises(TypeError, match="want a sequence of dp_accounting events"):
            price(spent(gaussian()), SAMPLER, also=iter([dpa.GaussianDpEvent(0.5)]), **delta)


def test_nothing_is_promised_without_noise():
    found = accounting.statement(spent(gaussian(0.0)), SAMPLER, DELTA)
    assert found.epsilon == math.inf
    assert str(found).startswith("not private")


def test_a_machine_can_read_it():
    strategy = matrix.BandedToeplitz((1.0, 0.5))
    tx = dpoptax.correlated_noise(
        strategy, noise_multiplier=4.0, batch_size=10, key=jax.random.key(0)
    )
    cyclic = matrix.CyclicPoissonSampler(1000, 10, seed=12345, cycle_length=2)
    text = json.dumps(accounting.statement(spent(tx), cyclic, DELTA).to_dict())
    assert json.loads(text)["ledgers"][0]["releases"] == 3
    assert "12345" not in text


def test_less_is_said_than_holds_where_digits_are_left_out():
    """A δ was rounded down, and a σ up."""
    noise = {0: 5.23456789, 2: 5.9999999}
    for multiplier, said in ((noise, "5.23456 from step 0 on, 5.99999"), (5.2345678, "5.23456")):
        found = accounting.statement(spent(gaussian(multiplier)), SAMPLER, 1.0000001e-5)
        assert f"multiplier{'s' * (multiplier is noise)} {said}" in str(found)
        assert ", 1.00001e-05)-differentially" in str(found)
    none = dataclasses.replace(found, epsilon=math.inf)
    assert "no ε holds at δ = 1.00001e-05" in str(none)


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
def test_numbers_are_rounded_up(value, text):
    assert _statement._up(value) == text


@pytest.mark.parametrize("also", [iter([dpa.GaussianDpEvent(8.0)]), filter(None, []), {}])
def test_others_that_can_be_read_but_once_are_refused(also):
    """The check read them, and ε was that of the run alone."""
    with pytest.raises(TypeError, match="want a sequence"):
        accounting.epsilon_spent(spent(gaussian()), SAMPLER, DELTA, also=also)
    with pytest.raises(TypeError, match="want a sequence"):
        accounting.calibrate_noise_multiplier(
            epsilon=9.0, delta=DELTA, steps=5, sampler=SAMPLER, also=also
        )


def test_a_composition_that_can_be_read_but_once_is_refused():
    """It had an ε of 0 where it was priced again, as by a calibration and for μ."""
    once = dpa.ComposedDpEvent(dpa.GaussianDpEvent(8.0) for _ in range(2))
    for accountant in ("pld", "rdp"):
        with pytest.raises(TypeError, match="want a list or a tuple"):
            accounting.event_epsilon(once, DELTA, accountant=accountant)
    with pytest.raises(TypeError, match="want a list or a tuple"):
        accounting.gdp_spent(spent(gaussian()), SAMPLER, DELTA, also=[once])
