"""Computes values that are derived from parameters, separately from the loss."""

import jax

from dpoptax._ghost_clipping.records.run_block import constant_array
from dpoptax._losses.program import (
    Constant,
    DerivedValue,
    Parameter,
    Result,
    ScanSlices,
    Step,
)
from dpoptax._support.jaxprs import bind


class ParameterEvaluator:
    """Computes and caches derived values at given parameters.

    Values inside scans have all steps stacked along leading axes.
    """

    def __init__(self, leaves: list[jax.Array]) -> None:
        self.leaves = leaves
        self.values: dict[DerivedValue, jax.Array] = {}
        self.results: dict[Step, tuple[jax.Array, ...]] = {}

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
                self.values[derived] = constant_array(value, derived.aval)
            case ScanSlices(whole):
                if whole not in self.values:
                    return [whole]
                self.values[derived] = self.values[whole]
            case Result(step, index) as result:
                missing = [v for v in result.operands if v not in self.values]
                if missing:
                    return missing
                if step not in self.results:
                    self.results[step] = _run_all_steps(
                        result, [self.values[v] for v in result.operands]
                    )
                self.values[derived] = self.results[step][index]
        return []


def _run_all_steps(result: Result, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the results of a step for all steps of the enclosing scans."""

    def one_step(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return bind(result.step.eqn, operands)

    function = one_step
    for scan in sorted({scan for v in result.operands for scan in v.scans}, reverse=True):
        axes = [0 if scan in v.scans else None for v in result.operands]
        function = jax.vmap(function, in_axes=axes)
    return function(*operands)
