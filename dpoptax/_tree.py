"""Helpers for pytrees: finds states in them, checks parameters, and names array types."""

import math
import numbers
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

# What JAX takes as a pytree: anything, as types go.
PyTree: TypeAlias = Any
State = TypeVar("State")
Tree = TypeVar("Tree", bound=PyTree)


def find_state(opt_state: PyTree, kind: type[State]) -> State | None:
    """Returns the one state of type `kind` in `opt_state`, or None; raises where there are two."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, kind))
    found = [(path, leaf) for path, leaf in leaves if isinstance(leaf, kind)]
    if len(found) > 1:
        places = ", ".join(f"opt_state{jax.tree_util.keystr(path)}" for path, _ in found)
        raise ValueError(
            f"two {kind.__name__} in the optimizer's state, at {places}: only one stage of a chain "
            "can choose the gradient points; remove the other"
        )
    return found[0][1] if found else None


def is_variable(x: object) -> bool:
    """Whether `x` is a variable of flax.nnx, told by name: flax is not needed here."""
    return "Variable" in nnx_kinds(x)


def nnx_kinds(x: object) -> set[str]:
    """The names of the classes of flax.nnx that `x` is of."""
    return {k.__name__ for k in type(x).__mro__ if k.__module__.startswith("flax.nnx.")}


def kind_of(x: object) -> str:
    """What `x` is, for errors, which call arrays so whether traced or not."""
    return "an array" if isinstance(x, jax.Array | np.ndarray) else f"a {type(x).__name__}"


def strip_variables(tree: PyTree) -> PyTree:
    """`tree` with the values of flax.nnx's variables in their place, as `nnx.as_pure` has it."""
    return jax.tree.map(lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable)


def check_arrays(params: PyTree) -> None:
    """Raises where a leaf of the parameters is not an array, as in a whole Equinox module."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, numbers.Number)):
            raise TypeError(
                f"params: {jax.tree_util.keystr(path) or 'the parameter'} is {kind_of(leaf)}, not "
                "an array. Parameters must be arrays. For an Equinox module take params, static = "
                "eqx.partition(model, eqx.is_inexact_array), and in loss_fn "
                "eqx.combine(params, static)"
            )


def no_params(stage: str) -> ValueError:
    """The error of a stage whose `update` needs the parameters and got none."""
    return ValueError(
        f"params=None, and {stage} reads the parameters: call tx.update(grads, opt_state, params)"
    )


def check_known(**values: object) -> None:
    """Raises where a number that Python reads is none, or an array, as of `inject_hyperparams`."""
    for name, value in values.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"{name}={value!r}: want a Python number, known before jit. "
                "optax.inject_hyperparams makes arrays of all numbers but those named by "
                "static_args: name all but learning_rate, or give it a function of learning_rate "
                "alone that returns the chain"
            )
        if not (value is None or callable(value) or isinstance(value, numbers.Real)):
            raise TypeError(f"{name}={value!r}: want a Python number")


def check_decays(**decays: float) -> None:
    """Raises where a decay, as of a running mean, is no Python number in [0, 1)."""
    check_known(**decays)
    for name, value in decays.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name}={value}: want a number in [0, 1)")


def check_stddev(stddev: float, *, zero: bool = True) -> None:
    """Raises where the noise of a release is told by no Python number of at least 0, or above."""
    check_known(stddev=stddev)
    if stddev is None or not (math.isfinite(stddev) and (stddev > 0.0 or (zero and stddev == 0.0))):
        raise ValueError(
            f"stddev={stddev}: want the noise's standard deviation in each coordinate, a finite "
            f"number {'>= 0' if zero else 'above 0'}, such as dpoptax.extend.noise_stddev gives"
        )


def float32_at_least(*arrays: jax.Array) -> jnp.dtype:
    """The dtype to compute in: float32, or that of the arrays, but integers, where it is wider.

    Under any `jax_numpy_dtype_promotion`: what JAX is told to refuse are the user's own.
    """
    inexact = (x.dtype for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(jnp.float32, *inexact)


def widen(x: jax.Array) -> jax.Array:
    """`x` in float32 at least."""
    return x.astype(float32_at_least(x))


def is_masked(x: object) -> bool:
    """Whether `x` is what `optax.masked` leaves in place of a parameter."""
    return isinstance(x, optax.MaskedNode)
