"""Kernels as matrices under white noise of known size: their singular values, and what is signal.

A kernel (…, n) is read as the matrix (m, n) of its inputs and outputs, m the product of the leading
axes. With noise of standard deviation σ in every entry, singular values up to a = σ(√m + √n) are
noise. One above, s, is a singular value x < s of the signal, whose left and right singular vectors
it has turned away; c is the product of both cosines:

    q = √((s² − a²)(s² − b²)),    b = σ|√m − √n|,
    x² = (s² − (m + n)σ² + q)/2,    c = q/(s x)

in the limit of large matrices of small rank (Benaych-Georges and Nadakuditi, 2012).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpoptax._linear_map import matrix_shape
from dpoptax._xla import out_sharding


def is_kernel(x: jax.Array) -> bool:
    """Whether it has two axes at least."""
    return x.ndim >= 2


def run_replicated(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`run(x)` where an explicitly split `x` is put together first, and split again after."""
    split = out_sharding(x)
    if split is None:
        return run(x)
    whole = jax.sharding.NamedSharding(split.mesh, jax.sharding.PartitionSpec(*[None] * x.ndim))
    return jax.sharding.reshard(run(jax.sharding.reshard(x, whole)), split)


def map_singular_values(kernel: jax.Array, replace: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """U diag(replace(s)) Vᵀ of a kernel, in its shape and dtype; computed in float32."""

    def run(kernel: jax.Array) -> jax.Array:
        matrix = kernel.reshape(matrix_shape(kernel)).astype(jnp.float32)
        left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
        return ((left * replace(values)[None]) @ right).reshape(kernel.shape).astype(kernel.dtype)

    return run_replicated(run, kernel) if kernel.size else kernel


def shrunk(values: jax.Array, shape: tuple[int, int], stddev: jax.Array) -> jax.Array:
    """q/s for singular values s of an (m, n) matrix: x c, what the signal has along theirs."""
    return values * _ratios(values, shape, stddev)[0]


def cosines(values: jax.Array, shape: tuple[int, int], stddev: jax.Array) -> jax.Array:
    """c for singular values s of an (m, n) matrix, 0 for noise and near 1 far above it."""
    shrinkage, signal = _ratios(values, shape, stddev)
    return shrinkage / signal


def _ratios(
    values: jax.Array, shape: tuple[int, int], stddev: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """q/s² and x/s, the latter as it would be without noise where s is all noise."""
    rows, columns = map(math.sqrt, shape)
    some = jnp.where(values > 0.0, values, 1.0)
    upper = jnp.square(stddev * (rows + columns) / some)
    lower = jnp.square(stddev * (rows - columns) / some)
    above = (upper < 1.0) & (values > 0.0)
    # NaN, as of a refused release, stays NaN.
    shrinkage = jnp.sqrt(jnp.where(above, (1.0 - upper) * (1.0 - lower), 0.0 * values))
    square = 0.5 * (1.0 - 0.5 * (upper + lower) + shrinkage)
    return shrinkage, jnp.sqrt(jnp.where(above, square, 1.0))
