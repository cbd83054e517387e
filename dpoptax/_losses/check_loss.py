"""Checks the user's parameters and loss."""

import warnings

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from dpoptax._support.jaxprs import programs
from dpoptax._support.tree import PyTree, check_arrays, is_narrow, is_real, is_variable, nnx_kinds

_MAX_CONSTANT_BYTES = 16_000_000


def check_parameters(params: PyTree) -> None:
    """Raises a TypeError if a parameter is not a real float of 16 bits or more."""
    leaves = jax.tree.leaves(params, is_leaf=is_variable)
    if not all(isinstance(leaf, jax.Array) and is_real(leaf.dtype) for leaf in leaves):
        _check_each_parameter(params)


def _check_each_parameter(params: PyTree) -> None:
    _check_variables(params)
    check_arrays(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jax.typeof(leaf).dtype
        if is_real(dtype):
            continue
        remedy = "It has no gradient. Remove it from the parameters and close `loss_fn` over it."
        if jnp.issubdtype(dtype, jnp.complexfloating):
            remedy = "Store the real and imaginary parts as two parameters."
        elif is_narrow(dtype):
            remedy = "Store it in bfloat16 or wider, and cast it in `loss_fn`."
        name = jax.tree_util.keystr(path) or "the parameter"
        raise TypeError(
            f"Parameters must be real floats of at least 16 bits, but {name} is {dtype}. {remedy}"
        )


def _check_variables(params: PyTree) -> None:
    """Raises an error if a flax.nnx variable is not trained, such as a BatchStat.

    Kinds of variables that a user defines are accepted.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable):
        kind = type(leaf).__name__
        if is_variable(leaf) and kind in nnx_kinds(leaf) and "Param" not in nnx_kinds(leaf):
            raise TypeError(
                f"Parameters must be trained, but {jax.tree_util.keystr(path)} is an nnx.{kind}. "
                "Write `graph, params, rest = nnx.split(model, nnx.Param, ...)`, and in `loss_fn` "
                "`nnx.merge(graph, params, rest)`."
            )


def check_result(shapes: PyTree, has_aux: bool) -> None:
    """Raises an error if a loss does not return a real scalar, or (scalar, aux)."""
    if has_aux and not (isinstance(shapes, tuple | list) and len(shapes) == 2):
        kind = type(shapes).__name__
        raise TypeError(f"`loss_fn` must return a pair (loss, aux) for has_aux=True, got {kind}.")
    value = shapes[0]
    is_array = isinstance(value, jax.ShapeDtypeStruct)
    if not is_array or value.shape != ():
        found = f"shape {value.shape}" if is_array else f"a {type(value).__name__}"
        raise TypeError(
            f"`loss_fn` must return a scalar for one example, got {found}. If it returns "
            "(loss, aux), pass has_aux=True."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"`loss_fn` must return a real float, got {value.dtype}, which has no gradient."
        )


def warn_of_constants(program: ClosedJaxpr) -> None:
    """Warns of a loss that closes over many bytes of arrays, counting each array once."""
    constants = {id(x): x for each in programs(program) for x in getattr(each, "consts", ())}
    arrays = (x for x in constants.values() if not isinstance(x, jax.core.Tracer))
    size = sum(getattr(x, "nbytes", 0) for x in arrays)
    if size > _MAX_CONSTANT_BYTES:
        from dpoptax._support.callers import level_of_caller

        warnings.warn(
            f"`loss_fn` closes over {size / 1e6:.0f} MB of arrays, which become constants in the "
            "compiled program and in compilation caches. Make frozen weights an argument of the "
            "jitted step, and call `dpoptax.clipped_grad` inside it with the loss that uses them.",
            stacklevel=level_of_caller(),
        )


def failure_note(error: Exception, example: PyTree, keyed: bool) -> str:
    """Returns a hint for a failing loss, which may expect a batch or a key."""
    if type(error).__name__ == "TraceContextError":
        return (
            "dpoptax: A module in `loss_fn` changes its own state, but the loss must be a function "
            "of the parameters and one example. Use `nnx.GroupNorm` or `nnx.LayerNorm` instead of "
            "`nnx.BatchNorm`. Create `nnx.Dropout` without rngs, and call it with `nnx.Rngs(key)` "
            "and the key of `loss_fn(params, example, key)`. If the model was created with rngs, "
            "write `graph, params, rest = nnx.split(model, nnx.Param, ...)`, and in `loss_fn` "
            "`m = nnx.merge(graph, params, rest, copy=True)` and `nnx.reseed(m, default=key)`, "
            "with a keyword for each stream of the model, such as dropout=key."
        )
    if "Context mesh" in str(error):
        return (
            "dpoptax: On the devices of a mesh, JAX refuses to index arrays that `loss_fn` closes "
            "over, such as frozen weights. Write `jax.lax.stop_gradient(weights)[i]`."
        )
    if any(map(_is_sparse, jax.tree.leaves(example, is_leaf=_is_sparse))):
        return (
            "dpoptax: The examples hold a sparse array of jax.experimental.sparse, which keeps the "
            "shape of its batch. Pass its arrays, `(x.data, x.indices)` of `x` with n_batch=1, and "
            "write `x = BCOO(example, shape=shape)` in `loss_fn`, with the shape of one example."
        )
    shapes = jax.tree.map(lambda x: tuple(jnp.shape(x)), example)
    note = (
        f"dpoptax: `loss_fn(params, example{', key' * keyed})` gets one example, the arrays of a "
        f"batch without their first axis, of shapes {shapes}. If the model expects a batch, call "
        "it with `x[None]` and take the result for the only row. Normalization over the batch, and "
        "losses that compare its examples, have no gradient for one row."
    )
    if keyed:
        return note
    return (
        f"{note} The third argument of `grad_fn` is the mask: labels belong to the batch, as in "
        "`grad_fn(params, (x, y), mask)`. If the loss needs a key, call `grad_fn(..., key=key, "
        "ids=indices)`."
    )


def _is_sparse(node: object) -> bool:
    return type(node).__module__.startswith("jax.experimental.sparse")  # slow to import
