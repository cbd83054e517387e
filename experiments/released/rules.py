"""Transcribes update rules in NumPy: DP-SGD, and papers' rules in two versions.

A rule turns the gradients of a step's examples into one noisy vector, filters it and hands it to
SGD. Arrays are parameters in their last axis; axes before it are independent runs.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Points = tuple[tuple[float, Array], ...]
"""Pairs of a weight and a point at which the gradients are taken."""
ClippedSums = Callable[[Sequence[Points]], Sequence[Array]]
"""Returns Σ_ξ clip(Σ_j w_j ∇ℓ(x_j; ξ)) over the examples ξ of a step, for each combination."""
Filter = Callable[[Array], Array]
LONGEST = 8
"""Number of iterates that a run keeps."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        points: (the last iterates, with x_t at the end; t) -> weights and points.
        noise: t -> standard deviation of the noise on the sum, relative to σC.
        clip_apart: Whether the gradient at each point is clipped. If not, their combination is.
        new_filter: Makes the filter of a run.
        normalize: Whether SGD gets m/‖m‖ instead of m.
    """

    points: Callable[[Sequence[Array], int], Points]
    noise: Callable[[int], float] = lambda t: 1.0
    clip_apart: bool = False
    new_filter: Callable[[], Filter] = lambda: lambda g: g
    normalize: bool = False

    def combinations(self, iterates: Sequence[Array], t: int) -> tuple[tuple[float, Points], ...]:
        """Returns the clipped combinations of step t, each with its weight in the sum."""
        points = self.points(iterates, t)
        if self.clip_apart:
            return tuple((weight, ((1.0, point),)) for weight, point in points)
        return ((1.0, points),)

    def release(self, sums: Sequence[Array], weights: Sequence[float], t: int, noise: Array) -> Any:
        """Returns the noisy sum of step t. `noise` has standard deviation σC."""
        total = sum(w * s for w, s in zip(weights, sums, strict=True))
        return total + self.noise(t) * noise

    def scaled_noise(self, factor: float) -> "Rule":
        """Returns the rule with `factor` times the noise."""
        return dataclasses.replace(self, noise=lambda t: factor * self.noise(t))


def run(
    rules: Sequence[Rule],
    start: Array,
    clipped_sums: Iterable[ClippedSums],
    noise: Iterable[Array],
    *,
    rates: Sequence[Sequence[float]],
    batch_size: int,
) -> Iterator[list[Array]]:
    """Yields the iterates x_1, x_2, … of all rules, on the same batches and noise.

    Args:
        rules: The update rules.
        start: x_0.
        clipped_sums: One function for each step, of that step's batch.
        noise: One draw for each step, with standard deviation σC.
        rates: Learning rates of each rule and step.
        batch_size: The expected batch size, which sums are divided by.
    """
    iterates, filters = [[start] for _ in rules], [rule.new_filter() for rule in rules]
    for t, (sums_of, w) in enumerate(zip(clipped_sums, noise, strict=False)):
        wanted = [rule.combinations(x, t) for rule, x in zip(rules, iterates, strict=True)]
        sums = iter(sums_of([points for combined in wanted for _, points in combined]))
        for i, rule in enumerate(rules):
            weights = [weight for weight, _ in wanted[i]]
            total = rule.release([next(sums) for _ in weights], weights, t, w)
            m = filters[i](total / batch_size)
            if rule.normalize:
                m = m / np.linalg.norm(m, axis=-1, keepdims=True)
            iterates[i] = [*iterates[i], iterates[i][-1] - rates[i][t] * m][-LONGEST:]
        yield [x[-1] for x in iterates]


class LowPass:
    """The filter m_t = −Σ a_i m_{t−i} + Σ b_i g_{t−i}, divided by a correction c_t.

    With `exact`, c_t is the filter's response to the constant 1. Otherwise it is b_0 in every step,
    which leaves a gain of 1/b_0.
    """

    def __init__(self, b: Sequence[float], a: Sequence[float] = (), exact: bool = True):
        self._m: list[Any] = []
        self._g: list[Any] = []
        self._b, self._a = b, a
        self._unit = LowPass(b, a, exact=False) if exact else None

    def _filtered(self, g: Any) -> Any:
        self._g = [g, *self._g][: len(self._b)]
        m = sum(b * x for b, x in zip(self._b, self._g, strict=False))
        m = m - sum(a * x for a, x in zip(self._a, self._m, strict=False))
        self._m = [m, *self._m][: len(self._a)]
        return m

    def __call__(self, g: Array) -> Array:
        """Returns m_t / c_t for the input g_t."""
        c = self._b[0] if self._unit is None else self._unit._filtered(1.0)
        return self._filtered(g) / c


class Average:
    """The filter m_t = (1 − κ) m_{t−1} + κ g_t with m_{−1} = g_0."""

    def __init__(self, kappa: float):
        self._kappa = kappa
        self._m: Array | None = None

    def __call__(self, g: Array) -> Array:
        """Returns m_t for the input g_t."""
        before = g if self._m is None else self._m
        found: Array = (1 - self._kappa) * before + self._kappa * g
        self._m = found
        return found


def _lagged(iterates: Sequence[Array], t: int, lag: int) -> Array:
    return iterates[-1 - min(lag, t)]


def _extrapolated(iterates: Sequence[Array], t: int, gamma: float) -> Array:
    return iterates[-1] + gamma * (iterates[-1] - _lagged(iterates, t, 1))


def dp_sgd(**options: Any) -> Rule:
    """Returns DP-SGD; with a filter, DOPPLER. `options` are attributes of `Rule`."""
    return Rule(lambda iterates, t: ((1.0, iterates[-1]),), **options)


def paper_pmlf(length: int, beta: float, new_filter: Callable[[], Filter]) -> Rule:
    """Returns DP-PMLF as printed: the weighted mean over k iterates is clipped."""
    total = sum(beta**i for i in range(length))

    def points(iterates: Sequence[Array], t: int) -> Points:
        return tuple((beta**i / total, _lagged(iterates, t, i)) for i in range(length))

    return Rule(points, new_filter=new_filter)


def released_pmlf(length: int, new_filter: Callable[[], Filter] = lambda: lambda g: g) -> Rule:
    """Returns the released DP-PMLF: k clipped gradients with the noise of one.

    The past points are x_{t−2}, …, x_{t−k}, or x_0 where these do not exist yet.
    """

    def points(iterates: Sequence[Array], t: int) -> Points:
        lags = (0, *range(2, length + 1))
        return tuple((1.0, _lagged(iterates, t, lag)) for lag in lags)

    return Rule(points, clip_apart=True, new_filter=new_filter)


def disk_weight(kappa: float, gamma: float) -> float:
    """Returns c = (1 − κ)/(κγ), the weight of DiSK's extrapolated point."""
    c = (1 - kappa) / (kappa * gamma)
    return 1.0 if math.isclose(c, 1.0) else c


def paper_disk(kappa: float, gamma: float, **options: Any) -> Rule:
    """Returns DiSK as printed: the combination of two gradients is clipped."""
    c = disk_weight(kappa, gamma)

    def points(iterates: Sequence[Array], t: int) -> Points:
        return (c, _extrapolated(iterates, t, gamma)), (1 - c, iterates[-1])

    return Rule(points, new_filter=lambda: Average(kappa), **options)


def released_disk(kappa: float, gamma: float) -> Rule:
    """Returns the released DiSK: two clipped gradients, noise scaled twice.

    Steps have unit length. The first release is 2(1 − c) times the clipped sum. The start of the
    filter is not among the measured facts. Here it is the paper's.
    """
    c = disk_weight(kappa, gamma)
    if c == 1.0:
        return paper_disk(kappa, gamma, normalize=True)
    scale = abs(1 - c) / math.hypot(c, 1 - c)

    def points(iterates: Sequence[Array], t: int) -> Points:
        if t == 0:
            return ((2 * (1 - c), iterates[-1]),)
        return (c, _extrapolated(iterates, t, gamma)), (1 - c, iterates[-1])

    return Rule(points, lambda t: scale, True, lambda: Average(kappa), True)
