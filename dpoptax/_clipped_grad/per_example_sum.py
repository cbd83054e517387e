"""Computes the clipped sum from per-example gradients, for any program.

This engine is the definition of the sum, and the reference for the others. For a dense layer `y = x
@ w + b` and a batch of B examples, `jax.vmap` of the gradient gives arrays (B, R, D) for `w` and
(B, D) for `b`. `sum_clipped` bounds the norm of each example, and adds the
examples with their coefficients: (R, D) and (D,).
"""

import functools
import operator

import jax

from dpoptax._clipped_sum.clip_per_example import sum_clipped
from dpoptax._clips.clip import Clip
from dpoptax._losses.trace_loss import Examples, TracedLoss
from dpoptax._points.points import GradientPoints, weigh
from dpoptax._support.tree import PyTree


def per_example_sum(
    loss: TracedLoss,
    points: GradientPoints,
    examples: Examples,
    *,
    clip: Clip,
    grid: float | None = None,
) -> tuple[PyTree, PyTree]:
    """Computes the clipped sum, and the auxiliary outputs at the first point.

    With a `grid`, clipped gradients are rounded to multiples of it, and the sum is in units of it.
    """
    differentiate = jax.grad(loss.function, has_aux=True)

    def combine(*grads: jax.Array) -> jax.Array:
        weighted = (weigh(g, w) for g, w in zip(grads, points.weights, strict=True))
        return functools.reduce(operator.add, weighted)

    def gradient(example: PyTree, key: jax.Array | None) -> tuple[PyTree, PyTree]:
        grads, aux = zip(*(differentiate(x, example, key) for x in points.points), strict=True)
        return jax.tree.map(combine, *grads), aux[0]

    grads, aux = jax.vmap(gradient)(examples.batch, examples.keys)
    mask, whole = examples.mask, examples.whole
    return sum_clipped(clip, grads, mask, points.reference, grid=grid, whole=whole), aux
