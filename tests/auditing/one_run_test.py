"""Tests of one-run audits against published numbers, exact probabilities and simulations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_privacy.auditing import CanaryScoreAuditor, Explicit
from scipy import optimize, sparse, stats

import dpoptax
from dpoptax import auditing
from dpoptax.auditing._one_run import _contradicted
from tests import games

# Pairs of ε and δ; each list is one claim.
CLAIMS = {
    "pure": [(1.0, 0.0)],
    "approximate": [(0.5, 0.01)],
    "curve": [(0.0, 0.2), (0.5, 0.07), (1.0, 0.02), (2.0, 0.001)],
}


def _claim(pairs):
    return auditing.approximate_trade_off(*np.array(pairs).T)


def _p_value(correct, guesses, canaries, trade_off):
    """Returns the least tail that the trade-off function excludes, rounded up, or 1."""

    def excludes(log_tail):
        return _contradicted(correct, guesses, canaries, trade_off, math.exp(log_tail))

    low, high = math.log(1e-30), 0.0
    while excludes(high) and high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if excludes(middle) else (middle, high)
    return math.exp(high)


def _most(correct, guesses, canaries, pairs):
    """Returns the largest P[at least `correct` are right] of any run with these pairs of ε and δ.

    Averaging a run over all relabelings of canaries and coins keeps it private. It then reduces to
    P_i, the probability that i guesses are right; turning a coin changes i by one. The δ of a pair
    is the sum of positive parts over all outcomes, expressed by slack variables.
    """
    n, r, m = guesses + 1, guesses, canaries
    rows, limits = [], []
    size = n + 2 * r * len(pairs)
    for j, (epsilon, delta) in enumerate(pairs):
        slack = n + 2 * r * j
        for i in range(1, n):
            for k, (more, less) in enumerate(
                [((i, i / m), (i - 1, (r - i + 1) / m)), ((i - 1, (r - i + 1) / m), (i, i / m))]
            ):
                row = np.zeros(size)
                row[more[0]], row[less[0]] = more[1], -math.exp(epsilon) * less[1]
                row[slack + 2 * (i - 1) + k] = -1
                rows.append(row)
                limits.append(0.0)
        rows.append((np.arange(size) >= slack) * (np.arange(size) < slack + 2 * r) * 1.0)
        limits.append(delta)
    total = np.where(np.arange(size) < n, 1.0, 0.0)
    gain = np.where((np.arange(size) >= correct) & (np.arange(size) < n), -1.0, 0.0)
    found = optimize.linprog(
        gain, sparse.csr_matrix(np.array(rows)), limits, total[None], [1.0], bounds=(0, None)
    )
    return -found.fun


@pytest.mark.parametrize("pairs", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.parametrize(("guesses", "canaries"), [(3, 3), (4, 6), (20, 20), (12, 40)])
def test_p_values_bound_any_private_run(guesses, canaries, pairs):
    for correct in range(1, guesses + 1):
        most = _most(correct, guesses, canaries, pairs)
        assert _p_value(correct, guesses, canaries, _claim(pairs)) >= most - 1e-8


def test_p_values_are_exact_if_all_guesses_are_right():
    for pairs in CLAIMS.values():
        exact = _most(4, 4, 4, pairs)
        assert _p_value(4, 4, 4, _claim(pairs)) == pytest.approx(exact, rel=2e-5)


def _refuted_epsilon(correct, guesses, canaries, delta):
    seen = auditing.OneRunGuesses(canaries, (guesses,), (correct,), 0.95)
    return auditing.approximate_family(delta).refuted(seen.refutes)


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "printed"),
    [
        # Appendix D.
        (100, 100, 75, 1e-300, 0.702),
        (100, 100, 75, 1e-4, 0.699),
        (1000, 100, 75, 1e-4, 0.673),
        # Section 7, next to figure 11.
        (100_000, 1510, 1439, 1e-5, 2.675),
    ],
)
def test_is_close_to_published_bounds_of_steinke_et_al(canaries, guesses, correct, delta, printed):
    """Compares at 95 % confidence. Their bound is exact at δ = 0, and weaker if mδ is large."""
    found = _refuted_epsilon(correct, guesses, canaries, delta)
    assert 0.975 * printed < found < 1.05 * printed


@pytest.mark.parametrize(
    ("correct", "guesses", "canaries"), [(82, 100, 100), (740, 1000, 1000), (98, 100, 1000)]
)
def test_gaussian_bound_matches_mahloujifar_et_al(correct, guesses, canaries):
    """Compares with another library, because the paper prints no numbers for this mechanism."""
    seen = auditing.OneRunGuesses(canaries, (guesses,), (correct,), 0.95)
    mu = auditing.gaussian_family().refuted(seen.refutes)
    scores = np.arange(canaries)[::-1]
    included = np.r_[np.arange(guesses) < correct, np.zeros(canaries - guesses, bool)]
    library = CanaryScoreAuditor(scores[included], scores[~included]).epsilon_one_run_fdp(
        0.05, 1e-5, threshold_strategy=Explicit(float(scores[guesses - 1]))
    )
    epsilon = auditing.gaussian_family().epsilon(mu, 1e-5)
    assert epsilon == pytest.approx(library, rel=1e-4)


def _gaussian_guesses(rng, mu, canaries, confidence=0.95):
    included = rng.random(canaries) < 0.5
    scores = rng.normal(size=canaries) + mu * included
    return auditing.guesses_about(scores, included, confidence)


def test_gaussian_bounds_keep_claim_and_catch_missing_noise():
    """Uses a synthetic mechanism: one coordinate per canary with unit noise, plus μ if included."""
    rng = np.random.default_rng(0)
    claimed, family = 1.0, auditing.gaussian_family()
    claim = auditing.gaussian_trade_off(claimed)
    # A refutation of an honest run has probability 0.05 at most. A third of the noise is refuted
    # in every run.
    honest = [_gaussian_guesses(rng, claimed, 1000) for _ in range(12)]
    assert not any(seen.refutes(claim) for seen in honest)
    assert np.mean([family.refuted(seen.refutes) for seen in honest]) > 0.4 * claimed
    epsilon = family.epsilon(claimed, 1e-5)
    any_mechanism = auditing.approximate_family(1e-5)
    assert all(any_mechanism.refuted(seen.refutes) <= epsilon for seen in honest)
    assert all(_gaussian_guesses(rng, 3 * claimed, 1000).refutes(claim) for _ in range(4))


def test_randomized_response_bounds_keep_claim():
    """Uses Steinke et al.'s ideal case: randomized response for every bit, and a guess for each."""
    rng = np.random.default_rng(1)
    for epsilon in (0.5, 2.0, 4.0):
        right = 1 / (1 + math.exp(-epsilon))
        correct = rng.binomial(2000, right, 30).tolist()
        bounds = [_refuted_epsilon(each, 2000, 2000, 1e-300) for each in correct]
        # At most 1.5 of 30 are expected to fail; more than 7 fail with probability below 10⁻⁴.
        assert np.sum(np.array(bounds) > epsilon) <= 7
        assert np.median(bounds) > 0.85 * epsilon - 0.05
        lying = int(rng.binomial(2000, 1 / (1 + math.exp(-1.5 * epsilon))))
        assert _refuted_epsilon(lying, 2000, 2000, 1e-300) > epsilon


@pytest.mark.slow
def test_claimed_epsilon_is_not_refuted_by_gaussian_bound():
    """Signs are randomized response: ε = log(p/(1 − p)) at any δ, unlike for a Gaussian."""
    sampler, right = games.poisson(1_000), stats.norm.cdf(1.0)
    signs = optax.stateless(lambda updates, _: jnp.sign(updates - 0.5 / 1_000))
    tx = optax.chain(games.noise(sampler, 0.5), signs)
    game = games.canary_gradients(tx, dpoptax.l2_clip(1.0), 1_000, sampler)
    claim = {"delta": 1e-10, "claimed_epsilon": math.log(right / (1 - right)) + 0.01}
    result = auditing.audit_one_run(game, key=jax.random.key(0), **claim)
    assert 0.5 < result.epsilon_lower_bound <= result.claimed_epsilon, result
    assert not result.violated, result
    by_curve = {bound.assumes: bound.epsilon for bound in result.bounds}
    assert by_curve["a Gaussian mechanism"] > result.claimed_epsilon


@pytest.mark.slow
def test_claimed_curve_catches_a_third_of_the_noise():
    sampler = games.poisson(2_000)
    honest, broken = (
        auditing.audit_one_run(
            games.canary_gradients(tx, dpoptax.l2_clip(1.0), 2_000, sampler),
            key=jax.random.key(3),
        )
        for tx in (
            games.noise(sampler),
            games.mislabeled(games.noise(sampler, 1 / 3), 1.0),
        )
    )
    assert not honest.violated, honest
    assert broken.violated, broken
    any_mechanism, claimed = honest.bounds
    assert any_mechanism.epsilon <= claimed.epsilon <= honest.claimed_epsilon
    assert claimed.epsilon == honest.epsilon_lower_bound
    # The (ε, δ) bound detects less of the missing noise.
    any_mechanism, claimed = broken.bounds
    assert any_mechanism.epsilon < claimed.epsilon


def test_guesses_are_highest_and_lowest_scores():
    included = np.r_[np.zeros(50, bool), np.ones(50, bool)]
    found = auditing.guesses_about(np.arange(100.0), included, 0.9)
    assert found.guesses == found.correct == (16, 25, 50)
    turned = auditing.guesses_about(-np.arange(100.0), included, 0.9)
    assert turned.correct == (0, 0, 0)


def _losses(rng, kind, canaries):
    uniform = rng.random(canaries)
    if kind == "bfloat16":
        return -np.asarray(jnp.asarray(2 + uniform, jnp.bfloat16), np.float32)
    return np.floor(kind * uniform)


@pytest.mark.parametrize("kind", [1, 2, 3, 11, "bfloat16"])
@pytest.mark.parametrize("members_last", [True, False])
def test_ties_accuse_no_noise(kind, members_last):
    """Scores of pure noise are rarely above ε = 0.01 in any order of the canaries."""
    rng = np.random.default_rng(5)
    claim, runs, failures = auditing.gaussian_trade_off(0.01), 400, 0
    for _ in range(runs):
        included = np.sort(rng.random(256) < 0.5)[:: 1 if members_last else -1]
        seen = auditing.guesses_about(_losses(rng, kind, 256), included, 0.95)
        failures += seen.refutes(claim)
    assert stats.binom.sf(failures - 1, runs, 0.05) > 1e-3


def test_ties_take_a_part_of_the_failure_probability():
    """Markov's inequality for random orders of ties costs a thousandth of it."""
    seen = auditing.guesses_about(np.arange(100.0), np.arange(100) % 2 == 0, 0.95)
    assert 1 - seen.confidence == pytest.approx(0.05 * 0.999)


def test_ties_are_counted_without_their_order():
    rng = np.random.default_rng(0)
    included = rng.random(500) < 0.5
    scores = np.floor(3 * rng.random(500) + included)
    seen = auditing.guesses_about(scores, included, 0.95)
    for order in (rng.permutation(500), np.argsort(included), np.argsort(~included)):
        assert auditing.guesses_about(scores[order], included[order], 0.95) == seen
    # Few random orders have fewer correct guesses than stated.
    guesses, correct = seen.guesses[-1], seen.correct[-1]
    found = []
    for _ in range(2000):
        ranked = included[np.lexsort((rng.random(500), -scores))]
        found.append(ranked[: guesses // 2].sum() + (~ranked[-(guesses // 2) :]).sum())
    assert np.mean(np.array(found) < correct) < 0.005
    assert np.median(found) - correct < 20


def test_binary_scores_still_refute():
    """All members are classified correctly, and half of the others."""
    rng = np.random.default_rng(1)
    included = rng.random(1000) < 0.5
    scores = included | (rng.random(1000) < 0.5)
    seen = auditing.guesses_about(scores, included, 0.95)
    assert auditing.approximate_family(1e-5).refuted(seen.refutes) > 0.5


def test_refuses_bad_claims():
    with pytest.raises(ValueError, match=r"`mu` must .* got -1\.0"):
        auditing.gaussian_trade_off(-1.0)
    with pytest.raises(ValueError, match="`delta` in .* got "):
        auditing.approximate_trade_off(1.0, 2.0)
