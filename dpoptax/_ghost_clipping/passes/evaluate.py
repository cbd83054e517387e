"""Runs a read program: one pass forward and one backward give every use's operand and cotangent.

A zero is added to the output of each use, and for opaque parameters to the parameter itself,
once per example; the derivatives by those zeros are the cotangents, respectively the per-example
gradients. No other gradient is formed.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from dpoptax._ghost_clipping.trace.derived_values import bind
from dpoptax._ghost_clipping.trace.program import (
    Application,
    Block,
    Constant,
    Derived,
    Parameter,
    Program,
    Result,
    Step,
    StepsOf,
    Use,
    Value,
)
from dpoptax._tree import PyTree
from dpoptax._xla import materialize

# The values of derived quantities where a block runs, each clean or carrying the perturbations.
Surroundings: TypeAlias = dict[tuple[Derived, bool], jax.Array]
# Arrays by the index of their use, or of their parameter.
ByIndex: TypeAlias = dict[int, jax.Array]


class Evaluation:
    """The values of derived quantities at some parameters, each computed once.

    All steps of their scans are stacked in front.
    """

    def __init__(self, leaves: list[jax.Array]) -> None:
        self.leaves = leaves
        self.values: dict[Derived, jax.Array] = {}
        self.results: dict[Application, tuple[jax.Array, ...]] = {}

    def __call__(self, derived: Derived) -> jax.Array:
        """Iterative, since programs nest deeper than Python's stack allows."""
        stack = [derived]
        while stack:
            top = stack[-1]
            missing = [] if top in self.values else self.compute(top)
            stack.extend(missing)
            if not missing:
                stack.pop()
        return self.values[derived]

    def compute(self, derived: Derived) -> list[Derived]:
        """Computes one value, or says which others it waits for."""
        match derived.origin:
            case Parameter(leaf):
                self.values[derived] = self.leaves[leaf]
            case Constant(value):
                self.values[derived] = _materialise(value, derived.aval)
            case StepsOf(whole):
                if whole not in self.values:
                    return [whole]
                self.values[derived] = self.values[whole]
            case Result(application, index):
                missing = [v for v in application.operands if v not in self.values]
                if missing:
                    return missing
                if application not in self.results:
                    operands = [self.values[v] for v in application.operands]
                    self.results[application] = _apply(application, operands)
                self.values[derived] = self.results[application][index]
        return []


def _materialise(value: Any, aval: ShapedArray) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return value
    return jnp.asarray(value, aval.dtype)


def _apply(application: Application, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    """The results of an operation, for all steps of the scans around it at once."""

    def one_step(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return bind(application.eqn, operands)

    function = one_step
    for scan in reversed(application.scans):
        axes = [0 if scan in v.scans else None for v in application.operands]
        function = jax.vmap(function, in_axes=axes)
    return function(*operands)


class _Runner:
    def __init__(self, perturbations: ByIndex, known: Surroundings) -> None:
        self.perturbations = perturbations
        self.known = known
        self.records: ByIndex = {}

    def run(self, block: Block, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        values: dict[Value, jax.Array] = dict(zip(block.inputs, inputs, strict=True))

        def read(value: Value, perturbed: bool) -> jax.Array:
            return self.known[value, perturbed] if isinstance(value, Derived) else values[value]

        for step in block.steps:
            operands = [read(v, step.use is None) for v in step.operands]
            outputs: Sequence[jax.Array]
            if step.use is not None:
                (out,) = bind(step.eqn, operands)
                self.records[step.use.index] = operands[step.data]
                outputs = [out + self.perturbations[step.use.index].astype(out.dtype)]
            elif step.body is None:
                outputs = bind(step.eqn, operands)
            elif step.scan is not None:
                outputs = self.scan(step, operands)
            else:
                outputs = self.rematerialise(step, operands)
            values.update(zip(step.outputs, outputs, strict=True))
        return [read(v, True) for v in block.results]

    def rematerialise(self, step: Step, operands: list[jax.Array]) -> list[jax.Array]:
        body = step.body
        assert body is not None
        private = [
            x for v, x in zip(step.operands, operands, strict=True) if not isinstance(v, Derived)
        ]
        own = {u.index: self.perturbations[u.index] for u in body.uses()}

        def call(
            inputs: list[jax.Array], perturbations: ByIndex
        ) -> tuple[list[jax.Array], ByIndex]:
            inner = _Runner(perturbations, self.known)
            return inner.run(body, inputs), inner.records

        params = step.eqn.params
        call = jax.checkpoint(call, prevent_cse=params["prevent_cse"], policy=params["policy"])
        outputs, records = call(private, own)
        self.records.update(records)
        return outputs

    def scan(self, step: Step, operands: list[jax.Array]) -> list[jax.Array]:
        assert step.body is not None
        p, body, scan = step.eqn.params, step.body, step.scan
        first, last = step.carry.start, step.carry.stop
        private = [not isinstance(v, Derived) for v in step.operands]
        consts = [x for x, is_private in zip(operands[:first], private, strict=False) if is_private]
        xs = [x for x, ok in zip(operands[last:], private[last:], strict=True) if ok]
        stacked = {k: self.known[k] for k in body.needs() if scan in k[0].scans}
        keys = list(stacked)
        own = {u.index: self.perturbations[u.index] for u in body.uses()}

        def one_step(carry: list[jax.Array], inputs: PyTree) -> PyTree:
            xs, slices, perturbations = inputs
            known = {**self.known, **dict(zip(keys, slices, strict=True))}
            inner = _Runner(perturbations, known)
            outputs = inner.run(body, [*consts, *carry, *xs])
            return outputs[: len(carry)], (outputs[len(carry) :], inner.records)

        carry, (ys, records) = lax.scan(
            one_step,
            operands[first:last],
            (xs, [stacked[k] for k in keys], own),
            length=p["length"],
            reverse=p["reverse"],
            unroll=p["unroll"],
        )
        self.records.update(records)
        return [*carry, *ys]


def _surroundings(
    program: Program, clean: list[jax.Array], perturbed: list[jax.Array]
) -> Surroundings:
    needs = list(program.block.needs())
    opaque = set(program.opaque)
    at_clean, at_perturbed = Evaluation(clean), Evaluation(perturbed)
    return {
        (v, flows): at_perturbed(v) if flows and v.leaves & opaque else at_clean(v)
        for v, flows in needs
    }


# Results per example, operands and cotangents by use, gradients by opaque parameter.
Passed: TypeAlias = tuple[list[jax.Array], ByIndex, ByIndex, ByIndex]


def run_batch(
    program: Program, leaves: list[jax.Array], batch: list[jax.Array], size: int
) -> Passed:
    """Losses, cotangents and operands of a batch of `size` examples at one point.

    Args:
      program: what `read_program` returned.
      leaves: the parameters, flattened.
      batch: the flattened examples (and keys), each with a leading batch axis.
      size: the number of examples.

    Returns:
      `(results, operands, cotangents, gradients)`: the flat results of the loss per example;
      by use, the data operand and the cotangent of the output per example; by opaque
      parameter, its per-example gradient through the opaque uses.
    """

    def example(
        perturbations: ByIndex, shifts: ByIndex, inputs: list[jax.Array]
    ) -> tuple[list[jax.Array], ByIndex]:
        shifted = [x + shifts[i] if i in shifts else x for i, x in enumerate(leaves)]
        runner = _Runner(perturbations, _surroundings(program, leaves, shifted))
        results = runner.run(program.block, inputs)
        return results, runner.records

    def total(perturbations: ByIndex, shifts: ByIndex) -> PyTree:
        results, operands = jax.vmap(example)(perturbations, shifts, batch)
        return results[0].sum(), (results, operands)

    zeros = {u.index: jnp.zeros((size, *u.shape), u.output.dtype) for u in program.uses}
    shifts = {
        i: jnp.zeros((size, *program.parameters[i].shape), program.parameters[i].dtype)
        for i in program.opaque
    }
    (cotangents, gradients), (results, operands) = jax.grad(total, argnums=(0, 1), has_aux=True)(
        zeros, shifts
    )
    return results, *materialize((operands, cotangents, gradients))


def use_layout(use: Use, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The factors (K, T, R) and (K, T, C) of one example's use, loops folded into T or K."""
    factors = use.rule.factors
    for _ in use.loops:
        factors = jax.vmap(factors)
    rows, columns = factors(operand, cotangent)
    return _fold_loops(use, rows), _fold_loops(use, columns)


def _fold_loops(use: Use, factor: jax.Array) -> jax.Array:
    lead = len(use.loops)
    stacked = [i for i, (_, s) in enumerate(use.loops) if s]
    shared = [i for i, (_, s) in enumerate(use.loops) if not s]
    order = (*stacked, lead, *shared, *range(lead + 1, factor.ndim))
    batch, _, _ = use.layout.sizes
    trailing = factor.shape[lead + 2 :]
    return factor.transpose(order).reshape(batch, use.positions, *trailing)
