"""Formats means over seeds with their spread, and differences that are paired by seed."""

import math
import statistics
from collections.abc import Iterable, Mapping

from scipy import stats

from dpoptax.training.run.figures import signed


def mean_and_deviation(values: Iterable[float], decimals: int = 2) -> str:
    """Returns the mean ± the standard deviation over seeds; for one seed, its value."""
    values = list(map(float, values))
    spread = f" ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{decimals}f}{spread}"


def paired_difference(
    ours: Mapping[int, float], theirs: Mapping[int, float]
) -> tuple[float, float]:
    """Returns the mean difference over the seeds of both, and half its 95 % interval.

    Half of the interval is Student's t times the standard error, and infinite for one seed.
    """
    values = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if len(values) < 2:
        return values[0] if values else math.nan, math.inf
    quantile = float(stats.t.ppf(0.975, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def mean_and_interval(mean: float, half: float) -> str:
    """Returns a difference ± half its interval, if that is finite."""
    return signed(mean, 2) + ("" if math.isinf(half) else f" ± {half:.2f}")
