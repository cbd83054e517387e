"""Public linear maps of gradients, parameter by parameter: there before the clip, and back."""

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

from dpoptax._serialization import serializable
from dpoptax._tree import PyTree, is_masked, widen

# A gradient times two such scales stays far from the ends of float32.
_SCALES = (1e-9, 1e9)
# How far U U⁻¹ may be from I in any entry: beyond, what comes back is not what went in.
_RESIDUAL = 1e-2


class Diagonal(NamedTuple):
    """A scale of each entry: g ↦ s₁ ⊙ s₂ ⊙ … ⊙ g.

    Attributes:
      scales: arrays that broadcast to the parameter: (R, 1) and (1, C) for a scale on each side of
        a kernel, (R, C) for one of every entry. Positive.
    """

    scales: tuple[jax.Array, ...]


class Sides(NamedTuple):
    """A matrix on each side of a kernel: g ↦ U g V, g read as (R, C).

    The last axis of the parameter is the columns, C; all before it are the rows, R. None for the
    identity.

    Attributes:
      rows: U, (R, R).
      columns: V, (C, C).
      rows_inverse: U⁻¹; None to have it computed.
      columns_inverse: V⁻¹; None to have it computed.
    """

    rows: jax.Array | None = None
    columns: jax.Array | None = None
    rows_inverse: jax.Array | None = None
    columns_inverse: jax.Array | None = None


Factor: TypeAlias = Diagonal | Sides


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearMap:
    """A public linear map T of gradients, of each parameter by itself.

    Attributes:
      factors: one for each leaf of the parameters, in the order of `jax.tree.leaves`; None for the
        identity.
      back: whether a release is mapped back by T⁻¹. Static.
    """

    factors: tuple[Factor | None, ...]
    back: bool = dataclasses.field(default=True, metadata={"static": True})

    def forward(self, grads: PyTree) -> PyTree:
        """T g, in float32 at least."""
        return self._each(forward, grads)

    def returned(self, mean: PyTree) -> PyTree:
        """T⁻¹ of a mean of mapped gradients, or itself where it stays mapped."""
        return self._each(_inverse, mean) if self.back else mean

    def _each(self, apply: Callable[[Factor | None, jax.Array], jax.Array], tree: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        mapped = [apply(f, x) for f, x in zip(self.factors, leaves, strict=True)]
        return jax.tree.unflatten(structure, mapped)


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearMapState:
    """State that holds the map of the next step; `gradient_points` finds it by its type.

    Attributes:
      factors: a tree like the parameters, of `Diagonal` and `Sides`. Public data: computed from
        releases and from public data, never from private data.
      back: whether a release is mapped back. Static.
    """

    factors: PyTree
    back: bool = dataclasses.field(default=True, metadata={"static": True})

    def of(self, params: PyTree) -> LinearMap:
        """The map of gradients by these parameters; the identity where `optax.masked` masks."""
        structure: jax.tree_util.PyTreeDef = jax.tree.structure(params)
        leaves = structure.flatten_up_to(self.factors)
        return LinearMap(tuple(None if is_masked(f) else f for f in leaves), self.back)


def forward(factor: Factor | None, gradient: jax.Array) -> jax.Array:
    """A gradient of one parameter, mapped, in float32 at least."""
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
            "Sides without their inverses: want those that dpoptax.extend.linear_map makes"
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
    """A factor for each parameter, from a tree that is a prefix of the parameters.

    Raises:
      ValueError: a factor that does not fit its parameter, or a tree that is no prefix.
    """
    given = jax.tree.leaves(factors, is_leaf=_is_factor)
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(factors, is_leaf=_is_factor)
    try:
        subtrees = structure.flatten_up_to(params)
    except ValueError as error:
        raise ValueError(
            f"factors: want a tree that is a prefix of the parameters: {error}"
        ) from error
    found = [
        jax.tree.map(lambda p, f=f: p if is_masked(p) else _fit(f, p), subtree, is_leaf=is_masked)
        for f, subtree in zip(given, subtrees, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


def _is_factor(x: object) -> bool:
    return isinstance(x, Diagonal | Sides)


def _fit(given: Factor | ArrayLike, param: jax.Array) -> Factor:
    """A factor whose scales have the parameter's axes, and whose matrices have inverses."""
    shape = jnp.shape(param)
    if isinstance(given, Sides):
        if len(shape) < 2:
            raise ValueError(
                f"Sides for a parameter of shape {shape}: want one with two axes or more"
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
            f"a scale of shape {scale.shape} does not broadcast to its parameter, {shape}"
        )
    return scale.reshape(thin)


def _matrix(
    side: str, given: jax.Array | None, inverse: jax.Array | None, size: int
) -> tuple[jax.Array | None, jax.Array | None]:
    if given is None:
        return None, None
    for name, x in ((side, given), (f"{side}_inverse", inverse)):
        if x is not None and jnp.shape(x) != (size, size):
            raise ValueError(f"{name} has shape {jnp.shape(x)}: want ({size}, {size})")
    matrix = jnp.asarray(given, jnp.float32)
    found = jnp.linalg.inv(matrix) if inverse is None else jnp.asarray(inverse, jnp.float32)
    return matrix, found


def identity(factors: PyTree) -> PyTree:
    """Factors of the same kinds that leave gradients as they are."""

    def one(factor: Factor) -> Factor:
        if isinstance(factor, Diagonal):
            return jax.tree.map(jnp.ones_like, factor)
        return jax.tree.map(lambda matrix: jnp.eye(len(matrix), dtype=matrix.dtype), factor)

    return jax.tree.map(one, factors, is_leaf=_is_factor)


def matrix_shape(param: jax.Array) -> tuple[int, int]:
    """Rows and columns of a kernel, its last axis the columns; a vector, or a scalar, is a row."""
    return (math.prod(param.shape[:-1]), param.shape[-1]) if param.ndim else (1, 1)


def sound(factors: PyTree) -> jax.Array:
    """Whether every factor is finite and can be taken back, a boolean scalar."""
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
