"""Computes norms of per-example gradients, to choose a clipping bound on public examples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from dpoptax._support.tree import PyTree, batch_length


def gradient_norms(
    loss_fn: Callable[[PyTree, PyTree], jax.Array],
    params: PyTree,
    examples: PyTree,
    *,
    microbatch_size: int = 64,
) -> jax.Array:
    """Computes the norm of each example's gradient, to see which ones a clip shortens.

        ‖∇ℓ(x; ξ_i)‖,   i = 1, …, n

    `l2_clip(C)` shortens the gradients with norms above C. Look at the examples of each class: if
    only those of a rare class are shortened, the model underrates it. See the guide on class
    imbalance.

    Privacy: norms are private and have no noise. Use public examples only. No ε covers a bound that
    was chosen with private norms.

    Args:
      loss_fn: `loss_fn(params, example)`, the scalar loss of one example.
      params: a tree of real arrays.
      examples: public examples, leaves (n, …).
      microbatch_size: the number of gradients that are in memory at once.

    Returns:
      The norms, (n,) float32.

    Raises:
      ValueError: the leaves of `examples` have different lengths.

    >>> import dpoptax, jax.numpy as jnp
    >>> loss_fn = lambda w, x: jnp.sum(w * x)
    >>> norms = gradient_norms(loss_fn, jnp.ones(2), jnp.array([[3.0, 4.0], [0.0, 0.5]]))
    >>> norms, jnp.mean(norms > 1.0)  # half of them are clipped at C = 1
    (Array([5. , 0.5], dtype=float32), Array(0.5, dtype=float32))
    """
    batch_length(examples)

    def norm_of_one(example: PyTree) -> jax.Array:
        return optax.tree.norm(optax.tree.cast(jax.grad(loss_fn)(params, example), jnp.float32))

    norms: jax.Array = jax.lax.map(norm_of_one, examples, batch_size=microbatch_size)
    return norms
