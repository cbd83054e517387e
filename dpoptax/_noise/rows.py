"""Many small arrays as the rows of one matrix, for one kernel that draws the noise of all."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax._trees import unstacked

# Numbers in a row; what is left of an array's last row is padding.
_WIDTH = 128
# Arrays of at most so many numbers, padding included: a matrix of larger ones is another pass
# through memory. Where several have one shape, the network is deep, and its steps long beside that.
# Found by hand on one x86 CPU; no command of the benchmarks repeats it.
_MOST = 2**17
_MOST_OF_SEVERAL = 2**18

Halves = Callable[[tuple[int, ...]], tuple[int, int]]
"""Of a shape, how many numbers repeat (one after another, in row-major order), and how many of
those are the first half: the numbers of both halves are drawn in pairs."""


class Places(NamedTuple):
    """What the numbers of a matrix of rows are drawn by.

    Attributes:
      array: which array a row is of.
      pair: uint32, of every number its place in its array, the second half's counted like the
        first's.
      second: whether a number is in the second half.
    """

    array: np.ndarray
    pair: jax.Array
    second: jax.Array


class Rows:
    """Arrays of these shapes, each cut into rows of one matrix, those of a shape side by side."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], halves: Halves) -> None:
        """Lays the rows out."""
        groups = {shape: [i for i, x in enumerate(shapes) if x == shape] for shape in shapes}
        self._groups = [(shape, _cut(shape, halves), indices) for shape, indices in groups.items()]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return sum(cut.rows * len(indices) for _, cut, indices in self._groups), _WIDTH

    def packed(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The matrix of arrays of one dtype, with zeros behind each."""
        return jnp.concatenate(
            [_in_rows(arrays[i], cut) for _, cut, indices in self._groups for i in indices]
        )

    def unpacked(self, matrix: jax.Array) -> list[jax.Array]:
        """The arrays of a matrix."""
        stacks, start = [], 0
        for shape, cut, indices in self._groups:
            end = start + cut.rows * len(indices)
            stacks.append(_out_of_rows(matrix[start:end], cut).reshape(-1, *shape))
            start = end
        found: dict[int, jax.Array] = {}
        for (_, _, indices), parts in zip(self._groups, unstacked(*stacks), strict=True):
            found.update(zip(indices, parts, strict=True))
        return [found[i] for i in range(len(found))]

    def places(self) -> Places:
        """The place of every number of the matrix; that of padding is whatever comes out."""
        table = np.concatenate(
            [np.tile(cut.table(), (len(indices), 1)) for _, cut, indices in self._groups]
        )
        start, half, before = (jnp.asarray(table[:, [column]]) for column in range(3))
        within = start + lax.broadcasted_iota(np.uint32, self.shape, 1)
        second = within >= half
        array = np.concatenate([np.repeat(indices, cut.rows) for _, cut, indices in self._groups])
        return Places(array, before + jnp.where(second, within - half, within), second)


def fits(shape: tuple[int, ...], halves: Halves, *, several: bool) -> bool:
    """Whether an array is small enough for rows; `several` for one of several of its shape."""
    most = _MOST_OF_SEVERAL if several else _MOST
    return math.prod(shape) > 0 and _cut(shape, halves).rows * _WIDTH <= most


class _Cut(NamedTuple):
    """How an array is cut: each of its periods into rows of its own."""

    periods: int
    period: int
    half: int

    @property
    def rows(self) -> int:
        return self.periods * -(-self.period // _WIDTH)

    def table(self) -> np.ndarray:
        """Of each row its start in the period, the half, and the pairs of periods before."""
        starts = np.arange(0, self.period, _WIDTH, dtype=np.uint32)
        before = np.arange(self.periods, dtype=np.uint32) * np.uint32(self.half)
        rows = np.meshgrid(before, starts, indexing="ij")
        return np.stack([rows[1], np.full_like(rows[1], self.half), rows[0]], -1).reshape(-1, 3)


def _cut(shape: tuple[int, ...], halves: Halves) -> _Cut:
    period, half = halves(shape)
    return _Cut(math.prod(shape) // period, period, half)


def _in_rows(x: jax.Array, cut: _Cut) -> jax.Array:
    x = x.reshape(cut.periods, cut.period)
    padding = -cut.period % _WIDTH
    if padding:
        x = jnp.pad(x, ((0, 0), (0, padding)))
    return x.reshape(cut.rows, _WIDTH)


def _out_of_rows(rows: jax.Array, cut: _Cut) -> jax.Array:
    """Of as many arrays as there are rows for: without the padding."""
    padded = rows.reshape(-1, -(-cut.period // _WIDTH) * _WIDTH)
    return padded[:, : cut.period]
