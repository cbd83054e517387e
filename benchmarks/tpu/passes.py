"""Counts passes of the matrix unit in a traced function, without a compiler.

A pass multiplies bfloat16 numbers. Contractions of float32 take one pass at the default precision,
three at HIGH and six at HIGHEST.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters import partial_eval

from benchmarks.tpu.cases import Case, Options, batched, plain_step, private_step
from benchmarks.tpu.hlo import window_products
from dpoptax._support.jaxprs import subprograms, type_of

_PASSES = {
    lax.Precision.HIGH: 3,
    lax.Precision.HIGHEST: 6,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X3: 3,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X6: 6,
    lax.DotAlgorithmPreset.F32_F32_F32: 6,
}


def ratio(case: Case, options: Options) -> float:
    """Returns the passes of the private step of a case over those of the plain step."""
    model = case.model()
    batch, mask = batched(case, model)
    counts = []
    for step, state in (plain_step(case, model), private_step(case, model, options)):
        counts.append(passes(step, model.params, state, batch, mask))
    return counts[1] / counts[0]


def passes(function: Callable[..., Any], *args: Any, platform: str = "tpu") -> float:
    """Returns 2 × multiply-adds × passes of all contractions of a function.

    The arguments may be shapes. Operations whose results are not used are left out. Loops count as
    often as they run, and of `lax.platform_dependent` only the branch of the platform counts.
    """
    closed = jax.make_jaxpr(function)(*args)
    used = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, used)
    return _count(jaxpr, platform)


def _count(jaxpr: Jaxpr, platform: str) -> float:
    return sum(_of_equation(eqn, platform) for eqn in jaxpr.eqns)


def _of_equation(eqn: JaxprEqn, platform: str) -> float:
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = type_of(eqn.invars[0]).shape
        depth = math.prod(shape[axis] for axis in contracted)
        return 2.0 * depth * math.prod(type_of(eqn.outvars[0]).shape) * _passes(eqn)
    if eqn.primitive.name == "conv_general_dilated":
        return 2.0 * _convolution(eqn) * _passes(eqn)
    counts = [_count(program, platform) for program in subprograms(eqn.params)]
    if not any(counts):
        return 0.0
    if eqn.primitive.name == "scan":
        return eqn.params["length"] * sum(counts)
    if eqn.primitive.name == "cond":
        return counts[_branch(eqn, platform)] if _platforms(eqn) else max(counts)
    if eqn.primitive.name == "while":
        raise ValueError("`while` must not contain contractions: its iterations are unknown.")
    return sum(counts)


def _platforms(eqn: JaxprEqn) -> tuple[tuple[str, ...] | None, ...]:
    """Returns the platforms of each branch of `lax.platform_dependent`."""
    return eqn.params.get("branches_platforms") or ()


def _branch(eqn: JaxprEqn, platform: str) -> int:
    platforms = _platforms(eqn)
    named = [i for i, names in enumerate(platforms) if names is not None and platform in names]
    return named[0] if named else platforms.index(None)


def _passes(eqn: JaxprEqn) -> int:
    """Returns the passes of a contraction, more than one only for float32."""
    if all(type_of(operand).dtype.name != "float32" for operand in eqn.invars):
        return 1
    precision = eqn.params["precision"]
    both = precision if isinstance(precision, tuple) else (precision,)
    return max(_PASSES.get(one, 1) for one in both)


def _convolution(eqn: JaxprEqn) -> int:
    """Returns the multiply-adds of a convolution without padding and dilation."""
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs = (type_of(operand).shape for operand in eqn.invars)
    out = type_of(eqn.outvars[0]).shape
    products = out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * rhs[numbers.rhs_spec[1]]
    for i, (at_lhs, at_rhs, at_out) in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        products *= window_products(
            lhs[at_lhs], rhs[at_rhs], out[at_out], eqn.params["window_strides"][i],
            eqn.params["padding"][i][0], eqn.params["lhs_dilation"][i],
            eqn.params["rhs_dilation"][i],
        )  # fmt: skip
    return products
