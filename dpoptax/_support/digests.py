"""Computes digests of programs, settings and data, equal in all processes.

The noise of a step belongs to one program and one data set: with the same noise, two sums would
reveal their difference. A digest covers every operation and every constant of a program, and no
addresses, names or lines of code.
"""

import dataclasses
import enum
import hashlib
import os
import re
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from dpoptax._support.tree import PyTree

_PART = 2**24
"""Bytes that a thread hashes at once. Digests depend on it."""
_SAMPLED = 64
"""Number of rows that `sampled_rows` returns. Digests of streamed sources depend on it."""

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
        if isinstance(value, jax.core.Tracer):  # an argument of the program around this one
            return str(value.aval)
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
                    "A run with a `workdir`, or on several hosts, must not call host functions in "
                    f"its steps, got {eqn.primitive.name}. Nothing shows whether the function or "
                    "its data have changed, and two sums would get the same noise. Compute its "
                    "values before the run and pass them as data."
                )
            params = {name: each for name, each in eqn.params.items() if name not in _UNUSED}
            inputs = " ".join(map(variable, eqn.invars))
            lines.append(
                f"{declared(eqn.outvars)} = {eqn.primitive.name} {self.text(params)} {inputs}"
            )
        lines.append(" ".join(map(variable, jaxpr.outvars)))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def rows_digest(data: PyTree, *, whole: bool = True) -> str:
    """Returns the SHA-256 of all records of a data set in order.

    A column is an array, a list of records, or an object with a length and records at integer
    indices. Of the last, an evenly spaced sample is read unless `whole`.
    """
    columns = jax.tree_util.tree_leaves_with_path(data, is_leaf=_is_list)
    found = [
        (jax.tree_util.keystr(path), _column_digest(column, whole)) for path, column in columns
    ]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _column_digest(column: Any, whole: bool) -> str:
    if isinstance(column, np.ndarray | jax.Array):
        return array_digest(column)
    size = column.shape[0] if hasattr(column, "shape") else len(column)
    places = range(size) if whole or _is_list(column) else sampled_rows(size).tolist()
    digest = hashlib.sha256(str(size).encode())
    for place in places:
        for path, leaf in jax.tree_util.tree_leaves_with_path(column[place]):
            values = _on_host(leaf)
            digest.update(jax.tree_util.keystr(path).encode() + _described(values))
            digest.update(_bytes_of(values))
    return digest.hexdigest()


def sampled_rows(size: int) -> np.ndarray:
    """Returns evenly spaced indices below `size`, including the first and the last."""
    return np.unique(np.linspace(0, size - 1, _SAMPLED).astype(np.int64))


def tree_digest(tree: Any) -> str:
    """Returns the SHA-256 of the paths, types and values of all arrays of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = [(jax.tree_util.keystr(path), array_digest(leaf)) for path, leaf in leaves]
    return hashlib.sha256(repr(named).encode()).hexdigest()


def array_digest(array: Any) -> str:
    """Returns the SHA-256 of type, shape and all values of an array, equal on all hosts.

    Threads hash parts of it, at about 2 GB a second and core.
    """
    values = _on_host(array)
    whole = hashlib.sha256(_described(values))
    rows = values.reshape(1) if values.ndim == 0 else values
    each = max(1, _PART // max(1, rows[:1].nbytes))
    starts = range(0, len(rows), each)

    def part(start: int) -> bytes:
        return hashlib.sha256(_bytes_of(rows[start : start + each])).digest()

    if len(starts) <= 1:
        parts = list(map(part, starts))
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            parts = list(pool.map(part, starts))
    whole.update(b"".join(parts))
    return whole.hexdigest()


def _on_host(array: Any) -> np.ndarray:
    if jnp.issubdtype(getattr(array, "dtype", np.float32), jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        array = multihost_utils.process_allgather(array, tiled=True)
    values = np.asarray(array)
    return values.astype(str) if values.dtype.hasobject else values


def _described(values: np.ndarray) -> bytes:
    return f"{values.dtype}{values.shape}".encode()


def _bytes_of(values: np.ndarray) -> Any:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _is_list(node: Any) -> bool:
    return isinstance(node, list)
