"""Runs a program with some of its operations replaced, also those in loops and calls.

A rule gets an equation and the `Constants` of the program around it. It returns a function of the
operands that replaces the operation, or `None`.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dpoptax._support.jaxprs import PROGRAM_CALLS, bind, inner_programs, open_jaxpr

# Primitives of the arithmetic of indices, which `Constants` evaluates.
_INDEX_ARITHMETIC = frozenset(
    {
        "add", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "eq", "ge", "gt",
        "iota", "jit", "le", "lt", "max", "min", "mul", "pjit", "reshape", "select_n", "slice",
        "squeeze", "stack", "sub", "transpose",
    }
)  # fmt: skip


class Constants:
    """Evaluates the arrays of a program that depend on none of its inputs, when asked for one.

    `around` is the equation that holds the program, and the constants of the program around it.
    """

    def __init__(
        self,
        program: Jaxpr | ClosedJaxpr,
        around: "tuple[JaxprEqn, Constants] | None" = None,
    ) -> None:
        self._jaxpr, self._around = open_jaxpr(program), around
        self._consts = getattr(program, "consts", ())

    @functools.cached_property
    def _values(self) -> dict[Var, Any]:
        consts = zip(self._jaxpr.constvars, self._consts, strict=False)
        return {v: x for v, x in consts if not isinstance(x, jax.core.Tracer)}

    @functools.cached_property
    def _outside(self) -> "dict[Var, tuple[Constants, Var | Literal]]":
        """The inputs that are constants of the program around it."""
        if self._around is None:
            return {}
        (eqn, constants), inputs = self._around, self._jaxpr.invars
        if eqn.primitive.name not in PROGRAM_CALLS or len(inputs) != len(eqn.invars):
            return {}
        pairs = zip(inputs, eqn.invars, strict=True)
        return {v: (constants, x) for v, x in pairs if constants._is_known(x)}

    @functools.cached_property
    def _definitions(self) -> dict[Var, tuple[JaxprEqn, int]]:
        return {v: (eqn, i) for eqn in self._jaxpr.eqns for i, v in enumerate(eqn.outvars)}

    @functools.cached_property
    def _known(self) -> set[Var]:
        known = {*self._values, *self._outside}
        for eqn in self._jaxpr.eqns:
            operands = (v for v in eqn.invars if not isinstance(v, Literal))
            if eqn.primitive.name in _INDEX_ARITHMETIC and known.issuperset(operands):
                known.update(eqn.outvars)
        return known

    def definition(self, atom: Var | Literal) -> JaxprEqn | None:
        """Returns the equation that computes an array, `None` for inputs and constants."""
        found = None if isinstance(atom, Literal) else self._definitions.get(atom)
        return found and found[0]

    def _is_known(self, atom: Var | Literal) -> bool:
        return isinstance(atom, Literal) or atom in self._known

    def value(self, atom: Var | Literal) -> np.ndarray | None:
        """Returns the value of an array, `None` if it may depend on an input."""
        return np.asarray(self._evaluate(atom)) if self._is_known(atom) else None

    def _evaluate(self, atom: Var | Literal) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        if atom in self._outside:
            constants, outside = self._outside[atom]
            return constants._evaluate(outside)
        if atom not in self._values:
            eqn, place = self._definitions[atom]
            with jax.ensure_compile_time_eval():
                self._values[atom] = bind(eqn, [self._evaluate(v) for v in eqn.invars])[place]
        return self._values[atom]


Rule: TypeAlias = Callable[[JaxprEqn, Constants], Callable[..., Any] | None]


def applies(rule: Rule, program: Jaxpr | ClosedJaxpr, constants: Constants | None = None) -> bool:
    """Returns whether a rule replaces an operation of a program."""
    constants = constants or Constants(program)
    return any(
        rule(eqn, constants) is not None
        or any(applies(rule, x, Constants(x, (eqn, constants))) for x in inner_programs(eqn.params))
        for eqn in open_jaxpr(program).eqns
    )


def evaluate(
    program: ClosedJaxpr,
    rule: Rule,
    inputs: Sequence[jax.Array],
    constants: Constants | None = None,
) -> list[jax.Array]:
    """Returns the outputs of a program in which a rule replaces operations."""
    jaxpr, constants = program.jaxpr, constants or Constants(program)
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
        own = Constants(param, (eqn, constants))
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
