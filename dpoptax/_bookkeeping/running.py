"""Runs a read program: one pass forward and one backward give every use's operand and cotangent.

A zero is added to the output of each use, and for opaque parameters to the parameter itself,
once per example; the derivatives by those zeros are the cotangents, respectively the per-example
gradients. No other gradient is formed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpoptax._bookkeeping.program import Block, Derived, Program, Step, Use, Value

# The values of derived quantities where a block runs, each clean or carrying the perturbations.
Surroundings = dict[tuple[Derived, bool], jax.Array]


def evaluate_derived(leaves: list[jax.Array], wanted: list[Derived]) -> list[jax.Array]:
    """The values of `wanted` at these parameters, all steps of their scans stacked in front."""
    memo: dict[Any, Any] = {}
    return [_value(v, leaves, memo) for v in wanted]


def _value(derived: Derived, leaves: list[jax.Array], memo: dict[Any, Any]) -> jax.Array:
    """Iterative, since programs nest deeper than Python's stack allows."""
    stack = [derived]
    while stack:
        top = stack[-1]
        if top in memo:
            stack.pop()
            continue
        if top.leaf is not None:
            memo[top] = leaves[top.leaf]
        elif top.alias is not None:
            if top.alias in memo:
                memo[top] = memo[top.alias]
            else:
                stack.append(top.alias)
        elif top.source is None:
            memo[top] = _materialise(top)
        else:
            missing = [v for v in top.source.operands if v not in memo]
            stack.extend(missing)
            if not missing:
                if top.source not in memo:
                    memo[top.source] = _apply(top, [memo[v] for v in top.source.operands])
                memo[top] = memo[top.source][top.index]
    return memo[derived]


def _materialise(derived: Derived) -> Any:
    if jnp.issubdtype(derived.aval.dtype, jax.dtypes.extended):
        return derived.constant
    return jnp.asarray(derived.constant, derived.aval.dtype)


def _apply(derived: Derived, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    source = derived.source
    assert source is not None

    def one_step(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return _bind(source.eqn, operands)

    function = one_step
    for scan in reversed(source.scans):
        axes = [0 if scan in v.scans else None for v in source.operands]
        function = jax.vmap(function, in_axes=axes)
    return function(*operands)


def _bind(eqn: Any, operands: Any) -> tuple[jax.Array, ...]:
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Before jax 0.10 the functions that a primitive takes came apart from its parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *operands, **params)
    return tuple(out) if eqn.primitive.multiple_results else (out,)


class _Runner:
    def __init__(self, perturbations: dict[int, jax.Array], known: Surroundings) -> None:
        self.perturbations = perturbations
        self.known = known
        self.records: dict[int, jax.Array] = {}

    def run(self, block: Block, inputs: Any) -> list[jax.Array]:
        values: dict[Value, jax.Array] = dict(zip(block.inputs, inputs, strict=True))

        def read(value: Value, perturbed: bool) -> jax.Array:
            return self.known[value, perturbed] if isinstance(value, Derived) else values[value]

        for step in block.steps:
            operands = [read(v, step.use is None) for v in step.operands]
            if step.use is not None:
                (out,) = _bind(step.eqn, operands)
                self.records[step.use.index] = operands[step.data]
                outputs: Any = [out + self.perturbations[step.use.index].astype(out.dtype)]
            elif step.body is None:
                outputs = _bind(step.eqn, operands)
            elif step.scan is not None:
                outputs = self.scan(step, operands)
            else:
                outputs = self.rematerialise(step, operands)
            values.update(zip(step.outputs, outputs, strict=True))
        return [read(v, True) for v in block.results]

    def rematerialise(self, step: Step, operands: list[jax.Array]) -> Any:
        body = step.body
        assert body is not None
        private = [
            x for v, x in zip(step.operands, operands, strict=True) if not isinstance(v, Derived)
        ]
        own = {u.index: self.perturbations[u.index] for u in body.uses()}

        def call(inputs: Any, perturbations: Any) -> Any:
            inner = _Runner(perturbations, self.known)
            return inner.run(body, inputs), inner.records

        params = step.eqn.params
        call = jax.checkpoint(call, prevent_cse=params["prevent_cse"], policy=params["policy"])
        outputs, records = call(private, own)
        self.records.update(records)
        return outputs

    def scan(self, step: Step, operands: list[jax.Array]) -> Any:
        assert step.body is not None
        p, body, scan = step.eqn.params, step.body, step.scan
        first, last = p["num_consts"], p["num_consts"] + p["num_carry"]
        private = [not isinstance(v, Derived) for v in step.operands]
        consts = [x for x, is_private in zip(operands[:first], private, strict=False) if is_private]
        xs = [x for x, ok in zip(operands[last:], private[last:], strict=True) if ok]
        stacked = {k: self.known[k] for k in body.needs() if scan in k[0].scans}
        keys = list(stacked)
        own = {u.index: self.perturbations[u.index] for u in body.uses()}

        def one_step(carry: Any, inputs: Any) -> Any:
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


def _surroundings(program: Program, clean: list[jax.Array], perturbed: list[jax.Array]) -> Any:
    needs = list(program.block.needs())
    opaque = set(program.opaque)
    memo_clean: dict[Any, Any] = {}
    memo_perturbed: dict[Any, Any] = {}
    return {
        (v, flows): _value(v, perturbed, memo_perturbed)
        if flows and v.leaves & opaque
        else _value(v, clean, memo_clean)
        for v, flows in needs
    }


def run_batch(program: Program, leaves: list[jax.Array], batch: list[jax.Array], size: int) -> Any:
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

    def example(perturbations: Any, shifts: Any, inputs: Any) -> Any:
        shifted = [x + shifts[i] if i in shifts else x for i, x in enumerate(leaves)]
        runner = _Runner(perturbations, _surroundings(program, leaves, shifted))
        results = runner.run(program.block, inputs)
        return results, runner.records

    def total(perturbations: Any, shifts: Any) -> Any:
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
    # Each is read several times; without the barrier XLA computes it anew for some of the readers.
    return results, *lax.optimization_barrier((operands, cotangents, gradients))


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
