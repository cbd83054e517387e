"""What a run lets any attack do: its trade-off function, and the Gaussian one that it is above."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa
import numpy as np
from scipy import special

from dpoptax._privacy import pricing
from dpoptax._privacy.checks import check_delta, relation_named
from dpoptax._privacy.events import with_others
from dpoptax._privacy.trade_offs import TradeOff, approximate_trade_off
from dpoptax.accounting._spent import spent_event

if TYPE_CHECKING:
    from dpoptax._trees import PyTree
    from dpoptax.sampling import Sampler

# The grid of the privacy loss for a whole curve: ten times as coarse as for a stated epsilon, and
# rounded as that is, so that less is claimed.
_INTERVAL = 10 * pricing.DISCRETIZATION
_TOLERANCE = 1e-4
_MOST = 1e3


def trade_off_spent(
    opt_state: "PyTree", sampler: "Sampler", *, also: Sequence[dpa.DpEvent] = ()
) -> TradeOff:
    """What a run lets any attack do: its trade-off function, read from the ledgers in its state.

        f(α) <= least false negative rate of a test of whether a record was in the data,
                among the tests with a false positive rate of α

    No attack that accuses a fraction α of those who were not in the data finds more than a fraction
    1 − f(α) of those who were, whatever else it knows. One curve for what ε says at every δ.

    Args:
      opt_state: as for `epsilon_spent`.
      sampler: as for `epsilon_spent`.
      also: as for `epsilon_spent`.

    Returns:
      f, of arrays too: a lower bound on the exact one, by privacy loss distributions, from 80
      pairs of ε and δ down to δ = 1e-10.

    Raises:
      ValueError: as `epsilon_spent` by "pld".

    Source: Dong, Roth, Su, "Gaussian differential privacy", 2019; Doroshenko et al., "Connect the
    dots", 2022, for the pairs.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> sampler = dpoptax.sampling.PoissonSampler(dataset_size=8, batch_size=8, seed=0)
    >>> tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=8, key=jax.random.key(0))
    >>> grad_fn = dpoptax.clipped_grad(lambda p, x: jnp.sum(p * x), dpoptax.l2_clip(1.0))
    >>> grads = grad_fn(dpoptax.gradient_points((), jnp.zeros(2)), jnp.ones((8, 2)))
    >>> _, state = tx.update(grads, tx.init(jnp.zeros(2)))
    >>> trade_off_spent(state, sampler)([0.01, 0.1]).round(3)
    array([0.966, 0.783])
    """
    return approximate_trade_off(*profile_spent(opt_state, sampler, also=also))


def gdp_spent(
    opt_state: "PyTree",
    sampler: "Sampler",
    delta: float,
    *,
    also: Sequence[dpa.DpEvent] = (),
) -> float:
    """The least μ for which a run is proved μ-Gaussian differentially private, but for delta.

        f(α) >= Φ(Φ⁻¹(1 − α) − μ) − delta   for all α,  f of `trade_off_spent`

    An attack on the run is, but for delta, as hard as to tell N(μ, 1) from N(0, 1) by one draw. One
    number that stands for ε at all δ: (ε, Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) + delta) holds for
    every ε >= 0. T releases of full batches with noise multiplier s have μ = √T/s.

    Args:
      opt_state: as for `epsilon_spent`.
      sampler: as for `epsilon_spent`.
      delta: in (0, 1): what is left out, as no μ is right in the far tails of batches that were
        drawn at random.
      also: as for `epsilon_spent`.

    Returns:
      An upper bound on μ, by privacy loss distributions; infinity where there is none up to 1000.

    Raises:
      ValueError: as `epsilon_spent` by "pld"; draws beyond the sampler's largest batch that use up
        delta.

    Source: Dong, Roth, Su, "Gaussian differential privacy", 2019; for reporting it, Gomez et al.,
    "(ε, δ) considered harmful: better privacy guarantees by reporting GDP", 2025.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> sampler = dpoptax.sampling.PoissonSampler(dataset_size=8, batch_size=8, seed=0)
    >>> tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=8, key=jax.random.key(0))
    >>> grad_fn = dpoptax.clipped_grad(lambda p, x: jnp.sum(p * x), dpoptax.l2_clip(1.0))
    >>> grads = grad_fn(dpoptax.gradient_points((), jnp.zeros(2)), jnp.ones((8, 2)))
    >>> _, state = tx.update(grads, tx.init(jnp.zeros(2)))
    >>> round(gdp_spent(state, sampler, 1e-6), 2)
    0.5
    """
    check_delta(delta, sampler.dataset_size)
    epsilons, deltas = profile_spent(opt_state, sampler, also=also, least_delta=delta / 2)
    if not np.isfinite(epsilons).all():
        return math.inf
    within = np.flatnonzero(deltas <= delta)
    if not within.size:
        raise ValueError(
            f"delta={delta} is used up by draws beyond the sampler's largest batch: use a larger "
            "max_batch_size"
        )
    if within[0] == 0:
        return 0.0
    # Behind the last of these δ is smaller still.
    odds, deltas = np.exp(epsilons[: within[0] + 1]), deltas[: within[0] + 1] - delta

    def holds(mu: float) -> bool:
        return _is_above(*_gaussian_deltas(mu, np.log(odds)), deltas, odds)

    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
        if high > _MOST:
            return math.inf
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def profile_spent(
    opt_state: "PyTree",
    sampler: "Sampler",
    *,
    also: Sequence[dpa.DpEvent] = (),
    noise: float = 1.0,
    least_delta: float = 1e-10,
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of ε and δ that a run has together, or would have with `noise` times its noise."""
    event = with_others(spent_event(opt_state, sampler, noise=noise), also)
    relation = relation_named(sampler.neighbouring_relation)
    return pricing.profile_of(event, relation, _INTERVAL, least_delta=least_delta)


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
