"""Augmentation multiplicity: several augmented copies of an example in one clipped gradient."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpoptax._tree import PyTree


def augmented(
    loss_fn: Callable[[PyTree, PyTree], PyTree],
    augment_fn: Callable[[PyTree, jax.Array], PyTree],
    multiplicity: int,
    *,
    has_aux: bool = False,
) -> Callable[[PyTree, PyTree, jax.Array], PyTree]:
    """The mean loss of K random augmentations of an example, as a loss for `clipped_grad`.

        ℓ_K(x; ξ, key) = (1/K) Σ_k ℓ(x; augment(ξ, key_k)),    key_k = split(key, K)[k]

    Its gradient is the mean of the copies' gradients, taken before the clip. An example has less
    variance then, and still adds one clipped gradient to the sum. Give `grad_fn` a key, a fresh one
    for each step: every example folds its own from it.

    Privacy: none of its own and no cost: the copies are of one example, and clipped as one. Costs K
    times the computation.

    Args:
      loss_fn: `loss_fn(params, example)`, scalar, or (scalar, aux) with `has_aux`.
      augment_fn: `augment_fn(example, key)`, an example of the same structure for `loss_fn`, made
        from that example and public data alone.
      multiplicity: K.
      has_aux: whether `loss_fn` returns auxiliary outputs; returned for all copies, (K, …).

    Returns:
      `loss(params, example, key)`.

    Raises:
      ValueError: `multiplicity` is no integer above 0.

    Source: De et al., "Unlocking High-Accuracy Differentially Private Image Classification through
    Scale", 2022, section 3.2.

    >>> import dpoptax
    >>> loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
    >>> jitter = lambda x, key: x + 0.1 * jax.random.normal(key, x.shape)
    >>> grad_fn = dpoptax.clipped_grad(augmented(loss_fn, jitter, 8), dpoptax.l2_clip(10.0))
    >>> points = dpoptax.gradient_points((), jnp.zeros(2))
    >>> key, ids = jax.random.key(0), jnp.arange(64)
    >>> grad_fn(points, jnp.ones((64, 2)), key=key, ids=ids).sum.round(-1)
    Array([-60., -60.], dtype=float32)
    """
    if not isinstance(multiplicity, int) or multiplicity < 1:
        raise ValueError(f"multiplicity={multiplicity!r}: want an integer of at least 1")

    def loss(params: PyTree, example: PyTree, key: jax.Array) -> PyTree:
        keys = jax.random.split(key, multiplicity)
        copies = jax.vmap(augment_fn, (None, 0))(example, keys)
        out = jax.vmap(loss_fn, (None, 0))(params, copies)
        return (jnp.mean(out[0]), out[1]) if has_aux else jnp.mean(out)

    return loss
