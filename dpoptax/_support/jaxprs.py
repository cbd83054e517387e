"""Names the primitives that call programs, and runs equations.

Ghost clipping, information flow and the rewrites for XLA all walk over jaxprs, and share these
functions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dpoptax._support.tree import PyTree

INLINED_CALLS = frozenset({"closed_call", "core_call", "jit", "pjit"})
"""Primitives that only call a program, which a reader may inline."""

REMATERIALIZED_CALLS = frozenset({"checkpoint", "remat", "remat2"})
"""Primitives of `jax.checkpoint`."""

CUSTOM_DERIVATIVE_CALLS = frozenset(
    {
        "custom_jvp_call", "custom_lin", "custom_transpose_call", "custom_vjp_call",
        "custom_vjp_call_jaxpr", "linear_call",
    }
)  # fmt: skip
"""Primitives with user-defined derivatives, which may be nonlinear in the cotangent."""

PROGRAM_CALLS = frozenset(
    {
        *INLINED_CALLS, *REMATERIALIZED_CALLS, "custom_jvp_call", "custom_vjp_call",
        "custom_vjp_call_jaxpr", "custom_vmap_call", "eval_jaxpr",
    }
)  # fmt: skip
"""Primitives that call one program with their operands, in order, and return its results."""

HIJAX_CALL = "call_hi_primitive"
"""The primitive of hijax operations, whose vmap and derivative rules are not visible."""

JOINT_ON_TPU = ("eigh", "svd")
"""Primitives that XLA iterates for a whole batch on TPU."""

JOINT_REDUCTIONS = ("unvmap_any", "unvmap_all", "unvmap_max")
"""Equinox reduces a batch with these, to end a loop or to raise an error for all examples."""

SPARSE = ("bcoo_", "bcsr_", "coo_", "csr_")
"""The first letters of the names of primitives of `jax.experimental.sparse`."""

RANDOM_PRIMITIVES = ("random_bits", "random_fold_in", "random_split")

MAY_MIX_EXAMPLES = frozenset(
    {
        *CUSTOM_DERIVATIVE_CALLS, HIJAX_CALL, "custom_vmap_call", "rng_bit_generator",
        "regularized_incomplete_beta", *JOINT_ON_TPU, *JOINT_REDUCTIONS, *RANDOM_PRIMITIVES,
    }
)  # fmt: skip
"""Primitives for which `check_separate` may raise an error, in addition to host functions."""

ZERO_DERIVATIVE_PRIMITIVES = frozenset({"ceil", "floor", "round", "sign", "stop_gradient"})
"""Primitives whose derivatives are zero by definition, although they return floats."""

INDEX_ARITHMETIC = frozenset(
    {
        "add", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "eq",
        "expand_dims", "ge", "gt", "iota", "jit", "le", "lt", "max", "min", "mul", "neg", "pjit",
        "rem", "reshape", "rev", "select_n", "slice", "squeeze", "stack", "sub", "transpose",
    }
)  # fmt: skip
"""Operations on indices whose results depend on no mesh, platform or host."""


def carries_gradient(aval: ShapedArray) -> bool:
    """Returns whether a value of this type can have a nonzero gradient."""
    return jnp.issubdtype(aval.dtype, jnp.inexact) and aval.size > 0


def type_of(atom: Var | Literal) -> ShapedArray:
    """Returns the type of an array in a trace."""
    return cast(ShapedArray, atom.aval)


def scan_parts(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are the carry."""
    if "num_consts" in eqn.params:  # before jax 0.12
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def bind(eqn: JaxprEqn, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the results of an equation on these operands."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*operands, **params)
    return tuple(out) if eqn.primitive.multiple_results else (out,)


def subprograms(params: Mapping[str, PyTree]) -> list[Jaxpr]:
    """Returns the programs among the parameters of an equation."""
    return list(map(open_jaxpr, inner_programs(params)))


def inner_programs(params: Mapping[str, PyTree]) -> list[Jaxpr | ClosedJaxpr]:
    """Returns the programs among the parameters of an equation, with their constants."""

    def is_program(x: object) -> TypeGuard[Jaxpr | ClosedJaxpr]:
        return hasattr(x, "eqns")

    return list(filter(is_program, jax.tree.leaves(list(params.values()), is_leaf=is_program)))


def programs(program: Jaxpr | ClosedJaxpr) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Yields a program and all programs inside it, with their constants."""
    yield program
    for eqn in open_jaxpr(program).eqns:
        for inner in inner_programs(eqn.params):
            yield from programs(inner)


def equations(program: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a program and of all programs inside it."""
    for each in programs(program):
        yield from open_jaxpr(each).eqns


def open_jaxpr(program: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Returns a program without its constants."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def closed_program(params: Mapping[str, PyTree]) -> tuple[Jaxpr, Sequence[object]]:
    """Returns the only program among the parameters of an equation, and its constants."""
    program = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return open_jaxpr(program), program.consts if isinstance(program, ClosedJaxpr) else ()


def updates_per_entry(eqn: JaxprEqn) -> int:
    """Returns how many updates of a scatter an entry gets at most.

    A promise of the program that indices are unique is not trusted, because data may break it. The
    windows at one index are disjoint, and so are those of two positions along a batching axis.
    """
    shape = type_of(eqn.invars[1]).shape[:-1]
    batching = eqn.params["dimension_numbers"].scatter_indices_batching_dims
    return math.prod(n for axis, n in enumerate(shape) if axis not in batching)
