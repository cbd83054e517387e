"""Singular values of kernels under white noise of known size.

A kernel (…, n) is read as the matrix (m, n) of its inputs and outputs, m the product of the leading
axes. With noise of standard deviation τ in every entry, singular values up to a = τ(√m + √n) are
noise. A larger singular value s comes from a singular value x < s of the signal. The noise rotates
the left and right singular vectors; c is the product of the cosines of both angles:

    q = √((s² − a²)(s² − b²)),    b = τ|√m − √n|,
    x² = (s² − (m + n)τ² + q)/2,    c = q/(s x)

in the limit of large matrices of small rank (Benaych-Georges and Nadakuditi, 2012).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpoptax._support.xla import out_sharding


def is_kernel(x: jax.Array) -> bool:
    """Returns whether an array has at least two axes."""
    return x.ndim >= 2


def matrix_shape(kernel: jax.Array) -> tuple[int, int]:
    """Returns the numbers of rows and columns of a kernel.

    The last axis gives the columns. A vector or scalar is one row.
    """
    return (math.prod(kernel.shape[:-1]), kernel.shape[-1]) if kernel.ndim else (1, 1)


def run_replicated(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Returns `run(x)`, gathering an explicitly sharded `x` and resharding the result."""
    split = out_sharding(x)
    if split is None:
        return run(x)
    whole = jax.sharding.NamedSharding(split.mesh, jax.sharding.PartitionSpec(*[None] * x.ndim))
    return jax.sharding.reshard(run(jax.sharding.reshard(x, whole)), split)


def map_singular_values(kernel: jax.Array, replace: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns U diag(replace(s)) Vᵀ of a kernel, in its shape and dtype.

    It is computed in float32.
    """

    def run(kernel: jax.Array) -> jax.Array:
        matrix = kernel.reshape(matrix_shape(kernel)).astype(jnp.float32)
        left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
        return ((left * replace(values)[None]) @ right).reshape(kernel.shape).astype(kernel.dtype)

    return run_replicated(run, kernel) if kernel.size else kernel


def shrunk(values: jax.Array, shape: tuple[int, int], stddev: jax.Array) -> jax.Array:
    """Returns q/s = x c for singular values s of an (m, n) matrix.

    This is the component of the signal along their singular vectors.
    """
    return values * _ratios(values, shape, stddev)[0]


def cosines(values: jax.Array, shape: tuple[int, int], stddev: jax.Array) -> jax.Array:
    """Returns c for singular values s of an (m, n) matrix.

    It is 0 for noise and near 1 far above it.
    """
    shrinkage, signal = _ratios(values, shape, stddev)
    return shrinkage / signal


def _ratios(
    values: jax.Array, shape: tuple[int, int], stddev: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns q/s² and x/s. If s is only noise, x/s is 1, as without noise."""
    rows, columns = map(math.sqrt, shape)
    some = jnp.where(values > 0.0, values, 1.0)
    upper = jnp.square(stddev * (rows + columns) / some)
    lower = jnp.square(stddev * (rows - columns) / some)
    above = (upper < 1.0) & (values > 0.0)
    # NaN, as in a refused release, stays NaN.
    shrinkage = jnp.sqrt(jnp.where(above, (1.0 - upper) * (1.0 - lower), 0.0 * values))
    square = 0.5 * (1.0 - 0.5 * (upper + lower) + shrinkage)
    return shrinkage, jnp.sqrt(jnp.where(above, square, 1.0))
