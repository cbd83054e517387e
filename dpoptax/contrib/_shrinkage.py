"""Shrinkage of released gradients by their known noise."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from dpoptax._support.tree import PyTree, check_decays, check_stddev
from dpoptax.contrib._singular_values import (
    cosines,
    is_kernel,
    map_singular_values,
    matrix_shape,
    shrunk,
)
from dpoptax.filters._coefficients import Filter
from dpoptax.filters._low_pass import LowPassState, low_pass, mean_share


def singular_value_shrinkage(
    stddev: float, *, decay: float = 0.0, accumulator_dtype: DTypeLike | None = None
) -> optax.GradientTransformation:
    """Shrinks the singular values of each kernel's noisy gradient.

    A kernel (…, n) is a matrix (m, n), m the product of the leading axes. For a signal of small
    rank under white noise of standard deviation τ,

        η(s) = √((s² − τ²(√m + √n)²)(s² − τ²(√m − √n)²)) / s   for s > τ(√m + √n), else 0

    has the smallest squared error of all functions of the singular values s, in the limit of large
    matrices. With `decay` = β > 0, it shrinks the bias-corrected running mean of the gradients,
    with its own τ,

        m_t = Σ_{i≤t} w_i g_{t−i},  w_i ∝ β^i,  Σ w_i = 1,    τ = stddev √(Σ w_i²),

    and so finds signal that no single release shows. This is momentum, so do not combine it with
    another filter. Leaves with fewer than two axes are only averaged.

    A smaller error of each gradient need not give a better model: descent averages out noise, but
    not the bias of shrinkage (docs/results/index.md has a comparison). It assumes white noise of
    constant size, as from `gaussian_noise` but not `correlated_noise`, and matrices of small rank.
    Sampling noise counts as signal.

    Input and output: privatized mean gradients. Privacy: post-processing, at no cost. Memory: one
    copy of the parameters with `decay`, none without. Each step computes the singular value
    decomposition of every kernel, unsharded on every device.

    Args:
      stddev: the absolute standard deviation of the noise in the released mean; see
        `dpoptax.extend.noise_stddev`. 0 does not shrink.
      decay: β of the running mean, in [0, 1). 0 shrinks each release separately.
      accumulator_dtype: the dtype of the running mean. Defaults to that of the parameters.

    Raises:
      ValueError: a number is out of range.

    Source: Gavish and Donoho, "Optimal shrinkage of singular values", 2017, eq. (7), for Frobenius
    loss, with the known noise instead of their estimate.

    >>> tx = singular_value_shrinkage(0.1)
    >>> noisy = {"kernel": jnp.diag(jnp.array([2.0, 0.3]))}
    >>> shrunk, _ = tx.update(noisy, tx.init(noisy))
    >>> [round(float(x), 2) for x in jnp.diag(shrunk["kernel"])]
    [1.98, 0.1]
    """

    def leaf(mean: jax.Array, noise: jax.Array) -> jax.Array:
        if not is_kernel(mean):
            return mean
        return map_singular_values(mean, lambda s: shrunk(s, matrix_shape(mean), noise))

    return _shrink_mean(_each(leaf), stddev, decay, accumulator_dtype)


def james_stein(
    stddev: float,
    *,
    per_leaf: bool = False,
    decay: float = 0.0,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Shrinks the noisy gradient by the positive-part James–Stein factor.

        g ↦ max(0, 1 − (d − 2) τ²/‖g‖²) g

    for d > 2 coordinates; fewer coordinates are unchanged. For every true gradient, the expected
    squared error is smaller than that of g. With `decay`, it shrinks the running mean with its own
    τ, as in `singular_value_shrinkage`; otherwise τ = `stddev`. The factor is about 1 if the signal
    outweighs the noise, and small if the gradient is mostly noise.

    Input and output: privatized mean gradients with white noise, as from `gaussian_noise`. Privacy:
    post-processing, at no cost. Memory: one copy of the parameters with `decay`, none without.

    Args:
      stddev: the absolute standard deviation of the noise in the released mean; see
        `dpoptax.extend.noise_stddev`. 0 does not shrink.
      per_leaf: whether each leaf has its own factor.
      decay: β of the running mean, in [0, 1). 0 shrinks each release separately.
      accumulator_dtype: the dtype of the running mean. Defaults to that of the parameters.

    Raises:
      ValueError: a number is out of range.

    Source: James and Stein, "Estimation with quadratic loss", 1961; Baranchik, 1964, for the
    positive part.

    >>> tx = james_stein(1.0, per_leaf=True)
    >>> loud, quiet = jnp.full(102, 10.0), jnp.full(102, 0.5)
    >>> [float(x[0]) for x in tx.update([loud, quiet], tx.init([loud, quiet]))[0]]
    [9.90..., 0.0]
    """

    def shrink(mean: PyTree, noise: jax.Array) -> PyTree:
        leaves, treedef = jax.tree.flatten(mean)
        # In units of the noise, a value that overflows is far above the noise.
        unit = jnp.where(noise > 0.0, noise, 1.0)
        squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32) / unit)) for leaf in leaves]
        sizes = [leaf.size for leaf in leaves]
        if not per_leaf:
            squares, sizes = [sum(squares, jnp.zeros([]))] * len(leaves), [sum(sizes)] * len(leaves)

        def shrunk_leaf(g: jax.Array, square: jax.Array, size: int) -> jax.Array:
            if size <= 2:
                return g
            factor = jnp.where(noise > 0.0, jnp.maximum(0.0, 1.0 - (size - 2) / square), 1.0)
            return (factor * g).astype(g.dtype)

        out = list(map(shrunk_leaf, leaves, squares, sizes))
        return jax.tree.unflatten(treedef, out)

    return _shrink_mean(shrink, stddev, decay, accumulator_dtype)


def orthogonalized(
    stddev: float, *, decay: float, accumulator_dtype: DTypeLike | None = None
) -> optax.GradientTransformation:
    """Returns U diag(c) Vᵀ √max(1, n/m) of each kernel's running mean.

    See `scale_by_shrunk_muon`.
    """

    def leaf(mean: jax.Array, noise: jax.Array) -> jax.Array:
        rows, columns = matrix_shape(mean)
        scale = math.sqrt(max(1.0, columns / max(rows, 1)))
        return map_singular_values(mean, lambda s: scale * cosines(s, (rows, columns), noise))

    return _shrink_mean(_each(leaf), stddev, decay, accumulator_dtype)


def _each(
    leaf: Callable[[jax.Array, jax.Array], jax.Array],
) -> Callable[[PyTree, jax.Array], PyTree]:
    """Returns a function that applies `leaf(m, τ)` to each leaf m of a mean."""
    return lambda mean, noise: jax.tree.map(lambda m: leaf(m, noise), mean)


def _shrink_mean(
    shrink: Callable[[PyTree, jax.Array], PyTree],
    stddev: float,
    decay: float,
    accumulator_dtype: DTypeLike | None,
) -> optax.GradientTransformation:
    """Applies `shrink(mean, τ)` to the running mean and the noise left in it."""
    check_stddev(stddev)
    check_decays(decay=decay)
    mean_filter = Filter((1.0 - decay,), (-decay,)) if decay else Filter((1.0,))
    averaging = low_pass(*mean_filter, accumulator_dtype=accumulator_dtype)

    def update_fn(
        updates: PyTree, state: LowPassState, params: PyTree = None
    ) -> tuple[PyTree, LowPassState]:
        del params
        forgotten = jnp.power(jnp.float32(decay), state.count + 1)
        mean, state = averaging.update(updates, state)
        return shrink(mean, stddev * jnp.sqrt(mean_share(decay, forgotten))), state

    return optax.GradientTransformation(averaging.init, update_fn)
