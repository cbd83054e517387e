"""Compares distributions of the number of trials of a sweep, at one chance to try a good setting.

A setting is good if it is in the best tenth. K trials try one with probability 1 − φ(0.9), where
φ(s) = E[s^K].
"""

import math
from collections.abc import Iterator

import dp_accounting as dpa
from scipy import optimize

from dpoptax import accounting
from dpoptax._pricing.best_trial import NumberOfTrials
from dpoptax.accounting import selection
from dpoptax.training.run import files

EPSILON, DELTA, GOOD = 3.0, 1e-5, 0.1
HEADER = ("chance", "number of trials", "mean", "σ of a trial / σ of one run", "ε of a trial")


def table(*, chances: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)) -> str:
    """Prints the least noise of a trial by distribution of the number of trials.

    Args:
        chances: Probabilities to try a setting in the best tenth.
    """
    return files.markdown_table(HEADER, list(_rows(chances)))


def chance(mean: float, distribution: str) -> float:
    """Returns the probability that a random number of trials tries a good setting."""
    bad = 1 - GOOD
    if distribution == "poisson":
        return -math.expm1(-mean * GOOD)
    gamma = NumberOfTrials(mean, selection.SHAPES[distribution]).gamma
    if distribution == "geometric":
        return 1 - gamma * bad / (1 - (1 - gamma) * bad)
    return 1 - math.log1p(-(1 - gamma) * bad) / math.log(gamma)


def _rows(chances: tuple[float, ...]) -> Iterator[tuple[str, ...]]:
    single = accounting.calibrate(epsilon=EPSILON, delta=DELTA, steps=1, sampling_probability=1.0)
    for wanted in chances:
        count = math.ceil(math.log1p(-wanted) / math.log1p(-GOOD))
        yield _row(wanted, "fixed", f"{count}", single * math.sqrt(count), single)
        for distribution in selection.SHAPES:
            mean = _mean(wanted, distribution)
            if mean > 1e6:
                yield (f"{wanted:g}", distribution, f"{mean:.1g}", "not computed", "")
                continue
            least = optimize.brentq(
                lambda sigma, m=mean, d=distribution: _selected(sigma, m, d) - EPSILON,
                0.9 * single,
                6 * single,
                xtol=1e-3 * single,
            )
            yield _row(wanted, distribution, f"{mean:,.1f}", least, single)


def _row(
    wanted: float, distribution: str, mean: str, sigma: float, single: float
) -> tuple[str, ...]:
    epsilon = accounting.Guarantee(_event(sigma), accountant="pld").epsilon(DELTA)
    return (f"{wanted:g}", distribution, mean, f"{sigma / single:.2f}", f"{epsilon:.2f}")


def _mean(wanted: float, distribution: str) -> float:
    return math.exp(
        optimize.brentq(lambda m: chance(math.exp(m), distribution) - wanted, 0.01, 30.0)
    )


def _selected(sigma: float, mean: float, distribution: str) -> float:
    event = selection.best_of_random([_event(sigma)], mean=mean, distribution=distribution)
    return accounting.Guarantee(event, accountant="pld").epsilon(DELTA)


def _event(sigma: float) -> accounting.PrivacyEvent:
    return accounting.PrivacyEvent(dpa.GaussianDpEvent(sigma))
