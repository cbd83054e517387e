"""Evaluates derived values, such as a normalized kernel, at given parameters."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from dpoptax._ghost_clipping.trace.program import (
    Constant,
    DerivedValue,
    Operation,
    Parameter,
    Result,
    ScanSlices,
)
from dpoptax._jaxprs import bind


class ParameterEvaluator:
    """Computes and caches derived values at given parameters.

    Values inside scans have all steps stacked along leading axes.
    """

    def __init__(self, leaves: list[jax.Array]) -> None:
        self.leaves = leaves
        self.values: dict[DerivedValue, jax.Array] = {}
        self.results: dict[Operation, tuple[jax.Array, ...]] = {}

    def __call__(self, derived: DerivedValue) -> jax.Array:
        """Returns a value. Not recursive, since programs nest deeper than Python's stack."""
        stack = [derived]
        while stack:
            top = stack[-1]
            missing = [] if top in self.values else self.compute(top)
            stack.extend(missing)
            if not missing:
                stack.pop()
        return self.values[derived]

    def compute(self, derived: DerivedValue) -> list[DerivedValue]:
        """Computes one value, or returns the values that must be computed before it."""
        match derived.origin:
            case Parameter(leaf):
                self.values[derived] = self.leaves[leaf]
            case Constant(value):
                self.values[derived] = _constant_array(value, derived.aval)
            case ScanSlices(whole):
                if whole not in self.values:
                    return [whole]
                self.values[derived] = self.values[whole]
            case Result(operation, index):
                missing = [v for v in operation.operands if v not in self.values]
                if missing:
                    return missing
                if operation not in self.results:
                    operands = [self.values[v] for v in operation.operands]
                    self.results[operation] = _apply_operation(operation, operands)
                self.values[derived] = self.results[operation][index]
        return []


def _constant_array(value: Any, aval: ShapedArray) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return value
    return jnp.asarray(value, aval.dtype)


def _apply_operation(operation: Operation, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the results of an operation for all steps of the enclosing scans."""

    def one_step(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return bind(operation.eqn, operands)

    function = one_step
    for scan in reversed(operation.scans):
        axes = [0 if scan in v.scans else None for v in operation.operands]
        function = jax.vmap(function, in_axes=axes)
    return function(*operands)
