"""Provides helpers for pytrees: state lookup, checks of parameters and batches, and dtypes."""

import numbers
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

# The number of leaves that an error lists. A Python list of numbers has thousands.
MAX_SHOWN = 8
# JAX accepts any object as a pytree.
PyTree: TypeAlias = Any
State = TypeVar("State")
Tree = TypeVar("Tree", bound=PyTree)


def find_state(opt_state: PyTree, kind: type[State]) -> State | None:
    """Returns the state of type `kind` in `opt_state`, or None.

    Raises:
      ValueError: `opt_state` contains two such states.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, kind))
    found = [(path, leaf) for path, leaf in leaves if isinstance(leaf, kind)]
    if len(found) > 1:
        places = ", ".join(f"opt_state{jax.tree_util.keystr(path)}" for path, _ in found)
        raise ValueError(
            f"The optimizer's state must contain at most one {kind.__name__}, got two, at {places}."
            " Both would decide where gradients are taken, or how they are clipped. Remove one."
        )
    return found[0][1] if found else None


def is_variable(x: object) -> bool:
    """Returns whether `x` is a flax.nnx variable, without importing flax."""
    return "Variable" in nnx_kinds(x)


def nnx_kinds(x: object) -> set[str]:
    """Returns the names of the flax.nnx classes that `x` is an instance of."""
    return {k.__name__ for k in type(x).__mro__ if k.__module__.startswith("flax.nnx.")}


def kind_of(x: object) -> str:
    """Describes the type of `x` for error messages, the same for traced arrays."""
    return "an array" if isinstance(x, jax.Array | np.ndarray) else f"a {type(x).__name__}"


def strip_variables(tree: PyTree) -> PyTree:
    """Replaces flax.nnx variables in `tree` by their values, like `nnx.as_pure`."""
    return jax.tree.map(lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable)


def check_arrays(params: PyTree) -> None:
    """Raises an error if a leaf is not an array, as in a whole Equinox module."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, numbers.Number)):
            raise TypeError(
                "Parameters must be arrays, but "
                f"{jax.tree_util.keystr(path) or 'the parameter'} is {kind_of(leaf)}. For an "
                "Equinox module, write `params, static = eqx.partition(model, "
                "eqx.is_inexact_array)`, and in `loss_fn` `eqx.combine(params, static)`."
            )


def no_params(stage: str) -> ValueError:
    """Returns the error of a stage whose `update` needs parameters but got None."""
    return ValueError(
        f"The `update` of {stage} needs `params`, got None. Call `tx.update(grads, opt_state, "
        "params)`."
    )


def float32_at_least(*arrays: jax.Array) -> jnp.dtype:
    """Returns the dtype to compute in, float32 or a wider float dtype of the arrays.

    Integers are ignored. The result does not depend on `jax_numpy_dtype_promotion`, a setting for
    user code.
    """
    inexact = (x.dtype for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(jnp.float32, *inexact)


def widen(x: jax.Array) -> jax.Array:
    """Converts `x` to float32 or wider."""
    return x.astype(float32_at_least(x))


def is_real(dtype: DTypeLike) -> bool:
    """Returns whether a dtype is a real float of 16 bits or more."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def is_narrow(dtype: DTypeLike) -> bool:
    """Returns whether a dtype is a float of fewer than 16 bits, which gradients do not support."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16


def is_masked(x: object) -> bool:
    """Returns whether `x` is the node with which `optax.masked` replaces a parameter."""
    return isinstance(x, optax.MaskedNode)


def check_mask(mask: ArrayLike | None, batch_size: int) -> jax.Array:
    """Returns the mask of a batch, (B,) booleans, all True if `mask` is None."""
    if mask is None:
        return jnp.ones(batch_size, bool)
    mask = jnp.asarray(mask)
    if mask.shape != (batch_size,):
        raise ValueError(
            f"`mask` must have shape ({batch_size},), one entry per example, got {mask.shape}. "
            "Labels go into the batch: `grad_fn(params, (x, y), mask)`."
        )
    if not (jnp.issubdtype(mask.dtype, bool) or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(
            f"`mask` must hold booleans or integers, got {mask.dtype}. Put weights of examples "
            "into the loss, before the clip. Labels go into the batch: "
            "`grad_fn(params, (x, y), mask)`."
        )
    return mask.astype(bool)


def batch_length(tree: PyTree) -> int:
    """Returns the common length of the leading axis, or raises an error."""
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            "Every leaf must have the examples as its leading axis, of one length, got "
            + _list_lengths(tree)
            + ". Convert a list of examples to one array with `np.stack`." * isinstance(tree, list)
        )
    return sizes.pop()[0]


def _list_lengths(tree: PyTree) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sizes = [(jax.tree_util.keystr(path) or "leaf", jnp.shape(leaf)[:1]) for path, leaf in leaves]
    shown = [f"{name}: {size}" for name, size in sizes]
    return ", ".join(shown[:MAX_SHOWN] + ["…"] * (len(shown) > MAX_SHOWN)) or "no leaf"
