"""Computes the clipped sum from per-example gradients, for any program.

This engine is the definition of the sum, and the reference for the others. For a dense layer `y = x
@ w + b` and a batch of B examples, `jax.vmap` of the gradient gives arrays (B, R, D) for `w` and
(B, D) for `b`. `sum_clipped` divides each example by a power of two, bounds its norm, and adds the
examples with their coefficients: (R, D) and (D,).
"""

import jax
import jax.numpy as jnp

from dpoptax._gradients.clip.clip import Clip
from dpoptax._gradients.clip.clip_per_example import sum_clipped
from dpoptax._gradients.ghost_clipping.trace.trace_loss import Examples, TracedLoss
from dpoptax._gradients.points import GradientPoints, weigh
from dpoptax._support.tree import PyTree


def per_example_sum(
    loss: TracedLoss,
    clip: Clip,
    points: GradientPoints,
    examples: Examples,
    *,
    grid: float | None = None,
) -> tuple[PyTree, PyTree]:
    """Computes the clipped sum, and the auxiliary outputs at the first point.

    With a `grid`, clipped gradients are rounded to multiples of it, and the sum is in units of it.
    """
    loss_fn, has_aux = loss.loss_fn, loss.has_aux
    keys = examples.keys

    def gradient(example: PyTree, key: jax.Array | None) -> tuple[PyTree, PyTree]:
        args = (example,) if key is None else (example, key)
        grad = jax.grad(lambda params: loss_fn(params, *args), has_aux=has_aux)
        total: PyTree = None
        aux: PyTree = None
        for j, (point, weight) in enumerate(zip(points.points, points.weights, strict=True)):
            if j == 0 and points.tangent is not None:
                found = jax.jvp(grad, (point,), (points.tangent,), has_aux=has_aux)
                value, derivative, *aux_here = found
                term = jax.tree.map(lambda g, d, w=weight: w * g + d, value, derivative)
            else:
                out = grad(point)
                value, *aux_here = out if has_aux else (out,)
                term = jax.tree.map(lambda g, w=weight: weigh(g, w), value)
            total = term if total is None else jax.tree.map(jnp.add, total, term)
            aux = aux_here[0] if j == 0 and has_aux else aux
        return total, aux

    grads, aux = jax.vmap(gradient, in_axes=(0, None if keys is None else 0))(examples.batch, keys)
    if points.linear_map is not None:
        grads = jax.vmap(points.linear_map.forward)(grads)
    mask, whole = loss.separate(examples.mask), examples.whole
    return sum_clipped(clip, grads, mask, points.reference, grid=grid, whole=whole), aux
