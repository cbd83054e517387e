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

from dpoptax._gradients.ghost_clipping.passes.interpreter import (
    Arrays,
    ByIndex,
    Environment,
    Interpreter,
    make_environment,
    opaque_zeros,
)
from dpoptax._gradients.ghost_clipping.trace.program import Program, Step, Use
from dpoptax._gradients.points import GradientPoints, weigh
from dpoptax._support.jaxprs import bind
from dpoptax._support.tree import PyTree, widen
from dpoptax._support.xla import materialize, round_to_dtype

# An operand, a cotangent, and the weight of their product.
WeightedPair: TypeAlias = tuple[jax.Array, jax.Array, float | jax.Array]


class PassResult(NamedTuple):
    """Holds the arrays (B, …) of one pass.

    Attributes:
      outputs: the loss and the auxiliary outputs, flattened.
      operands: the data operand of each use.
      cotangents: the cotangent of the output of each use.
      gradients: the gradient of each opaque parameter, through opaque uses.
    """

    outputs: Arrays
    operands: ByIndex
    cotangents: ByIndex
    gradients: ByIndex


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """Holds the operands, cotangents and gradients of all gradient points.

    Attributes:
      points: the gradient points and their weights.
      leaves: the flattened parameters at each point.
      at_points: the arrays of each point.
      tangent: the derivatives of the first point's arrays along the tangent; `None` unless a
        Hessian-vector product is added, as for `disk(gamma=0)`.
      factor_dtype: the dtype to round factors to; `None` for no rounding. At a single point,
        operands and cotangents are already recorded in it.
    """

    points: GradientPoints
    leaves: list[Arrays]
    at_points: list[PassResult]
    tangent: PassResult | None
    factor_dtype: DTypeLike | None


def run_passes(
    program: Program,
    points: GradientPoints,
    inputs: Arrays,
    *,
    factor_dtype: DTypeLike | None = None,
) -> Passes:
    """Runs a program forward and backward at all gradient points.

    `inputs` are the flattened examples (and keys), each with a leading batch axis.
    """
    leaves = [jax.tree.leaves(point) for point in points.points]
    # At several points, factors are rounded later, since differences of rounded numbers would be
    # less exact.
    single = len(leaves) == 1 and points.tangent is None
    record_dtype = factor_dtype if single else None

    def run_at(leaves: Arrays) -> PassResult:
        return run_pass(program, leaves, inputs, record_dtype)

    first, *others = leaves
    if points.tangent is None:
        at_first, tangent = run_at(first), None
    else:
        # Forward over reverse: the derivatives of operands, cotangents and gradients.
        at_first, tangent = jax.jvp(run_at, (first,), (jax.tree.leaves(points.tangent),))
    return Passes(points, leaves, [at_first, *map(run_at, others)], tangent, factor_dtype)


def run_pass(
    program: Program,
    leaves: Arrays,
    inputs: Arrays,
    record_dtype: DTypeLike | None = None,
) -> PassResult:
    """Runs a program forward and backward on a batch of examples at one point.

    Args:
      program: the result of `read_program`.
      leaves: the parameters, flattened.
      inputs: the flattened examples (and keys), each with a leading batch axis.
      record_dtype: the dtype in which float32 operands and cotangents are recorded; `None` for
        float32.
    """
    batch_size = inputs[0].shape[0]

    def example(
        output_zeros: ByIndex, parameter_zeros: ByIndex, inputs: Arrays
    ) -> tuple[Arrays, ByIndex]:
        known = make_environment(program, leaves, parameter_zeros)
        recorder = _Recorder(output_zeros, known, record_dtype)
        outputs = recorder.run(program.block, inputs)
        return outputs, recorder.records

    def total(output_zeros: ByIndex, parameter_zeros: ByIndex) -> PyTree:
        outputs, operands = jax.vmap(example)(output_zeros, parameter_zeros, inputs)
        # Only the loss of an example depends on its zeros, so the sum has the same derivative.
        return outputs[0].sum(), (outputs, operands)

    # Only derivatives with respect to these zeros are taken, so gradients of used parameters are
    # not formed.
    output_zeros = {
        u.index: jnp.zeros((batch_size, *u.shape), recorded_dtype(u.output.dtype, record_dtype))
        for u in program.uses
    }
    parameter_zeros = opaque_zeros(program, batch_size)
    (cotangents, gradients), (outputs, operands) = jax.grad(total, argnums=(0, 1), has_aux=True)(
        output_zeros, parameter_zeros
    )
    return PassResult(outputs, *materialize((operands, cotangents, gradients)))


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
    return [
        (at_point.operands[use.index], at_point.cotangents[use.index], weight)
        for at_point, weight in zip(passes.at_points, passes.points.weights, strict=True)
    ]
