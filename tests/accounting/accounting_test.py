"""Tests of privacy accounting against published values, closed forms and numerical integration."""

import inspect
import itertools
import math
import warnings

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, optimize, stats

import dpoptax
from dpoptax import accounting, matrix
from dpoptax._pricing import accountants, events
from dpoptax.sampling import (
    FixedSizeSampler,
    PoissonSampler,
    RandomAllocationSampler,
    ShuffledSampler,
)
from tests.helpers import after_releases, divergences, event_epsilon, planned_epsilon, slow_but

DELTA = 1e-5
TF_ORDERS = [1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4, 4.5, *range(5, 64), 128, 256, 512]


def divergences_of(orders, **run):
    """Returns the Rényi divergences of a planned run."""
    planned = accounting.planned_guarantee(**run)
    relation = planned.neighboring_relation
    return divergences(planned.event.dp_event, np.atleast_1d(orders), relation)


def curve_of(steps, delta, **run):
    """Returns upper bounds on ε after each of `steps`."""
    return accounting.planned_guarantee(steps=max(steps, default=0), **run).epsilon_curve(
        steps, delta
    )


def classic_epsilon(noise_multiplier, probability, steps, orders):
    """Returns ε by Mironov's conversion (2017, Proposition 3), as in the older papers."""
    orders = np.asarray(orders, float)
    divergences = divergences_of(
        noise_multiplier=noise_multiplier,
        sampling_probability=probability,
        steps=steps,
        orders=orders,
    )
    return np.min(divergences + math.log(1 / DELTA) / (orders - 1))


def hockey_stick(log_p, log_q, epsilon, span):
    """Integrates max(0, p - e^epsilon q) over [-span, span], in one dimension."""
    x = np.linspace(-span, span, 100_001)
    return integrate.simpson(np.maximum(0, np.exp(log_p(x)) - np.exp(epsilon + log_q(x))), x=x)


def mixture(probability, mean, stddev):
    def log_density(x):
        return np.logaddexp(
            math.log1p(-probability) + stats.norm.logpdf(x, 0, stddev),
            math.log(probability) + stats.norm.logpdf(x, mean, stddev),
        )

    return log_density


class TestPublishedValues:
    def test_rdp_of_the_poisson_sampled_gaussian(self, no_rounding):
        # From dp_accounting, rdp_privacy_accountant_test.py,
        # test_compute_rdp_poisson_sampled_gaussian. Its first two values, 6.70579741e-04 and
        # 1.08548710e-03, omit the signs of a series. The values here are integrated with mpmath.
        # Mironov, Talwar and Zhang report 6.5e-4 for the first.
        orders = [1.5, 2.5, 5, 50, 100]
        expected = [6.50070897e-04, 1.08541806e-03, 2.18075656e-03, 2.38460375e-02, 1.67416308e02]
        found = divergences_of(
            noise_multiplier=2.5, sampling_probability=0.01, steps=50, orders=orders
        )
        np.testing.assert_allclose(found, expected, rtol=1e-8)

    @pytest.mark.parametrize(
        ("noise_multiplier", "batch_size", "steps", "orders", "expected"),
        [
            # Abadi et al. (2016), section 3.2: q = 0.01, σ = 4, T = 10,000, δ = 1e-5.
            (4, 600, 10_000, np.arange(2, 34), 1.26),
            # Bu, Dong, Long, Su (2020), figure 4: MNIST, moments accountant.
            (1.3, 256, 4688, np.arange(1.1, 65, 0.1), 1.34),
            (0.7, 256, 16_406, np.arange(1.1, 65, 0.1), 8.68),
            # TensorFlow Privacy's MNIST tutorial.
            (1.3, 256, 3516, TF_ORDERS, 1.19),
            (1.1, 256, 14_062, TF_ORDERS, 3.01),
        ],
    )
    def test_moments_accountant(self, noise_multiplier, batch_size, steps, orders, expected):
        found = classic_epsilon(noise_multiplier, batch_size / 60_000, steps, orders)
        assert found == pytest.approx(expected, abs=0.02 if batch_size == 256 else 0.005)

    @pytest.mark.parametrize(
        ("probability", "steps", "expected"),
        [
            (0.01, 1, 0.67379294682),
            pytest.param(0.001, 25, 3.20956502598 / 6, marks=pytest.mark.slow),
        ],
    )
    def test_least_noise_by_pld(self, probability, steps, expected):
        # From dp_accounting, accountant_test.py, test_get_smallest_subsampled_gaussian_noise.
        run = {"delta": DELTA, "sampling_probability": probability, "steps": steps}
        less, more = (
            planned_epsilon(noise_multiplier=expected * (1 + rel), **run) for rel in (3e-4, -3e-4)
        )
        assert less <= 1 < more


class TestIndependentComputations:
    @pytest.mark.parametrize(("noise_multiplier", "steps"), [(0.8, 1), (5, 30)])
    def test_full_batches_match_analytic_gaussian_mechanism(self, noise_multiplier, steps):
        # Balle and Wang (2018), Theorem 8: T releases of multiplier s are one release of s /
        # sqrt(T).
        mu = math.sqrt(steps) / noise_multiplier

        def log_ratio(epsilon):
            first = stats.norm.cdf(mu / 2 - epsilon / mu)
            second = math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu))
            return first - second - DELTA

        expected = optimize.brentq(log_ratio, 0, 50, xtol=1e-12)
        found = planned_epsilon(
            noise_multiplier=noise_multiplier, sampling_probability=1.0, steps=steps
        )
        assert expected <= found * (1 + 1e-9)
        assert found == pytest.approx(expected, rel=1e-4)

    @pytest.mark.parametrize(("noise_multiplier", "q"), [(0.6, 0.01), (2.0, 0.5)])
    def test_poisson_step_matches_quadrature(self, noise_multiplier, q):
        found = planned_epsilon(noise_multiplier=noise_multiplier, sampling_probability=q, steps=1)
        with_record = mixture(q, 1.0, noise_multiplier)
        without = mixture(q, 0.0, noise_multiplier)
        deltas = [
            hockey_stick(*pair, found, 15 * noise_multiplier)
            for pair in ((with_record, without), (without, with_record))
        ]
        assert max(deltas) == pytest.approx(DELTA, rel=3e-3)

    @pytest.mark.parametrize(
        ("noise_multiplier", "batch"), [(1.5, 10), pytest.param(2.0, 80, marks=pytest.mark.slow)]
    )
    def test_fixed_size_step_matches_quadrature(self, noise_multiplier, batch):
        sampler = FixedSizeSampler(100, batch, seed=0)
        with pytest.warns(UserWarning, match="not below 1/N"):
            found = planned_epsilon(
                noise_multiplier=noise_multiplier, sampler=sampler, steps=1, delta=0.02
            )
        q, s = batch / 100, noise_multiplier
        span = 15 * s
        dominating = hockey_stick(mixture(q, 2, s), mixture(q, 0, s), found, span)
        assert dominating == pytest.approx(0.02, rel=3e-3)
        # Two real neighbors: the target is +1 or -1, and all other examples are +1, 0 or -1.
        for others in (1.0, 0.0, -1.0):
            shown = hockey_stick(
                mixture(q, 1 - others, s) if others != 1 else mixture(q, 0, s),
                mixture(q, -1 - others, s) if others != -1 else mixture(q, 0, s),
                found,
                span,
            )
            assert shown <= 0.02 * (1 + 1e-3)

    def test_rdp_doubles_the_sensitivity_under_replace_one(self):
        # dp_accounting issue 378: its RDP of this event is a quarter of the correct value; its PLD
        # is correct.
        event = dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(6.0), 5)
        orders = np.array(dpa.rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
        by_hand, _ = dpa.rdp.compute_epsilon(orders, 5 * orders * 2**2 / (2 * 6.0**2), DELTA)
        found = {
            accountant: event_epsilon(
                event, DELTA, accountant=accountant, neighboring_relation="replace-one"
            )
            for accountant in ("pld", "rdp")
        }
        assert found["rdp"] == pytest.approx(by_hand)
        assert found["pld"] < found["rdp"] < 1.15 * found["pld"]

    def test_fixed_size_rdp_halves_the_multiplier(self):
        sampler = FixedSizeSampler(10_000, 100, seed=0)
        event = dpa.SelfComposedDpEvent(
            dpa.SampledWithoutReplacementDpEvent(10_000, 100, dpa.GaussianDpEvent(1.5)), 200
        )
        library = dpa.rdp.RdpAccountant(None, dpa.NeighboringRelation.REPLACE_ONE)
        assert planned_epsilon(
            noise_multiplier=3.0, sampler=sampler, steps=200, accountant="rdp"
        ) == pytest.approx(library.compose(event).get_epsilon(DELTA))

    @pytest.mark.parametrize(
        ("sigma", "design", "steps", "most"),
        [
            (2.2, {"sampling_probability": 0.2}, 50, 1.5),
            (4.0, {"sampling_probability": 1.0}, 20, 1.5),
            # The bound of Wang et al. holds for any mechanism.
            (6.0, {"sampler": FixedSizeSampler(10_000, 100, seed=0)}, 500, 2.5),
            pytest.param(*(0.7, {"sampling_probability": 0.01}, 1000, 1.5), marks=pytest.mark.slow),
        ],
    )
    def test_rdp_is_never_below_pld(self, sigma, design, steps, most):
        pld, rdp = (
            planned_epsilon(noise_multiplier=sigma, steps=steps, accountant=accountant, **design)
            for accountant in ("pld", "rdp")
        )
        assert pld < rdp < most * pld


class TestCurve:
    @pytest.mark.parametrize("accountant", ["pld", "rdp"])
    @pytest.mark.parametrize(
        "sampler",
        [
            PoissonSampler(1438, 256, seed=0),
            FixedSizeSampler(1000, 100, seed=0),
            matrix.CyclicPoissonSampler(1000, 50, seed=0),
        ],
    )
    def test_never_below_epsilon_and_nondecreasing(self, sampler, accountant):
        run = {"noise_multiplier": 12.0, "delta": DELTA, "sampler": sampler}
        counts = [0, *range(1, 40, 9)]
        bounds = curve_of(steps=counts, accountant=accountant, **run)
        exact = [planned_epsilon(steps=n, accountant=accountant, **run) for n in counts]
        assert bounds[0] == 0
        assert np.all(np.diff(bounds) >= 0)
        assert bounds[-1] == exact[-1]
        if accountant == "rdp":
            assert bounds.tolist() == exact
        assert np.all(bounds >= exact)
        assert np.all(bounds <= np.asarray(exact) + 0.2 * exact[-1])

    def test_order_and_repetition_do_not_matter(self):
        run = {"noise_multiplier": 2.0, "delta": DELTA, "sampling_probability": 0.1}
        once = curve_of(steps=[5, 10], **run)
        assert curve_of(steps=[10, 5, 5], **run).tolist() == [*once[::-1], once[0]]
        assert curve_of(steps=[], **run).shape == (0,)


class TestRenyiDivergences:
    """Rényi divergences. dp_accounting omits the signs of the series at non-integer orders."""

    @pytest.mark.parametrize(
        ("q", "sigma", "order", "expected"),
        [
            # log E_Q[((1 - q) + q L)^α], integrated with mpmath to 45 digits.
            (0.01, 2.5, 1.5, 6.5007089718803974e-6),
            (0.1, 2.0, 1.001, 1.3825325294164585e-6),
            (0.05, 0.7, 1.6, 0.0067851617189623575),
            (0.2, 1.0, 1.7, 0.036595851751913743),
            (0.5, 0.3, 3.5, 46.185095979154328),
            (1e-4, 10.0, 7.3, 2.3110482709053647e-9),
            (0.999, 0.15, 10.9, 2397.9890945463643),
            (1e-6, 1.0, 1.1, 9.4505270711470796e-14),
        ],
    )
    def test_match_values_integrated_with_mpmath(self, q, sigma, order, expected):
        found = divergences_of(
            noise_multiplier=sigma, sampling_probability=q, steps=1, orders=order
        )
        # At orders near 1, the last digits of order - 1 are also lost.
        assert -1e-12 < found[0] * (order - 1) / expected - 1 < 2e-6

    @pytest.mark.parametrize(("sigma", "orders"), [(0.4, [1.01, 2.5, 2]), (7.0, [1.5, 63.9])])
    def test_everything_sampled_is_a_gaussian_at_fractional_orders(self, sigma, orders):
        expected = np.array(orders) / (2 * sigma**2)
        gaussian = dpa.GaussianDpEvent(sigma)
        for event in (
            gaussian,
            dpa.PoissonSampledDpEvent(1.0, gaussian),  # a special case of `renyi`
            dpa.SampledWithoutReplacementDpEvent(10, 10, dpa.GaussianDpEvent(2 * sigma)),
        ):
            replaced = isinstance(event, dpa.SampledWithoutReplacementDpEvent)
            relation = "replace-one" if replaced else "add-or-remove-one"
            found = divergences(event, orders, relation)
            np.testing.assert_allclose(found, expected, rtol=1e-9)
            assert np.all(found >= expected * (1 - 1e-15))

    def test_chord_bounds_fractional_orders_with_little_noise(self):
        run = {"noise_multiplier": 0.005, "sampling_probability": 0.1, "steps": 1}
        below, found, above = divergences_of(orders=[2, 2.5, 3], **run) * [1, 1.5, 2]
        assert found == pytest.approx((below + above) / 2)
        assert divergences_of(orders=1.5, **run) == pytest.approx(below)

    @pytest.mark.parametrize(
        "design",
        [
            *({"sampling_probability": q} for q in (0.01, 0.5, 1.0)),
            {"sampler": FixedSizeSampler(1000, 50, seed=0)},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("sigma", [0.3, 2.5])
    def test_infinite_at_order_infinity(self, design, sigma):
        run = {"noise_multiplier": sigma, **design}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = divergences_of(orders=[1.5, 2, math.inf], steps=50, **run)
            nothing = divergences_of(orders=[2, math.inf], steps=0, **run)
        assert np.isfinite(found[:2]).all()
        assert found[2] == math.inf
        assert nothing.tolist() == [0, 0]

    def test_gaussians_on_one_sample_combine_into_one(self):
        one = dpa.PoissonSampledDpEvent(0.05, dpa.GaussianDpEvent(0.7))
        both = dpa.ComposedDpEvent([dpa.GaussianDpEvent(0.7 * math.sqrt(2))] * 2)
        found = [
            event_epsilon(dpa.SelfComposedDpEvent(event, 3000), DELTA, accountant="rdp")
            for event in (one, dpa.PoissonSampledDpEvent(0.05, both))
        ]
        assert found[1] == pytest.approx(found[0], rel=1e-9)

    @pytest.mark.parametrize(
        ("sigma", "q", "steps", "delta"),
        [(1e6, 1e-4, 10**9, 1e-9), (1e8, 0.1, 10**12, 1e-12), (3e6, 0.01, 10**12, 1e-5)],
    )
    def test_tiny_divergences_are_not_rounded_to_zero(self, sigma, q, steps, delta):
        """Checks so many steps that they add up to a Gaussian of mean about q √steps/σ."""
        mean = q * math.sqrt(steps) / sigma
        found = planned_epsilon(
            noise_multiplier=sigma,
            sampling_probability=q,
            steps=steps,
            accountant="rdp",
            delta=delta,
        )
        assert (
            stats.norm.cdf(mean / 2 - found / mean)
            - math.exp(found) * stats.norm.cdf(-mean / 2 - found / mean)
            < delta
        )


@pytest.mark.usefixtures("coarse_prices")
class TestOneStep:
    @pytest.mark.parametrize(
        "event",
        [
            dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(6.7654)),
            dpa.TruncatedSubsampledGaussianDpEvent(1000, 0.1, 130, 6.7654),
        ],
    )
    def test_steps_match_dp_accounting(self, event):
        for steps in (3, 20):
            whole = dpa.SelfComposedDpEvent(event, steps)
            found = event_epsilon(whole, DELTA, accountant="pld")
            theirs = dpa.pld.PLDAccountant(value_discretization_interval=accountants.DISCRETIZATION)
            # Equal except for the rounding of transforms, which dp_accounting ignores.
            assert 0 <= found / theirs.compose(whole).get_epsilon(DELTA) - 1 < 1e-8

    @pytest.mark.parametrize(
        ("event", "expected"),
        [
            (dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(0.0)), math.inf),
            (dpa.PoissonSampledDpEvent(0.0, dpa.GaussianDpEvent(1.0)), 0.0),
            (dpa.TruncatedSubsampledGaussianDpEvent(1000, 0.1, 130, 0.0), math.inf),
            (dpa.TruncatedSubsampledGaussianDpEvent(1000, 0.1, 0, 1.0), 0.0),
        ],
    )
    def test_no_noise_is_infinite_and_no_draws_cost_nothing(self, event, expected):
        whole = dpa.SelfComposedDpEvent(event, 3)
        assert event_epsilon(whole, DELTA, accountant="pld") == expected


class TestTruncation:
    run = {"noise_multiplier": 2.2, "steps": 1000, "delta": DELTA}

    def test_default_padding_barely_changes_epsilon(self):
        sampler = PoissonSampler(50_000, 256, seed=0)
        for accountant in ("pld", "rdp"):
            plain = planned_epsilon(
                **self.run, sampling_probability=256 / 50_000, accountant=accountant
            )
            truncated = planned_epsilon(**self.run, sampler=sampler, accountant=accountant)
            assert plain < truncated < plain * (1 + 2e-4)

    def test_fast_price_matches_exact_price(self):
        sampler = PoissonSampler(50_000, 256, seed=0)
        exact = dpa.pld.PLDAccountant().compose(sampler.dp_event(2.2, 1000)).get_epsilon(DELTA)
        assert planned_epsilon(**self.run, sampler=sampler) == pytest.approx(exact, rel=2e-4)

    @pytest.mark.usefixtures("coarse_prices")
    def test_tight_truncation_raises_epsilon(self):
        sampler = PoissonSampler(50_000, 256, seed=0, max_batch_size=300)
        plain = planned_epsilon(**self.run, sampling_probability=256 / 50_000)
        assert planned_epsilon(**self.run, sampler=sampler) > 1.02 * plain

    def test_rare_truncation_is_subtracted_from_delta(self):
        q = 256 / 50_000
        event = PoissonSampler(50_000, 256, seed=0, max_batch_size=335).dp_event(1.1, 1000)
        paid = 1000 * q * stats.binom.sf(334, 50_000, q)
        assert 1e-2 * DELTA < paid < 0.9 * DELTA
        plain = dpa.SelfComposedDpEvent(
            dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(1.1)), 1000
        )
        found, want = (
            event_epsilon(e, delta, accountant="rdp")
            for e, delta in ((event, DELTA), (plain, DELTA - paid))
        )
        assert found == pytest.approx(want, rel=1e-12)

    @pytest.mark.parametrize(
        ("sampler", "sigma", "steps"),
        [
            *(
                (PoissonSampler(1000, 50, seed=0), *noise)
                for noise in ((0.3, 1), (0.1, 1), (0.468, 10))
            ),
            *((matrix.CyclicPoissonSampler(1000, 50, seed=0), sigma, 1) for sigma in (0.3, 0.1)),
        ],
    )
    def test_default_truncation_is_negligible_with_little_noise(self, sampler, sigma, steps):
        """Charging e^ε times the probability of truncation would use up all of δ."""
        run = {"noise_multiplier": sigma, "delta": DELTA, "steps": steps, "accountant": "rdp"}
        found = planned_epsilon(sampler=sampler, **run)
        plain = planned_epsilon(sampling_probability=0.05, **run)
        assert found == pytest.approx(plain, rel=1e-6 if steps == 1 else 2e-4)
        if sigma == 0.3:
            assert found == pytest.approx(15.0613, rel=1e-5)

    def test_rdp_refuses_truncation_that_delta_cannot_cover(self):
        # The default truncation has probability 5e-12 in this run.
        run = {"noise_multiplier": 8.0, "delta": 1e-13, "steps": 100}
        sampler = PoissonSampler(1000, 50, seed=0)
        with pytest.raises(ValueError, match="largest batch is full.*accountant='pld'"):
            planned_epsilon(sampler=sampler, accountant="rdp", **run)
        assert planned_epsilon(sampling_probability=0.05, **run) < planned_epsilon(
            sampler=sampler, **run
        )

    @pytest.mark.parametrize("largest", slow_but((1,), (1, 2, 4, 6)))
    def test_truncated_draw_reveals_no_more_than_priced(self, largest):
        """Checks the exact pair of batches: the others add −1, and the record adds 1 or 0."""
        size, q, sigma = 100, 0.01, 0.7
        k = np.arange(size)
        others, cut = stats.binom.pmf(k, size - 1, q), np.minimum(1, largest / (k + 1))
        y, step = np.linspace(-largest - 9, 10, 4001, retstep=True)

        def densities(sums):
            return stats.norm.pdf(y[:, None], sums, sigma)

        without = densities(-np.minimum(k, largest))
        there = np.minimum(k, largest - 1)  # number of other records if the record is drawn
        adding = without @ (others * (1 - q * cut)) + densities(1 - there) @ (q * others * cut)
        zero = without @ (others * (1 - q * cut)) + densities(-there) @ (q * others * cut)
        pairs = {"add-or-remove-one": without @ others, "replace-special": zero}
        event = dpa.TruncatedSubsampledGaussianDpEvent(size, q, largest, sigma)
        ((plain, count),), paid, _ = events.without_truncation(events.parts_of(event))
        uncut = dpa.pld.PLDAccountant().compose(plain, count)
        for other in pairs.values():
            for p, r in ((adding, other), (other, adding)):
                for epsilon in (0.1, 1.0, 3.0):
                    shown = np.maximum(p - math.exp(epsilon) * r, 0).sum() * step
                    assert shown <= uncut.get_delta(epsilon) + paid
        if largest == 1:  # far more than without truncation
            shown = np.maximum(adding - math.e * pairs["replace-special"], 0).sum() * step
            assert shown > 1.2 * uncut.get_delta(1.0)


class TestEdges:
    @pytest.mark.parametrize("accountant", ["pld", "rdp"])
    @pytest.mark.parametrize(
        "design",
        [
            {"sampling_probability": 0.1},
            {"sampling_probability": 1.0},
            {"sampler": PoissonSampler(10_000, 100, seed=0)},
            {"sampler": FixedSizeSampler(10_000, 100, seed=0)},
        ],
        ids=str,
    )
    def test_no_noise_and_no_steps(self, design, accountant):
        def spent(noise_multiplier, steps):
            return planned_epsilon(
                noise_multiplier=noise_multiplier, steps=steps, accountant=accountant, **design
            )

        assert spent(0, 10) == math.inf
        assert spent(1.0, 0) == 0
        assert spent(0, 0) == 0
        assert spent(math.inf, 10) == 0

    @pytest.mark.parametrize(
        ("noise_multiplier", "steps", "q"),
        [(0.001, 1000, 0.999), (0.05, 10**9, 0.01), (50, 10**15, 0.01)],
    )
    def test_epsilon_is_infinite_if_losses_exceed_the_grid(self, noise_multiplier, steps, q):
        """An infinite ε is returned without an error, although the grid cannot span the losses."""
        run = {"noise_multiplier": noise_multiplier, "steps": steps, "sampling_probability": q}
        assert planned_epsilon(**run) == math.inf
        assert planned_epsilon(**run, accountant="rdp") > 1e6

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"noise_multiplier": -1.0}, "`noise_multiplier` must be at least 0, got -1.0"),
            ({"noise_multiplier": math.nan}, "`noise_multiplier` must be a real number, got nan"),
            ({"noise_multiplier": None}, "`noise_multiplier` must be a real number, got None"),
            ({"delta": 1.0}, r"`delta` must be in \(0, 1\), got 1.0. Choose"),
            ({"delta": 0}, "`delta` must be in .* got 0"),
            ({"delta": math.nan}, "`delta` must be a real number, got nan"),
            ({"delta": "1e-5"}, "`delta` must be a real number, got '1e-5'"),
            ({"noise_multiplier": np.ones((5, 2))}, r"number, got <ndarray of shape \(5, 2\)>"),
            ({"steps": -1}, "`steps` must be an integer of at least 0, got -1"),
            ({"steps": 1.5}, "`steps` must be an integer .* got 1.5"),
            ({"steps": math.nan}, "`steps` must be an integer .* got nan"),
            ({"sampling_probability": 1.1}, r"`sampling_probability` must be in \[0, 1\], got 1.1"),
            (
                {"sampling_probability": math.nan},
                "`sampling_probability` must be a real number, got nan",
            ),
            ({"sampling_probability": None}, "Pass exactly one"),
            ({"sampler": PoissonSampler(10, 1, seed=0)}, "Pass exactly one"),
            ({"accountant": "gdp"}, "`accountant` must be one of .* got 'gdp'"),
        ],
    )
    def test_refuses_bad_input(self, arguments, message):
        good = {"noise_multiplier": 1, "sampling_probability": 0.1, "steps": 9, "delta": DELTA}
        with pytest.raises(ValueError, match=message):
            accounting.planned_guarantee(**{**good, **arguments})

    def test_errors_do_not_print_data(self):
        with pytest.raises(ValueError, match=r"`dataset_size` .* got <ndarray of shape \(99, 2\)>"):
            PoissonSampler(np.ones((99, 2)), 1, seed=0)

    def test_warns_if_delta_is_not_below_one_over_n(self):
        sampler = PoissonSampler(1000, 10, seed=0)
        run = {"noise_multiplier": 6.0, "sampler": sampler, "steps": 5}
        with pytest.warns(UserWarning, match=r"delta=0.001 is not below 1/N = 0.001") as caught:
            accounting.planned_guarantee(**run).epsilon(1e-3)
        assert caught[0].filename == __file__
        with pytest.warns(UserWarning, match="not below 1/N") as caught:
            accounting.calibrate(epsilon=1, delta=2e-3, sampler=sampler, steps=5, accountant="rdp")
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            planned_epsilon(**run, delta=9e-4)

    def test_refuses_unsupported_events(self):
        gaussian = dpa.GaussianDpEvent(1.0)
        with pytest.raises(
            ValueError, match="`neighboring_relation` must be one of .* got 'bounded'"
        ):
            event_epsilon(gaussian, DELTA, neighboring_relation="bounded")
        poisson = dpa.PoissonSampledDpEvent(0.1, gaussian)
        with pytest.raises(ValueError, match="accountant 'rdp' does not support.*Try.*'pld'"):
            event_epsilon(poisson, DELTA, accountant="rdp", neighboring_relation="replace-one")
        without = dpa.SampledWithoutReplacementDpEvent(100, 10, gaussian)
        with pytest.raises(ValueError, match="neighboring relation of the sampler"):
            event_epsilon(without, DELTA, accountant="rdp")
        # Its sampling event is not halved inside, so it cannot be priced.
        other = dpa.dp_event.SampledWithReplacementDpEvent(100, 10, gaussian)
        with pytest.raises(ValueError, match="not accounted for here"):
            event_epsilon(other, DELTA, accountant="rdp", neighboring_relation="replace-one")
        unknown = dpa.UnsupportedDpEvent()
        with pytest.raises(ValueError, match="does not support the event"):
            event_epsilon(unknown, DELTA)
        with pytest.raises(ValueError, match="does not support the event"):
            accounting.calibrate(
                epsilon=1.0, delta=DELTA, steps=3, sampling_probability=0.1, also=[unknown]
            )

    def test_composed_events(self):
        parts = [dpa.GaussianDpEvent(18.0), dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(24.0), 2)]
        joint = (18.0**-2 + 2 * 24.0**-2) ** -0.5
        for relation in ("add-or-remove-one", "replace-one", "replace-special"):
            for accountant in ("pld", "rdp"):
                kwargs = {"accountant": accountant, "neighboring_relation": relation}
                assert event_epsilon(dpa.ComposedDpEvent(parts), DELTA, **kwargs) == pytest.approx(
                    event_epsilon(dpa.GaussianDpEvent(joint), DELTA, **kwargs), rel=1e-3
                )


@pytest.mark.usefixtures("coarse_prices")
class TestCalibration:
    @pytest.mark.parametrize("accountant", ["pld", "rdp"])
    @pytest.mark.parametrize(
        ("epsilon", "design", "steps"),
        [
            pytest.param(1, {"sampling_probability": 256 / 50_000}, 3000, marks=pytest.mark.slow),
            pytest.param(8, {"sampling_probability": 0.02}, 500, marks=pytest.mark.slow),
            pytest.param(0.1, {"sampling_probability": 0.01}, 1000, marks=pytest.mark.slow),
            (3, {"sampling_probability": 1.0}, 100),
            (1, {"sampler": PoissonSampler(1797, 64, seed=0)}, 280),
            pytest.param(
                1, {"sampler": FixedSizeSampler(1797, 64, seed=0)}, 280, marks=pytest.mark.slow
            ),
        ],
        ids=str,
    )
    def test_noise_multiplier_is_safe_and_tight(self, epsilon, design, steps, accountant):
        found = accounting.calibrate(
            epsilon=epsilon, delta=DELTA, steps=steps, accountant=accountant, **design
        )
        spent = planned_epsilon(
            noise_multiplier=found, steps=steps, accountant=accountant, **design
        )
        assert 0.9998 * epsilon <= spent <= epsilon
        assert found == float(f"{found:.4e}")

    @pytest.mark.parametrize(
        ("accountant", "design"),
        [
            *itertools.product(
                ("pld", "rdp"),
                (
                    {"sampling_probability": 0.01},
                    {"sampler": FixedSizeSampler(10_000, 100, seed=0)},
                ),
            ),
            ("pld", {"sampler": RandomAllocationSampler(10_000, 100, seed=0)}),
        ],
        ids=str,
    )
    def test_steps_are_the_most_that_fit(self, accountant, design):
        run = {"noise_multiplier": 4.4, "delta": DELTA, "accountant": accountant, **design}
        steps = accounting.calibrate(epsilon=1.5, **run)
        assert planned_epsilon(steps=steps, **run) <= 1.5
        assert planned_epsilon(steps=steps + 1, **run) > 1.5

    @pytest.mark.parametrize("epsilon", [0, -1, math.inf, math.nan, "1e"])
    def test_bad_target(self, epsilon):
        with pytest.raises(ValueError, match="epsilon"):
            accounting.calibrate(epsilon=epsilon, delta=DELTA, sampling_probability=0.01, steps=10)

    @pytest.mark.slow
    def test_target_out_of_reach(self):
        with pytest.raises(
            ValueError, match="at least .* which noise_multiplier=1e.06.* got 1e-09. Raise"
        ):
            accounting.calibrate(epsilon=1e-9, delta=1e-12, sampling_probability=0.5, steps=1000)
        with pytest.raises(ValueError, match="below .* which noise_multiplier=0.05.* got 1. Lower"):
            # With high probability no record participates at all.
            accounting.calibrate(epsilon=1, delta=1e-3, sampling_probability=1e-6, steps=10)
        with pytest.raises(ValueError, match="at least .* which steps=1 .* got 0.1. Raise"):
            accounting.calibrate(
                epsilon=0.1, delta=DELTA, noise_multiplier=0.5, sampling_probability=0.5
            )
        with pytest.raises(ValueError, match="below .* which steps=1e.09 .* got 5. Lower"):
            accounting.calibrate(
                epsilon=5, delta=DELTA, noise_multiplier=math.inf, sampling_probability=0.5
            )

    @pytest.mark.parametrize(
        "changes",
        [
            {"noise_multiplier": 1.0},
            {"steps": None},
            {"noise_multiplier": 1.0, "steps": None, "schedule": {0: 1.0}},
        ],
        ids=str,
    )
    def test_refuses_unless_one_number_is_left_out(self, changes):
        run = {"epsilon": 1.0, "delta": 1e-5, "steps": 9, "sampler": PoissonSampler(100, 10)}
        with pytest.raises(ValueError, match="Leave out exactly one"):
            accounting.calibrate(**{**run, **changes})
        with pytest.raises(ValueError, match="must have a phase from step 0"):
            accounting.calibrate(**run, schedule={})


class TestEpsilonSpent:
    sampler = PoissonSampler(10_000, 100, seed=0)

    def state(self, releases, noise_multiplier=4.0, batch_size=100, key=0):
        tx = dpoptax.gaussian_noise(
            noise_multiplier=noise_multiplier, batch_size=batch_size, key=jax.random.key(key)
        )
        return after_releases(tx, {"w": jnp.zeros(2)}, releases)

    def spent(self, noise_multiplier, steps):
        return planned_epsilon(noise_multiplier=noise_multiplier, sampler=self.sampler, steps=steps)

    def test_reads_the_ledger(self):
        assert accounting.guarantee(self.state(0), self.sampler).epsilon(DELTA) == 0
        for accountant in ("pld", "rdp"):
            found = accounting.guarantee(
                (self.state(7), ()), self.sampler, accountant=accountant
            ).epsilon(DELTA)
            assert found == planned_epsilon(
                noise_multiplier=4.0, sampler=self.sampler, steps=7, accountant=accountant
            )

    def test_two_ledgers_share_batches(self):
        both = accounting.guarantee(
            (self.state(7, 4.0), self.state(7, 6.0, key=1)), self.sampler
        ).epsilon(DELTA)
        assert both == self.spent((4.0**-2 + 6.0**-2) ** -0.5, 7)

    def test_ledgers_of_unequal_length(self):
        found = accounting.guarantee(
            (self.state(7, 4.0), self.state(3, 6.0, key=1)), self.sampler
        ).epsilon(DELTA)
        joint = (4.0**-2 + 6.0**-2) ** -0.5
        expected = event_epsilon(
            dpa.ComposedDpEvent([self.sampler.dp_event(joint, 3), self.sampler.dp_event(4.0, 4)]),
            DELTA,
        )
        assert found == expected
        assert self.spent(4.0, 7) < found < self.spent(joint, 7)

    def test_alternating_ledgers_are_composed(self):
        states = (self.state(7, 4.0), self.state(3, 6.0, key=1))
        found = accounting.guarantee(states, self.sampler, same_batches=False).epsilon(DELTA)
        apart = [self.sampler.dp_event(4.0, 7), self.sampler.dp_event(6.0, 3)]
        assert found == event_epsilon(dpa.ComposedDpEvent(apart), DELTA)
        # With cyclic groups, all steps of a record may belong to the first stage.
        groups = matrix.CyclicPoissonSampler(10_000, 100, seed=0, cycle_length=4)
        found = accounting.guarantee(states, groups, same_batches=False).epsilon(DELTA)
        assert found == event_epsilon(groups.dp_event(4.0, 10), DELTA)
        with pytest.raises(ValueError, match="different numbers of releases"):
            accounting.guarantee(states, groups).epsilon(DELTA)

    def test_stages_with_dependent_steps_share_batches_at_the_least_noise(self):
        states = (self.state(7, 4.0), self.state(7, 6.0, key=1))
        groups = matrix.CyclicPoissonSampler(10_000, 100, seed=0, cycle_length=4)
        found = accounting.guarantee(states, groups).epsilon(DELTA)
        assert found == event_epsilon(groups.dp_event((2 * 4.0**-2) ** -0.5, 7), DELTA)

    @pytest.mark.usefixtures("coarse_prices")
    def test_alternating_batches_cost_more_at_large_delta(self):
        sampler = PoissonSampler(10, 1, seed=0)
        states = (self.state(1, 0.5, 1), self.state(1, 0.5, 1, key=1))
        shared, apart = (
            accounting.guarantee(states, sampler, same_batches=b) for b in (True, False)
        )
        assert shared.epsilon(0.099) < 0.01 < 0.1 < apart.epsilon(0.099)

    def test_no_noise_means_infinite_epsilon(self):
        assert accounting.guarantee(self.state(1, 0.0), self.sampler).epsilon(DELTA) == math.inf
        states = (self.state(2, 0.0), self.state(2, key=1))
        assert accounting.guarantee(states, self.sampler).epsilon(DELTA) == math.inf

    def test_refuses_bad_states_and_samplers(self):
        with pytest.raises(ValueError, match="no noise ledger"):
            accounting.guarantee((), self.sampler).epsilon(DELTA)
        other = PoissonSampler(10_000, 128, seed=0)
        with pytest.raises(
            ValueError, match="`sampler.batch_size` must be the noise stage's, 100, got 128"
        ):
            accounting.guarantee(self.state(1), other).epsilon(DELTA)
        with pytest.raises(ValueError, match="no privacy event"):
            accounting.guarantee(self.state(1), ShuffledSampler(10_000, 100, seed=0)).epsilon(DELTA)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("probability", [0.1, 1.0])
def test_extreme_multipliers_give_sound_epsilon(accountant, probability):
    spent = [
        planned_epsilon(
            noise_multiplier=multiplier,
            sampling_probability=probability,
            steps=3,
            accountant=accountant,
        )
        for multiplier in (1e-300, 1e-10, 1e9, 1e200, 1e300)
    ]
    assert spent[:2] == [math.inf, math.inf]
    assert spent[2:] == [spent[2]] * 3
    assert 0 <= spent[2] < 1e-3


@pytest.mark.parametrize("wrong", [1e-5, PoissonSampler])
def test_refuses_sampler_of_wrong_type(wrong):
    tx = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=10, key=jax.random.key(0))
    run = {"noise_multiplier": 1.0, "delta": 1e-5, "steps": 3}
    with pytest.raises(TypeError, match="`sampler` must be the sampler that draws the batches"):
        accounting.guarantee(tx.init(jnp.zeros(2)), wrong)
    with pytest.raises(TypeError, match="`sampler` must be the sampler that draws the batches"):
        accounting.planned_guarantee(sampler=wrong, **run)


def test_every_public_function_has_one_default_accountant():
    names = [getattr(accounting, name) for name in dir(accounting) if not name.startswith("_")]
    public = [dpoptax.PrivacyPlan, *filter(callable, names)]
    defaults = {
        f.__name__: inspect.signature(f).parameters["accountant"].default
        for f in public
        if "accountant" in inspect.signature(f).parameters
    }
    assert {"suggest_plan", "guarantee", "calibrate"} < defaults.keys()
    assert set(defaults.values()) == {"pld"}
