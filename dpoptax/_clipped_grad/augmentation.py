"""Averages losses over augmented copies of an example (augmentation multiplicity)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpoptax._support.tree import PyTree


def augmented(
    loss_fn: Callable[[PyTree, PyTree], PyTree],
    augment_fn: Callable[[PyTree, jax.Array], PyTree],
    multiplicity: int,
    *,
    has_aux: bool = False,
) -> Callable[[PyTree, PyTree, jax.Array], PyTree]:
    """Returns the mean loss of K random augmentations of an example.

        ℓ_K(x; ξ, key) = (1/K) Σ_k ℓ(x; augment(ξ, key_k)),    key_k = split(key, K)[k]

    Pass it to `clipped_grad`, which then clips the mean of the copies' gradients. The mean has less
    variance than a single gradient. Pass `grad_fn` a new key in each step; it derives a key for
    each example.

    Privacy: no extra cost, because each example still adds one clipped gradient. Time: K times the
    computation.

    Args:
      loss_fn: `loss_fn(params, example)`. Returns a scalar, or (scalar, aux) with `has_aux`.
      augment_fn: `augment_fn(example, key)`. Returns an example of the same structure, computed
        only from this example and public data.
      multiplicity: K.
      has_aux: whether `loss_fn` returns auxiliary outputs. Those of the copies are stacked, (K, …).

    Returns:
      `loss(params, example, key)`.

    Raises:
      ValueError: `multiplicity` is not a positive integer.

    Source: De et al., "Unlocking High-Accuracy Differentially Private Image Classification through
    Scale", 2022, section 3.2.

    >>> import dpoptax
    >>> loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
    >>> jitter = lambda x, key: x + 0.1 * jax.random.normal(key, x.shape)
    >>> grad_fn = dpoptax.clipped_grad(augmented(loss_fn, jitter, 8), dpoptax.l2_clip(10.0))
    >>> key, ids = jax.random.key(0), jnp.arange(64)
    >>> grad_fn(jnp.zeros(2), jnp.ones((64, 2)), key=key, ids=ids).sum.round(-1)
    Array([-60., -60.], dtype=float32)
    """
    if not isinstance(multiplicity, int) or multiplicity < 1:
        raise ValueError(f"`multiplicity` must be an integer of at least 1, got {multiplicity!r}.")

    def loss(params: PyTree, example: PyTree, key: jax.Array) -> PyTree:
        keys = jax.random.split(key, multiplicity)
        copies = jax.vmap(augment_fn, (None, 0))(example, keys)
        out = jax.vmap(loss_fn, (None, 0))(params, copies)
        return (jnp.mean(out[0]), out[1]) if has_aux else jnp.mean(out)

    return loss
