"""Seals arrays: gives them a dtype that no arithmetic accepts, as a program is traced.

A sealed array has an extended dtype of JAX, like a key of `jax.random`. It crosses `jit`, `vmap`,
`scan` and shardings like any array, but JAX raises a `TypeError` for arithmetic with it. Its bits
are those of the array, so a seal costs no operation in a compiled program.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import define_prng_impl

from dpoptax._support.marks import SEALED
from dpoptax._support.tree import PyTree

# JAX shows this text as the dtype in its errors.
_DTYPE = (
    "ClippedSum, private until the noise stage. Place other transforms after that stage, and add "
    "sums of disjoint parts of a batch with dpoptax.accumulate"
)


class Leaf(NamedTuple):
    """Describes an array before it was sealed.

    Attributes:
      path: its path in the tree.
      shape: its shape. Under `jax.vmap` this is the shape for one of the mapped values.
      dtype: the name of its dtype.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str


def seal(tree: PyTree, terms: Hashable) -> tuple[PyTree, tuple[Leaf, ...]]:
    """Seals all arrays of a tree, and describes them.

    The dtype of a sealed array states `terms` and the place of the array, so that an array of other
    terms, or of another place, cannot replace it.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    arrays = [jnp.asarray(x) for _, x in paths]
    leaves = tuple(
        Leaf(jax.tree_util.keystr(path), x.shape, x.dtype.name)
        for (path, _), x in zip(paths, arrays, strict=True)
    )
    return jax.tree.unflatten(structure, _seal(arrays, leaves, terms)), leaves


def unseal(tree: PyTree, leaves: tuple[Leaf, ...]) -> PyTree:
    """Returns the arrays of a sealed tree."""
    sealed, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _unseal(sealed, leaves))


def is_sealed(tree: PyTree, leaves: Sequence[Leaf], terms: Hashable) -> bool:
    """Returns whether a tree holds the arrays that `seal` returned, as far as types tell."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return len(found) == len(leaves) and all(
        jax.tree_util.keystr(path) == leaf.path and _is_own(array, leaf, terms)
        for (path, array), leaf in zip(found, leaves, strict=True)
    )


def _is_own(array: object, leaf: Leaf, terms: Hashable) -> bool:
    if not isinstance(array, jax.Array) or array.shape != leaf.shape:
        return False
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    # Equal kinds mean equal clip, place, shape and dtype, since all of them are in the name.
    return is_key and jax.random.key_impl(array) == _dtype_of(leaf, terms)


def _dtype_of(leaf: Leaf, terms: Hashable) -> Hashable:
    """Returns the kind of key of a sealed array, equal for equal arguments."""
    # A key consists of words of 32 bits. Narrower dtypes are widened, and float64 takes two words.
    words = 2 if jnp.dtype(leaf.dtype).itemsize == 8 else 1
    # JAX needs these functions of a key, but nothing may be drawn from a sealed array.
    draw = {name: _refuse for name in ("seed", "split", "random_bits", "fold_in")}
    return define_prng_impl(key_shape=(words,), name=f"{terms!r} {leaf!r}", tag=_DTYPE, **draw)


def _refuse(*_: object) -> NoReturn:
    raise TypeError(f"The dtype of this array is that of a {_DTYPE}.")


def _seal_arrays(
    arrays: list[jax.Array], leaves: tuple[Leaf, ...], terms: Hashable
) -> list[jax.Array]:
    """Returns the bits of arrays as uint32, with a last axis of one or two words, as keys."""

    def bits(x: jax.Array) -> jax.Array:
        if x.dtype.itemsize == 8:
            return lax.bitcast_convert_type(x, jnp.uint32)
        if x.dtype != jnp.bool_:  # which has no bits to convert
            x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        return x.astype(jnp.uint32)[..., None]

    return [
        jax.random.wrap_key_data(bits(x), impl=_dtype_of(leaf, terms))
        for x, leaf in zip(arrays, leaves, strict=True)
    ]


def _unseal_arrays(sealed: list[jax.Array], leaves: tuple[Leaf, ...]) -> list[jax.Array]:
    def array(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
        if dtype.itemsize == 8:
            return lax.bitcast_convert_type(words, dtype)
        word = jnp.squeeze(words, -1)
        if dtype == jnp.bool_:
            return word.astype(dtype)
        return lax.bitcast_convert_type(word.astype(f"uint{8 * dtype.itemsize}"), dtype)

    return [
        array(jax.random.key_data(x), jnp.dtype(leaf.dtype))
        for x, leaf in zip(sealed, leaves, strict=True)
    ]


# `information_flow` knows these functions by their name.
_seal_arrays.__name__ = _unseal_arrays.__name__ = SEALED
# Compiled once for a tree. Without `jit`, each array would be compiled.
_seal = jax.jit(_seal_arrays, static_argnums=(1, 2))
_unseal = jax.jit(_unseal_arrays, static_argnums=1)
