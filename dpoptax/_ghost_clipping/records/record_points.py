"""Runs a program forward and backward, and records operands and cotangents.

A zero is added to the output of each use. For each example, the loss is differentiated with
respect to these zeros, which gives the cotangents of the uses, and with respect to the opaque
parameters. No other gradients are formed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpoptax._ghost_clipping.records.run_block import Arrays, ByIndex, run_block
from dpoptax._losses.traced_program import Program, ProgramStep, Use
from dpoptax._points.points import GradientPoints, weigh
from dpoptax._rounding.bounds import within_range
from dpoptax._support.jaxprs import bind
from dpoptax._support.tree import PyTree, widen
from dpoptax._support.xla import materialize, round_to_dtype

# An operand, a cotangent, and the weight of their product.
WeightedPair: TypeAlias = tuple[jax.Array, jax.Array, float]


class PointRecord(NamedTuple):
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
class Records:
    """Holds the operands, cotangents and gradients of all gradient points.

    Attributes:
      points: the gradient points and their weights.
      leaves: the flattened parameters at each point.
      at_points: the arrays of each point.
      factor_dtype: the dtype to round factors to; `None` for no rounding.
      early: whether operands and cotangents are recorded in `factor_dtype`, and finite where
        necessary.
    """

    points: GradientPoints
    leaves: list[Arrays]
    at_points: list[PointRecord]
    factor_dtype: DTypeLike | None
    early: bool


class Recording(NamedTuple):
    """Describes how operands and cotangents are recorded.

    Attributes:
      dtype: the dtype for float32; `None` for float32.
      finite_operands: the uses whose operand must be finite.
      finite_cotangents: the uses whose cotangent must be finite.
    """

    dtype: DTypeLike | None = None
    finite_operands: frozenset[int] = frozenset()
    finite_cotangents: frozenset[int] = frozenset()


def record_points(
    program: Program,
    points: GradientPoints,
    inputs: Arrays,
    *,
    factor_dtype: DTypeLike | None = None,
    formed_uses: Sequence[Use] = (),
    finite: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset()),
    early: bool = False,
) -> Records:
    """Runs a program forward and backward at all gradient points.

    `inputs` are the flattened examples (and keys), each with a leading batch axis. `formed_uses`
    are the uses whose gradients will be formed; see `record_point`. `finite` are the uses whose
    operand, and those whose cotangent, must be finite. With `early`, other numbers are replaced and
    factors are rounded when they are recorded. Otherwise this is done later, since differences of
    rounded numbers would be less exact.
    """
    leaves = [jax.tree.leaves(point) for point in points.points]
    recording = Recording(factor_dtype, *finite) if early else Recording()

    at_points = [record_point(program, each, inputs, recording, formed_uses) for each in leaves]
    return Records(points, leaves, at_points, factor_dtype, early)


def record_point(
    program: Program,
    leaves: Arrays,
    inputs: Arrays,
    recording: Recording,
    formed_uses: Sequence[Use] = (),
) -> PointRecord:
    """Runs a program forward and backward on a batch of examples at one point.

    Args:
      program: the result of `read_program`.
      leaves: the parameters, flattened.
      inputs: the flattened examples (and keys), each with a leading batch axis.
      recording: how operands and cotangents are recorded.
      formed_uses: uses whose gradients will be formed. Their factors are read only once, so the
        compiler may form each gradient during the backward pass and drop the factors.
    """
    run_use = functools.partial(_record, frozenset(program.opaque), recording)
    zeros = {
        # A cotangent gets the dtype of its zero, so zeros have the dtype of records.
        u.index: jnp.zeros(
            (len(inputs[0]), *u.shape), _recorded_dtype(u.output.dtype, recording.dtype)
        )
        for u in program.uses
    }
    opaque = {i: leaves[i] for i in program.opaque}

    def example(zeros: ByIndex, opaque: ByIndex, inputs: Arrays) -> PyTree:
        params = [opaque.get(i, leaf) for i, leaf in enumerate(leaves)]
        outputs, records = run_block(program.block, [*params, *inputs], zeros, run_use)
        return outputs[0], (outputs, records)

    # No other derivatives are taken, so gradients of used parameters are not formed.
    # The gradient is taken inside `vmap`, so each example has its own, also with respect to
    # parameters that all examples share.
    by_example = jax.vmap(jax.grad(example, argnums=(0, 1), has_aux=True), in_axes=(0, None, 0))
    (cotangents, gradients), (outputs, operands) = by_example(zeros, opaque, inputs)
    formed = [use.index for use in formed_uses]
    # Not materialized, so that the compiler may drop these factors once the gradients are formed.
    passing = [{i: arrays.pop(i) for i in formed} for arrays in (operands, cotangents)]
    operands, cotangents, gradients = materialize((operands, cotangents, gradients))
    return PointRecord(outputs, operands | passing[0], cotangents | passing[1], gradients)


def _recorded_dtype(dtype: jnp.dtype, record_dtype: DTypeLike | None) -> jnp.dtype:
    """Returns the dtype in which arrays of a dtype are recorded.

    float16 is widened, since it holds no number beyond the working range except infinity.
    """
    # Row numbers of lookups are integers.
    if not jnp.issubdtype(dtype, jnp.floating) or dtype == jnp.bfloat16:
        return dtype
    if record_dtype is not None:
        return jnp.dtype(record_dtype)
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def recorded(x: jax.Array, record_dtype: DTypeLike | None, *, finite: bool) -> jax.Array:
    """Returns an array in the dtype of records, with finite numbers if required."""
    if finite and jnp.issubdtype(x.dtype, jnp.floating):
        x = within_range(x)
    dtype = _recorded_dtype(x.dtype, record_dtype)
    if x.dtype == dtype:
        return x
    narrows = jnp.finfo(dtype).bits < jnp.finfo(x.dtype).bits
    return round_to_dtype(x, dtype) if narrows else x.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _convert_zero(
    zero: jax.Array, dtype: jnp.dtype, record_dtype: DTypeLike | None, finite: bool
) -> jax.Array:
    """Converts a zero to the dtype of an output, and cotangents to records."""
    del record_dtype, finite
    return zero.astype(dtype)


_convert_zero.defvjp(
    lambda zero, dtype, record_dtype, finite: (zero.astype(dtype), None),
    lambda dtype, record_dtype, finite, _, cotangent: (
        recorded(cotangent, record_dtype, finite=finite),
    ),
)


def _record(
    opaque: frozenset[int],
    recording: Recording,
    step: ProgramStep,
    operands: Arrays,
    zero: jax.Array,
) -> tuple[Arrays, jax.Array]:
    """Returns the output of a use plus a zero, in a list, and the data operand.

    The derivative with respect to the zero is the cotangent of the output.
    """
    use, operand = step.use, operands[step.data]
    assert use is not None
    if use.value.leaves & opaque:
        # Operand and cotangent give this part of the gradient, which must not be counted again.
        place = step.operands.index(use.value)
        operands = list(operands)
        operands[place] = lax.stop_gradient(operands[place])
    (output,) = bind(step.eqn, operands)
    finite = use.index in recording.finite_operands, use.index in recording.finite_cotangents
    record = recorded(operand, recording.dtype, finite=finite[0])
    # Its derivative converts the cotangent, which is then the record.
    if finite[1] or zero.dtype != output.dtype:
        zero = _convert_zero(zero, output.dtype, recording.dtype, finite[1])
    return [output + zero], record


def weighted_pairs(use: Use, records: Records, differences: bool) -> list[WeightedPair]:
    """Returns operands, cotangents and weights whose products sum to a use's gradient.

    With `differences`, operands of further points are replaced by their differences from the first
    point. Weights that are large and cancel then multiply small numbers.
    """
    pairs = pairs_by_point(use, records)
    if len(pairs) == 1:
        return pairs
    weights = records.points.weights
    operands, cotangents = [o for o, _, _ in pairs], [c for _, c, _ in pairs]
    # A difference of row numbers is not a row number, so lookups keep their pairs.
    lookup = jnp.issubdtype(operands[0].dtype, jnp.integer)
    # Σ_j w_j o_j ⊗ c_j = o_0 ⊗ Σ_j w_j c_j + Σ_{j>0} w_j (o_j - o_0) ⊗ c_j. Equal operands have no
    # differences, so one pair is left.
    if not use.operand_varies or (differences and not lookup):
        total = weigh(cotangents[0], weights[0])
        for cotangent, weight in zip(cotangents[1:], weights[1:], strict=True):
            total += weigh(cotangent, weight)
        # Stored, since XLA may round sums of products differently each time.
        total = materialize(recorded(total, records.factor_dtype, finite=True))
        first = widen(operands[0]) if use.operand_varies else operands[0]
        others = pairs[1:] if use.operand_varies else []
        # The total contains the weights already, so the first pair gets weight 1.
        pairs = [(operands[0], total, 1.0), *((widen(o) - first, c, w) for o, c, w in others)]
    return pairs


def pairs_by_point(use: Use, records: Records) -> list[WeightedPair]:
    """Returns the operand, cotangent and weight of a use at each point."""
    return [
        (at_point.operands[use.index], at_point.cotangents[use.index], weight)
        for at_point, weight in zip(records.at_points, records.points.weights, strict=True)
    ]
