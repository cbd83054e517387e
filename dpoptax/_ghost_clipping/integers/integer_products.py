"""Multiplies and sums integer factors of gradients, exactly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpoptax._ghost_clipping.sums.weighted_products import merge_examples
from dpoptax._rounding.bounds import broadcast_examples

# Columns are 2⁸ high + low, with two digits in int8.
DIGIT_BITS = 8
# Products of int8 are at most 2¹⁴, so sums of 2¹⁰ are exact in float32, and sums of 2¹⁶ in int32.
_EXACT_TERMS = 2**10
INTEGER_TERMS = 2**16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntegerFactors:
    """Holds the integer factors of one use.

    Attributes:
      rows: (B, K, L, R) int8, or the indices of one-hot rows, (B, K, L) int32.
      columns: (B, K, L, D) int16, times the coefficient.
      scale: the entry of one-hot rows, (B,) int32.
      size: the length of a row.
      swapped: whether the contribution is transposed.
    """

    rows: jax.Array
    columns: jax.Array
    scale: jax.Array
    size: int = dataclasses.field(metadata={"static": True})
    swapped: bool = dataclasses.field(metadata={"static": True})


def is_index(rows: jax.Array) -> bool:
    """Returns whether rows are one-hot, given by their indices."""
    return rows.dtype == jnp.int32


def _scatter(index: jax.Array, values: jax.Array, size: int) -> jax.Array:
    """Adds values (B, K, L, D) to rows of zeros, (B, K, size, D)."""

    def add(index: jax.Array, values: jax.Array) -> jax.Array:
        zeros = jnp.zeros((size, values.shape[-1]), jnp.int32)
        return zeros.at[index].add(values, mode="drop")

    return jax.vmap(jax.vmap(add))(index, values)


def form(use: IntegerFactors) -> jax.Array:
    """Returns the contributions of examples, (B, K, R, D) int32."""
    if is_index(use.rows):
        found = _scatter(use.rows, _scaled_columns(use), use.size)
    else:
        found = _multiply(use.rows, use.columns)
    return found.swapaxes(-1, -2) if use.swapped else found


def sum_kept(use: IntegerFactors, kept: jax.Array) -> jax.Array:
    """Returns the sum of the contributions of examples that are kept, (K, R, D) int32."""
    columns = _scaled_columns(use) if is_index(use.rows) else use.columns
    joined = dataclasses.replace(
        use,
        rows=merge_examples(use.rows),
        columns=merge_examples(select(kept, columns)),
        scale=jnp.ones(1, jnp.int32),
    )
    return form(joined)[0]


def _scaled_columns(use: IntegerFactors) -> jax.Array:
    """Returns columns times the entry of one-hot rows."""
    return use.columns.astype(jnp.int32) * broadcast_examples(use.scale, use.columns)


def select(kept: jax.Array, x: jax.Array) -> jax.Array:
    """Sets the numbers (B, …) of examples that are not kept to zero."""
    return jnp.where(broadcast_examples(kept, x), x, 0)


def _multiply(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns Σ_t rows_t ⊗ columns_t modulo 2³², for int8 (…, T, R) and int16 (…, T, D)."""
    low = low_digit(columns)
    high = (columns - low) >> DIGIT_BITS
    return 2**DIGIT_BITS * multiply_digits(rows, high) + multiply_digits(rows, low)


def low_digit(columns: jax.Array) -> jax.Array:
    """Returns the numbers from −2⁷ to 2⁷ − 1 that equal int16 modulo 2⁸."""
    return ((columns + 128) & 255) - 128


def multiply_digits(rows: jax.Array, digits: jax.Array) -> jax.Array:
    """Returns products of matrices in int8, (…, R, D) int32.

    XLA's integer products are slow on CPU. There, short sums are exact in float32.
    """
    found: jax.Array = lax.platform_dependent(
        rows,
        digits.astype(jnp.int8),
        cpu=functools.partial(_multiply_in_blocks, kind=jnp.float32, length=_EXACT_TERMS),
        default=functools.partial(_multiply_in_blocks, kind=jnp.int32, length=INTEGER_TERMS),
    )
    return found


def _multiply_in_blocks(a: jax.Array, b: jax.Array, *, kind: DTypeLike, length: int) -> jax.Array:
    """Multiplies matrices (B, K, T, …) with sums of at most `length` products, in dtype `kind`."""
    positions = a.shape[2]
    operand = kind if kind == jnp.float32 else jnp.int8

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        found = jnp.einsum(
            "bktr,bktd->bkrd",
            a.astype(operand),
            b.astype(operand),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=kind,
        )
        return found.astype(jnp.int32)

    if positions <= length:
        return dot(a, b)
    blocks = -(-positions // length)
    padding = [(0, 0), (0, 0), (0, blocks * length - positions), (0, 0)]
    a, b = (jnp.pad(x, padding) for x in (a, b))

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        a_block, b_block = (lax.dynamic_slice_in_dim(x, i * length, length, 2) for x in (a, b))
        return total + dot(a_block, b_block)

    return lax.fori_loop(
        0, blocks, add, jnp.zeros((*a.shape[:2], a.shape[3], b.shape[3]), jnp.int32)
    )
