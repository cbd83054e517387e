"""Checks whether two releases have independent noise of the claimed size."""

import dataclasses
from typing import Any

import jax
import numpy as np
from scipy import stats

from dpoptax._support.argument_checks import number
from dpoptax.auditing._exact_scores import FALSE_ALARM, Array, Checked, Finding, spread_p_value


@dataclasses.dataclass(frozen=True)
class NoiseReport(Checked):
    """Holds the result of `check_noise`.

    Attributes:
      stddev: the claimed standard deviation.
      coordinates: the number of coordinates of a release.
      correlation: ⟨z, z'⟩/(‖z‖ ‖z'‖) of the two samples of noise.
      stddevs: the standard deviations of both samples.
      intervals: limits of each standard deviation with 99.9 % confidence, (2, 2).
      tests: all tests, with their p-values.
    """

    stddev: float
    coordinates: int
    correlation: float
    stddevs: tuple[float, float]
    intervals: Array
    tests: tuple[Finding, ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        (low, high), (other_low, other_high) = self.intervals
        return "\n".join(
            [
                f"noise of {self.coordinates:,} coordinates, claimed standard deviation "
                f"{self.stddev:.4g}: {'NOT as claimed' if self.alarm else 'not contradicted'}",
                f"  standard deviations between {low:.4g} and {high:.4g}, and between "
                f"{other_low:.4g} and {other_high:.4g}",
                f"  correlation {self.correlation:.3g}",
                *(f"  {finding}" for finding in self.findings),
            ]
        )


def check_noise(first: Any, second: Any, *, stddev: float, signal: Any = 0.0) -> NoiseReport:
    """Checks whether two releases have independent normal noise of the claimed size.

    Take the releases of two steps, or of the first step of two runs, whose sums are zero or known:
    with gradients of zero, or an empty batch. Noise that two releases share can be subtracted, and
    noise that is too small has another price. The tests are exact:

    - The correlation of two independent samples, r² ~ Beta(1/2, (d − 1)/2) for d coordinates, also
      between leaves of one size of the first release.
    - Σ z²/stddev² ~ χ²(d), for each release.
    - Kolmogorov and Smirnov's test of z/stddev, for each release.

    No alarm proves nothing about the quality of the generator. A few thousand coordinates detect a
    standard deviation that is 5 % off.

    Args:
      first: a release, an array or a tree of arrays.
      second: another release of the same shapes.
      stddev: the claimed standard deviation of each coordinate, such as σC, or σC/B of a mean.
      signal: the release without noise, a number or a tree like `first`.

    Raises:
      ValueError: the shapes differ, there are fewer than two coordinates, a release is not finite,
        or `stddev` is not positive.

    >>> rng = np.random.default_rng(0)
    >>> first, second = rng.normal(size=(2, 5000))
    >>> print(check_noise(first, second, stddev=1.0))
    noise of 5,000 coordinates, claimed standard deviation 1: not contradicted
      standard deviations between 0.9636 and 1.029, and between 0.9688 and 1.035
      correlation 0.014
    >>> check_noise(first, first, stddev=1.0).alarm, check_noise(first, second, stddev=0.9).alarm
    (True, True)
    """
    if not 0 < number("stddev", stddev) < np.inf:
        raise ValueError(f"`stddev` must be positive and finite, got {stddev}.")
    leaves, others = _noise(first, signal, "first"), _noise(second, signal, "second")
    if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in others]:
        raise ValueError("`first` and `second` must have the same shapes.")
    z, other = (np.concatenate([leaf.ravel() for leaf in each]) for each in (leaves, others))
    if len(z) < 2:
        raise ValueError(f"`first` must have at least two coordinates, got {len(z)}.")
    samples = (z, other)
    correlation, between = _correlation("correlation of the releases", np.stack(samples))
    tests = [between, _leaves(leaves)]
    tests += [_size(each, stddev) for each in samples]
    tests += [_normal(each, stddev) for each in samples]
    limits = stats.chi2.ppf([1 - FALSE_ALARM / 2, FALSE_ALARM / 2], len(z))
    squares = [float(np.sum(each**2)) for each in samples]
    root_mean = (float(np.sqrt(squares[0] / len(z))), float(np.sqrt(squares[1] / len(z))))
    intervals = np.sqrt(np.divide.outer(squares, limits))
    return NoiseReport(stddev, len(z), correlation, root_mean, intervals, tuple(tests))


def _noise(release: Any, signal: Any, name: str) -> list[Array]:
    """Returns the leaves of a release minus its signal, in float64."""
    if np.ndim(signal) == 0 and not isinstance(signal, dict | list | tuple):
        signal = jax.tree.map(lambda _: signal, release)
    found = jax.tree.map(lambda x, s: np.asarray(x, np.float64) - s, release, signal)
    leaves: list[Array] = jax.tree.leaves(found)
    if not all(np.isfinite(leaf).all() for leaf in leaves):
        raise ValueError(f"`{name}` must be finite. Pass a release of a step that was not refused.")
    return leaves


def _correlation(name: str, samples: Array) -> tuple[float, Finding]:
    """Returns the greatest correlation of any two rows, (samples, d), and its test."""
    count, size = samples.shape
    norms = np.linalg.norm(samples, axis=1)
    if not norms.all():
        return 0.0, Finding(name, 1.0, "a sample without noise")
    unit = samples / norms[:, None]
    pairs = np.triu_indices(count, 1)
    found = (unit @ unit.T)[pairs]
    greatest = float(found[np.argmax(np.abs(found))])
    p_value = len(found) * float(stats.beta.sf(min(1.0, greatest**2), 0.5, (size - 1) / 2))
    return greatest, Finding(name, min(1.0, p_value), f"{greatest:.3g}")


def _leaves(leaves: list[Array]) -> Finding:
    """Tests leaves of one size against each other."""
    name, sizes = "correlation of leaves", [leaf.size for leaf in leaves]
    found = [
        _correlation(name, np.stack([leaf.ravel() for leaf in leaves if leaf.size == size]))[1]
        for size in set(sizes)
        if size > 1 and sizes.count(size) > 1
    ]
    if not found:
        return Finding(name, 1.0, "none")
    least = min(found, key=lambda finding: finding.p_value)
    return least._replace(p_value=min(1.0, least.p_value * len(found)))


def _size(z: Array, stddev: float) -> Finding:
    ratio = float(np.sqrt(np.mean((z / stddev) ** 2)))
    seen = f"{ratio:.4g} of the claimed one"
    return Finding("standard deviation", spread_p_value(z / stddev), seen)


def _normal(z: Array, stddev: float) -> Finding:
    found = stats.kstest(z / stddev, "norm")
    seen = f"distance {found.statistic:.3g} from the claimed law"
    return Finding("normal law", float(found.pvalue), seen)
