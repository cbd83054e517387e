"""Checks the user's parameters and loss."""

import itertools
import warnings
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from dpoptax._gradients.ghost_clipping.trace.rules import is_narrow, is_real
from dpoptax._support.jaxprs import (
    INLINED_CALLS,
    REMATERIALIZED_CALLS,
    ZERO_DERIVATIVE_PRIMITIVES,
    carries_gradient,
    equations,
    subprograms,
    type_of,
)
from dpoptax._support.tree import PyTree, check_arrays, is_variable, nnx_kinds

_MAX_CONSTANT_BYTES = 16_000_000
# Calls whose operands and results are those of one inner program.
_FOLLOWED_CALLS = INLINED_CALLS | REMATERIALIZED_CALLS | {"scan"}


def check_parameters(params: PyTree) -> None:
    """Raises a TypeError if a parameter is not a real float of 16 bits or more."""
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


def check_scalar(shapes: PyTree, has_aux: bool) -> None:
    """Raises an error if the returned shapes are not a scalar, or (scalar, aux)."""
    if has_aux and not (isinstance(shapes, tuple | list) and len(shapes) == 2):
        raise TypeError(
            "`loss_fn` must return a pair (loss, aux) for has_aux=True, got "
            f"{type(shapes).__name__}."
        )
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


def _constants(program: ClosedJaxpr) -> Iterator[PyTree]:
    yield from program.consts
    is_closed = lambda x: isinstance(x, ClosedJaxpr)  # noqa: E731
    for eqn in program.jaxpr.eqns:
        inner = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_closed)
        for x in filter(is_closed, inner):
            yield from _constants(x)


def warn_of_constants(program: ClosedJaxpr) -> None:
    """Warns of a loss that closes over many bytes of arrays, counting each array once."""
    constants = {id(x): x for x in _constants(program) if not isinstance(x, jax.core.Tracer)}
    size = sum(getattr(x, "nbytes", 0) for x in constants.values())
    if size > _MAX_CONSTANT_BYTES:
        warnings.warn(
            f"`loss_fn` closes over {size / 1e6:.0f} MB of arrays, which become constants in the "
            "compiled program and in compilation caches. Make frozen weights an argument of the "
            "jitted step, and call `dpoptax.clipped_grad` inside it with the loss that uses them.",
            stacklevel=2,
        )


def may_vanish(program: Jaxpr, parameters: int) -> bool:
    """Returns whether the gradients of some parameters may be zero for every example.

    If it returns false, `zero_gradients` finds none. The first inputs are the parameters.
    """
    reached = _reached_inputs(program, [True] + [False] * (len(program.outvars) - 1))
    inputs = zip(program.invars[:parameters], reached, strict=False)
    return any(type_of(v).size and not used for v, used in inputs) or _takes_mean_of_one(program)


def _reached_inputs(program: Jaxpr, outputs: Sequence[bool]) -> list[bool]:
    """Returns which inputs get a gradient from the given outputs. It may omit some."""
    reached = {v for v in itertools.compress(program.outvars, outputs) if isinstance(v, Var)}
    for eqn in reversed(program.eqns):
        used = [v in reached for v in eqn.outvars]
        if not any(used) or eqn.primitive.name in ZERO_DERIVATIVE_PRIMITIVES:
            continue
        flags = [True] * len(eqn.invars)
        if eqn.primitive.name in _FOLLOWED_CALLS:
            (inner,) = subprograms(eqn.params)
            flags = _reached_inputs(inner, used)
        operands = itertools.compress(eqn.invars, flags)
        variables = (v for v in operands if isinstance(v, Var))
        reached.update(v for v in variables if carries_gradient(type_of(v)))
    return [v in reached for v in program.invars]


def _takes_mean_of_one(program: Jaxpr) -> bool:
    """Returns whether a program sums over axes of size one, as batch normalization may."""
    return any(
        all(type_of(eqn.invars[0]).shape[axis] == 1 for axis in eqn.params["axes"])
        for eqn in equations(program)
        if eqn.primitive.name == "reduce_sum"
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
        f"batch without their first axis, of shapes {shapes}. If the model expects a batch, pass "
        "it a batch of one: `jax.tree.map(lambda x: x[None], example)`."
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
