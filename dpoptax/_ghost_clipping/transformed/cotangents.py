"""Represents gradients of derived values while they are pulled back.

The gradient with respect to such a value is represented as outer products times a fixed array, plus
fixed arrays times a few numbers of each example:

    scale ⊙ Σ_t rows_t ⊗ columns_t + Σ_k basis_k ⊙ weights_k.

Scaling, sums along axes and products with matrices preserve this form. Fixed arrays depend on the
parameters only. Fixed arrays and weights have the axes of the value, with size 1 along axes on
which they are constant.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from dpoptax._ghost_clipping.factor_products import Segment, contract
from dpoptax._losses.rules import FactorLayout
from dpoptax._rounding import bounds
from dpoptax._support.xla import materialize


class NotFactoredError(Exception):
    """Signals that a gradient does not have this form."""


def normalize_fixed(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides a fixed array by its largest entry, and sets entries that are then tiny to zero.

    So products with a factor that is in the working range, and squares, lose nothing that matters.
    Returns the quotient and the divisor. Numbers that are not finite become 2⁴⁰, for which examples
    add zero or little.
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    largest = jnp.where(largest == 0, 1.0, largest)
    found = bounds.within_range(x / largest)
    return jnp.where(jnp.abs(found) < _SMALLEST_ENTRY, 0.0, found), largest


# Entries of fixed arrays that are smaller, relative to the largest, count as zero, for norm and sum
# alike.
_SMALLEST_ENTRY = 2.0**-40


def permute_axes(x: jax.Array, source: Sequence[int | None]) -> jax.Array:
    """Returns an array whose axis i is axis source[i] of `x`.

    If source[i] is `None`, axis i is new. Axes of `x` that are left out must have size 1.
    """
    kept = [i for i in source if i is not None]
    dropped = [i for i in range(x.ndim) if i not in kept]
    return x.transpose(*kept, *dropped).reshape([1 if i is None else x.shape[i] for i in source])


@dataclasses.dataclass(frozen=True, eq=False)
class FixedTerm:
    """Represents `basis` ⊙ `weights`, with weights (B, …). A basis of `None` is 1."""

    basis: jax.Array | None
    weights: jax.Array

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Returns the shape of one example's weights."""
        return self.weights.shape[1:]

    @property
    def fixed_axes(self) -> list[int]:
        """Returns the axes along which the weights do not vary."""
        return [i for i, n in enumerate(self.weight_shape) if n == 1]

    def times(self, y: jax.Array) -> "FixedTerm":
        # Weights absorb an array that varies only along axes on which they vary. Any other array is
        # multiplied into the basis, which all examples share.
        if all(n in (1, m) for n, m in zip(y.shape, self.weight_shape, strict=True)):
            return FixedTerm(self.basis, self.weights * y)
        return FixedTerm(y if self.basis is None else materialize(self.basis * y), self.weights)

    def total(self, axes: Iterable[int], shape: tuple[int, ...]) -> "FixedTerm":
        """Returns the sum over axes, which then have size 1, of a value of this `shape`."""
        axes = set(axes)
        fixed = [i for i in axes if self.weight_shape[i] == 1]
        rest = [i + 1 for i in axes if self.weight_shape[i] != 1]
        basis = jnp.ones((1,) * len(shape), jnp.float32) if self.basis is None else self.basis
        # A basis of size 1 along a summed axis counts once for each entry of the axis.
        missing = math.prod(shape[i] for i in fixed if basis.shape[i] == 1)
        basis = materialize(missing * jnp.sum(basis, fixed, keepdims=True))
        if not rest:
            return FixedTerm(None, self.weights).times(basis)
        # Σ_i weights_i basis_ij would need a number for each j and example.
        if any(n not in (1, m) for n, m in zip(basis.shape, self.weight_shape, strict=True)):
            raise NotFactoredError
        return FixedTerm(None, jnp.sum(self.weights * basis, rest, keepdims=True))

    def permuted(self, source: Sequence[int | None]) -> "FixedTerm":
        basis = None if self.basis is None else permute_axes(self.basis, source)
        return FixedTerm(basis, jax.vmap(lambda w: permute_axes(w, source))(self.weights))


@dataclasses.dataclass(frozen=True, eq=False)
class OuterSum:
    """Represents `scale` ⊙ Σ_t rows_t ⊗ columns_t. A scale of `None` is 1.

    Attributes:
      segment: the factors.
      layout: how the factors read the value, whose axes are those of `layout.split`.
      scale: a fixed array.
      known: cached contractions with fixed arrays, by the ids of these. The arrays are kept, so
        that ids stay unique.
    """

    segment: Segment
    layout: FactorLayout
    scale: jax.Array | None = None
    known: dict[tuple[int, ...], tuple[object, jax.Array]] = dataclasses.field(default_factory=dict)

    def times(self, y: jax.Array) -> "OuterSum":
        scale = y if self.scale is None else materialize(self.scale * y)
        # `known` is kept: its keys contain the id of the scale.
        return dataclasses.replace(self, scale=scale)

    def total(self, axes: Iterable[int]) -> FixedTerm:
        """Returns the sum over axes, which then have size 1."""
        return FixedTerm(None, jax.vmap(self.restore)(self.inner_product(None, axes)))

    def inner_product(self, basis: jax.Array | None, axes: Iterable[int]) -> jax.Array:
        """Returns the sum of basis ⊙ self over axes, (B, K, R, D), for a normalized basis."""
        is_summed = self.sides(axes)
        # Contract a summed side, the rows if both are. The other side is summed below.
        along = 1 if is_summed[1] else 2
        inside: list[tuple[jax.Array, jax.Array]] = []
        outside = []
        scale, divisor = (None, 1.0) if self.scale is None else normalize_fixed(self.scale)
        for fixed, y in ((basis, basis), (self.scale, scale)):
            if fixed is not None and y is not None:
                y = self.cut(y)
                # Arrays that are constant along the summed side factor out of the contraction.
                if y.shape[along] == 1:
                    outside.append(y)
                else:
                    inside.append((fixed, y))
        # Several terms ask for the contraction with the same array, and it is the costly part.
        # Fixed arrays are compared by identity, because their values are traced.
        key = (along, *(id(fixed) for fixed, _ in inside))
        if key not in self.known:
            x = functools.reduce(operator.mul, [y for _, y in inside]) if inside else None
            self.known[key] = inside, self._contract(x, along)
        value = functools.reduce(operator.mul, outside, self.known[key][1])
        for side in (0, 1, 2):  # one axis after the other, for shorter chains of roundings
            if is_summed[side] and value.shape[side + 1] != 1:
                value = materialize(jnp.sum(value, side + 1, keepdims=True))
        return value * divisor

    def _contract(self, x: jax.Array | None, along: int) -> jax.Array:
        """Sums x ⊙ Σ_t rows_t ⊗ columns_t along the rows, (B, K, 1, D), or the columns."""
        rows, columns = self.segment if along == 1 else self.segment.swapped
        rows, columns = rows.astype(jnp.float32), columns.astype(jnp.float32)
        if x is None:
            mixed = jnp.sum(rows, axis=-1, keepdims=True)
        else:
            x = x if along == 1 else x.swapaxes(1, 2)
            x = jnp.broadcast_to(x, (rows.shape[1], rows.shape[3], x.shape[2]))
            # Σ_r x[k, r, d] rows[t, r] for each t first, (B, K, L, D), so that no array has B R D
            # entries.
            mixed = contract("krd,bktr->bktd", x, rows)
        found = jnp.sum(mixed * columns, axis=2)
        # (B, K, D), or (B, K, R) with the sides exchanged.
        return found[:, :, None, :] if along == 1 else found[:, :, :, None]

    def transposed(self, source: Sequence[int]) -> "OuterSum":
        """Returns the gradient of a value whose axis i is axis source[i] of this one."""
        to = [source.index(i) for i in range(len(source))]
        sides = [tuple(to[i] for i in s) for s in self.layout.sides]
        layout = FactorLayout(tuple(self.layout.split[i] for i in source), *sides)
        scale = None if self.scale is None else permute_axes(self.scale, source)
        return OuterSum(self.segment, layout, scale)

    def times_matrix(self, matrix: jax.Array, axis: int) -> "OuterSum":
        """Returns the gradient of the left (0) or right (1) operand of a matrix product."""
        layout, scale = self.layout, self.scale
        if layout.stacks or len(layout.rows) != 1 or len(layout.columns) != 1:
            raise NotFactoredError
        if scale is not None and scale.size != 1:
            raise NotFactoredError
        matrix = matrix if scale is None else materialize(matrix * scale)
        # The contracted axes are axis 1 of the left operand and axis 0 of the right operand.
        # For a @ b, the gradient of a is g bᵀ and that of b is aᵀ g. The matrix maps one factor of
        # g, and the other one stays.
        mapped = contract(
            "dc,bktc->bktd" if axis == 0 else "rd,bktr->bktd",
            matrix,
            self._factor(1 - axis).astype(jnp.float32),
        )
        rows, columns = layout.split
        split = (rows, matrix.shape[0]) if axis == 0 else (matrix.shape[1], columns)
        acts_on_rows = layout.rows == (1 - axis,)
        segment = self.segment._replace(
            **{"rows" if acts_on_rows else "columns": materialize(bounds.within_range(mapped))}
        )
        return OuterSum(segment, dataclasses.replace(layout, split=split))

    def _factor(self, axis: int) -> jax.Array:
        return self.segment.rows if self.layout.rows == (axis,) else self.segment.columns

    def cut(self, x: jax.Array) -> jax.Array:
        """Reads a fixed array as (K, R, D), with size 1 for sides on which it is constant."""
        shape = list(x.shape)
        for side in self.layout.sides:
            if any(shape[i] != 1 for i in side):
                for i in side:
                    shape[i] = self.layout.split[i]
        sizes = [math.prod(shape[i] for i in side) for side in self.layout.sides]
        return jnp.broadcast_to(x, shape).transpose(sum(self.layout.sides, ())).reshape(sizes)

    def restore(self, x: jax.Array) -> jax.Array:
        """Inverts `cut`."""
        shape = [1] * len(self.layout.split)
        for side, size in zip(self.layout.sides, x.shape, strict=True):
            for i in side:
                shape[i] = self.layout.split[i] if size != 1 else 1
        return dataclasses.replace(self.layout, split=tuple(shape)).fold(x, tuple(shape))

    def sides(self, axes: Iterable[int]) -> list[bool]:
        """Returns whether stacks, rows and columns lie within the `axes` of the value.

        Raises:
          NotFactoredError: one of them lies only partly within the axes.
        """
        within = set(axes)
        found = []
        for side in self.layout.sides:
            flags = {i in within for i in side if self.layout.split[i] != 1}
            # A side that is summed in part would no longer be a factor.
            if len(flags) > 1:
                raise NotFactoredError
            # A side of size 1 has no flags, and counts as summed.
            found.append(flags != {False})
        if not (found[1] or found[2]):
            raise NotFactoredError
        return found
