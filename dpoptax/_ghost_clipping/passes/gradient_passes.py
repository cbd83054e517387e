"""Forward and backward passes at all gradient points, and what each use has of them."""

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp

from dpoptax._ghost_clipping.passes.evaluate import ByIndex, Passed, run_batch
from dpoptax._ghost_clipping.trace.program import Program, Use
from dpoptax._points import GradientPoints, weigh
from dpoptax._tree import widen
from dpoptax._xla import materialize

# An operand, a cotangent, and the weight of their product.
Pair: TypeAlias = tuple[jax.Array, jax.Array, float | jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """What the passes at all points gave, with the derivative along the tangent if there is one."""

    points: GradientPoints
    leaves: list[list[jax.Array]]
    operands: list[ByIndex]
    cotangents: list[ByIndex]
    gradients: list[ByIndex]
    tangent: tuple[list[jax.Array], ByIndex, ByIndex, ByIndex] | None


def run_passes(
    program: Program, points: GradientPoints, batch: list[jax.Array], size: int
) -> tuple[Passes, list[jax.Array]]:
    """Runs a program forward and backward at all points; also gives the results at the first."""
    leaves = [jax.tree.leaves(point) for point in points.points]
    tangent = None
    outs = []
    for j, point in enumerate(leaves):
        if j == 0 and points.tangent is not None:
            direction = jax.tree.leaves(points.tangent)

            def at(leaves: list[jax.Array]) -> Passed:
                return run_batch(program, leaves, batch, size)

            out, derivative = jax.jvp(at, (point,), (direction,))
            tangent = (direction, *derivative[1:])
        else:
            out = run_batch(program, point, batch, size)
        outs.append(out)
    passes = Passes(
        points, leaves, [o[1] for o in outs], [o[2] for o in outs], [o[3] for o in outs], tangent
    )
    return passes, outs[0][0]


def pairs_of(use: Use, passes: Passes, differences: bool) -> list[Pair]:
    """Operands, cotangents and weights whose products sum to the gradient of a use."""
    weights, u = passes.points.weights, use.index
    pairs = pairs_by_point(use, passes)
    operands, cotangents = [o for o, _, _ in pairs], [c for _, c, _ in pairs]
    lookup = jnp.issubdtype(operands[0].dtype, jnp.integer)
    if len(pairs) > 1 and (not use.operand_varies or (differences and not lookup)):
        total = weigh(cotangents[0], weights[0])
        for cotangent, weight in zip(cotangents[1:], weights[1:], strict=True):
            total += weigh(cotangent, weight)
        total = materialize(total)  # sums of products may be rounded in one of several ways
        first = widen(operands[0]) if use.operand_varies else operands[0]
        others = pairs[1:] if use.operand_varies else []
        pairs = [(operands[0], total, 1.0), *((widen(o) - first, c, w) for o, c, w in others)]
    if passes.tangent is not None:
        _, changed, changes, _ = passes.tangent
        operand, cotangent, weight = pairs[0]
        pairs[0] = (operand, materialize(weigh(cotangent, weight) + changes[u]), 1.0)
        if use.operand_varies and not lookup:
            pairs.append((changed[u], cotangents[0], 1.0))
    return pairs


def pairs_by_point(use: Use, passes: Passes) -> list[Pair]:
    """The operand, cotangent and weight of a use at each point: none of them are added up."""
    operands = [o[use.index] for o in passes.operands]
    cotangents = [c[use.index] for c in passes.cotangents]
    return list(zip(operands, cotangents, passes.points.weights, strict=True))
