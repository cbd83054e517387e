"""Runs a program with some of its operations replaced, also those in loops and calls.

A rule gets an equation and the `Constants` of the program around it. It returns a function of the
operands that replaces the operation, or `None`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dpoptax._support.jaxprs import bind, open_jaxpr, programs, subprograms

# Primitives of the arithmetic of indices, which `Constants` evaluates.
_INDEX_ARITHMETIC = frozenset(
    {
        "add", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "eq", "ge", "gt",
        "iota", "jit", "le", "lt", "max", "min", "mul", "pjit", "reshape", "select_n", "slice",
        "squeeze", "sub", "transpose",
    }
)  # fmt: skip


class Constants:
    """Evaluates the arrays of a program that depend on none of its inputs.

    Attributes:
      definitions: the equation that computes each array, and the position of its result.
    """

    def __init__(self, program: Jaxpr | ClosedJaxpr) -> None:
        jaxpr = open_jaxpr(program)
        consts = zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False)
        self._values: dict[Var, Any] = {
            v: x for v, x in consts if not isinstance(x, jax.core.Tracer)
        }
        self._known = set(self._values)
        self.definitions: dict[Var, tuple[JaxprEqn, int]] = {}
        for eqn in jaxpr.eqns:
            self.definitions |= {v: (eqn, i) for i, v in enumerate(eqn.outvars)}
            if eqn.primitive.name in _INDEX_ARITHMETIC and all(map(self._is_known, eqn.invars)):
                self._known.update(eqn.outvars)

    def _is_known(self, atom: Var | Literal) -> bool:
        return isinstance(atom, Literal) or atom in self._known

    def value(self, atom: Var | Literal) -> np.ndarray | None:
        """Returns the value of an array, `None` if it may depend on an input."""
        return np.asarray(self._evaluate(atom)) if self._is_known(atom) else None

    def _evaluate(self, atom: Var | Literal) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self._values:
            eqn, place = self.definitions[atom]
            with jax.ensure_compile_time_eval():
                self._values[atom] = bind(eqn, [self._evaluate(v) for v in eqn.invars])[place]
        return self._values[atom]


Rule: TypeAlias = Callable[[JaxprEqn, Constants], Callable[..., jax.Array] | None]


def applies(rule: Rule, program: Jaxpr | ClosedJaxpr) -> bool:
    """Returns whether a rule replaces an operation of a program."""
    return any(
        rule(eqn, constants) is not None
        for each in programs(program)
        for constants in [Constants(each)]
        for eqn in open_jaxpr(each).eqns
    )


def evaluate(program: ClosedJaxpr, rule: Rule, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the outputs of a program in which a rule replaces operations."""
    jaxpr, constants = program.jaxpr, Constants(program)
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        replacement = rule(eqn, constants)
        if replacement is not None:
            outputs: Sequence[jax.Array] = [replacement(*operands)]
        else:
            outputs = bind(_rewrite_subprograms(eqn, rule), operands)
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(v) for v in jaxpr.outvars]


def _rewrite_subprograms(eqn: JaxprEqn, rule: Rule) -> JaxprEqn:
    """Returns the equation with the programs inside it rewritten."""

    def rewrite(param: Any) -> Any:
        if isinstance(param, (tuple, list)) and subprograms({"param": param}):
            return type(param)(map(rewrite, param))
        if not hasattr(param, "eqns") or not applies(rule, param):
            return param
        closed = param if isinstance(param, ClosedJaxpr) else ClosedJaxpr(param, ())
        made = jax.make_jaxpr(lambda *inputs: evaluate(closed, rule, inputs))(
            *(v.aval for v in closed.jaxpr.invars)
        )
        if isinstance(param, ClosedJaxpr):
            return made
        return param if made.consts else made.jaxpr  # a bare jaxpr cannot hold constants

    return eqn.replace(params={name: rewrite(param) for name, param in eqn.params.items()})
