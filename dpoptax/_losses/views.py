"""Describes which entries of a parameter a derived value holds, and their order.

A reshape, a transposition, a slice or a scaling moves entries without mixing them. Except for the
scale, the gradient of such a view has the same norm as the gradient of the parameter, and two uses
of a parameter can be compared entry by entry.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax._support.marks import ANY_ORDER

# One axis in row-major order, as runs of (size, stride) in the flattened parameter.
# A (4, 6) array has the axes ((4, 6),) and ((6, 1),). Transposed and flattened to (24,), its only
# axis is ((6, 1), (4, 6)).
AxisRuns = tuple[tuple[int, int], ...]

_IDENTITY_PRIMITIVES = frozenset(
    {
        "convert_element_type", "copy", "copy_p", "name", "optimization_barrier", "pvary",
        "reduce_precision", "sharding_constraint",
    }
)  # fmt: skip
# Scales beyond this range may overflow or underflow although the values do not.
_MINIMUM_SCALE = 2.0**-60


def merge_runs(runs: AxisRuns) -> AxisRuns:
    """Drops runs of size one and joins contiguous neighbors."""
    merged: list[tuple[int, int]] = []
    for size, stride in runs:
        if size == 1:
            continue
        # An entry of the outer run is as far from the next as a whole inner run: (4, 6), (6, 1) are
        # (24, 1).
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


def _split_front(runs: list[tuple[int, int]], size: int) -> AxisRuns | None:
    """Removes `size` entries from the front of runs; `None` if they do not divide."""
    taken = []
    while size > 1:
        run, stride = runs[0]
        if size % run == 0:  # the whole run belongs to the new axis, and more runs follow
            taken.append(runs.pop(0))
            size //= run
        elif run % size == 0:  # the outer part of the run does, the inner part is left
            rest = run // size
            taken.append((size, stride * rest))
            runs[0] = (rest, stride)
            size = 1
        else:
            return None
    return tuple(taken)


@dataclasses.dataclass(frozen=True)
class View:
    """Describes entries of one parameter.

    The entries are scale · parameter.ravel()[offset + strides · index]. Each entry occurs at most
    once: operations start from all entries, and only permute or drop some.
    """

    leaf: int
    axes: tuple[AxisRuns, ...]
    offset: int = 0
    scale: float = 1.0

    @classmethod
    def identity(cls, leaf: int, shape: tuple[int, ...]) -> "View":
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return cls(leaf, tuple(merge_runs(((n, s),)) for n, s in zip(shape, strides, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(n for n, _ in axis) for axis in self.axes)

    def runs(self, axes: tuple[int, ...]) -> AxisRuns:
        """Returns the runs of several axes, read as one axis."""
        return merge_runs(sum((self.axes[i] for i in axes), ()))

    def transpose(self, permutation: tuple[int, ...]) -> "View":
        return dataclasses.replace(self, axes=tuple(self.axes[i] for i in permutation))

    def reshape(self, shape: tuple[int, ...]) -> "View | None":
        if tuple(shape) == self.shape:
            return self
        # All runs in row-major order. Each new axis takes its entries from the front.
        rest = list(self.runs(tuple(range(len(self.axes)))))
        axes: list[AxisRuns] = []
        for size in shape:
            axis = _split_front(rest, size)
            if axis is None:
                return None
            axes.append(axis)
        return dataclasses.replace(self, axes=tuple(axes))

    def slice(
        self, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int] | None
    ) -> "View | None":
        axes, offset = [], self.offset
        for axis, size, start, limit, step in zip(
            self.axes, self.shape, starts, limits, strides or [1] * len(starts), strict=True
        ):
            if (start, limit, step) == (0, size, 1):
                axes.append(axis)
            # Entries 2 to 5 of the axis ((6, 1), (4, 6)) are not evenly spaced in the parameter, so
            # an axis of several runs is not cut.
            elif len(axis) == 1:
                stride = axis[0][1]
                offset += start * stride
                axes.append(merge_runs(((len(range(start, limit, step)), stride * step),)))
            else:
                return None
        return dataclasses.replace(self, axes=tuple(axes), offset=offset)

    def gather(self, params: Mapping[str, Any], indices: np.ndarray) -> "View | None":
        """Returns the view after a gather of evenly spaced, increasing rows, or `None`."""
        d, shape = params["dimension_numbers"], self.shape
        axes, rows = tuple(d.start_index_map), indices.reshape(-1).tolist()
        if len(axes) != 1 or axes != tuple(d.collapsed_slice_dims) or d.operand_batching_dims:
            return None
        (axis,) = axes
        # `w[jnp.array([0, 2, 4])]` is a gather, but reads the same entries as `w[0:5:2]`. A single
        # row has no distance to a next one, and any will do.
        steps = {b - a for a, b in itertools.pairwise(rows)} or {1}
        whole = all(n == shape[i] for i, n in enumerate(params["slice_sizes"]) if i != axis)
        # Indices outside would be clamped or dropped, so entries might repeat or be missing.
        inside = rows and rows[0] >= 0 and rows[-1] < shape[axis]
        if indices.ndim != 2 or not whole or not inside or len(steps) > 1 or min(steps) < 1:
            return None
        starts, limits, strides = [0] * len(shape), list(shape), [1] * len(shape)
        starts[axis], limits[axis], strides[axis] = rows[0], rows[-1] + 1, min(steps)
        found = self.slice(starts, limits, strides)
        # The other axes keep their order and become `offset_dims`. The indexed axis gets the place
        # that is left.
        order = [i for i in range(len(shape)) if i != axis]
        place = next(i for i in range(len(shape)) if i not in d.offset_dims)
        order.insert(place, axis)
        return None if found is None else found.transpose(tuple(order))

    def split(self, axis: int, sizes: Sequence[int]) -> "list[View | None]":
        """Returns the pieces along an axis."""
        starts, limits = [0] * len(self.axes), list(self.shape)
        pieces = []
        for size in sizes:
            limits[axis] = starts[axis] + size
            pieces.append(self.slice(starts, limits, None))
            starts[axis] += size
        return pieces

    def scatter(self, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Adds `values`, shaped like the view, to zeros of the given shape.

        This is the transpose of reading the view.
        """
        values = self.scale * values if self.scale != 1.0 else values
        # A permutation of all entries is a transposition, which is faster than a scatter. Axes are
        # not joined, since a reshape of a sharded axis would gather it.
        apart = sum(self.axes, ())
        if math.prod(self.shape) == math.prod(shape):
            # Runs sorted by their strides are in the row-major order of the parameter.
            order = sorted(range(len(apart)), key=lambda i: -apart[i][1])
            return values.reshape([n for n, _ in apart]).transpose(order).reshape(shape)
        runs = merge_runs(apart)
        # So is the addition of whole rows.
        row = math.prod(shape[1:])
        start, rest = divmod(self.offset, row)
        if len(runs) == 1 and runs[0][1] == 1 and not rest and not values.size % row:
            values = values.reshape(-1, *shape[1:])
            after = shape[0] - start - values.shape[0]
            zero = jnp.zeros((), values.dtype)
            return lax.pad(values, zero, [(start, after, 0), *[(0, 0, 0)] * len(shape[1:])])
        # Flat positions in the parameter, one for each entry of the view in row-major order.
        positions = jnp.full(1, self.offset)
        for size, stride in runs:
            positions = (positions[:, None] + stride * jnp.arange(size)[None]).ravel()
        flat = jnp.zeros(math.prod(shape), values.dtype)
        with jax.named_scope(ANY_ORDER):  # each entry gets at most one value
            return flat.at[positions].add(values.ravel()).reshape(shape)

    def entries_of(self, entries: np.ndarray) -> np.ndarray:
        """Returns the view's part, not a copy, of an array flattened like the parameter."""
        runs = self.runs(tuple(range(len(self.axes))))
        strides = [stride * entries.itemsize for _, stride in runs]
        # NumPy counts strides in bytes. Nothing is read outside, since the view lies in the
        # parameter.
        first = entries[self.offset :]
        return np.lib.stride_tricks.as_strided(first, [size for size, _ in runs], strides)


def view_of_result(
    view: View, name: str, params: Mapping[str, Any], constants: Sequence[Any]
) -> View | None:
    """Returns the view after one operation; `None` if it does more than move entries.

    `constants` holds the values of the other operands, `None` for unknown values.
    """
    if name in _IDENTITY_PRIMITIVES:
        return view
    if name == "reshape":
        # With `dimensions`, the axes would be permuted first.
        return view.reshape(params["new_sizes"]) if params.get("dimensions") is None else None
    if name == "transpose":
        return view.transpose(params["permutation"])
    if name == "squeeze":
        kept = [i for i in range(len(view.axes)) if i not in params["dimensions"]]
        return view.transpose(tuple(kept))
    if name == "broadcast_in_dim":
        # Only axes of size 1 may be new: otherwise entries would occur more than once.
        kept_shape = [params["shape"][i] for i in params["broadcast_dimensions"]]
        if math.prod(params["shape"]) != math.prod(view.shape) or tuple(kept_shape) != view.shape:
            return None
        return view.reshape(params["shape"])
    if name == "slice":
        return view.slice(params["start_indices"], params["limit_indices"], params["strides"])
    if name == "neg":
        return dataclasses.replace(view, scale=-view.scale)
    if name in ("mul", "div") and len(constants) == 1 and np.ndim(constants[0]) == 0:
        factor = constants[0]
        # A tracer has no known value. Zero, infinity and NaN are not scales of a view.
        if isinstance(factor, (int, float, np.generic, np.ndarray)) and factor:
            factor = float(factor)
            scale = view.scale * factor if name == "mul" else view.scale / factor
            if _MINIMUM_SCALE <= abs(scale) <= 1 / _MINIMUM_SCALE:
                return dataclasses.replace(view, scale=scale)
    return None
