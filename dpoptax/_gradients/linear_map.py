"""Defines public linear maps of gradients before the clip, and their inverses."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from dpoptax._support.serialization import SerializableState
from dpoptax._support.tree import PyTree, is_masked, widen

# The range of scales. A gradient times two of them stays well within the range of float32.
_SCALES = (1e-9, 1e9)
# The largest deviation of an entry of U U⁻¹ from I. Beyond it, mapping back is inaccurate.
_RESIDUAL = 1e-2


class Diagonal(NamedTuple):
    """Scales each entry, g ↦ s₁ ⊙ s₂ ⊙ … ⊙ g.

    Attributes:
      scales: positive arrays that broadcast to the parameter: (R, 1) and (1, C) for the sides of a
        kernel, (R, C) for its entries.
    """

    scales: tuple[jax.Array, ...]


class Sides(NamedTuple):
    """Multiplies both sides of a kernel by matrices, g ↦ U g V, with g read as (R, C).

    The last axis of the parameter gives the columns, C, and all other axes give the rows, R. `None`
    is the identity.

    Attributes:
      rows: U, (R, R).
      columns: V, (C, C).
      rows_inverse: U⁻¹, or `None` to compute it.
      columns_inverse: V⁻¹, or `None` to compute it.
    """

    rows: jax.Array | None = None
    columns: jax.Array | None = None
    rows_inverse: jax.Array | None = None
    columns_inverse: jax.Array | None = None


Factor: TypeAlias = Diagonal | Sides


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearMap:
    """Represents a public linear map T of gradients, separate for each parameter.

    Attributes:
      factors: one for each leaf of the parameters, in the order of `jax.tree.leaves`; `None` for
        the identity.
      back: whether a release is mapped back with T⁻¹. Static.
      reference: the public data of a clip that follows the run, in the units of T g, or `None`.
    """

    factors: tuple[Factor | None, ...]
    back: bool = dataclasses.field(default=True, metadata={"static": True})
    reference: PyTree = None

    def forward(self, grads: PyTree) -> PyTree:
        """Returns T g, in float32 or wider."""
        return self._each(forward, grads)

    def map_leaf(self, leaf: int) -> Callable[[jax.Array], jax.Array]:
        """Returns the map of one parameter's gradient."""
        return functools.partial(forward, self.factors[leaf])

    def returned(self, mean: PyTree) -> PyTree:
        """Returns T⁻¹ of a mean of mapped gradients, or the mean if `back` is false."""
        return self._each(_inverse, mean) if self.back else mean

    def _each(self, apply: Callable[[Factor | None, jax.Array], jax.Array], tree: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        mapped = [apply(f, x) for f, x in zip(self.factors, leaves, strict=True)]
        return jax.tree.unflatten(structure, mapped)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearMapState(SerializableState):
    """Holds the map of the next step. `gradient_points` finds it by its type.

    Attributes:
      factors: a tree like the parameters, of `Diagonal` and `Sides`. They must be public, computed
        only from releases and public data.
      back: whether a release is mapped back. Static.
    """

    factors: PyTree
    back: bool = dataclasses.field(default=True, metadata={"static": True})

    def of(self, params: PyTree, reference: PyTree = None) -> LinearMap:
        """Returns the map for `params`. It is the identity for leaves of `optax.masked`.

        `reference` is the reference of the clip, in the units of T g.
        """
        structure: jax.tree_util.PyTreeDef = jax.tree.structure(params)
        leaves = structure.flatten_up_to(self.factors)
        factors = tuple(None if is_masked(f) else f for f in leaves)
        return LinearMap(factors, self.back, reference)


def forward(factor: Factor | None, gradient: jax.Array) -> jax.Array:
    """Returns the mapped gradient of one parameter, in float32 or wider."""
    if factor is None:
        return gradient
    gradient = widen(gradient)
    if isinstance(factor, Diagonal):
        return functools.reduce(operator.mul, factor.scales, gradient)
    return _multiply(factor.rows, factor.columns, gradient)


def _inverse(factor: Factor | None, mapped: jax.Array) -> jax.Array:
    if factor is None:
        return mapped
    mapped = widen(mapped)
    if isinstance(factor, Diagonal):
        return functools.reduce(operator.truediv, factor.scales, mapped)
    inverses = factor.rows_inverse, factor.columns_inverse
    if any((x is None) != (y is None) for x, y in zip(factor[:2], inverses, strict=True)):
        raise ValueError(
            "`Sides` must have inverses to map back. Use those of `dpoptax.extend.linear_map`."
        )
    return _multiply(*inverses, mapped)


def _multiply(rows: jax.Array | None, columns: jax.Array | None, x: jax.Array) -> jax.Array:
    matrix = x.reshape(-1, x.shape[-1])
    if rows is not None:
        matrix = jnp.matmul(rows, matrix, precision=lax.Precision.HIGHEST)
    if columns is not None:
        matrix = jnp.matmul(matrix, columns, precision=lax.Precision.HIGHEST)
    return matrix.reshape(x.shape)


def resolve(factors: PyTree, params: PyTree) -> PyTree:
    """Returns a factor for each parameter, from a tree prefix of the parameters.

    Raises:
      ValueError: a factor does not fit its parameter, or the tree is not a prefix.
    """
    given = jax.tree.leaves(factors, is_leaf=_is_factor)
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(factors, is_leaf=_is_factor)
    try:
        subtrees = structure.flatten_up_to(params)
    except ValueError as error:
        raise ValueError(f"`factors` must be a tree prefix of the parameters: {error}") from error
    found = [
        jax.tree.map(lambda p, f=f: p if is_masked(p) else _fit(f, p), subtree, is_leaf=is_masked)
        for f, subtree in zip(given, subtrees, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


def _is_factor(x: object) -> bool:
    return isinstance(x, Diagonal | Sides)


def _fit(given: Factor | ArrayLike, param: jax.Array) -> Factor:
    """Returns a factor with the parameter's axes, and with inverses of matrices."""
    shape = jnp.shape(param)
    if isinstance(given, Sides):
        if len(shape) < 2:
            raise ValueError(
                f"A parameter must have at least two axes for `Sides`, got shape {shape}."
            )
        rows = _matrix("rows", given.rows, given.rows_inverse, math.prod(shape[:-1]))
        columns = _matrix("columns", given.columns, given.columns_inverse, shape[-1])
        return Sides(rows[0], columns[0], rows[1], columns[1])
    scales: Sequence[ArrayLike] = given.scales if isinstance(given, Diagonal) else (given,)
    return Diagonal(tuple(_scale(scale, shape) for scale in scales))


def _scale(given: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    scale = jnp.asarray(given, jnp.float32)
    rank = len(shape)
    thin = (1,) * (rank - scale.ndim) + scale.shape
    if len(thin) != rank or any(n not in (1, m) for n, m in zip(thin, shape, strict=True)):
        raise ValueError(
            f"A scale must broadcast to its parameter, {shape}, got shape {scale.shape}."
        )
    return scale.reshape(thin)


def _matrix(
    side: str, given: jax.Array | None, inverse: jax.Array | None, size: int
) -> tuple[jax.Array | None, jax.Array | None]:
    if given is None:
        return None, None
    for name, x in ((side, given), (f"{side}_inverse", inverse)):
        if x is not None and jnp.shape(x) != (size, size):
            raise ValueError(f"`{name}` must have shape ({size}, {size}), got {jnp.shape(x)}.")
    matrix = jnp.asarray(given, jnp.float32)
    found = jnp.linalg.inv(matrix) if inverse is None else jnp.asarray(inverse, jnp.float32)
    return matrix, found


def identity(factors: PyTree) -> PyTree:
    """Returns factors of the same types that do not change gradients."""

    def one(factor: Factor) -> Factor:
        if isinstance(factor, Diagonal):
            return jax.tree.map(jnp.ones_like, factor)
        return jax.tree.map(lambda matrix: jnp.eye(len(matrix), dtype=matrix.dtype), factor)

    return jax.tree.map(one, factors, is_leaf=_is_factor)


def matrix_shape(param: jax.Array) -> tuple[int, int]:
    """Returns the numbers of rows and columns of a kernel.

    The last axis gives the columns. A vector or scalar is one row.
    """
    return (math.prod(param.shape[:-1]), param.shape[-1]) if param.ndim else (1, 1)


def sound(factors: PyTree) -> jax.Array:
    """Returns whether all factors are finite and invertible, a boolean scalar."""
    flags = [_sound(f) for f in jax.tree.leaves(factors, is_leaf=_is_factor) if _is_factor(f)]
    return jnp.all(jnp.stack([jnp.bool_(True), *flags]))


def _sound(factor: Factor) -> jax.Array:
    if isinstance(factor, Diagonal):
        low, high = _SCALES
        inside = [jnp.all((s >= low) & (s <= high)) for s in factor.scales]
        return jnp.all(jnp.stack([jnp.bool_(True), *inside]))
    flags = [jnp.bool_(True)]
    pairs = ((factor.rows, factor.rows_inverse), (factor.columns, factor.columns_inverse))
    for matrix, inverse in pairs:
        if matrix is not None and inverse is not None:
            product = jnp.matmul(matrix, inverse, precision=lax.Precision.HIGHEST)
            error = jnp.max(jnp.abs(product - jnp.eye(len(product))))
            bounded = jnp.max(jnp.abs(matrix)) <= _SCALES[1]
            flags.append((error <= _RESIDUAL) & bounded)
    return jnp.all(jnp.stack(flags))
