"""Matrices for the two sides of every kernel, from public probes."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpoptax._ghost_clipping.second_moments import side_moments
from dpoptax._linear_map import Diagonal, Factor, Sides
from dpoptax._tree import PyTree


def kronecker_factors(
    loss_fn: Callable[..., PyTree], params: PyTree, probes: PyTree, *, damping: float = 0.1
) -> PyTree:
    """Factors for `dpoptax.extend.linear_map` from public probes: K-FAC's curvature by sides.

        A = E Σ_t a_t a_tᵀ,   G = E Σ_t e_t e_tᵀ;   U = A_γ^{−1/2},   V = G_γ^{−1/2}

    a_t are the kernel's inputs at each of its positions and e_t the derivatives by its outputs,
    over the probes; A_γ = (A + γ tr(A)/R · I) over its mean eigenvalue, and G_γ alike. So U and V
    make the gradients of probes even in all directions, and keep the power of a kernel's noise on
    its way back. Parameters of fewer than two axes keep a scale of 1, and so do kernels that the
    loss looks up, or contracts with part of their rows at a time.

        linear_map(lambda params: kronecker_factors(loss_fn, params, probes), every=100, back=False)

    is DP-KFC; with `back=True` what is released is a gradient, for any optimizer.

    Privacy: of the probes, none. They must be public: synthetic, such as noise with the spectrum of
    images and random labels, or of a public data set. Parameters are released ones.

    Args:
      loss_fn: `loss_fn(params, example)`, a scalar.
      params: the parameters.
      probes: public examples along the leading axis of every leaf.
      damping: γ, positive, relative to the mean eigenvalue.

    Returns:
      A tree like the parameters, of `Sides` and `Diagonal`.

    Raises:
      ValueError: `damping` that is not positive and finite.
      TypeError: a loss that is no scalar.

    Source: Molina Van den Bosch et al., "DP-KFC: Data-Free Preconditioning for Privacy-Preserving
    Deep Learning", 2026; Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored
    Approximate Curvature", 2015. The normalization is this library's.

    >>> loss_fn = lambda params, x: jnp.sum(jnp.sin(x @ params["w"]))
    >>> probes = jnp.array([[3.0, 0.0], [0.0, 1.0]])
    >>> sides = kronecker_factors(loss_fn, {"w": jnp.zeros((2, 2))}, probes, damping=1e-3)["w"]
    >>> (sides.rows[0, 0] / sides.rows[1, 1]).round(1)
    Array(0.3, dtype=float32)
    """
    if not (math.isfinite(damping) and damping > 0.0):
        raise ValueError(f"damping={damping}: want a positive, finite number")
    moments = side_moments(loss_fn, params, probes)

    def factor(leaf: int) -> Factor:
        if leaf not in moments:
            return Diagonal((jnp.ones([], jnp.float32),))
        (rows, back_rows), (columns, back_columns) = (_root(m, damping) for m in moments[leaf])
        return Sides(rows, columns, back_rows, back_columns)

    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, list(map(factor, range(len(leaves)))))


def _root(moment: jax.Array, damping: float) -> tuple[jax.Array, jax.Array]:
    """M_γ^{−1/2} and M_γ^{1/2}; the identity for a moment that is zero."""
    mean = jnp.trace(moment) / len(moment)
    even = jnp.eye(len(moment), dtype=moment.dtype)
    moment = jnp.where(mean > 0, moment / jnp.where(mean > 0, mean, 1.0), even)
    values, vectors = jnp.linalg.eigh(moment)
    values = (jnp.maximum(values, 0.0) + damping) / (1.0 + damping)

    def power(exponent: float) -> jax.Array:
        return jnp.matmul(
            vectors * values**exponent, vectors.T, precision=jax.lax.Precision.HIGHEST
        )

    return power(-0.5), power(0.5)
