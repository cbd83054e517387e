"""Runs a program with some of its operations replaced, also those in loops and calls.

A rule gets an equation and the `Constants` of the program around it. It returns a function of the
operands that replaces the operation, or `None`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dpoptax._support.jaxprs import (
    INDEX_ARITHMETIC,
    PROGRAM_CALLS,
    bind,
    inner_programs,
    open_jaxpr,
)


class Constants:
    """Evaluates the arrays of a program that depend on none of its inputs, when asked for one.

    `around` is the equation that holds the program, and the constants of the program around it.
    """

    def __init__(
        self, program: Jaxpr | ClosedJaxpr, around: "tuple[JaxprEqn, Constants] | None" = None
    ) -> None:
        self._program, self._around = program, around
        self._known: dict[Var, np.ndarray | None] = {}

    def definition(self, atom: Var | Literal) -> JaxprEqn | None:
        """Returns the equation that computes an array, `None` for inputs and constants."""
        eqns = open_jaxpr(self._program).eqns
        return next((eqn for eqn in eqns if any(v is atom for v in eqn.outvars)), None)

    def value(self, atom: Var | Literal) -> np.ndarray | None:
        """Returns the value of an array, `None` if it may depend on an input."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if atom not in self._known:
            self._known[atom] = self._evaluate(atom)
        return self._known[atom]

    def _evaluate(self, atom: Var) -> np.ndarray | None:
        eqn, jaxpr = self.definition(atom), open_jaxpr(self._program)
        if eqn is not None:
            arithmetic = eqn.primitive.name in INDEX_ARITHMETIC
            operands: list[Any] = list(map(self.value, eqn.invars)) if arithmetic else [None]
            if any(x is None for x in operands):
                return None
            with jax.ensure_compile_time_eval():
                return np.asarray(bind(eqn, operands)[eqn.outvars.index(atom)])
        if atom in jaxpr.constvars:
            consts = zip(jaxpr.constvars, getattr(self._program, "consts", ()), strict=False)
            x = dict(consts).get(atom)
            # A constant that is traced outside has no value yet.
            return None if x is None or isinstance(x, jax.core.Tracer) else np.asarray(x)
        around, outside = self._around or (None, self)
        if around is None or around.primitive.name not in PROGRAM_CALLS:
            return None
        # A call passes its operands on, one for each input of its program.
        same = len(jaxpr.invars) == len(around.invars)
        return outside.value(around.invars[jaxpr.invars.index(atom)]) if same else None


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
        # The named scope of the equation, for profiles and tests of compiled programs.
        stack = str(eqn.source_info.name_stack)
        with jax.named_scope(stack) if stack else nullcontext():
            if replacement is not None:
                found = replacement(*operands)
                outputs: Sequence[jax.Array] = found if eqn.primitive.multiple_results else [found]
            else:
                outputs = bind(_rewrite_inside(eqn, rule, constants), operands)
        values |= zip(eqn.outvars, outputs, strict=True)
    return [read(v) for v in jaxpr.outvars]


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
        # A bare `Jaxpr` has no constants.
        closed = param if isinstance(param, ClosedJaxpr) else ClosedJaxpr(param, ())
        made = jax.make_jaxpr(lambda *inputs: evaluate(closed, rule, inputs, own))(
            *(v.aval for v in closed.jaxpr.invars)
        )
        if isinstance(param, ClosedJaxpr):
            return made
        assert not made.consts  # a bare jaxpr cannot hold them, and no replacement makes any
        return made.jaxpr

    return eqn.replace(params={name: rewrite(param) for name, param in eqn.params.items()})
