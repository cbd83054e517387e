"""A batch in parts: less memory, the same sum but for rounding."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from optax import microbatching

from dpoptax._trees import PyTree

# `sums(batch, mask, keys)`: the total over the examples, and their auxiliary outputs.
BatchSums: TypeAlias = Callable[[PyTree, jax.Array, jax.Array | None], tuple[PyTree, PyTree]]


def in_microbatches(sums: BatchSums, size: int | None) -> BatchSums:
    """`sums(batch, mask, keys)` over microbatches of `size`; padding is masked out.

    The totals are added, and the auxiliary outputs put side by side.
    """
    if size is None:
        return sums

    def run(batch: PyTree, mask: jax.Array, keys: jax.Array | None) -> tuple[PyTree, PyTree]:
        examples = mask.shape[0]
        if size >= examples:
            return sums(batch, mask, keys)
        missing = -examples % size
        if missing:

            def pad(x: jax.Array) -> jax.Array:
                return jnp.concatenate([x, jnp.repeat(x[:1], missing, axis=0)])

            batch, keys = jax.tree.map(pad, (batch, keys))
            mask = jnp.concatenate([mask, jnp.zeros(missing, bool)])
        kinds = (microbatching.AccumulationType.SUM, microbatching.AccumulationType.CONCAT)
        total, aux = microbatching.microbatch(
            jax.jit(sums),  # traced for its shapes and for the loop: once, not twice
            argnums=(0, 1, 2),
            microbatch_size=size,
            accumulator=kinds,
            in_axes=(0, 0, 0),
        )(batch, mask, keys)
        return total, jax.tree.map(lambda x: x[:examples], aux)

    return run
