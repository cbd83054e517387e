"""Tests that audits confirm the claim of every method and reach most of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax import auditing, sampling
from dpoptax._ghost_clipping import factor_products
from dpoptax._rounding import bounds
from dpoptax.auditing import _replay, _result, _worst_example
from dpoptax.matrix import CyclicPoissonSampler
from tests import games, helpers
from tests.helpers import slow_but

KEY = jax.random.key(17)
SEES = 0.6


# Trials and δ of an audit. With a smaller δ, the same proof needs more trials.
QUICK = {"trials": 20_000, "delta": 1e-2}


def _assert_seen(result):
    assert not result.violated, result
    assert result.epsilon_lower_bound >= SEES * result.claimed_epsilon, result


@pytest.fixture(scope="module")
def full_batch_audit():
    game = auditing.canary_gradient(
        games.noise(games.poisson()), games.CLIP, games.PARAMS, games.poisson()
    )
    return auditing.audit(game, key=KEY, **QUICK)


def test_audit_confirms_full_batch_release(full_batch_audit):
    _assert_seen(full_batch_audit)
    claim = games.claim(delta=full_batch_audit.delta)
    assert full_batch_audit.claimed_epsilon == pytest.approx(claim, rel=1e-3)


@pytest.mark.slow
def test_audit_confirms_proven_geodp():
    _assert_seen(auditing.audit(games.hyperspherical(), key=KEY, **QUICK))


RUNS = [(0.7, 0.5, 4), (1.0, 0.25, 4), (2.0, 1.0, 4)]


@pytest.mark.slow
@pytest.mark.usefixtures("coarse_prices")
@pytest.mark.spread(6)
@pytest.mark.parametrize("name", games.FILTERS)
@pytest.mark.parametrize("run", RUNS)
def test_runs_do_not_exceed_claim(name, run):
    noise_multiplier, probability, steps = run
    sampler = games.poisson(64, int(64 * probability))
    tx = games.method(name, sampler, noise_multiplier)
    game = auditing.canary_gradient(tx, games.CLIP, games.PARAMS, sampler, steps=steps)
    claim = games.claim(noise_multiplier, probability, steps, delta=1e-2)
    for threat_model, least in (("white-box", 0.3), ("last-iterate", 0.0)):
        result = auditing.audit(game, key=KEY, trials=5_000, delta=1e-2, threat_model=threat_model)
        assert result.claimed_epsilon == pytest.approx(claim, rel=1e-3)
        assert not result.violated, result
        assert result.epsilon_lower_bound >= least * result.claimed_epsilon, result


@pytest.mark.slow
def test_filters_do_not_hide_releases():
    """A linear filter is invertible, so the bound equals that of the noise stage, draw by draw."""
    bounds = []
    for name in ("DP-SGD", "DOPPLER", "DiSK"):
        tx = games.method(name, games.poisson(), 3.0)
        game = auditing.canary_gradient(tx, games.CLIP, games.PARAMS, games.poisson(), steps=6)
        result = auditing.audit(game, key=KEY, trials=5_000, delta=1e-2, claimed_epsilon=1.0)
        bounds.append(result.epsilon_lower_bound)
    assert bounds[0] > 0.5
    np.testing.assert_allclose(bounds, bounds[0], rtol=0.02)


def _silent(game, **changes):
    silent = jax.tree.map(jnp.zeros_like, game.dataset)
    return dataclasses.replace(game, dataset=silent, **changes)


def _updates(update, canary):
    """An attacker with access to all updates, for canaries without a projection."""
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(update)])


@pytest.mark.slow
@pytest.mark.parametrize("threat_model", ["white-box", "last-iterate"])
def test_scores_without_signal_prove_nothing(threat_model):
    sampler = games.poisson(64, 32)
    game = auditing.canary_gradient(
        games.noise(sampler), games.CLIP, games.PARAMS, sampler, steps=3
    )
    result = auditing.audit(
        _silent(game, observe=_updates),
        key=KEY,
        trials=2_000,
        threat_model=threat_model,
        claimed_epsilon=1.0,
    )
    assert result.epsilon_lower_bound < 0.05, result


@pytest.mark.slow
@pytest.mark.parametrize("threat_model", slow_but(("white-box",), ("white-box", "last-iterate")))
def test_one_run_audit_reaches_part_of_claim(threat_model):
    sampler = games.poisson(2_000)
    tx = games.noise(sampler)
    game = games.canary_gradients(tx, dpoptax.l2_clip(1.0), 2_000, sampler)
    result = auditing.audit_one_run(game, key=KEY, threat_model=threat_model)
    assert 1.0 < result.epsilon_lower_bound <= result.claimed_epsilon, result
    unseen = dataclasses.replace(game, dataset=1e-6 * game.dataset)
    silent = auditing.audit_one_run(unseen, key=KEY, threat_model=threat_model)
    assert silent.epsilon_lower_bound < 0.05
    assert result.claimed_epsilon == pytest.approx(games.claim())


@pytest.fixture(scope="module")
def examples():
    """Returns a network, 24 examples, and a canary with a wrong label."""
    x, y = helpers.mlp_batch(0, 24)
    return helpers.mlp_params(0), (x, (y + 1) % 3)


@pytest.mark.slow
@pytest.mark.usefixtures("coarse_prices")
@pytest.mark.parametrize("sampler_type", [sampling.PoissonSampler, sampling.FixedSizeSampler])
def test_audits_canary_examples_of_a_network(sampler_type, examples):
    params, dataset = examples
    sampler = sampler_type(24, 8, seed=0, multiple_of=4)
    tx = optax.chain(games.method("DiSK", sampler, 0.5), optax.sgd(0.1))
    grad_fn = dpoptax.clipped_grad(helpers.mlp_loss, games.CLIP, microbatch_size=4)
    game = auditing.Game(tx, grad_fn, params, dataset, sampler, steps=3)
    result = auditing.audit(game, key=KEY, trials=1_000, delta=1e-2)
    assert not result.violated
    assert result.epsilon_lower_bound > 0.1, result


def _searched(clip=games.CLIP, noise_multiplier=1.0, **effort):
    sampler = games.poisson(16)
    return auditing.searched_canary(games.noise(sampler, noise_multiplier), clip, **effort)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("automatic_clip",), games.CLIPS))
def test_audit_confirms_claim_for_worst_example(name):
    game, ratio = _searched(games.CLIPS[name](0.5), starts=14, steps=5)
    assert 0.99 < ratio < 1 + 1e-4
    _assert_seen(auditing.audit(game, key=KEY, **QUICK))


@pytest.mark.slow
def test_worst_example_catches_wrong_norm_bound(monkeypatch):
    """Plants a norm that leaves out the last position of each example."""

    def unproven(segments, sizes):
        seen = [
            segment._replace(rows=segment.rows[:, :, :-1], columns=segment.columns[:, :, :-1])
            for segment in segments
        ]
        square = bounds.upper_square(factor_products.multiply_factors(seen, sizes))
        return square, jnp.sqrt(square)

    helpers.force_norm_method(monkeypatch, "form")
    monkeypatch.setattr(factor_products, "measure_formed", unproven)
    # With so many steps the move does not depend on the rounding of either program.
    game, ratio = _searched(starts=14, steps=40)
    assert ratio > 2
    effort = {"trials": 2_000, "delta": 1e-2}
    result = auditing.audit(game, key=KEY, **effort)
    assert result.violated, result
    plain = auditing.canary_gradient(
        games.noise(games.poisson()), games.CLIP, games.PARAMS, games.poisson()
    )
    assert not auditing.audit(plain, key=KEY, **effort).violated


@pytest.mark.slow
def test_worst_example_search_keeps_integer_labels():
    params = helpers.mlp_params(0)
    points, batch = dpoptax.gradient_points((), params), helpers.mlp_batch(0, 6)
    grad_fn = dpoptax.clipped_grad(helpers.mlp_loss, games.CLIP)
    found = auditing.worst_example(grad_fn, points, batch, np.arange(6) % 2 == 0, starts=7, steps=3)
    assert 0.9 < found.ratio < 1 + 1e-4
    assert found.example[1].dtype == batch[1].dtype
    with pytest.raises(ValueError, match=r"must have a leaf of floats.*\['int32'\]"):
        auditing.worst_example(grad_fn, points, (batch[1], batch[1]))


def test_non_finite_sum_is_an_infinite_move():
    total = lambda batch, mask: jnp.where(mask[-1], jnp.inf, 1.0)  # noqa: E731
    assert _worst_example.moved(total, jnp.ones((2, 1)), np.ones(1)) == np.inf


def test_result_reports_violation():
    result = auditing.AuditResult(1.0, 2.0, 1e-5, 0.999, 100, "white-box", "largest", 0.1)
    assert result.violated
    assert "VIOLATED" in str(result)
    assert "not contradicted" in str(dataclasses.replace(result, epsilon_lower_bound=1.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trials": 3}, "`trials` must .* got 3"),
        ({"confidence": 1.0}, "`confidence` must .* got 1.0"),
        ({"threat_model": "black-box"}, "`threat_model` must .* got 'black-box'"),
    ],
)
def test_refuses_bad_audits(change, message):
    game = auditing.canary_gradient(
        games.noise(games.poisson()), games.CLIP, games.PARAMS, games.poisson()
    )
    with pytest.raises(ValueError, match=message):
        auditing.audit(game, **{"key": KEY, **change})


@pytest.mark.parametrize("canary", slow_but((0.0,), (0.0, np.nan)))
def test_refuses_canaries_that_add_nothing(canary):
    """Canaries that add nothing are refused: their bound would be 0 for any noise, or none."""
    sampler = games.poisson(64)
    one = auditing.canary_gradient(games.noise(sampler), games.CLIP, games.PARAMS, sampler)
    many = games.canary_gradients(games.noise(sampler), games.CLIP, 64, sampler)
    for audit, game in ((auditing.audit, one), (auditing.audit_one_run, many)):
        dataset = jax.tree.map(lambda x: jnp.full_like(x, canary), game.dataset)
        silent = dataclasses.replace(game, dataset=dataset)
        options = {"trials": 100} if audit is auditing.audit else {}
        with pytest.raises(ValueError, match="the canaries add nothing"):
            audit(silent, key=KEY, **options)


@pytest.mark.slow
@pytest.mark.parametrize("threat_model", ["white-box", "last-iterate"])
def test_refuses_audit_of_diverging_run(threat_model):
    sampler = games.poisson(64)
    tx = optax.chain(games.noise(sampler), optax.scale(1e38), optax.scale(1e10))
    one = auditing.canary_gradient(tx, games.CLIP, games.PARAMS, sampler)
    many = games.canary_gradients(tx, games.CLIP, 64, sampler)
    with pytest.raises(ValueError, match="must be finite"):
        auditing.audit(one, key=KEY, trials=100, threat_model=threat_model)
    with pytest.raises(ValueError, match="must be finite"):
        auditing.audit_one_run(many, key=KEY, threat_model=threat_model)


@pytest.mark.parametrize(
    ("sampler", "bands", "exact"),
    [
        (sampling.PoissonSampler(8, 4, seed=0), 1, True),
        (sampling.PoissonSampler(8, 4, seed=0, max_batch_size=5), 1, False),
        (sampling.FixedSizeSampler(8, 8, seed=0), 1, True),
        (sampling.FixedSizeSampler(8, 4, seed=0), 1, False),
        (CyclicPoissonSampler(8, 2, seed=0, cycle_length=2), 1, False),
        (sampling.RandomAllocationSampler(8, 2, seed=0), 1, False),
        (sampling.RandomAllocationSampler(16, 2, seed=0), 2, False),
    ],
)
def test_only_exact_claims_have_a_family(sampler, bands, exact):
    """Correlated noise and balls in bins do not claim the Gaussian mechanism that prices them.

    Their errors may refute a Gaussian mechanism whose ε at the audit's δ is larger.
    """
    tx = games.noise(sampler, 4.0)
    if bands > 1:
        tx = dpoptax.correlated_noise(
            dpoptax.matrix.BandedToeplitz((1.0, 0.5)),
            noise_multiplier=4.0,
            batch_size=sampler.batch_size,
            key=KEY,
        )
    others = -1.0 if getattr(sampler, "max_batch_size", None) else 0.0  # reveals truncation
    game = auditing.canary_gradient(
        tx, games.CLIP, games.PARAMS, sampler, steps=4, background=others
    )
    state = _result.state_after(game, np.array([[4, 0]]))
    claim = _result.claim_of(game.sampler, lambda: state, 1e-2, None)
    assert (claim["family"] is not None) == exact
    assert claim["claimed"] is not None


def test_family_bounds_need_claim_with_a_family(full_batch_audit):
    methods = [bound.method for bound in full_batch_audit.bounds]
    assert methods == ["one threshold", "f-DP of the claim"]
    without = dataclasses.replace(full_batch_audit, family=None)
    assert [bound.method for bound in without.bounds] == ["one threshold"]


def test_refuses_canary_that_overflows_its_dtype():
    tx, sampler = games.noise(games.poisson()), games.poisson()
    narrow = {"w": jnp.zeros(2), "v": jnp.zeros(2, jnp.float16)}
    with pytest.raises(ValueError, match="`params` must hold a canary of 100000.* got float16"):
        auditing.canary_gradient(tx, dpoptax.l2_clip(100.0), narrow, sampler)


@pytest.mark.slow
def test_audit_detects_canary_of_mixed_dtypes():
    tx, sampler = games.noise(games.poisson()), games.poisson()
    narrow = {"w": jnp.zeros(2), "v": jnp.zeros(2, jnp.float16)}
    game = auditing.canary_gradient(tx, dpoptax.l2_clip(1.0), narrow, sampler)
    assert auditing.audit(game, key=KEY, trials=2000, delta=1e-2).epsilon_lower_bound > 0.1


def test_audit_runs_have_different_keys_and_seeds():
    """Seeds have more than 32 bits; with 32 bits, about twenty pairs of runs would agree."""

    def key_of_run(key):
        state = _replay._with_fresh_keys(games.noise(games.poisson()).init(games.PARAMS), key)
        return jax.random.key_data(state.key)

    keys = jax.jit(jax.vmap(key_of_run))(jax.random.split(KEY, 400_000))
    assert len(np.unique(np.asarray(keys).view(np.uint64))) == 400_000

    class Noted(sampling.FixedSizeSampler):
        dp_event = sampling.FixedSizeSampler.dp_event

        def sample(self, step):
            seeds.append(self.seed)
            return super().sample(step)

    def seeds_of_runs(seed):
        seeds.clear()
        game = auditing.canary_gradient(
            games.noise(games.poisson()), games.CLIP, games.PARAMS, Noted(8, 2, seed=seed)
        )
        _replay.Runs(game, "last-iterate", KEY)._replay(jax.random.split(KEY, 20), True)
        assert len(set(seeds)) == 20
        return seeds

    seeds: list[int | bytes] = []
    assert max(seeds_of_runs(0)) >= 2**32
    # The audit uses the same draws as the run.
    assert all(isinstance(seed, bytes) for seed in seeds_of_runs(bytes(32)))


def test_refuses_bad_games():
    sampler = games.poisson(64, 8)
    game = auditing.canary_gradient(games.noise(sampler), games.CLIP, games.PARAMS, sampler)
    with pytest.raises(ValueError, match="`steps` must .* got 0"):
        dataclasses.replace(game, steps=0)
    with pytest.raises(ValueError, match="`dataset` must .* 64 records, got 2 rows"):
        dataclasses.replace(game, dataset=jnp.zeros((2, 1)))
    truncated = dataclasses.replace(sampler, max_batch_size=9)
    with pytest.raises(ValueError, match="max_batch_size"):
        dataclasses.replace(game, sampler=truncated)
    with pytest.raises(ValueError, match="number of canaries must .* got 1"):
        auditing.audit_one_run(game, key=KEY)
    with pytest.raises(ValueError, match="must not have an empty leaf"):
        auditing.canary_gradient(games.noise(sampler), games.CLIP, jnp.zeros(0), sampler)


def test_calls_sample_of_user_defined_sampler():
    class Asked(Exception):  # noqa: N818
        pass

    class Own(sampling.PoissonSampler):
        dp_event = sampling.PoissonSampler.dp_event

        def sample(self, step):
            raise Asked

    sampler = Own(8, 2, seed=0)
    tx = dpoptax.gaussian_noise(noise_multiplier=4.0, batch_size=2, key=jax.random.key(0))
    game = auditing.canary_gradient(tx, dpoptax.l2_clip(1.0), jnp.zeros(2), sampler)
    with pytest.raises(Asked):
        auditing.audit(game, key=jax.random.key(1), trials=64, delta=1e-3)
    alone = jnp.ones((1, 2))
    with pytest.raises(ValueError, match="`dataset` must .* 8 records, got 1 rows"):
        dataclasses.replace(game, dataset=alone)
