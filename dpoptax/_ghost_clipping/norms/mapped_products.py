"""Products of factors that go through a public linear map: each side by itself, before any norm.

    T(Σ_t rows_t ⊗ columns_t) = Σ_t (U rows_t) ⊗ (V columns_t)

for a scale or a matrix on each side. What comes out is stored, and is what is measured, clipped
and summed: the bound speaks of the mapped gradients as they are held, however they were rounded.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._clip import bounds
from dpoptax._ghost_clipping.norms.cotangents import normalised
from dpoptax._ghost_clipping.norms.factor_products import Segment, contract, indexed
from dpoptax._ghost_clipping.trace.rules import Layout
from dpoptax._ghost_clipping.trace.views import View
from dpoptax._linear_map import Diagonal, Factor
from dpoptax._xla import materialize


@dataclasses.dataclass(frozen=True, eq=False)
class Scaling:
    """A scale of the map, as (K, R, C): the entries of it that each is, one of R and C being 1."""

    index: int
    entries: np.ndarray

    @property
    def of_rows(self) -> bool:
        return self.entries.shape[1] != 1


@dataclasses.dataclass(frozen=True, eq=False)
class OnSide:
    """The matrix on a side of the map, for a side of the products, in the order of its entries."""

    of_map_rows: bool
    of_rows: bool
    order: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Mapping:
    """How a map goes on the sides of a product.

    Attributes:
      steps: what is done, one after the other.
    """

    steps: tuple[Scaling | OnSide, ...]

    @property
    def mixes_rows(self) -> bool:
        """Whether entries of rows are mixed, which one-hot ones do not allow."""
        return any(isinstance(step, OnSide) and step.of_rows for step in self.steps)

    def __call__(
        self, factor: Factor, segments: list[Segment]
    ) -> tuple[list[Segment], jax.Array, jax.Array]:
        """The mapped factors over powers of two of each example, so that no entry is above 2.

        Returns:
          The factors, stored; the exponent (B,) of what both sides together were divided by; and
          whether they are finite, (B,): what is not is zero.
        """
        exponent = jnp.zeros((), jnp.int32)
        for step in self.steps:
            if isinstance(step, Scaling):
                assert isinstance(factor, Diagonal)
                fixed = factor.scales[step.index].ravel()[step.entries]
            else:
                assert not isinstance(factor, Diagonal)
                matrix = factor.rows if step.of_map_rows else factor.columns
                assert matrix is not None
                # V goes from the right: the columns of g see its transpose.
                matrix = matrix if step.of_map_rows else matrix.T
                fixed = matrix[step.order[:, None], step.order]
            fixed, found = normalised(fixed)
            exponent += found
            of_rows = step.of_rows
            segments = [_step(step, s if of_rows else s.swapped, fixed) for s in segments]
            segments = segments if of_rows else [s.swapped for s in segments]
        return _over_powers(segments, exponent)


def _step(step: Scaling | OnSide, segment: Segment, fixed: jax.Array) -> Segment:
    """One step on the rows of a segment; of one-hot ones, the scale goes on the columns."""
    rows, columns = segment
    if isinstance(step, OnSide):
        return Segment(contract("dr,bktr->bktd", fixed, rows.astype(jnp.float32)), columns)
    scale = fixed.reshape(fixed.shape[0], -1)  # (K, R), either of size 1
    if not indexed(rows):
        return Segment(rows * scale[None, :, None], columns)
    if scale.shape[1] == 1:
        picked = jnp.broadcast_to(scale, rows.shape[1:])
    else:
        scale = jnp.broadcast_to(scale, (rows.shape[1], scale.shape[1]))
        picked = jax.vmap(lambda r: jax.vmap(jnp.take)(scale, r))(rows)
    return Segment(rows, columns * picked[..., None])


def _over_powers(
    segments: list[Segment], exponent: jax.Array
) -> tuple[list[Segment], jax.Array, jax.Array]:
    """What `Mapping` returns. One-hot factors stay; the other side is divided in their place."""

    def top(side: tuple[jax.Array, ...]) -> jax.Array:
        ones = jnp.ones(side[0].shape[:1], jnp.float32)
        return functools.reduce(jnp.maximum, [ones if indexed(x) else bounds.top(x) for x in side])

    tops = jnp.stack([top(side) for side in zip(*segments, strict=True)])
    (exponents,), scales = bounds.scales([tops])
    over = []
    for segment in segments:
        sides = list(segment)
        for i, divisor in enumerate(exponents):
            place = 1 - i if indexed(segment[i]) else i
            sides[place] = bounds.over_power(sides[place], divisor)
        over.append(Segment(*sides))
    return materialize(over), exponent + scales.exponent[0], jnp.all(scales.finite[0], axis=0)


def arrange(factor: Factor, view: View, layout: Layout, shape: tuple[int, ...]) -> Mapping | None:
    """How a parameter's map goes on the sides of products of it, or None where it mixes them.

    Args:
      factor: the parameter's.
      view: its entries that the product is of, cut by `layout`.
      layout: batch, rows and columns.
      shape: the parameter's.
    """
    sides = [_positions(view, axes) for axes in layout.sides]
    if isinstance(factor, Diagonal):
        scales = [_arranged(i, s.shape, sides, view, shape) for i, s in enumerate(factor.scales)]
        return None if None in scales else Mapping(tuple(s for s in scales if s is not None))
    columns = shape[-1]
    steps = []
    for of_map_rows, matrix in ((True, factor.rows), (False, factor.columns)):
        if matrix is None:
            continue
        number = np.floor_divide if of_map_rows else np.remainder
        found = [number(view.offset + side, columns) for side in sides]
        varying = [i for i, x in enumerate(found) if np.any(x != x[0])]
        if matrix.shape[0] == 1:
            varying = varying or [1]
        if len(varying) != 1 or varying[0] == 0:
            return None
        order = found[varying[0]]
        if not np.array_equal(np.sort(order), np.arange(matrix.shape[0])):
            return None
        steps.append(OnSide(of_map_rows, varying[0] == 1, order))
    return Mapping(tuple(steps))


def _positions(view: View, axes: tuple[int, ...]) -> np.ndarray:
    """The places in the flattened parameter along a side, less the view's offset."""
    positions = np.zeros((), np.int64)
    for axis in axes:
        for size, stride in view.axes[axis]:
            positions = positions[..., None] + np.arange(size) * stride
    return positions.ravel()


def _arranged(
    index: int,
    thin: tuple[int, ...],
    sides: list[np.ndarray],
    view: View,
    shape: tuple[int, ...],
) -> Scaling | None:
    def entries(positions: np.ndarray) -> np.ndarray:
        if math.prod(thin) == 1:
            return np.zeros_like(positions)
        places = np.unravel_index(positions, shape)
        kept = [p if n != 1 else np.zeros_like(p) for p, n in zip(places, thin, strict=True)]
        return np.asarray(np.ravel_multi_index(kept, thin))

    along = [entries(view.offset + side) for side in sides]
    varies = [bool(np.any(x != x[0])) for x in along]
    if varies[1] and varies[2]:
        return None
    kept = [side if flag else side[:1] for side, flag in zip(sides, varies, strict=True)]
    batch, rows, columns = kept
    return Scaling(index, entries(view.offset + batch[:, None, None] + rows[:, None] + columns))
