"""Composition of privacy losses by Fourier transforms, with rounding bounds.

A pair of distributions has finite privacy losses x, multiples of an interval h, with probabilities
p(x), and an infinite loss with probability p(∞). Pair i is composed n_i times. The finite losses
add up to S, and

    δ(ε) = 1 − Π(1 − p_i(∞))^n_i + E[(1 − e^(ε − S))⁺].

A convolution by Fourier transforms has an absolute error of about 10^-16 per pair. At 10^6 steps,
this hides δ = 10^-10. So the losses are tilted first. With K_i(λ) = log Σ_x p_i(x) e^(λx),
K = Σ n_i K_i, and t the convolution of the t_i(x) = p_i(x) e^(λx − K_i),

    E[(1 − e^(ε − S))⁺] = e^(K − λε) Σ_s t(s) g(s),    g(s) = e^(−λ(s − ε)) (1 − e^(ε − s))⁺ ≤ 1,

for any λ > 0. If λ concentrates t around ε, the sum is not small. The result is an upper bound:

* Losses above ε + 60/λ add at most e^-60, since g is at most that. This bound is added.
* t is computed modulo a window of N losses. Mass below the window is added to other losses. Mass
  above it is at most e^(K(λ + r) − K(λ) − r · top), for any r > 0. This bound is added.
* The error of a computed transform F̂_i is at most η_i. It consists of the rounding of t_i and of
  log₂ N stages. So the product of powers is off by at most E, which is
  Π(|F̂_i| + η_i)^n_i − Π|F̂_i|^n_i plus the rounding of powers. By Parseval's identity and the
  Cauchy-Schwarz inequality, Σ t g is off by at most ‖g‖ (‖E‖/√N + η‖t‖).

Source: F. Esscher, 1932, for the tilt; N. Higham, "Accuracy and Stability of Numerical Algorithms",
2002, chapter 24, for Fourier transforms.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pair
from scipy import fft, optimize

_UNIT = 2.0**-53
# Units of rounding per stage of a transform and per operation on its inputs, and a factor that
# covers all other rounding.
_STAGE, _OPERATION, _REST = 8.0, 4.0, 1.0 + 1e-9
# The range in which λ is sought, and the logarithm of the mass that a window leaves out.
_TILTS = (1e-4, 1e7)
_LOG_OUTSIDE = math.log(1e-20)
# Losses more than this over λ above ε are left out. Logarithms of smaller numbers are not taken.
_STEEP = 60.0
_TINY = 1e-300
# Four times as many losses are still composed in a second.
_MOST_LOSSES = 1_000_000
# The share of the error in a sum that ends the search for λ, its tries, and the largest λ h.
_ENOUGH, _TRIES, _PER_INTERVAL = 1e-5, 8, 10.0
# λ is optimized for the ε at these quantiles of the requested ones.
_QUANTILES = (0.0, 0.2, 0.5, 1.0)
# The tolerance of ε, relative to a bound on it.
_STEP = 1e-9


def composed_epsilon(pairs: Sequence[tuple[Pair, int]], interval: float, delta: float) -> float:
    """Returns the least provable ε at δ, in both directions, or infinity.

    Args:
      pairs: pairs of distributions, each with its number of compositions.
      interval: h, the same for all pairs.
      delta: in (0, 1).
    """
    if not pairs:
        return 0.0
    return max(_epsilon(parts, interval, delta) for parts in _directions(pairs, interval))


def deltas_of(
    pairs: Sequence[tuple[Pair, int]], interval: float, epsilons: np.ndarray
) -> np.ndarray:
    """Returns the least provable δ at each ε of at least 0, in both directions."""
    return deltas_by_direction(pairs, interval, epsilons).max(0)


def deltas_by_direction(
    pairs: Sequence[tuple[Pair, int]], interval: float, epsilons: np.ndarray
) -> np.ndarray:
    """Returns the least provable δ of removing and of adding a record, (2, n)."""
    if not pairs:
        return np.zeros((2, len(epsilons)))
    found = [_deltas(parts, interval, epsilons) for parts in _directions(pairs, interval)]
    return np.stack([found[0], found[-1]])


def least_delta(pairs: Sequence[tuple[Pair, int]], interval: float) -> float:
    """Returns the probability of an infinite loss in the worse direction."""
    return max((_infinite(parts) for parts in _directions(pairs, interval)), default=0.0)


def blur(pairs: Sequence[tuple[Pair, int]], interval: float) -> float:
    """Returns the interval over the standard deviation of a loss, on average over variances.

    It is 0 if a finer grid would be too large.
    """
    parts = _directions(pairs, interval)[0]
    if max(len(part.losses) for part in parts) > _MOST_LOSSES:
        return 0.0
    deviations = [(part.count, part.deviation) for part in parts]
    total = math.fsum(count * each**2 for count, each in deviations)
    return (
        interval * math.fsum(count * each for count, each in deviations) / total if total else 0.0
    )


def _directions(pairs: Sequence[tuple[Pair, int]], interval: float) -> list[list["_Losses"]]:
    """Returns the losses of removing a record, and of adding one if they differ."""
    found = [[_Losses.of(pair._pmf_remove, count, interval) for pair, count in pairs]]
    if any(pair._pmf_add is not pair._pmf_remove for pair, _ in pairs):
        found.append([_Losses.of(pair._pmf_add, count, interval) for pair, count in pairs])
    return found


@dataclasses.dataclass(frozen=True)
class _Losses:
    """Privacy losses of a pair in one direction.

    Attributes:
      first: the least loss, in units of h.
      losses: (n,) ascending.
      logs: (n,) log p.
      infinite: p(∞).
      count: the number of compositions.
    """

    first: int
    losses: np.ndarray
    logs: np.ndarray
    infinite: float
    count: int

    @classmethod
    def of(cls, pmf: Any, count: int, interval: float) -> "_Losses":
        dense = pmf.to_dense_pmf()
        # Negative masses are rounding errors. Without them, no δ is smaller.
        first, masses = int(dense._lower_loss), np.maximum(dense._probs, 0.0)
        with np.errstate(divide="ignore"):
            logs = np.log(masses)
        losses = (first + np.arange(len(masses))) * interval
        return cls(first, losses, logs, float(dense._infinity_mass), count)

    @property
    def greatest(self) -> float:
        """The greatest finite loss."""
        return float(self.losses[np.flatnonzero(self.logs > -np.inf)[-1]])

    @property
    def deviation(self) -> float:
        """The standard deviation of the finite losses."""
        masses = np.exp(self.logs)
        mean = _dot(masses, self.losses)
        return math.sqrt(max(0.0, _dot(masses, (self.losses - mean) ** 2)))

    def log_moment(self, tilt: float) -> float:
        """Returns K_i(λ)."""
        exponents = self.logs + tilt * self.losses
        # Without the largest exponent, no exponential overflows.
        top = float(exponents.max())
        return top + math.log(float(np.exp(exponents - top).sum()))


@dataclasses.dataclass(frozen=True)
class _Tilted:
    """Convolution of tilted losses.

    Attributes:
      tilt: λ.
      log_moment: K.
      losses: (N,) s, ascending.
      masses: (N,) t, as computed.
      off: ‖E‖/√N + η‖t‖.
      outside: an upper bound on the mass above the window.
    """

    tilt: float
    log_moment: float
    losses: np.ndarray
    masses: np.ndarray
    off: float
    outside: float

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on E[(1 − e^(ε − S))⁺]."""
        total, room = self._terms(epsilon)
        # Limited to 700, against overflow. The bound is then above 1 in any case: `room` ≥ e^-60.
        log_factor = min(self.log_moment - self.tilt * epsilon, 700.0)
        return _REST * math.exp(log_factor) * (total + room)

    def fits(self, epsilon: float) -> bool:
        """Returns whether the error bound at ε is negligible."""
        total, room = self._terms(epsilon)
        return room <= _ENOUGH * total

    def _terms(self, epsilon: float) -> tuple[float, float]:
        """Returns Σ t g, without losses where g is negligible, and its error bound."""
        first, end = np.searchsorted(self.losses, [epsilon, epsilon + _STEEP / self.tilt])
        excess = self.losses[first:end] - epsilon
        weights = np.exp(-self.tilt * excess) * -np.expm1(-excess)
        total = _dot(weights, self.masses[first:end])
        # The last two terms bound the losses that were left out: those above the window, and those
        # more than 60/λ above ε.
        return total, _norm(weights) * self.off + self.outside + math.exp(-_STEEP)


def _dot(x: np.ndarray, y: np.ndarray) -> float:
    """Returns x · y. BLAS would start threads, which wait for each other on a busy machine."""
    return float(np.sum(x * y))


def _norm(x: np.ndarray) -> float:
    return math.sqrt(_dot(x, x))


def _epsilon(parts: list[_Losses], interval: float, delta: float) -> float:
    left = delta - _infinite(parts)
    if left < 0:
        return math.inf
    greatest = _greatest(parts)  # nothing is above it
    if left == 0:
        return greatest

    def chernoff(tilt: float) -> float:
        return (_log_moment(parts, tilt) - math.log(left)) / tilt

    # With the tilt of the least Chernoff bound, E e^(λS − λε) = δ, the tilted S is about ε.
    # Beyond the grid's resolution, it would select the greatest loss only.
    tilt = min(_best_tilt(chernoff), _PER_INTERVAL / interval)
    # The Chernoff bound is an ε that holds. An interval more is room for the errors of `composed`.
    most, best = max(interval, chernoff(tilt) + interval), math.inf
    for _ in range(_TRIES):
        composed = _tilted(parts, tilt, interval)
        epsilon = _least(composed, left, most)
        # Less tilt no longer helps.
        if best <= epsilon and best < math.inf:
            break
        best = epsilon
        if best == 0 or (best < math.inf and composed.fits(best)):
            break
        tilt /= 4  # Near the largest loss, the best Chernoff bound tilts too much.
    return min(best, greatest)


def _greatest(parts: list[_Losses]) -> float:
    """Returns the greatest finite S, or 0 if that is negative."""
    total = max(0.0, math.fsum(part.count * part.greatest for part in parts))
    # One loss is a point of the grid. Products and sums are rounded, and must not be too small.
    return total if len(parts) == 1 and parts[0].count == 1 else total * (1 + 8 * _UNIT)


def _deltas(parts: list[_Losses], interval: float, epsilons: np.ndarray) -> np.ndarray:
    """Returns bounds by a few tilts, each used for the ε for which it is nearly best."""
    infinite = _infinite(parts)
    if infinite >= 1:
        return np.ones(len(epsilons))
    targets = np.quantile(epsilons, _QUANTILES)
    edges = [-math.inf, *targets, math.inf]
    proved = np.ones(len(epsilons))
    # Each λ also serves the ε next to its target, so those between two have the better bound.
    for before, target, after in zip(edges, targets, edges[2:], strict=False):

        def chernoff(tilt: float, epsilon: float = target) -> float:
            """Returns a Chernoff bound on log P[S ≥ ε]."""
            return _log_moment(parts, tilt) - tilt * epsilon

        composed = _tilted(parts, _best_tilt(chernoff), interval)
        for i in np.flatnonzero((epsilons >= before) & (epsilons <= after)):
            proved[i] = min(proved[i], infinite + composed.delta(float(epsilons[i])))
    return proved


def _infinite(parts: list[_Losses]) -> float:
    """Returns the probability of an infinite loss."""
    if len(parts) == 1 and parts[0].count == 1:
        return parts[0].infinite  # not rounded, so that a δ equal to it is still provable
    if any(part.infinite >= 1 for part in parts):
        return 1.0
    # 1 − Π(1 − p)^n, without the cancellation for small p.
    return -math.expm1(math.fsum(p.count * math.log1p(-p.infinite) for p in parts))


def _best_tilt(bound: Callable[[float], float]) -> float:
    """Returns a λ that nearly minimizes the bound."""
    # Any λ gives a valid bound, so a rough minimum suffices.
    limits = math.log(_TILTS[0]), math.log(_TILTS[1])
    found = optimize.minimize_scalar(
        lambda log_tilt: bound(math.exp(log_tilt)),
        bounds=limits,
        method="bounded",
        options={"xatol": 0.1},
    )
    return math.exp(found.x)


def _least(composed: _Tilted, delta: float, most: float) -> float:
    """Returns the least provable ε in [0, most] at δ, or infinity."""
    log_delta, proved = math.log(delta), functools.cache(composed.delta)

    def above(epsilon: float) -> float:
        """Returns the logarithm of proved(ε)/δ, which is nearly a parabola in ε."""
        return math.log(max(proved(epsilon), _TINY)) - log_delta

    if proved(most) > delta:
        return math.inf
    least = 0.5 * most  # usually a lower bound already
    if proved(least) <= delta:
        least = 0.0
        if proved(least) <= delta:
            return 0.0
    step = _STEP * most
    epsilon = optimize.brentq(above, least, most, xtol=step)
    # The root is only approximate. An ε is returned only if its δ is proved.
    while proved(epsilon) > delta:  # doubles the step, since δ may be nearly constant in ε
        epsilon, step = min(epsilon + step, most), 2 * step
    return float(epsilon)


def _log_moment(parts: list[_Losses], tilt: float) -> float:
    """Returns K(λ)."""
    return math.fsum(part.count * part.log_moment(tilt) for part in parts)


def _tilted(parts: list[_Losses], tilt: float, interval: float) -> _Tilted:
    moments = [part.log_moment(tilt) for part in parts]
    log_moment = math.fsum(p.count * k for p, k in zip(parts, moments, strict=True))
    masses = [np.exp(p.logs + tilt * p.losses - k) for p, k in zip(parts, moments, strict=True)]
    low, high = _window(parts, tilt, log_moment)
    start = math.floor(low / interval)
    size = fft.next_fast_len(math.ceil(high / interval) - start + 2, real=True)

    # log Π|F̂|^n, log Π(|F̂| + η)^n, and the phase of the product, by frequency.
    log_least, log_most, phase = np.zeros((3, size // 2 + 1))
    rounded, stages = 0.0, _STAGE * _UNIT * math.log2(size)
    for part, mass, moment in zip(parts, masses, moments, strict=True):
        # A loss outside of the window lands on another one in it. The module docstring bounds this.
        places = (part.first + np.arange(len(mass))) % size
        transform = fft.rfft(np.bincount(places, mass, size))
        logs = np.where(mass > 0, part.logs, 0.0)
        # A rounded exponent of size x changes its exponential by about x units in the last place.
        sizes = np.abs(logs) + np.abs(tilt * part.losses) + abs(moment) + 1.0
        off = _OPERATION * _UNIT * _dot(mass, sizes) + stages * float(mass.sum())
        # Logarithms, since the power of a small number underflows long before the product ends.
        absolute = np.abs(transform)
        log_least += part.count * np.log(np.maximum(absolute, _TINY))
        log_most += part.count * np.log(absolute + off)
        phase += part.count * np.angle(transform)
        # The phase of a factor, at most π, is rounded, and the n factors add up.
        rounded += part.count * _OPERATION * _UNIT * (math.pi + 1.0)
    power = np.exp(log_least + 1j * phase)
    # Π(|F̂| + η)^n − Π|F̂|^n, without the cancellation of a difference of two large products.
    error = np.exp(log_most) * -np.expm1(np.minimum(log_least - log_most, 0.0))
    # Rounding of `power` itself: of its phase, and of its logarithm, whose size is −log_least.
    error += np.abs(power) * (math.expm1(rounded) - _OPERATION * _UNIT * log_least)
    # Loss k h is at place k modulo N. Rolled, the window starts at place 0.
    found = np.roll(fft.irfft(power, size), -(start % size))
    # A real transform keeps half of the frequencies. The others have the same errors, hence the 2.
    off = math.sqrt(2.0 / size) * _norm(error) + stages * _norm(found)
    losses = (start + np.arange(size)) * interval
    return _Tilted(tilt, log_moment, losses, found, off, math.exp(_LOG_OUTSIDE))


def _window(parts: list[_Losses], tilt: float, log_moment: float) -> tuple[float, float]:
    """Returns Chernoff limits that the tilted S exceeds with probability 10^-20."""

    def limit(rate: float) -> float:
        # P[S > x] ≤ e^(K(λ + r) − K(λ) − r x) if r > 0, and P[S < x] if r < 0. Solved for x.
        return (_log_moment(parts, tilt + rate) - log_moment - _LOG_OUTSIDE) / rate

    below, above = _best_tilt(lambda rate: -limit(-rate)), _best_tilt(limit)
    return limit(-below), limit(above)
