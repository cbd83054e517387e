"""Packs small arrays into one matrix, so that one kernel draws all their noise."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax._support.xla import unstack

# Numbers per row. The rest of the last row of each half is padding.
_WIDTH = 128
# The largest array, including padding. For larger ones, packing costs an extra pass through memory.
# Tuned by hand on one x86 CPU; no benchmark command repeats it.
_MAX_SIZE = 2**18
_WHOLE = slice(None)

HalvesFn = Callable[[tuple[int, ...]], tuple[int, int]]
"""Maps a shape to the lengths of a period and of its first half.

Elements are in row-major order. Numbers at the same place in both halves are drawn as a pair. If
the first half is the whole period, there are no pairs.
"""


class RowMatrix:
    """Lays out arrays, grouped by shape, as the rows of one matrix.

    Each half of each period has its own rows.

    Attributes:
      shape: the shape of the matrix.
      array: the index of each row's array.
      place: uint32, the place of each row's first number in its array. If numbers are drawn in
        pairs, the place of its first pair among the array's pairs.
      second: whether a row belongs to a second half.
      pair: for each row, the index among first-half rows of the row with the same pairs.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], halves: HalvesFn) -> None:
        """Computes the layout of the rows."""
        groups = {shape: [i for i, x in enumerate(shapes) if x == shape] for shape in shapes}
        self._groups = [(shape, _cut(shape, halves), indices) for shape, indices in groups.items()]
        cuts = [(cut, i) for _, cut, indices in self._groups for i in indices]
        self.array = np.concatenate([np.full(cut.rows, i) for cut, i in cuts])
        self.place = np.concatenate([cut.place() for cut, _ in cuts])
        self.second = np.concatenate([cut.second() for cut, _ in cuts])
        self.shape = len(self.array), _WIDTH
        # Each first half is followed by its second half. So a row of the second half has the pairs
        # of the row that lies before it by the rows of a half.
        places = np.cumsum(~self.second) - 1
        length = np.concatenate([np.full(cut.rows, cut.rows_of_half) for cut, _ in cuts])
        first = np.arange(len(self.array)) - np.where(self.second, length, 0)
        self.pair = places[first]

    def unpacked(self, matrix: jax.Array) -> list[jax.Array]:
        """Unpacks the arrays of a matrix."""
        stacks, start = [], 0
        for shape, cut, indices in self._groups:
            end = start + cut.rows * len(indices)
            stacks.append(_trim_rows(matrix[start:end], cut).reshape(-1, *shape))
            start = end
        found: dict[int, jax.Array] = {}
        for (_, _, indices), parts in zip(self._groups, unstack(*stacks), strict=True):
            found.update(zip(indices, parts, strict=True))
        return [found[i] for i in range(len(found))]

    def drawn_by(
        self, keys: jax.Array, which: np.ndarray | slice = _WHOLE
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the key of each row, (rows, 1), and the places of all its numbers.

        `keys` has one key per array.
        """
        place = jnp.asarray(self.place[which])[:, None]
        along = lax.broadcasted_iota(np.uint32, (len(place), _WIDTH), 1)
        return keys[self.array[which]][:, None], place + along


def fits(shape: tuple[int, ...], halves: HalvesFn) -> bool:
    """Returns whether an array is small enough for rows."""
    return math.prod(shape) > 0 and _cut(shape, halves).rows * _WIDTH <= _MAX_SIZE


class _Cut(NamedTuple):
    """Describes how the halves of an array's periods are cut into rows."""

    periods: int
    period: int
    half: int

    @property
    def sides(self) -> int:
        return 1 if self.half == self.period else 2

    @property
    def rows_of_half(self) -> int:
        return -(-self.half // _WIDTH)

    @property
    def rows(self) -> int:
        return self.periods * self.sides * self.rows_of_half

    def second(self) -> np.ndarray:
        """Returns whether each row belongs to a second half."""
        return np.tile(np.repeat(np.arange(self.sides) == 1, self.rows_of_half), self.periods)

    def place(self) -> np.ndarray:
        """Returns the place of each row. Both halves have the places of their pairs."""
        of_half = np.tile(np.arange(self.rows_of_half) * _WIDTH, self.sides)
        before = np.arange(self.periods)[:, None] * self.half
        return (before + of_half).ravel().astype(np.uint32)


def _cut(shape: tuple[int, ...], halves: HalvesFn) -> _Cut:
    period, half = halves(shape)
    return _Cut(math.prod(shape) // period, period, half)


def _trim_rows(rows: jax.Array, cut: _Cut) -> jax.Array:
    """Removes the padding from the rows of one or more arrays."""
    halves = rows.reshape(-1, cut.rows_of_half * _WIDTH)[:, : cut.half]
    return halves.reshape(-1, cut.sides * cut.half)[:, : cut.period]
