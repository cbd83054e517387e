"""Matrices for the two sides of each kernel, from public probes."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpoptax._gradients.ghost_clipping.second_moments import side_moments
from dpoptax._gradients.linear_map import Diagonal, Factor, Sides
from dpoptax._support.tree import PyTree


def kronecker_factors(
    loss_fn: Callable[..., PyTree], params: PyTree, probes: PyTree, *, damping: float = 0.1
) -> PyTree:
    """Returns factors for `dpoptax.extend.linear_map` from K-FAC on public probes.

        A = E Σ_t a_t a_tᵀ,   G = E Σ_t e_t e_tᵀ;   U = A_γ^{−1/2},   V = G_γ^{−1/2}

    Over the probes, a_t are the kernel's inputs at each of its positions and e_t the derivatives
    with respect to its outputs. A_γ is A + γ tr(A)/R · I divided by its mean eigenvalue, with R the
    size of A; G_γ is similar. U and V equalize the gradients of the probes in all directions, and
    preserve the power of a kernel's noise on the way back. The scale stays 1 for parameters with
    fewer than two axes, and for kernels that the loss looks up or contracts only in parts.

        linear_map(lambda params: kronecker_factors(loss_fn, params, probes), every=100, back=False)

    is DP-KFC. With `back=True` the release is a gradient, for any optimizer.

    Privacy: probes are not protected. They must be public: synthetic, such as noise with the
    spectrum of images and random labels, or from a public data set. `params` must be released.

    Args:
      loss_fn: `loss_fn(params, example)`, a scalar.
      params: the parameters.
      probes: public examples along the leading axis of every leaf.
      damping: γ, positive, relative to the mean eigenvalue.

    Returns:
      A tree like the parameters, of `Sides` and `Diagonal`.

    Raises:
      ValueError: `damping` is not positive and finite.
      TypeError: the loss is not a scalar.

    Source: Molina Van den Bosch et al., "DP-KFC: Data-Free Preconditioning for Privacy-Preserving
    Deep Learning", 2026; Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored
    Approximate Curvature", 2015. The normalization is specific to dpoptax.

    >>> loss_fn = lambda params, x: jnp.sum(jnp.sin(x @ params["w"]))
    >>> probes = jnp.array([[3.0, 0.0], [0.0, 1.0]])
    >>> sides = kronecker_factors(loss_fn, {"w": jnp.zeros((2, 2))}, probes, damping=1e-3)["w"]
    >>> (sides.rows[0, 0] / sides.rows[1, 1]).round(1)
    Array(0.3, dtype=float32)
    """
    if not (math.isfinite(damping) and damping > 0.0):
        raise ValueError(f"`damping` must be positive and finite, got {damping}.")
    moments = side_moments(loss_fn, params, probes)

    def factor(leaf: int) -> Factor:
        if leaf not in moments:
            return Diagonal((jnp.ones([], jnp.float32),))
        (rows, back_rows), (columns, back_columns) = (_root(m, damping) for m in moments[leaf])
        return Sides(rows, columns, back_rows, back_columns)

    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, list(map(factor, range(len(leaves)))))


def _root(moment: jax.Array, damping: float) -> tuple[jax.Array, jax.Array]:
    """Returns M_γ^{−1/2} and M_γ^{1/2}, or the identity for a zero moment."""
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
