"""Runs a read program: one forward and one backward pass record operands and cotangents.

A zero is added to the output of each use, once per example, and for opaque parameters to the
parameter itself. The derivatives by these zeros are the cotangents of the uses, and the per-example
gradients of the opaque parameters. No other gradient is formed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpoptax._ghost_clipping.passes.parameter_values import ParameterEvaluator
from dpoptax._ghost_clipping.trace.program import Block, DerivedValue, Program, Step, Use, Value
from dpoptax._jaxprs import bind
from dpoptax._points import GradientPoints, weigh
from dpoptax._tree import PyTree, widen
from dpoptax._xla import materialize, round_to_dtype

# The derived values that a block reads, by (value, shifted). Shifted ones are computed from opaque
# parameters with their zeros added, so that gradients flow to these zeros.
Environment: TypeAlias = dict[tuple[DerivedValue, bool], jax.Array]
Arrays: TypeAlias = list[jax.Array]
# Arrays by the index of their use, or of their parameter.
ByIndex: TypeAlias = dict[int, jax.Array]
# An operand, a cotangent, and the weight of their product.
WeightedPair: TypeAlias = tuple[jax.Array, jax.Array, float | jax.Array]


class PassResult(NamedTuple):
    """Holds the arrays of one pass, each per example, (B, …).

    Attributes:
      results: the flat results of the loss.
      operands: the data operand of each use.
      cotangents: the cotangent of the output of each use.
      gradients: the gradient by each opaque parameter, through opaque uses.
    """

    results: Arrays
    operands: ByIndex
    cotangents: ByIndex
    gradients: ByIndex


class TangentPass(NamedTuple):
    """Holds the direction of a Hessian-vector product, and derivatives along it.

    Attributes:
      direction: the direction, flattened like the parameters.
      operands: the derivative of each operand.
      cotangents: the derivative of each cotangent.
      gradients: the derivative of each gradient by an opaque parameter.
    """

    direction: Arrays
    operands: ByIndex
    cotangents: ByIndex
    gradients: ByIndex


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """Holds the operands, cotangents and gradients of all gradient points.

    `tangent` is there if a Hessian-vector product is added, as `disk(gamma=0)` does.
    """

    points: GradientPoints
    leaves: list[Arrays]
    operands: list[ByIndex]
    cotangents: list[ByIndex]
    gradients: list[ByIndex]
    tangent: TangentPass | None


def run_passes(
    program: Program,
    points: GradientPoints,
    batch: Arrays,
    batch_size: int,
    *,
    factor_dtype: DTypeLike | None = None,
) -> tuple[Passes, Arrays]:
    """Runs a program forward and backward at all points; also returns the first point's results.

    At a single point, operands and cotangents in float32 are recorded in `factor_dtype`. At several
    points they are rounded later, since differences of rounded numbers would be less exact.
    """
    leaves = [jax.tree.leaves(point) for point in points.points]
    if len(leaves) > 1 or points.tangent is not None:
        factor_dtype = None
    tangent = None
    outs: list[PassResult] = []
    for j, point in enumerate(leaves):
        if j == 0 and points.tangent is not None:
            direction = jax.tree.leaves(points.tangent)

            def run_at(leaves: Arrays) -> PassResult:
                return run_pass(program, leaves, batch, batch_size)

            # Forward over reverse: operands, cotangents and gradients change along the direction.
            out, derivative = jax.jvp(run_at, (point,), (direction,))
            tangent = TangentPass(
                direction, derivative.operands, derivative.cotangents, derivative.gradients
            )
        else:
            out = run_pass(program, point, batch, batch_size, factor_dtype)
        outs.append(out)
    passes = Passes(
        points,
        leaves,
        [out.operands for out in outs],
        [out.cotangents for out in outs],
        [out.gradients for out in outs],
        tangent,
    )
    return passes, outs[0].results


def run_pass(
    program: Program,
    leaves: Arrays,
    batch: Arrays,
    batch_size: int,
    record_dtype: DTypeLike | None = None,
) -> PassResult:
    """Runs a program forward and backward on a batch of examples at one point.

    Args:
      program: the value that `read_program` returned.
      leaves: the parameters, flattened.
      batch: the flattened examples (and keys), each with a leading batch axis.
      batch_size: the number of examples.
      record_dtype: the dtype that operands and cotangents in float32 are recorded in, `None` for
        their own.
    """

    def example(
        output_zeros: ByIndex, parameter_zeros: ByIndex, inputs: Arrays
    ) -> tuple[Arrays, ByIndex]:
        shifted = [
            x + parameter_zeros[i] if i in parameter_zeros else x for i, x in enumerate(leaves)
        ]
        runner = _Interpreter(
            output_zeros, _make_environment(program, leaves, shifted), record_dtype
        )
        results = runner.run(program.block, inputs)
        return results, runner.records

    def total(output_zeros: ByIndex, parameter_zeros: ByIndex) -> PyTree:
        results, operands = jax.vmap(example)(output_zeros, parameter_zeros, batch)
        # The sum over examples is linear: its derivative by an example's zeros is that example's.
        return results[0].sum(), (results, operands)

    # Only these zeros are differentiated, so no gradient by the parameter of a use is formed.
    output_zeros = {
        u.index: jnp.zeros((batch_size, *u.shape), _recorded_dtype(u.output.dtype, record_dtype))
        for u in program.uses
    }
    parameter_zeros = {
        i: jnp.zeros((batch_size, *program.parameters[i].shape), program.parameters[i].dtype)
        for i in program.opaque
    }
    (cotangents, gradients), (results, operands) = jax.grad(total, argnums=(0, 1), has_aux=True)(
        output_zeros, parameter_zeros
    )
    return PassResult(results, *materialize((operands, cotangents, gradients)))


def _recorded_dtype(dtype: jnp.dtype, record_dtype: DTypeLike | None) -> jnp.dtype:
    """Returns the dtype that arrays of a dtype are recorded in."""
    wide = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32
    return dtype if record_dtype is None or not wide else jnp.dtype(record_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _widen_zero(zero: jax.Array, dtype: jnp.dtype, zero_dtype: jnp.dtype) -> jax.Array:
    """Converts a zero to the dtype of an output. The cotangent is rounded to the zero's dtype."""
    del zero_dtype
    return zero.astype(dtype)


_widen_zero.defvjp(
    lambda zero, dtype, zero_dtype: (zero.astype(dtype), None),
    lambda dtype, zero_dtype, _, cotangent: (round_to_dtype(cotangent, zero_dtype),),
)


class _Interpreter:
    """Runs the steps of a block and records the data operand of each use."""

    def __init__(
        self, output_zeros: ByIndex, known: Environment, record_dtype: DTypeLike | None
    ) -> None:
        self.output_zeros = output_zeros
        self.known = known
        self.record_dtype = record_dtype
        self.records: ByIndex = {}

    def record(self, use: Use, operand: jax.Array) -> None:
        dtype = _recorded_dtype(operand.dtype, self.record_dtype)
        same = dtype == operand.dtype
        self.records[use.index] = operand if same else round_to_dtype(operand, dtype)

    def shift(self, use: Use, output: jax.Array) -> jax.Array:
        """Returns an output plus a zero, by which the derivative is the output's cotangent."""
        zero = self.output_zeros[use.index]
        if self.record_dtype is None:
            return output + zero.astype(output.dtype)
        return output + _widen_zero(zero, output.dtype, zero.dtype)

    def run(self, block: Block, inputs: Sequence[jax.Array]) -> Arrays:
        values: dict[Value, jax.Array] = dict(zip(block.inputs, inputs, strict=True))

        def read(value: Value, shifted: bool) -> jax.Array:
            return self.known[value, shifted] if isinstance(value, DerivedValue) else values[value]

        for step in block.steps:
            # A use reads unshifted parameters: the gradient through it comes from its operand and
            # cotangent, and must not be counted again in the gradient of an opaque parameter.
            operands = [read(v, step.use is None) for v in step.operands]
            outputs: Sequence[jax.Array]
            if step.use is not None:
                (out,) = bind(step.eqn, operands)
                self.record(step.use, operands[step.data])
                outputs = [self.shift(step.use, out)]
            elif step.body is None:
                outputs = bind(step.eqn, operands)
            elif step.scan_id is not None:
                outputs = self.scan(step, operands)
            else:
                outputs = self.rematerialize(step, operands)
            values.update(zip(step.outputs, outputs, strict=True))
        return [read(v, True) for v in block.results]

    def rematerialize(self, step: Step, operands: Arrays) -> Arrays:
        body = step.body
        assert body is not None
        private = [
            x
            for v, x in zip(step.operands, operands, strict=True)
            if not isinstance(v, DerivedValue)
        ]
        own = {u.index: self.output_zeros[u.index] for u in body.uses()}

        def call(inputs: Arrays, output_zeros: ByIndex) -> tuple[Arrays, ByIndex]:
            inner = _Interpreter(output_zeros, self.known, self.record_dtype)
            return inner.run(body, inputs), inner.records

        params = step.eqn.params
        call = jax.checkpoint(call, prevent_cse=params["prevent_cse"], policy=params["policy"])
        outputs, records = call(private, own)
        self.records.update(records)
        return outputs

    def scan(self, step: Step, operands: Arrays) -> Arrays:
        assert step.body is not None
        p, body, scan_id = step.eqn.params, step.body, step.scan_id
        first, last = step.carry.start, step.carry.stop
        private = [not isinstance(v, DerivedValue) for v in step.operands]
        consts = [x for x, is_private in zip(operands[:first], private, strict=False) if is_private]
        xs = [x for x, ok in zip(operands[last:], private[last:], strict=True) if ok]
        stacked = {k: self.known[k] for k in body.needs() if scan_id in k[0].scans}
        keys = list(stacked)
        own = {u.index: self.output_zeros[u.index] for u in body.uses()}

        def one_step(carry: Arrays, inputs: PyTree) -> PyTree:
            xs, slices, output_zeros = inputs
            # Derived values of stacked parameters are scanned over, all others are closed over.
            known = {**self.known, **dict(zip(keys, slices, strict=True))}
            inner = _Interpreter(output_zeros, known, self.record_dtype)
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


def _make_environment(program: Program, unshifted: Arrays, shifted: Arrays) -> Environment:
    needs = list(program.block.needs())
    opaque = set(program.opaque)
    evaluate, evaluate_shifted = ParameterEvaluator(unshifted), ParameterEvaluator(shifted)
    return {
        (v, is_shifted): evaluate_shifted(v) if is_shifted and v.leaves & opaque else evaluate(v)
        for v, is_shifted in needs
    }


def weighted_pairs(use: Use, passes: Passes, differences: bool) -> list[WeightedPair]:
    """Returns operands, cotangents and weights whose products add up to the gradient of a use.

    With `differences`, operands of further points are written as differences to the first point's.
    Weights that are large and cancel then multiply small numbers.
    """
    weights, u = passes.points.weights, use.index
    pairs = pairs_by_point(use, passes)
    if len(pairs) == 1 and passes.tangent is None:
        return pairs
    # Several points, or a tangent.
    operands, cotangents = [o for o, _, _ in pairs], [c for _, c, _ in pairs]
    lookup = jnp.issubdtype(operands[0].dtype, jnp.integer)
    if len(pairs) > 1 and (not use.operand_varies or (differences and not lookup)):
        total = weigh(cotangents[0], weights[0])
        for cotangent, weight in zip(cotangents[1:], weights[1:], strict=True):
            total += weigh(cotangent, weight)
        # Stored, since XLA may round sums of products differently each time.
        total = materialize(total)
        first = widen(operands[0]) if use.operand_varies else operands[0]
        others = pairs[1:] if use.operand_varies else []
        pairs = [(operands[0], total, 1.0), *((widen(o) - first, c, w) for o, c, w in others)]
    if passes.tangent is not None:
        # The product rule: the derivatives of the cotangent and of the operand each add a product.
        operand, cotangent, weight = pairs[0]
        cotangent = materialize(weigh(cotangent, weight) + passes.tangent.cotangents[u])
        pairs[0] = (operand, cotangent, 1.0)
        if use.operand_varies and not lookup:
            pairs.append((passes.tangent.operands[u], cotangents[0], 1.0))
    return pairs


def pairs_by_point(use: Use, passes: Passes) -> list[WeightedPair]:
    """Returns the operand, cotangent and weight of a use at each point, without adding any."""
    operands = [o[use.index] for o in passes.operands]
    cotangents = [c[use.index] for c in passes.cotangents]
    return list(zip(operands, cotangents, passes.points.weights, strict=True))
