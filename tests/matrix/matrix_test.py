"""Tests of correlated noise: covariance, the sampler that separates participations, price."""

import dataclasses
import functools

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_privacy import matrix_factorization as peer

import dpoptax
from dpoptax import accounting, matrix, sampling
from dpoptax._release.correlated_fixed_point import reciprocal
from dpoptax.matrix._strategies import _buffered_noise, _settled_noise
from tests.helpers import after_releases, equations, planned_epsilon

KEY = jax.random.key(0)
CLIP = dpoptax.l2_clip(0.5)
ONE_BAND = matrix.BandedToeplitz((7.0,))
BANDED = matrix.BandedToeplitz((1.0, 0.5, 0.375))
BUFFERED = matrix.BufferedToeplitz((0.9, 0.3), (0.2, 0.3), steps=24)


def _dense(strategy, steps):
    return np.array(
        [
            [strategy.column(steps)[t - s] if t >= s else 0.0 for s in range(steps)]
            for t in range(steps)
        ]
    )


def _releases(tx, steps, params):
    total = dpoptax.extend.trust_clipped(jax.tree.map(jnp.zeros_like, params), CLIP)

    def step(state, _):
        mean, state = tx.update(total, state, params)
        return state, mean

    return jax.jit(lambda s: jax.lax.scan(step, s, length=steps))(tx.init(params))


@functools.cache
def _white_releases(noise_multiplier, steps, size):
    """Returns releases of independent noise, (steps, size)."""
    tx = dpoptax.gaussian_noise(noise_multiplier=noise_multiplier, batch_size=1, key=KEY)
    return _releases(tx, steps, jnp.zeros(size))[1]


def _cyclic(**changes):
    arguments = {"dataset_size": 1000, "batch_size": 50, "seed": 0, "cycle_length": 4, **changes}
    return matrix.CyclicPoissonSampler(**arguments)


@pytest.mark.parametrize("strategy", [ONE_BAND, BANDED, BUFFERED])
def test_noise_is_inverse_strategy_times_white_noise(strategy):
    arguments = {"noise_multiplier": 1.5, "batch_size": 8, "key": KEY}
    params = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(4)}
    _, white = _releases(dpoptax.gaussian_noise(**arguments), 24, params)
    state, got = _releases(dpoptax.correlated_noise(strategy, **arguments), 24, params)
    inverse = np.linalg.inv(_dense(strategy, 24))
    for name, leaf in white.items():
        want = np.einsum("ts,s...->t...", inverse, np.asarray(leaf, np.float64))
        np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5)
    (ledger,) = dpoptax.ledgers(state)
    assert ledger == (dpoptax.extend.Mechanism(1.5, 8, strategy=strategy), 24, "threefry")


# Products of poles as close to the unit circle as allowed, up to rounding.
@pytest.mark.parametrize(
    "coefficients",
    [
        (1.0, -0.9995),
        (1, -1.9, 0.93),
    ],
)
def test_independent_noise_is_recoverable_from_releases(coefficients):
    steps, stddev = 2000, 0.5
    strategy = matrix.BandedToeplitz(coefficients)
    arguments = {"noise_multiplier": 1.0, "batch_size": 1, "key": KEY}
    white = _white_releases(1.0, steps, 32)
    _, got = _releases(dpoptax.correlated_noise(strategy, **arguments), steps, jnp.zeros(32))
    got = np.asarray(got, np.float64)
    assert got[-1000:].std() > 10 * stddev
    found = np.zeros_like(got)
    for lag, coefficient in enumerate(strategy.coefficients):
        found[lag:] += coefficient * got[: steps - lag]
    np.testing.assert_allclose(found, white, atol=3e-5 * stddev)


def test_settled_noise_equals_norm_of_impulse_response():
    rng = np.random.default_rng(0)
    for bands in range(2, 8):
        taps = np.poly(rng.uniform(-0.9, 0.9, bands))
        taps /= np.linalg.norm(taps)
        impulse = reciprocal(taps / taps[0], 1000) / taps[0]
        np.testing.assert_allclose(_settled_noise(taps), np.linalg.norm(impulse), rtol=1e-9)
        assert _settled_noise(np.append(taps, 1.1 * taps[0])) == np.inf  # the poles multiply to 1.1


@pytest.mark.parametrize("steps", [1, 2, 300])
def test_buffered_noise_equals_norm_of_impulse_response(steps):
    rng = np.random.default_rng(0)
    for buffers in range(1, 5):
        decay, scale = rng.uniform(0, 1, buffers), rng.uniform(0, 0.4, buffers)
        powers = decay ** np.arange(max(steps - 1, 0))[:, None]
        impulse = reciprocal(np.append(1.0, powers @ scale), steps)
        found = _buffered_noise(decay, scale, steps)
        np.testing.assert_allclose(found, np.linalg.norm(impulse), rtol=1e-9)
    assert _buffered_noise(np.zeros(1), np.ones(1), 9) == 3.0  # 1, −1, 1, …


@pytest.mark.parametrize("strategy", [BANDED, BUFFERED])
def test_price_uses_float32_coefficients(strategy):
    noising = strategy.noising_matrix()
    with jax.enable_x64(True):  # the values of the noise, without further rounding
        rows, state = [], noising.init_multiply(jnp.zeros(9))
        for white in jnp.eye(9):
            row, state = noising.multiply_next(white, state)
            rows.append(np.asarray(row))
    first = np.linalg.inv(rows)[:, 0]
    np.testing.assert_allclose(first, strategy.column(9), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("strategy", [BANDED, BUFFERED])
def test_refuses_buffers_cast_to_another_dtype(strategy):
    """A state cast to bfloat16 would give noise that differs from the priced noise."""
    tx = dpoptax.correlated_noise(strategy, noise_multiplier=1.0, batch_size=8, key=KEY)
    total = dpoptax.extend.trust_clipped(jnp.zeros(3), CLIP)
    state = after_releases(tx, jnp.zeros(3), 1)
    narrow = dataclasses.replace(state, buffers=optax.tree.cast(state.buffers, jnp.bfloat16))
    with pytest.raises(ValueError, match="must be (float|int)32, got bfloat16. The state was cast"):
        tx.update(total, narrow)


@pytest.mark.parametrize("strategy", [BANDED, BUFFERED])
def test_refuses_buffers_of_other_parameters(strategy):
    """A state of three numbers is refused for one: an earlier version released three.

    Their differences contained only the noise of the step before.
    """
    tx = dpoptax.correlated_noise(strategy, noise_multiplier=1.0, batch_size=8, key=KEY)
    one = dpoptax.extend.trust_clipped(jnp.zeros(1), CLIP)
    state = after_releases(tx, jnp.zeros(3), 1)
    structure = jax.tree.structure(tx.init(jnp.zeros(1)))
    restored = jax.tree.unflatten(structure, jax.tree.leaves(state))
    with pytest.raises(ValueError, match="The state belongs to other parameters"):
        tx.update(one, restored)


@pytest.mark.parametrize("strategy", [BANDED, BUFFERED])
def test_noise_products_use_highest_precision(strategy):
    tx = dpoptax.correlated_noise(strategy, noise_multiplier=1.0, batch_size=8, key=KEY)
    total = dpoptax.extend.trust_clipped(jnp.zeros(3), CLIP)
    traced = jax.make_jaxpr(tx.update)(total, tx.init(jnp.zeros(3)))
    highest = (jax.lax.Precision.HIGHEST,) * 2
    products = [e for e in equations(traced.jaxpr) if e.primitive is jax.lax.dot_general_p]
    assert [p for e in products if (p := e.params["precision"]) != highest] == []


@pytest.mark.parametrize("strategy", [BANDED, BUFFERED])
def test_columns_have_norm_at_most_one(strategy):
    norms = np.linalg.norm(_dense(strategy, 24), axis=0)
    np.testing.assert_allclose(norms[0], 1.0)
    # The coefficients are rounded, and the price uses the same rounded coefficients as the noise.
    assert norms.max() <= 1 + (0 if strategy is BANDED else 1e-6)


def test_release_has_clipped_sum():
    tx = dpoptax.correlated_noise(BANDED, noise_multiplier=0.0, batch_size=4, key=KEY)
    params = jnp.zeros(2, jnp.bfloat16)
    total = dpoptax.extend.trust_clipped(jnp.array([8.0, 4.0]), CLIP)
    mean, _ = jax.jit(tx.update)(total, tx.init(params), params)
    assert mean.dtype == jnp.bfloat16
    np.testing.assert_array_equal(mean.astype(float), [2.0, 1.0])


def test_records_participate_only_in_their_turn():
    sampler = _cyclic(dataset_size=203, batch_size=10, multiple_of=8)
    assert sampler.padded_size % 8 == 0
    drawn = np.zeros((400, 203), bool)
    for t, (indices, mask) in enumerate(sampler.samples(0, 400)):
        assert len(np.unique(indices[mask])) == mask.sum()
        drawn[t, indices[mask]] = True
    turns = drawn.reshape(100, 4, 203).sum(axis=0)
    assert (np.count_nonzero(turns, axis=0) <= 1).all()
    assert (turns.sum(axis=0) > 0).sum() == 200  # 3 records are left over
    np.testing.assert_allclose(turns.sum(axis=1) / 100, 10.0, rtol=0.1)
    share = turns.max(axis=0)[turns.max(axis=0) > 0] / 100
    np.testing.assert_allclose(share.mean(), sampler.participation_probability, rtol=0.05)
    assert 0.02 < share.std() < 0.07  # the binomial value is 0.04
    again = sampler.sample(37)
    np.testing.assert_array_equal(again.indices, sampler.sample(37).indices)
    other = _cyclic(dataset_size=203, batch_size=10, seed=1).sample(37)
    assert not np.array_equal(again.indices[again.mask], other.indices[other.mask])


def test_full_groups_are_batches_in_fixed_order():
    sampler = _cyclic(batch_size=250)
    assert sampler.participation_probability == 1
    first, second = (np.sort([s.indices for s in sampler.samples(t, t + 4)]) for t in (0, 8))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(np.sort(first.ravel()), np.arange(1000))


def test_amplified_price_is_that_of_one_group():
    sampler = _cyclic(batch_size=50, cycle_length=4)
    sampling = BANDED.under(sampler)
    spent = planned_epsilon(noise_multiplier=4.0, sampler=sampling, steps=42)
    event = dpa.SelfComposedDpEvent(
        dpa.PoissonSampledDpEvent(50 / 250, dpa.GaussianDpEvent(4.0)), 11
    )
    reference = dpa.pld.PLDAccountant(dpa.NeighboringRelation.REPLACE_SPECIAL)
    np.testing.assert_allclose(spent, reference.compose(event).get_epsilon(1e-5), rtol=2e-3)
    rdp = planned_epsilon(noise_multiplier=4.0, sampler=sampling, steps=42, accountant="rdp")
    assert spent < rdp < 1.3 * spent


@pytest.mark.parametrize("strategy", [BANDED, BUFFERED])
@pytest.mark.parametrize("cycle_length", [2, 5])
def test_fixed_participation_has_worst_case_sensitivity(strategy, cycle_length):
    sampler = _cyclic(batch_size=1000 // cycle_length, cycle_length=cycle_length)
    got = strategy.under(sampler).sensitivity(24)
    dense = _dense(strategy, 24)
    patterns = [np.arange(24) % cycle_length == offset for offset in range(cycle_length)]
    want = max(np.linalg.norm(dense @ pattern) for pattern in patterns)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    bound = peer.sensitivity.get_min_sep_sensitivity_upper_bound(
        jnp.asarray(dense, jnp.float32), cycle_length
    )
    assert got <= float(bound) * (1 + 1e-5)
    if strategy is BANDED and cycle_length >= 3:
        return  # here the amplified event is stated, which is equal at q = 1
    event = strategy.under(sampler).dp_event(3.0, 24)
    np.testing.assert_allclose(event.event.noise_multiplier, 3.0 / want, rtol=1e-6)


@pytest.mark.parametrize("column", [(1.0, 0.2, 0.5), (1.0, -0.5)])
def test_refuses_columns_with_unknown_worst_pattern(column):
    sampler = _cyclic(batch_size=500, cycle_length=2)
    with pytest.raises(ValueError, match="nonnegative and nonincreasing"):
        matrix.BandedToeplitz(column).under(sampler).sensitivity(24)


@pytest.mark.usefixtures("coarse_prices")
def test_calibrates_multiplier_for_strategy_and_sampler():
    for strategy, batch_size in ((BANDED, 50), (BUFFERED, 250)):
        sampling = strategy.under(_cyclic(batch_size=batch_size))
        sigma = accounting.calibrate(epsilon=0.5, delta=1e-5, steps=24, sampler=sampling)
        spent = planned_epsilon(noise_multiplier=sigma, sampler=sampling, steps=24)
        assert 0.995 * 0.5 < spent <= 0.5


@pytest.mark.parametrize(
    ("strategy", "sampler", "message"),
    [
        (BANDED, sampling.PoissonSampler(1000, 50, seed=0), "got PoissonSampler"),
        (BANDED, sampling.FixedSizeSampler(1000, 50, seed=0), "got FixedSizeSampler"),
        (BANDED, sampling.ShuffledSampler(1000, 50, seed=0), "got ShuffledSampler"),
        (BANDED, _cyclic(cycle_length=2), "got 2 for .* 3 successive step"),
        (BUFFERED, _cyclic(cycle_length=10), "be N/B, got 10 for .* every step"),
    ],
)
def test_refuses_sampler_that_does_not_fit_strategy(strategy, sampler, message):
    with pytest.raises(ValueError, match=message):
        strategy.under(sampler)
    tx = dpoptax.correlated_noise(
        strategy, noise_multiplier=1.0, batch_size=sampler.batch_size, key=KEY
    )
    with pytest.raises(ValueError, match=message):
        accounting.guarantee(tx.init(jnp.zeros(2)), sampler).epsilon(1e-5)


def test_one_band_works_with_poisson_sampling():
    sampler = sampling.PoissonSampler(1000, 50, seed=0)
    arguments = {"noise_multiplier": 6.0, "steps": 10, "delta": 1e-5}
    one = matrix.BandedToeplitz((1.0,)).under(sampler)
    assert planned_epsilon(sampler=one, **arguments) == planned_epsilon(
        sampler=sampler, **arguments
    )


@pytest.mark.usefixtures("coarse_prices")
def test_epsilon_is_read_from_state():
    sampler = _cyclic()
    arguments = {"noise_multiplier": 6.0, "batch_size": 50, "key": KEY}
    state = after_releases(dpoptax.correlated_noise(BANDED, **arguments), jnp.zeros(2), 9)
    spent = accounting.guarantee(state, sampler).epsilon(1e-5)
    want = planned_epsilon(noise_multiplier=6.0, sampler=BANDED.under(sampler), steps=9)
    assert spent == want
    other = {**arguments, "key": jax.random.key(1)}
    second = dpoptax.gaussian_noise(**other).init(jnp.zeros(2))
    with pytest.raises(ValueError, match="2 noise stages"):
        accounting.guarantee((state, second), sampler).epsilon(1e-5)
    long = after_releases(
        dpoptax.correlated_noise(BUFFERED, **{**arguments, "batch_size": 250}), jnp.zeros(2), 25
    )
    with pytest.raises(ValueError, match="made for 24 steps, not for 25"):
        accounting.guarantee(long, _cyclic(batch_size=250)).epsilon(1e-5)


def test_guarantee_takes_strategy_of_the_ledger_only():
    sampler = _cyclic(batch_size=250)
    correlated = functools.partial(dpoptax.correlated_noise, BUFFERED)
    # Independent noise would be priced like that of the strategy: ε = 1.7 instead of 4.4.
    for tx, other in ((dpoptax.gaussian_noise, BUFFERED), (correlated, BANDED)):
        tx = tx(noise_multiplier=1.0, batch_size=250, key=KEY)
        state = after_releases(tx, jnp.zeros(2), 2)
        with pytest.raises(ValueError, match="`sampler` must have the strategy of the noise stage"):
            accounting.guarantee(state, other.under(sampler)).epsilon(1e-5)
    got = accounting.guarantee(state, BUFFERED.under(sampler), delta=1e-5)
    assert str(got) == str(accounting.guarantee(state, sampler, delta=1e-5))


@pytest.mark.slow
def test_optimal_strategies_reduce_noise_in_sums():
    steps = 32
    sums = np.tril(np.ones((steps, steps)))

    def error(strategy, sensitivity=1.0):
        noise = sums @ np.linalg.inv(_dense(strategy, steps))
        return np.mean(np.sum(noise**2, axis=1)) * sensitivity**2

    two, eight = (matrix.optimal_banded_toeplitz(steps, b, optimizer_steps=40) for b in (2, 8))
    of_independent_noise = (steps + 1) / 2
    assert error(eight) < 0.45 * of_independent_noise
    assert error(eight) < error(two) < of_independent_noise
    sampler = _cyclic(batch_size=125, cycle_length=8)
    buffered = matrix.optimal_buffered_toeplitz(steps, 8, max_buffers=2)
    independent = matrix.BandedToeplitz((1.0,)).under(sampler).sensitivity(steps)
    assert independent == pytest.approx(4**0.5)
    ours = error(buffered, buffered.under(sampler).sensitivity(steps))
    assert ours < 0.5 * error(matrix.BandedToeplitz((1.0,)), independent)
    assert ours < 1.2 * error(eight, independent)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: matrix.BandedToeplitz(()), "`coefficients` must"),
        (lambda: matrix.BandedToeplitz((0.0, 1.0)), "first positive"),
        (lambda: matrix.BandedToeplitz((1.0, 1.5)), "outside the unit circle"),
        (lambda: matrix.BandedToeplitz((1.0, -1.0)), "on or outside the unit circle"),
        (lambda: matrix.BandedToeplitz((1.0, -0.9999)), "100 times the noise Z that hides"),
        (lambda: matrix.BandedToeplitz(np.poly([0.9] * 6)), "float32 would round off Z"),
        # Stable except for the rounding of its coefficients. After 800 steps, a threshold on one
        # release passed 97 % of the runs without an example and 0.8 % of those with it.
        (
            lambda: matrix.BandedToeplitz(np.poly([0.99] * 4)),
            "In float32, .* has a pole on or outside",
        ),
        (lambda: matrix.BufferedToeplitz((1.0,), (0.1,), 8), r"`decay` must be in \[0, 1\)"),
        (lambda: matrix.BufferedToeplitz((0.5,), (0.1, 0.2), 8), "same number of entries"),
        (lambda: matrix.BufferedToeplitz((0.5,), (1.7,), 8), "must be stable"),
        (lambda: matrix.BufferedToeplitz((0.9999,), (1.9999,), 9000), "float32 would round off"),
        (lambda: matrix.BufferedToeplitz((0.5,), (0.1,), 0), "`steps` must .* got 0"),
        (lambda: matrix.optimal_banded_toeplitz(8, 9), "`bands` must .* got 9"),
        (lambda: matrix.optimal_buffered_toeplitz(8, 9), "`cycle_length` between .* and 9"),
        (lambda: _cyclic(batch_size=251), "at most the 250 records"),
        (lambda: _cyclic(cycle_length=0), "`cycle_length` must .* got 0"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_refuses_tuple_as_strategy():
    with pytest.raises(TypeError, match="BandedToeplitz"):
        dpoptax.correlated_noise((1.0, 0.5), noise_multiplier=1.0, batch_size=4, key=KEY)


def test_calibrated_steps_do_not_exceed_strategy_steps():
    sampler = matrix.CyclicPoissonSampler(48, 4, cycle_length=12, seed=0)
    run = {"delta": 1e-5, "noise_multiplier": 2.0, "sampler": BUFFERED.under(sampler)}
    assert accounting.calibrate(epsilon=50.0, **run) == 24
