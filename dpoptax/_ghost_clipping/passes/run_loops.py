"""Runs the bodies of `jax.lax.scan` and `jax.checkpoint`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from jax import lax

from dpoptax._losses.program import Step
from dpoptax._support.tree import PyTree

if TYPE_CHECKING:
    from dpoptax._ghost_clipping.passes.run_passes import Arrays, ByIndex


def run_body(
    step: Step,
    operands: "Arrays",
    by_use: "ByIndex",
    run: "Callable[[Arrays, ByIndex], tuple[Arrays, ByIndex]]",
) -> "tuple[Arrays, ByIndex]":
    """Returns the results of a step with a body, and the records of its uses.

    `run(inputs, by_use)` runs the body once.
    """
    params, body = step.eqn.params, step.body
    assert body is not None
    own = {use.index: by_use[use.index] for use in body.uses()}
    if step.scan_id is not None:
        return _scan(step, operands, own, run)
    run = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return run(operands, own)


def _scan(
    step: Step,
    operands: "Arrays",
    own: "ByIndex",
    run: "Callable[[Arrays, ByIndex], tuple[Arrays, ByIndex]]",
) -> "tuple[Arrays, ByIndex]":
    """Runs a scan, which slices the arrays of uses and stacks their records."""
    first, last = step.carry.start, step.carry.stop

    def one_step(carry: "Arrays", inputs: PyTree) -> PyTree:
        slices, own = inputs
        outputs, records = run([*operands[:first], *carry, *slices], own)
        return outputs[: last - first], (outputs[last - first :], records)

    params = step.eqn.params
    carry, (stacked, records) = lax.scan(
        one_step,
        operands[first:last],
        (operands[last:], own),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked], records
