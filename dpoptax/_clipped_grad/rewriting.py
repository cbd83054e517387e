"""Runs a program with some of its operations replaced, also those in loops and calls.

A rule gets an equation and the `Constants` of the program around it. It returns a function of the
operands that replaces the operation, or `None`.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dpoptax._losses.derived_views import INDEX_ARITHMETIC
from dpoptax._support.jaxprs import PROGRAM_CALLS, bind, inner_programs, open_jaxpr

# Computes an array.
_Value: TypeAlias = Callable[[], Any]


class Constants(NamedTuple):
    """Holds the arrays of a program that depend on none of its inputs.

    Attributes:
      values: a function for each, so that nothing is computed unless a rule needs it.
      definitions: the equation that computes each array of the program.
    """

    values: dict[Var, _Value]
    definitions: dict[Var, JaxprEqn]

    def get(self, atom: Var | Literal) -> _Value | None:
        """Returns a function that computes an array, `None` if it may depend on an input."""
        return (lambda: atom.val) if isinstance(atom, Literal) else self.values.get(atom)

    def value(self, atom: Var | Literal) -> np.ndarray | None:
        """Returns the value of an array, `None` if it may depend on an input."""
        found = self.get(atom)
        return None if found is None else np.asarray(found())

    def inside(self, eqn: JaxprEqn, program: Jaxpr | ClosedJaxpr) -> "Constants":
        """Returns the constants of a program inside an equation of this one."""
        inputs = open_jaxpr(program).invars
        called = eqn.primitive.name in PROGRAM_CALLS and len(inputs) == len(eqn.invars)
        return find_constants(program, list(map(self.get, eqn.invars)) if called else ())


def find_constants(program: Jaxpr | ClosedJaxpr, inputs: Sequence[_Value | None] = ()) -> Constants:
    """Returns the constants of a program, if some of its inputs are constants."""
    jaxpr, consts = open_jaxpr(program), getattr(program, "consts", ())
    found = Constants({}, {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars})
    for v, x in zip(jaxpr.constvars, consts, strict=False):
        if not isinstance(x, jax.core.Tracer):
            found.values[v] = lambda x=x: x
    found.values.update((v, x) for v, x in zip(jaxpr.invars, inputs, strict=False) if x)
    for eqn in jaxpr.eqns:
        operands = list(filter(None, map(found.get, eqn.invars)))
        if eqn.primitive.name in INDEX_ARITHMETIC and len(operands) == len(eqn.invars):
            results = functools.cache(functools.partial(_evaluate, eqn, operands))
            found.values.update(
                (v, lambda i=i, results=results: results()[i]) for i, v in enumerate(eqn.outvars)
            )
    return found


def _evaluate(eqn: JaxprEqn, operands: Sequence[_Value]) -> tuple[jax.Array, ...]:
    with jax.ensure_compile_time_eval():
        return bind(eqn, [operand() for operand in operands])


Rule: TypeAlias = Callable[[JaxprEqn, Constants], Callable[..., Any] | None]


def applies(rule: Rule, program: Jaxpr | ClosedJaxpr, constants: Constants | None = None) -> bool:
    """Returns whether a rule replaces an operation of a program."""
    constants = constants or find_constants(program)
    return any(
        rule(eqn, constants) is not None
        or any(applies(rule, x, constants.inside(eqn, x)) for x in inner_programs(eqn.params))
        for eqn in open_jaxpr(program).eqns
    )


def evaluate(
    program: ClosedJaxpr,
    rule: Rule,
    inputs: Sequence[jax.Array],
    constants: Constants | None = None,
) -> list[jax.Array]:
    """Returns the outputs of a program in which a rule replaces operations."""
    jaxpr, constants = program.jaxpr, constants or find_constants(program)
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        replacement = rule(eqn, constants)
        with _scope(eqn):
            if replacement is not None:
                found = replacement(*operands)
                outputs: Sequence[jax.Array] = found if eqn.primitive.multiple_results else [found]
            else:
                outputs = bind(_rewrite_inside(eqn, rule, constants), operands)
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(v) for v in jaxpr.outvars]


def _scope(eqn: JaxprEqn) -> AbstractContextManager[None]:
    """Returns the named scope of an equation, for profiles and tests of compiled programs."""
    stack = str(eqn.source_info.name_stack)
    return jax.named_scope(stack) if stack else nullcontext()


def _rewrite_inside(eqn: JaxprEqn, rule: Rule, constants: Constants) -> JaxprEqn:
    """Returns the equation with the programs inside it rewritten."""

    def rewrite(param: Any) -> Any:
        if isinstance(param, (tuple, list)) and inner_programs({"param": param}):
            return type(param)(map(rewrite, param))
        if not isinstance(param, (Jaxpr, ClosedJaxpr)):
            return param
        own = constants.inside(eqn, param)
        if not applies(rule, param, own):
            return param
        closed = param if isinstance(param, ClosedJaxpr) else ClosedJaxpr(param, ())
        made = jax.make_jaxpr(lambda *inputs: evaluate(closed, rule, inputs, own))(
            *(v.aval for v in closed.jaxpr.invars)
        )
        if isinstance(param, ClosedJaxpr):
            return made
        return param if made.consts else made.jaxpr  # a bare jaxpr cannot hold constants

    return eqn.replace(params={name: rewrite(param) for name, param in eqn.params.items()})
