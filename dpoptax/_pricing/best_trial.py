"""Privacy losses of the best of a random number of trials.

φ is the generating function of the number K of trials, φ(s) = E[s^K]. The trials are pairs of an
output and a score, with laws P and Q under two neighbors. Let ℓ = dP/dQ, and let G(u) be the
largest P(E) of any set with Q(E) ≤ u. Then the best trial has

    δ(ε) ≤ E_Q[h(ℓ)],    h(ℓ) = sup_u (ℓ φ′(G(u)) − e^ε φ′(u))⁺,

whatever the scores are. The proof is in docs/developers/selection.md.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize, stats

from dpoptax._pricing import composition, curves
from dpoptax._pricing.curves import Curve

# The numbers of values of u and of ε.
_CELLS, _POINTS = 4000, 400
# The interval of losses of several trials, their numbers, and a chance that is left out.
_COARSE, _NEGLIGIBLE = 0.01, 1e-9
_MOST_TRIALS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 90, 128, 256)
# Covers the rounding of φ′ and of the parameter of K.
_MORE = 1.0 + 1e-9


@dataclasses.dataclass(frozen=True)
class NumberOfTrials:
    """Law of a random number K of trials.

    Attributes:
      mean: E[K], at least 1.
      shape: 0 for the logarithmic distribution, 1 for the geometric, infinite for the Poisson.
    """

    mean: float
    shape: float

    @property
    def gamma(self) -> float:
        """γ: P[K = k] is proportional to (1 − γ)^k / k, or to (1 − γ)^k if the shape is 1."""
        if self.shape == 1 or self.mean < 1 + 1e-10:
            return 1 / self.mean

        # The logarithmic law has E[K] = (1/γ − 1)/log(1/γ), which decreases in γ.
        def excess(log_gamma: float) -> float:
            return math.expm1(-log_gamma) / -log_gamma - self.mean

        return math.exp(optimize.brentq(excess, -600.0, -1e-13, xtol=1e-15, rtol=1e-14))

    @property
    def law(self) -> Any:
        """The distribution in SciPy."""
        if math.isinf(self.shape):
            return stats.poisson(self.mean)
        if self.shape == 1 or self.mean < 1 + 1e-10:
            return stats.geom(1 / self.mean)
        return stats.logser(1 - self.gamma)

    def slope(self, below_one: np.ndarray) -> np.ndarray:
        """Returns φ′(1 − w)."""
        if math.isinf(self.shape):
            return self.mean * np.exp(-self.mean * below_one)
        gamma = self.gamma
        return self.mean * (gamma / (gamma + (1 - gamma) * below_one)) ** (self.shape + 1)

    def even(self, count: int) -> np.ndarray:
        """Returns w from 1 to 0, with about the same ratio of φ′(1 − w) from one to the next."""
        shares = np.linspace(1.0, 0.0, count)
        if math.isinf(self.shape) or self.gamma == 1:
            return shares
        gamma = self.gamma
        return np.clip(gamma * np.expm1(-shares * math.log(gamma)) / (1 - gamma), 0.0, 1.0)


def selected_curve(curve: Curve, number: NumberOfTrials) -> tuple[np.ndarray, np.ndarray]:
    """Returns ε, (n,), and δ of the best trial in both directions, (n,).

    Args:
      curve: of one trial.
      number: the number of trials.
    """
    found = [_best_trial(each, number) for each in (curve, curves.reverse(curve))]
    most = float(curve[0][-1]) + 1.0
    # Up to an ε at which finite losses add no more to δ than infinite ones.
    while max(delta(most) for delta in found) > 2 * _infinite(curve, number) and most < 700:
        most *= 1.1
    at = most * np.linspace(0, 1, _POINTS) ** 1.5
    best = np.array([max(delta(float(epsilon)) for delta in found) for epsilon in at])
    # Publishing all trials reveals at least as much as the best one, so its δ is also a bound.
    return at, curves.convex(at, np.minimum(best, _all_trials(curve, number, at)))


def _all_trials(curve: Curve, number: NumberOfTrials, at: np.ndarray) -> np.ndarray:
    """Returns δ of publishing all trials, (n,), which is less than that of the best one at small ε.

    E[δ_K(ε)] with δ_k of k trials, at the next larger k for which it is computed.
    """
    epsilons, deltas = curve
    losses = curves.losses(epsilons, deltas.max(0), _COARSE)
    trial = curves.symmetric(losses, _COARSE)
    chances, before = number.law.pmf(np.arange(_MOST_TRIALS[-1] + 1)), 1
    total = np.full(len(at), 1.0 - math.fsum(chances) + _NEGLIGIBLE)
    for count in _MOST_TRIALS:
        chance = float(chances[before : count + 1].sum())
        likely = chance > _NEGLIGIBLE
        total += chance * (composition.deltas_of([(trial, count)], _COARSE, at) if likely else 1.0)
        before = count + 1
    return total


def _infinite(curve: Curve, number: NumberOfTrials) -> float:
    """Returns φ′(1) times the probability of an infinite loss."""
    return float(curve[1].max(0)[-1]) * number.mean * _MORE


def _best_trial(curve: Curve, number: NumberOfTrials) -> Callable[[float], float]:
    """Returns δ(ε) = E[sup_u (φ′(G(u)) − e^(ε − s) φ′(u))⁺] over the losses s, P against Q."""
    losses, masses = _atoms(curve)
    high, low = _envelope(curve, number)
    infinite = _infinite(curve, number)

    def delta(epsilon: float) -> float:
        ratios = np.exp(np.minimum(epsilon - losses, 700.0))
        # Slopes between corners fall, so the best corner is the one after the last slope above r.
        best = np.searchsorted(-np.diff(high) / np.diff(low), -ratios)
        gains = np.maximum(high[best] - ratios * low[best], 0.0)
        return float(min(1.0, masses @ gains + infinite))

    return delta


def _atoms(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Returns finite losses and P of a pair with the chords of the curve.

    A loss −ℓ has e^−ℓ times the probability of ℓ under Q for Q against P, and the rest is at 0.
    Rounding can only make the probabilities larger.
    """
    epsilons, deltas = curve
    # The slope of δ in e^ε changes at each ε by the probability of this loss under Q, and e^ε times
    # it is that under P.
    losses, steps, falls = epsilons[1:], np.diff(epsilons), np.diff(deltas)
    # e^ε times the slope of δ in e^ε, after and before each loss.
    after = np.pad((falls / np.expm1(steps))[:, 1:], ((0, 0), (0, 1)))
    masses = np.maximum(after - falls / -np.expm1(-steps), 0.0) * _MORE
    mirrored = masses[1] * np.exp(-losses)
    rest = max(0.0, 1.0 - float(masses[0].sum() + mirrored.sum() + deltas[0, -1])) + 1e-9
    all_losses = np.concatenate([-losses, [0.0], losses])
    return all_losses, np.concatenate([mirrored, [rest], masses[0]])


def _envelope(curve: Curve, number: NumberOfTrials) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs (b, a) with sup_u (φ′(G(u)) − r φ′(u)) ≤ max (b − r a) for every r ≥ 0.

    u in [u_i, u_{i+1}] has φ′(G(u)) ≤ φ′(G(u_{i+1})) and φ′(u) ≥ φ′(u_i).
    """
    even = number.even(_CELLS)
    # Values of u with about even φ′(u), and others with about even φ′(G(u)).
    matching = curves.least_complement(even, 1.0 - even, curves.reverse(curve))
    rest = np.unique(np.clip(np.concatenate([[0.0, 1.0], even, 1.0 - matching]), 0.0, 1.0))[::-1]
    complement = curves.least_complement(1.0 - rest, rest, curve)
    high = number.slope(complement[1:]) * _MORE
    low = number.slope(rest[:-1]) / _MORE
    return curves.corners(high, low)
