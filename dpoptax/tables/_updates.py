"""Optimizers that update only the given rows of a table."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpoptax._support.tree import widen
from dpoptax.tables._lookups import take_rows


def rowwise_adagrad(
    table: jax.Array,
    accumulator: jax.Array,
    rows: ArrayLike,
    gradient: jax.Array,
    *,
    learning_rate: ArrayLike,
    eps: float = 1e-8,
) -> tuple[jax.Array, jax.Array]:
    """Computes one step of Adagrad with one accumulator per row, on the given rows.

        a_j ← a_j + mean(g_j²),   table_j ← table_j − η g_j / (√a_j + ε)

    A donated table and accumulator are written in place, in time independent of the number of rows
    of the table. Privacy: post-processing of a release.

    Args:
      table: (V, d).
      accumulator: (V,), float32, initially zeros.
      rows: (k,), distinct; numbers from V on are ignored.
      gradient: (k, d), the release of the noise stage for the rows.
      learning_rate: η.
      eps: ε.

    Returns:
      The table and the accumulator after the step.

    Source: Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep
    Learning Recommendation Models", 2022; Duchi et al., 2011.

    >>> table, accumulator = rowwise_adagrad(
    ...     jnp.zeros((3, 2)), jnp.zeros(3), jnp.array([1]), jnp.array([[3.0, -3.0]]),
    ...     learning_rate=0.5,
    ... )
    >>> table.tolist(), accumulator.tolist()
    ([[0.0, 0.0], [-0.5, 0.5], [0.0, 0.0]], [0.0, 9.0, 0.0])
    """
    rows = jnp.asarray(rows)
    gradient = widen(gradient)
    squares = jnp.mean(jnp.square(gradient), axis=-1)
    sums = take_rows(accumulator, rows) + squares
    step = learning_rate * gradient / (jnp.sqrt(sums) + eps)[:, None]
    table = table.at[rows].add(-step.astype(table.dtype), mode="drop")
    return table, accumulator.at[rows].set(sums.astype(accumulator.dtype), mode="drop")
