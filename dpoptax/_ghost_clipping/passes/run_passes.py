"""Runs a program forward and backward, and records operands and cotangents.

Zeros are added to the output of each use and to opaque parameters, separately for each example. The
derivatives with respect to these zeros are the cotangents of the uses and the per-example gradients
of the opaque parameters. No other gradients are formed.
"""

import dataclasses
import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpoptax._ghost_clipping.passes.interpreter import (
    Arrays,
    ByIndex,
    Environment,
    Interpreter,
    make_environment,
    opaque_zeros,
)
from dpoptax._ghost_clipping.trace.program import Program, Step, Use
from dpoptax._jaxprs import bind
from dpoptax._points import GradientPoints, weigh
from dpoptax._tree import PyTree, widen
from dpoptax._xla import materialize, round_to_dtype

# An operand, a cotangent, and the weight of their product.
WeightedPair: TypeAlias = tuple[jax.Array, jax.Array, float | jax.Array]


class PassResult(NamedTuple):
    """Holds the arrays (B, …) of one pass.

    Attributes:
      results: the flat results of the loss.
      operands: the data operand of each use.
      cotangents: the cotangent of the output of each use.
      gradients: the gradient of each opaque parameter, through opaque uses.
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
      gradients: the derivative of the gradient of each opaque parameter.
    """

    direction: Arrays
    operands: ByIndex
    cotangents: ByIndex
    gradients: ByIndex


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """Holds the operands, cotangents and gradients of all gradient points.

    `tangent` is `None` unless a Hessian-vector product is added, as for `disk(gamma=0)`.
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
    """Runs a program forward and backward at all gradient points.

    Also returns the results of the loss at the first point. At a single point, operands and
    cotangents in float32 are recorded in `factor_dtype`. At several points they are rounded later,
    since differences of rounded numbers would be less exact.
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

            # Forward over reverse: the derivatives of operands, cotangents and gradients.
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
      program: the result of `read_program`.
      leaves: the parameters, flattened.
      batch: the flattened examples (and keys), each with a leading batch axis.
      batch_size: the number of examples.
      record_dtype: the dtype in which float32 operands and cotangents are recorded; `None` for
        float32.
    """

    def example(
        output_zeros: ByIndex, parameter_zeros: ByIndex, inputs: Arrays
    ) -> tuple[Arrays, ByIndex]:
        known = make_environment(program, leaves, parameter_zeros)
        runner = _Recorder(output_zeros, known, record_dtype)
        results = runner.run(program.block, inputs)
        return results, runner.records

    def total(output_zeros: ByIndex, parameter_zeros: ByIndex) -> PyTree:
        results, operands = jax.vmap(example)(output_zeros, parameter_zeros, batch)
        # Only the loss of an example depends on its zeros, so the sum has the same derivative.
        return results[0].sum(), (results, operands)

    # Only derivatives with respect to these zeros are taken, so gradients of used parameters are
    # not formed.
    output_zeros = {
        u.index: jnp.zeros((batch_size, *u.shape), recorded_dtype(u.output.dtype, record_dtype))
        for u in program.uses
    }
    parameter_zeros = opaque_zeros(program, batch_size)
    (cotangents, gradients), (results, operands) = jax.grad(total, argnums=(0, 1), has_aux=True)(
        output_zeros, parameter_zeros
    )
    return PassResult(results, *materialize((operands, cotangents, gradients)))


def recorded_dtype(dtype: jnp.dtype, record_dtype: DTypeLike | None) -> jnp.dtype:
    """Returns the dtype in which arrays of a dtype are recorded."""
    wide = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32
    return dtype if record_dtype is None or not wide else jnp.dtype(record_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _widen_zero(zero: jax.Array, dtype: jnp.dtype, zero_dtype: jnp.dtype) -> jax.Array:
    """Converts a zero to the dtype of an output, and cotangents to `zero_dtype`."""
    del zero_dtype
    return zero.astype(dtype)


_widen_zero.defvjp(
    lambda zero, dtype, zero_dtype: (zero.astype(dtype), None),
    lambda dtype, zero_dtype, _, cotangent: (round_to_dtype(cotangent, zero_dtype),),
)


class _Recorder(Interpreter):
    """Records the data operand of each use, and adds a zero to its output."""

    def __init__(self, by_use: ByIndex, known: Environment, record_dtype: DTypeLike | None) -> None:
        super().__init__(by_use, known)
        self.record_dtype = record_dtype

    def inner(self, by_use: ByIndex, known: Environment) -> "_Recorder":
        return _Recorder(by_use, known, self.record_dtype)

    def use(self, step: Step, use: Use, operands: Arrays) -> jax.Array:
        (output,) = bind(step.eqn, operands)
        operand, zero = operands[step.data], self.by_use[use.index]
        dtype = recorded_dtype(operand.dtype, self.record_dtype)
        same = dtype == operand.dtype
        self.records[use.index] = operand if same else round_to_dtype(operand, dtype)
        # The derivative with respect to this zero is the cotangent of the output.
        if self.record_dtype is None:
            return output + zero.astype(output.dtype)
        return output + _widen_zero(zero, output.dtype, zero.dtype)


def weighted_pairs(use: Use, passes: Passes, differences: bool) -> list[WeightedPair]:
    """Returns operands, cotangents and weights whose products sum to a use's gradient.

    With `differences`, operands of further points are replaced by their differences from the first
    point. Weights that are large and cancel then multiply small numbers.
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
        # By the product rule, the derivatives of cotangent and operand each add a product.
        operand, cotangent, weight = pairs[0]
        cotangent = materialize(weigh(cotangent, weight) + passes.tangent.cotangents[u])
        pairs[0] = (operand, cotangent, 1.0)
        if use.operand_varies and not lookup:
            pairs.append((passes.tangent.operands[u], cotangents[0], 1.0))
    return pairs


def pairs_by_point(use: Use, passes: Passes) -> list[WeightedPair]:
    """Returns the operand, cotangent and weight of a use at each point."""
    operands = [o[use.index] for o in passes.operands]
    cotangents = [c[use.index] for c in passes.cotangents]
    return list(zip(operands, cotangents, passes.points.weights, strict=True))
