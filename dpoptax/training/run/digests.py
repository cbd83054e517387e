"""Computes digests of traced programs and settings, equal in all processes.

The noise of a step belongs to one program: with the same noise, two sums would reveal their
difference. A digest covers every operation and every constant of a program, and no addresses, names
or lines of code.
"""

import dataclasses
import enum
import hashlib
import re
from collections.abc import Mapping, Set
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from dpoptax.training.data.fingerprints import array_digest

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_UNUSED = {"name", "ctx_mesh", "debug_info", "donated_invars"}
"""Parameters of equations that do not affect values."""


def digest_of(value: Any) -> str:
    """Returns the SHA-256 of a traced program, of settings, or of a tree of both.

    Functions count by their names. Trace them to include their operations.

    Raises:
        ValueError: A program calls a host function, whose operations and data are unknown.
    """
    return hashlib.sha256(_Describer().text(value).encode()).hexdigest()


def traced(function: Any, *args: Any) -> ClosedJaxpr:
    """Traces a function for the shapes and types of arguments, on one device."""
    with jax.disable_jit(False):
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.eval_shape(lambda *args: args, *args),
        )
        return jax.make_jaxpr(function)(*shapes)


class _Describer:
    """Writes values as text, and each shared array or program once, as a digest."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}  # keeps objects, so that ids stay theirs

    def text(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return self._once(value, array_digest)
        if isinstance(value, Jaxpr | ClosedJaxpr):  # one class since jax 0.12
            return self._once(value, self._program)
        if isinstance(value, Mapping):
            items = sorted((self.text(key), self.text(each)) for key, each in value.items())
            return repr(items)
        if isinstance(value, Set):
            return repr(sorted(map(self.text, value)))
        if isinstance(value, tuple | list):
            return repr([self.text(each) for each in value])
        if isinstance(value, enum.Enum):
            return str(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
            return f"{type(value).__name__} {self.text(fields)}"
        if callable(value):
            named = getattr(value, "__qualname__", type(value).__qualname__)
            return f"{getattr(value, '__module__', '')}.{named}"
        return _ADDRESS.sub("", repr(value))

    def _once(self, value: Any, describe: Any) -> str:
        if id(value) not in self._known:
            self._known[id(value)] = value, describe(value)
        return self._known[id(value)][1]

    def _program(self, program: Jaxpr | ClosedJaxpr) -> str:
        """Returns the digest of constants and operations of a program, with numbered variables."""
        jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
        numbers: dict[Any, int] = {}

        def variable(x: Any) -> str:
            if isinstance(x, Literal):
                return f"{x.aval} {self.text(x.val)}"
            return f"{numbers.setdefault(x, len(numbers))}"

        def declared(variables: Any) -> str:
            return ", ".join(f"{variable(x)}: {x.aval}" for x in variables)

        consts = list(getattr(program, "consts", ()))
        lines = [self.text(consts), declared(jaxpr.constvars), declared(jaxpr.invars)]
        for eqn in jaxpr.eqns:
            if "callback" in eqn.primitive.name and eqn.outvars:
                raise ValueError(
                    "A run with a `workdir` must not call host functions in its steps, got "
                    f"{eqn.primitive.name}. Nothing shows whether the function or its data have "
                    "changed, and two sums would get the same noise. Compute its values before "
                    "the run and pass them as data, or omit `workdir`."
                )
            params = {name: each for name, each in eqn.params.items() if name not in _UNUSED}
            inputs = " ".join(map(variable, eqn.invars))
            lines.append(
                f"{declared(eqn.outvars)} = {eqn.primitive.name} {self.text(params)} {inputs}"
            )
        lines.append(" ".join(map(variable, jaxpr.outvars)))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
