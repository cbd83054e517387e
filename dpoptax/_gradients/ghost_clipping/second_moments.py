"""Estimates second moments of the factors of gradients, on public examples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dpoptax._gradients.ghost_clipping.norms.factor_products import contract
from dpoptax._gradients.ghost_clipping.passes.run_passes import run_passes
from dpoptax._gradients.ghost_clipping.planned_uses import make_plan
from dpoptax._gradients.ghost_clipping.sums.scaled_gradients import collect_operands, make_segment
from dpoptax._gradients.ghost_clipping.trace.read_program import read_program
from dpoptax._gradients.ghost_clipping.trace.trace_loss import trace_loss
from dpoptax._gradients.ghost_clipping.transformed.mapped_products import MatrixStep
from dpoptax._gradients.linear_map import LinearMap, Sides, matrix_shape
from dpoptax._gradients.points import GradientPoints
from dpoptax._support.tree import PyTree


def side_moments(
    loss_fn: Callable[..., PyTree], params: PyTree, examples: PyTree
) -> dict[int, tuple[jax.Array, jax.Array]]:
    """Returns E Σ_t rows_t rows_tᵀ and E Σ_t columns_t columns_tᵀ for each kernel.

    The result is indexed by leaf. Σ_t rows_t ⊗ columns_t is the gradient of one example, for a
    kernel read as (R, D). Kernels that the loss does not contract in this form are omitted.
    """
    leaves = jax.tree.leaves(params)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples)
    program = read_program(trace_loss(loss_fn, params, example, None, has_aux=False))
    batch = jax.tree.leaves(examples)
    size = batch[0].shape[0]
    # The plan for a two-sided map shows which kernels have two sides, and their order.
    shapes = [matrix_shape(p) if p.ndim > 1 else None for p in leaves]
    factors = [None if s is None else Sides(*map(jnp.eye, s)) for s in shapes]
    plan = make_plan(program, size, 1, LinearMap(tuple(factors)))
    passes = run_passes(program, GradientPoints((params,), (1.0,)), batch)
    found = {}
    for product in plan.products:
        if product.mapping is None:
            continue
        segments = [make_segment(*use) for use in collect_operands(product, passes, False)]
        moments = []
        for step in product.mapping.steps:
            assert isinstance(step, MatrixStep)
            sides = [s.rows if step.acts_on_rows else s.columns for s in segments]
            total = sum(contract("bktr,bktd->rd", x, x) for x in sides) / size
            moments.append(jnp.zeros_like(total).at[step.order[:, None], step.order].set(total))
        found[product.leaf] = moments[0], moments[1]
    return found
