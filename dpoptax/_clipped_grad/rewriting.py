"""Operations that XLA is slow with on CPU, or wrong, written otherwise before it sees them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from dpoptax._clipped_grad import convolutions, pooling
from dpoptax._ghost_clipping.trace.derived_values import bind, inside
from dpoptax._tree import PyTree

_RULES = {lax.conv_general_dilated_p: convolutions, lax.select_and_scatter_add_p: pooling}


def rewritten(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`fun`, which computes the same by operations that XLA is fast with, in loops too."""
    traced = jax.jit(fun)

    def run(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*args)
        if not _any_wants_rewriting(closed.jaxpr):
            return traced(*args)
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _evaluate(
    jaxpr: Jaxpr, consts: Sequence[jax.Array], inputs: Sequence[jax.Array]
) -> list[jax.Array]:
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if _wants_rewriting(eqn):
            outputs: Sequence[jax.Array] = [_RULES[eqn.primitive].rewritten(eqn, *operands)]
        else:
            outputs = bind(_rewritten_inside(eqn), operands)
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(v) for v in jaxpr.outvars]


def _wants_rewriting(eqn: JaxprEqn) -> bool:
    return eqn.primitive in _RULES and _RULES[eqn.primitive].wants_rewriting(eqn)


def _any_wants_rewriting(jaxpr: Jaxpr) -> bool:
    return any(
        _wants_rewriting(eqn) or any(map(_any_wants_rewriting, inside(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _rewritten_inside(eqn: JaxprEqn) -> JaxprEqn:
    """The operation, with the programs inside it rewritten where they want it."""

    def rewrite(param: Any) -> Any:
        programs = inside({"param": param})
        if not any(map(_any_wants_rewriting, programs)):
            return param
        if isinstance(param, (tuple, list)):
            return type(param)(map(rewrite, param))
        (jaxpr,) = programs
        consts = param.consts if isinstance(param, ClosedJaxpr) else []
        made = jax.make_jaxpr(lambda *inputs: _evaluate(jaxpr, consts, inputs))(
            *(v.aval for v in jaxpr.invars)
        )
        if isinstance(param, ClosedJaxpr):
            return made
        return param if made.consts else made.jaxpr  # it has no room for constants

    return eqn.replace(params={name: rewrite(param) for name, param in eqn.params.items()})
