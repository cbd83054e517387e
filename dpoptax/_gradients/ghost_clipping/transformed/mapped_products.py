"""Applies a public linear map to the factors of gradients, before norms are taken.

    T(Σ_t rows_t ⊗ columns_t) = Σ_t (U rows_t) ⊗ (V columns_t)

for a scale or a matrix on each side. The mapped factors are stored, and then measured, clipped and
summed. The bound applies to the mapped gradients as stored, however they were rounded.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._gradients.clip import bounds
from dpoptax._gradients.ghost_clipping.norms.factor_products import Segment, contract, is_one_hot
from dpoptax._gradients.ghost_clipping.trace.rules import FactorLayout
from dpoptax._gradients.ghost_clipping.trace.views import View
from dpoptax._gradients.ghost_clipping.transformed.cotangents import normalize_fixed
from dpoptax._gradients.linear_map import Diagonal, Factor
from dpoptax._support.xla import materialize


@dataclasses.dataclass(frozen=True, eq=False)
class ScaleStep:
    """Scales a factor by the `entries` of a scale of the map.

    `entries` are indices, (K, R, D) with R or D of size 1.
    """

    index: int
    entries: np.ndarray

    @property
    def acts_on_rows(self) -> bool:
        return self.entries.shape[1] != 1


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixStep:
    """Multiplies a factor by a matrix of the map, with entries permuted by `order`."""

    uses_map_rows: bool
    acts_on_rows: bool
    order: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class SideMap:
    """Applies a linear map to the factors of a product.

    Attributes:
      steps: the scalings and matrix products, in order.
    """

    steps: tuple[ScaleStep | MatrixStep, ...]

    @property
    def mixes_rows(self) -> bool:
        """Returns whether entries of rows are mixed, which is impossible for one-hot rows."""
        return any(isinstance(step, MatrixStep) and step.acts_on_rows for step in self.steps)

    def __call__(
        self, factor: Factor, segments: list[Segment]
    ) -> tuple[list[Segment], jax.Array, jax.Array]:
        """Maps the factors, and divides them by powers of two of each example.

        Returns:
          The stored factors, with entries of at most 2; the exponent (B,) of the divisor of both
          sides together; and whether the factors are finite, (B,). Factors that are not finite are
          zero.
        """
        exponent = jnp.zeros((), jnp.int32)
        for step in self.steps:
            if isinstance(step, ScaleStep):
                assert isinstance(factor, Diagonal)
                fixed = factor.scales[step.index].ravel()[step.entries]
            else:
                assert not isinstance(factor, Diagonal)
                matrix = factor.rows if step.uses_map_rows else factor.columns
                assert matrix is not None
                # V multiplies from the right, so its transpose acts on the columns of g.
                matrix = matrix if step.uses_map_rows else matrix.T
                fixed = matrix[step.order[:, None], step.order]
            fixed, found = normalize_fixed(fixed)
            exponent += found
            acts_on_rows = step.acts_on_rows
            segments = [
                _apply_step(step, s if acts_on_rows else s.swapped, fixed) for s in segments
            ]
            segments = segments if acts_on_rows else [s.swapped for s in segments]
        return _divide_segments(segments, exponent)


def _apply_step(step: ScaleStep | MatrixStep, segment: Segment, fixed: jax.Array) -> Segment:
    """Applies one step to the rows of a segment, or to columns for one-hot rows."""
    rows, columns = segment
    if isinstance(step, MatrixStep):
        return Segment(contract("dr,bktr->bktd", fixed, rows.astype(jnp.float32)), columns)
    scale = fixed.reshape(fixed.shape[0], -1)  # (K, R), either of size 1
    if not is_one_hot(rows):
        return Segment(rows * scale[None, :, None], columns)
    if scale.shape[1] == 1:
        picked = jnp.broadcast_to(scale, rows.shape[1:])
    else:
        scale = jnp.broadcast_to(scale, (rows.shape[1], scale.shape[1]))
        picked = jax.vmap(lambda r: jax.vmap(jnp.take)(scale, r))(rows)
    return Segment(rows, columns * picked[..., None])


def _divide_segments(
    segments: list[Segment], exponent: jax.Array
) -> tuple[list[Segment], jax.Array, jax.Array]:
    """Divides the factors by powers of two; see `SideMap.__call__`.

    One-hot factors do not change, and the other side is divided instead.
    """

    def top(side: tuple[jax.Array, ...]) -> jax.Array:
        ones = jnp.ones(side[0].shape[:1], jnp.float32)
        return functools.reduce(
            jnp.maximum, [ones if is_one_hot(x) else bounds.largest_entry(x) for x in side]
        )

    tops = jnp.stack([top(side) for side in zip(*segments, strict=True)])
    (exponents,), scales = bounds.make_scales([tops])
    over = []
    for segment in segments:
        sides = list(segment)
        for i, divisor in enumerate(exponents):
            # A one-hot side has no magnitude to divide.
            place = 1 - i if is_one_hot(segment[i]) else i
            sides[place] = bounds.divide_by_power(sides[place], divisor)
        over.append(Segment(*sides))
    return materialize(over), exponent + scales.exponent[0], jnp.all(scales.finite[0], axis=0)


def make_side_map(
    factor: Factor, view: View, layout: FactorLayout, shape: tuple[int, ...]
) -> SideMap | None:
    """Returns how a parameter's map acts on the factors; `None` if it mixes the sides.

    Args:
      factor: the parameter's part of the map.
      view: the entries that the product covers, cut by `layout`.
      layout: groups, rows and columns.
      shape: the parameter's shape.
    """
    sides = [_side_positions(view, axes) for axes in layout.sides]
    if isinstance(factor, Diagonal):
        scales = [_scale_step(i, s.shape, sides, view, shape) for i, s in enumerate(factor.scales)]
        return None if None in scales else SideMap(tuple(s for s in scales if s is not None))
    columns = shape[-1]
    steps = []
    for uses_map_rows, matrix in ((True, factor.rows), (False, factor.columns)):
        if matrix is None:
            continue
        # A kernel is read as (rows, columns) in row-major order: position = row · columns + column.
        number = np.floor_divide if uses_map_rows else np.remainder
        found = [number(view.offset + side, columns) for side in sides]
        varying = [i for i, x in enumerate(found) if np.any(x != x[0])]
        if matrix.shape[0] == 1:
            varying = varying or [1]
        if len(varying) != 1 or varying[0] == 0:
            return None
        order = found[varying[0]]
        # A side must visit each row (or column) of the map exactly once.
        if not np.array_equal(np.sort(order), np.arange(matrix.shape[0])):
            return None
        steps.append(MatrixStep(uses_map_rows, varying[0] == 1, order))
    return SideMap(tuple(steps))


def _side_positions(view: View, axes: tuple[int, ...]) -> np.ndarray:
    """Returns positions along a side in the flattened parameter, without the offset."""
    positions = np.zeros((), np.int64)
    for axis in axes:
        for size, stride in view.axes[axis]:
            positions = positions[..., None] + np.arange(size) * stride
    return positions.ravel()


def _scale_step(
    index: int, thin: tuple[int, ...], sides: list[np.ndarray], view: View, shape: tuple[int, ...]
) -> ScaleStep | None:
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
    groups, rows, columns = kept
    return ScaleStep(index, entries(view.offset + groups[:, None, None] + rows[:, None] + columns))
