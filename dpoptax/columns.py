"""Private statistics of the columns of a table: counts, means, scales and quantiles.

Training needs public numbers to normalize columns, such as the range of an age. If no public ones
exist, `release_counts` counts the values of all columns in public bins and adds noise, once. Means,
scales and quantiles are computed from these counts, at no further cost.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax import _pricing
from dpoptax._clipped_sum.clipped_sum import trust_clipped
from dpoptax._clips.clip import l2_clip
from dpoptax._random.keys import check_noise_key, words_of
from dpoptax._release.fixed_point import fixed_point_grid
from dpoptax._release.gaussian import gaussian_noise
from dpoptax.users import UserTable

if TYPE_CHECKING:
    from dpoptax._pricing.privacy_event import PrivacyEvent

Bins: TypeAlias = Sequence[float] | Sequence[str] | np.ndarray

__all__ = ["ColumnCounts", "release_counts"]


def __dir__() -> list[str]:
    return __all__


@dataclasses.dataclass(frozen=True)
class ColumnCounts:
    """Holds noisy counts of the values in each column. Public, at the price of `event`.

    Attributes:
      counts: the noisy count of each bin or word, and then that of missing values, by column,
        (bins + 1,) float64. A count may be negative: its noise has mean zero.
      bins: the edges or words of each column.
      stddev: the standard deviation of the noise of each count.
      event: the price, for `also` of `dpoptax.PrivacyPlan` and `dpoptax.accounting.guarantee`.
    """

    counts: dict[str, np.ndarray]
    bins: dict[str, tuple[Any, ...]] = dataclasses.field(repr=False)
    stddev: float
    event: "PrivacyEvent" = dataclasses.field(repr=False)

    def mean_and_scale(self, name: str) -> tuple[float, float]:
        """Returns the mean and the standard deviation of a numeric column.

        Values are taken as uniform in their bins, and missing ones are left out.
        """
        edges, counts = self._numeric(name)
        middles, widths, total = (edges[1:] + edges[:-1]) / 2, np.diff(edges), counts.sum()
        total = max(total, 1.0)  # noise may outweigh few values
        mean = float(np.clip(counts @ middles / total, edges[0], edges[-1]))
        variance = counts @ ((middles - mean) ** 2 + widths**2 / 12) / total
        return mean, math.sqrt(max(variance, widths.min() ** 2 / 12))

    def quantiles(self, name: str, levels: Sequence[float]) -> np.ndarray:
        """Returns the quantiles of a numeric column at levels in [0, 1], (levels,).

        They are interpolated in the bins, and missing values are left out.
        """
        edges, counts = self._numeric(name)
        below = np.maximum.accumulate(np.concatenate([[0.0], np.cumsum(counts)]))
        return np.interp(np.asarray(levels, float) * below[-1], below, edges)

    def _numeric(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(self.bins[name][0], str):
            raise ValueError(f"`name` must be a column with edges, got {name!r} with words.")
        return np.array(self.bins[name], float), self.counts[name][:-1]


def release_counts(
    columns: Mapping[str, Any],
    bins: Mapping[str, Bins],
    *,
    noise_multiplier: float,
    key: jax.Array,
    users: UserTable | None = None,
) -> ColumnCounts:
    """Counts the values of each column in public bins, with noise.

        counts_j = Σ_i onehot(x_ij) + σ √k N(0, I),   j = 1, …, k the columns

    With `users`, each user counts as 1, in equal parts for its rows. The price alone is
    `dpoptax.accounting.Guarantee(found.event).epsilon(delta)`.

    Privacy: one release of the Gaussian mechanism with multiplier σ = `noise_multiplier`, for every
    bit, as `dpoptax.gaussian_noise(fixed_point=True)`. In each column, an example adds 1 to one
    count, and a user adds numbers that are at least 0 and have the sum 1, whatever the values and
    the number of rows: the l2 norm is at most 1. So k columns change by at most √k in l2 norm, and
    the sums are exact, because they are sums of integers. The bins, the names of the columns and
    the number of examples or users are public: choose the bins without looking at the data. If
    an example or user may be replaced, the price doubles the sensitivity, as for gradients.

    Args:
      columns: arrays or lists of N values by name, such as a data frame. Only those in `bins` are
        read.
      bins: for a numeric column, two or more increasing edges; values beyond them count in the
        outer bins, and NaN as missing. For others, the words of a vocabulary; other values count as
        missing.
      noise_multiplier: σ > 0.
      key: a key that is not used elsewhere, such as `dpoptax.random_key_from_os()`. Keep it secret.
      users: the owner of each row, if ε shall be about users.

    Raises:
      ValueError: `bins` has no column, edges that do not increase, or a word twice; a column has
        another length, text for edges, or numbers for words; or σ is not positive, or too small or
        large for the number of rows.
      KeyError: `columns` lacks a column.

    >>> import dpoptax
    >>> columns = {"age": np.arange(20_000) % 60 + 20, "city": ["Bern", "Wil"] * 10_000}
    >>> bins = {"age": np.linspace(0, 100, 51), "city": ("Bern", "Genf", "Wil")}
    >>> found = release_counts(columns, bins, noise_multiplier=5.0, key=jax.random.key(0))
    >>> found.counts["city"].round(-2) + 0.0
    array([10000.,     0., 10000.,     0.])
    >>> [round(x) for x in (*found.mean_and_scale("age"), *found.quantiles("age", [0.25]))]
    [50, 17, 35]
    >>> plan = {"dataset_size": 20_000, "batch_size": 1000, "steps": 100}
    >>> plan = dpoptax.PrivacyPlan(**plan, epsilon=2.0, delta=1e-5, also=[found.event])
    """
    places = {name: _checked(name, each) for name, each in bins.items()}
    if not places:
        raise ValueError("`bins` must have a column, got none.")
    cells = {name: _cells(name, columns, each) for name, each in places.items()}
    rows = len(next(iter(cells.values()))) if users is None else users.num_records
    for name, found in cells.items():
        if found.shape != (rows,):
            raise ValueError(f"Column {name!r} must have shape ({rows},), got {found.shape}.")
    key, bound = check_noise_key(key), math.sqrt(len(places))
    size = rows if users is None else users.num_users
    grid = fixed_point_grid(bound, noise_multiplier=noise_multiplier, batch_size=size)
    unit = round(1 / grid)  # the integer of one example, or of all rows of a user
    if unit < 1:
        raise ValueError(
            f"`noise_multiplier` or the number of rows must be smaller, got {noise_multiplier} "
            f"and {size:,}."
        )
    weights = np.full(rows, unit) if users is None else users._shares(unit)
    total = {  # float64 is exact, since each sum is an integer below 2⁵³
        name: jnp.asarray(np.bincount(cell, weights, _missing(places[name]) + 1), jnp.int32)
        for name, cell in cells.items()
    }
    noise = gaussian_noise(
        noise_multiplier=noise_multiplier, batch_size=size, key=key, fixed_point=True
    )
    clipped = trust_clipped(total, l2_clip(bound), grid=grid, examples=size)
    means, _ = jax.jit(noise.update)(clipped, noise.init(total))
    counts = {name: size * np.asarray(means[name], np.float64) for name in places}
    event = dataclasses.replace(
        _pricing.privacy_event.release_event(noise_multiplier, words_of(key)),
        unit="example" if users is None else "user",
        owners=None if users is None else users.owners,
    )
    return ColumnCounts(counts, places, noise_multiplier * bound, event)


def _is_words(bins: Sequence[Any]) -> bool:
    return isinstance(bins[0], str)


def _missing(bins: Sequence[Any]) -> int:
    """Returns the place of the count of missing values."""
    return len(bins) if _is_words(bins) else len(bins) - 1


def _checked(name: str, bins: Bins) -> tuple[Any, ...]:
    """Returns the edges or the words of a column, or raises."""
    given = tuple(bins)
    if given and all(isinstance(word, str) for word in given):
        if len(set(given)) < len(given):
            raise ValueError(f"The words of {name!r} must differ, got {given}.")
        return given
    edges = np.array(given, float)
    if edges.ndim != 1 or len(edges) < 2 or not np.all(np.diff(edges) > 0):
        raise ValueError(f"The edges of {name!r} must be two or more and increase, got {given}.")
    if not np.all(np.isfinite(edges)):
        raise ValueError(f"The edges of {name!r} must be finite, got {given}.")
    return tuple(edges.tolist())


def _cells(name: str, columns: Mapping[str, Any], bins: tuple[Any, ...]) -> np.ndarray:
    """Returns the place of the count of each value in a column, or raises."""
    if name not in columns:
        raise KeyError(f"`columns` must have the column {name!r} of `bins`, got {list(columns)}.")
    if _is_words(bins):
        if np.asarray(columns[name]).dtype.kind in "biufc":  # no number equals a word
            raise ValueError(
                f"Column {name!r} must hold text, because its bins are words. For numbers, pass "
                "edges as bins."
            )
        numbers = {word: number for number, word in enumerate(bins)}
        return np.array([numbers.get(value, _missing(bins)) for value in columns[name]], np.int64)
    try:
        values = np.asarray(columns[name], np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"Column {name!r} must hold numbers, because its bins are edges. For text, pass the "
            "words that it may contain as bins."
        ) from None
    inside = np.clip(np.searchsorted(bins, values, side="right") - 1, 0, len(bins) - 2)
    return np.where(np.isnan(values), _missing(bins), inside)
