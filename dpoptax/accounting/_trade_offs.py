"""What a run lets any attack do: its trade-off function, and the Gaussian one that it is above."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa
import numpy as np
from scipy import special

from dpoptax._pricing import accountants
from dpoptax._pricing.checks import check_delta, relation_named
from dpoptax._pricing.events import with_others
from dpoptax._pricing.trade_off_functions import TradeOff, approximate_trade_off
from dpoptax.accounting._design import make_design
from dpoptax.accounting._spent import spent_event

if TYPE_CHECKING:
    from dpoptax._tree import PyTree
    from dpoptax.sampling import Sampler

# The grid of the privacy loss for a whole curve: ten times as coarse as for a stated epsilon, and
# rounded as that is, so that less is claimed.
_INTERVAL = 10 * accountants.DISCRETIZATION
_LEAST_DELTA = 1e-10
_TOLERANCE, _MOST_MU = 1e-4, 1e3
_MOST_EPSILON = 700.0  # e^ε of more is no double


def trade_off(
    *,
    noise_multiplier: float | Mapping[int, float],
    steps: int,
    sampling_probability: float | None = None,
    sampler: "Sampler | None" = None,
) -> TradeOff:
    """What `steps` noisy clipped sums let any attack do: their trade-off function.

        f(α) <= least false negative rate of a test of whether a record was in the data,
                among the tests with a false positive rate of α

    No attack that accuses a fraction α of those who were not in the data finds more than a fraction
    1 − f(α) of those who were, whatever else it knows. One curve for what ε says at every δ.

    Args:
      noise_multiplier: standard deviation of the noise on the *sum*, over the clip bound, or a
        schedule, as for `epsilon`.
      steps: number of noisy releases.
      sampling_probability: of each record in each step, for Poisson sampling under
        add-or-remove-one. Either this or `sampler`.
      sampler: says how batches are drawn, and under which neighbouring relation it protects.

    Returns:
      f, of arrays too: a lower bound on the exact one, by privacy loss distributions, from 80
      pairs of ε and δ down to δ = 1e-10.

    Raises:
      ValueError: as `epsilon` by "pld".

    Source: Dong, Roth, Su, "Gaussian differential privacy", 2019; Doroshenko et al., "Connect the
    dots", 2022, for the pairs.

    >>> trade_off(noise_multiplier=2.0, sampling_probability=1.0, steps=1)([0.01, 0.1]).round(3)
    array([0.966, 0.783])
    """
    design = make_design(sampling_probability, sampler)
    event = design.releases(noise_multiplier, steps)
    return approximate_trade_off(*profile(event, design.relation))


def gdp(
    *,
    noise_multiplier: float | Mapping[int, float],
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    sampler: "Sampler | None" = None,
) -> float:
    """The least μ for which `steps` noisy clipped sums are proved μ-Gaussian DP, but for delta.

        f(α) >= Φ(Φ⁻¹(1 − α) − μ) − delta   for all α,  f of `trade_off`

    An attack is, but for delta, as hard as to tell N(μ, 1) from N(0, 1) by one draw. One number
    that stands for ε at all δ: (ε, Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) + delta) holds for every
    ε >= 0. T sums over full batches with noise multiplier s have μ = √T/s.

    Args:
      noise_multiplier: as for `trade_off`, and so are all others.
      delta: in (0, 1): what is left out, as no μ is right in the far tails of batches that were
        drawn at random.
      steps: number of noisy releases.
      sampling_probability: this or `sampler`.
      sampler: says how batches are drawn.

    Returns:
      An upper bound on μ, by privacy loss distributions; infinity where there is none up to 1000.

    Raises:
      ValueError: as `epsilon` by "pld"; `delta` is not above the probability of a full batch.

    Source: Dong, Roth, Su, "Gaussian differential privacy", 2019; for reporting it, Gomez et al.,
    "(ε, δ) considered harmful: better privacy guarantees by reporting GDP", 2025.

    >>> round(gdp(noise_multiplier=5.0, sampling_probability=1.0, steps=100, delta=1e-6), 2)
    2.0
    """
    design = make_design(sampling_probability, sampler)
    check_delta(delta, design.dataset_size)
    return _least_mu(design.releases(noise_multiplier, steps), design.relation, delta)


def trade_off_spent(
    opt_state: "PyTree",
    sampler: "Sampler",
    *,
    same_batches: bool = True,
    also: Sequence[dpa.DpEvent] = (),
) -> TradeOff:
    """What a run lets any attack do: `trade_off` of the ledgers in its optimizer state.

    Args:
      opt_state: as for `epsilon_spent`.
      sampler: as for `epsilon_spent`.
      same_batches: as for `epsilon_spent`.
      also: as for `epsilon_spent`.

    Raises:
      ValueError: as `epsilon_spent` by "pld".

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> sampler = dpoptax.sampling.PoissonSampler(dataset_size=8, batch_size=8, seed=0)
    >>> tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=8, key=jax.random.key(0))
    >>> grad_fn = dpoptax.clipped_grad(lambda p, x: jnp.sum(p * x), dpoptax.l2_clip(1.0))
    >>> grads = grad_fn(dpoptax.gradient_points((), jnp.zeros(2)), jnp.ones((8, 2)))
    >>> _, state = tx.update(grads, tx.init(jnp.zeros(2)))
    >>> trade_off_spent(state, sampler)([0.01, 0.1]).round(3)
    array([0.966, 0.783])
    """
    event = with_others(spent_event(opt_state, sampler, same_batches=same_batches), also)
    return approximate_trade_off(*profile(event, sampler.neighbouring_relation))


def gdp_spent(
    opt_state: "PyTree",
    sampler: "Sampler",
    delta: float,
    *,
    same_batches: bool = True,
    also: Sequence[dpa.DpEvent] = (),
) -> float:
    """The least μ for which a run is proved μ-Gaussian DP, but for delta: `gdp` of its ledgers.

    Args:
      opt_state: as for `epsilon_spent`.
      sampler: as for `epsilon_spent`.
      delta: as for `gdp`.
      same_batches: as for `epsilon_spent`.
      also: as for `epsilon_spent`.

    Raises:
      ValueError: as `epsilon_spent` by "pld", and as `gdp`.
    """
    check_delta(delta, sampler.dataset_size)
    event = with_others(spent_event(opt_state, sampler, same_batches=same_batches), also)
    return _least_mu(event, sampler.neighbouring_relation, delta)


def profile(
    event: dpa.DpEvent, neighbouring_relation: str, least_delta: float = _LEAST_DELTA
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of ε and δ that an event has together, by privacy loss distributions."""
    relation = relation_named(neighbouring_relation)
    return accountants.profile_of(event, relation, _INTERVAL, least_delta=least_delta)


def _least_mu(event: dpa.DpEvent, neighbouring_relation: str, delta: float) -> float:
    epsilons, deltas = profile(event, neighbouring_relation, delta / 2)
    if not np.isfinite(epsilons).all():
        return math.inf
    within = np.flatnonzero(deltas <= delta)
    if not within.size:
        raise ValueError(
            f"delta={delta} must be above the probability that the sampler's largest batch is "
            "full in this run. Pass a larger `max_batch_size` or a larger `delta`."
        )
    last = within[0]  # behind it δ is smaller still
    if last == 0:
        return 0.0
    if epsilons[last] > _MOST_EPSILON:
        return math.inf
    epsilons, deltas = epsilons[: last + 1], deltas[: last + 1] - delta

    def holds(mu: float) -> bool:
        return _is_above(*_gaussian_deltas(mu, epsilons), deltas, np.exp(epsilons))

    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
        if high > _MOST_MU:
            return math.inf
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _is_above(values: np.ndarray, slopes: np.ndarray, deltas: np.ndarray, odds: np.ndarray) -> bool:
    """Whether a convex function of e^ε, of these values and slopes at `odds`, is above `deltas`.

    δ is convex in e^ε, too: between two points it is below the chord of its bounds, and the other
    above both of its tangents, which are closest to the chord where they meet, or at the points.
    """
    width, bend = np.diff(odds), np.diff(slopes)
    with np.errstate(divide="ignore", invalid="ignore"):
        meet = np.clip((slopes[1:] * width - np.diff(values)) / bend, 0, width)
    meet = np.where(bend > 0, meet, 0)
    chords = deltas[:-1] + np.diff(deltas) / width * meet
    return bool(np.all(values >= deltas) and np.all(values[:-1] + slopes[:-1] * meet >= chords))


def _gaussian_deltas(mu: float, epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """δ of N(μ, 1) and N(0, 1) at each ε, and its derivative by e^ε."""
    below = special.log_ndtr(-mu / 2 - epsilons / mu)
    deltas = special.ndtr(mu / 2 - epsilons / mu) - np.exp(epsilons + below)
    return deltas, -np.exp(below)
