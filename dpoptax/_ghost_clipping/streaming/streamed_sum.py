"""Clips and sums each use of a parameter during the backward pass.

The norm of one part of the gradient does not depend on other parts, so factors are not kept.
Automatic differentiation would sum the gradients of all examples. Instead, `use_clip.UseClip` clips
and sums them. A scan stacks the results as it would stack gradients, and `jax.checkpoint` computes
operands again. A step then needs little more memory than one without privacy.

The bound of the whole sum follows from the bounds of its parts:

- Leaves of a layer, and slices of a scan over stacked parameters, share no coordinate, so the
  squares of their bounds add up.
- Uses of one parameter share coordinates, so their bounds add up.
- Adding several uses rounds once more for each addition.

Source: He et al., "Exploring the Limits of Differentially Private Deep Learning with Group-wise
Clipping", 2023. The bounds on rounding and the support for arbitrary programs are new here.
"""

import collections
import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpoptax._clipped_sum.clip_per_example import clip_each
from dpoptax._clips.clipping_functions import PerLayerClip
from dpoptax._ghost_clipping.backward.batch_devices import ONE_DEVICE, BatchDevices
from dpoptax._ghost_clipping.backward.use_places import (
    UsePlaces,
    UseTotal,
    check_uses,
    leaf_of,
)
from dpoptax._ghost_clipping.backward.use_runner import BatchFunction, run_uses
from dpoptax._ghost_clipping.streaming.use_clip import Part, UseClip
from dpoptax._losses.program import Program, Use
from dpoptax._losses.trace_loss import Examples
from dpoptax._points.points import GradientPoints
from dpoptax._rounding import block_sums
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._support.tree import PyTree


def streamed_sum(
    program: Program,
    clip: PerLayerClip,
    points: GradientPoints,
    examples: Examples,
    *,
    devices: BatchDevices = ONE_DEVICE,
    factor_dtype: DTypeLike | None = None,
) -> tuple[UseTotal, PyTree]:
    """Computes the clipped sum of a batch.

    The arguments are those of `ghost_clipped_sum` and the `devices` that share the batch.

    Returns:
      The sum, shaped like the parameters, and the auxiliary outputs, `None` without `has_aux`.

    Raises:
      ValueError: there are several gradient points, or the loss transforms a parameter before
        combining it with data.
    """
    params = points.points[0]
    mask, whole = program.loss.separate(examples.mask), examples.whole
    check_uses(program, points, "streaming")
    places = UsePlaces(program, jax.tree.leaves(params), devices.specs)
    parts, opaque_parts = _split_bounds(program, clip, params, places.added)

    def function(use: Use) -> BatchFunction:
        part = parts[use.index]
        clipped = UseClip(
            use, part.clip.sensitivity, factor_dtype, devices, places.spec(use), part, whole
        )
        kind = jax.ShapeDtypeStruct(use.step_rule.layout.split, jnp.float32)
        return BatchFunction(clipped.batch_sum, kind, mapped=False)

    def live(use: Use) -> jax.Array:
        # The mask, repeated for each step of the scans, which slice it like the use's operands.
        steps = tuple(n for n, _ in use.loops)
        return jnp.broadcast_to(mask.reshape(-1, *(1 for _ in steps)), (*mask.shape, *steps))

    sums, gradients, results = run_uses(
        program,
        places.leaves,
        examples.inputs,
        {use.index: function(use) for use in program.uses},
        own={use.index: live(use) for use in program.uses},
        axes=devices.axes,
    )
    opaque = {}
    for i, gradient in gradients.items():
        sum_opaque = functools.partial(_sum_opaque, opaque_parts[i], whole)
        opaque[i] = devices.add(sum_opaque, places.specs[i])(gradient, mask)
    added = places.join(sums, opaque)
    total = jax.tree.unflatten(jax.tree.structure(params), added)
    return (total, None), program.loss.aux(results)


def _split_bounds(
    program: Program, clip: PerLayerClip, params: PyTree, added: Counter[int]
) -> tuple[dict[int, Part], dict[int, Part]]:
    """Returns the parts of uses, by index, and of opaque parameters, by leaf."""
    groups = clip.groups(params)
    leaves_of = collections.Counter(groups)

    def part(leaf: int, steps: int) -> Part:
        group = groups[leaf]
        # Parameters and steps share no entry: the squares of k bounds C/√k add up to C². The u uses
        # of a parameter share entries, so each gets 1/u of its bound, which is u² under the root.
        split = clip.split(group, 1 + max(groups), leaves_of[group] * added[leaf] ** 2 * steps)
        return Part(split, added[leaf])

    steps = {u.index: math.prod(n for n, _ in u.loops) for u in program.uses}
    uses = {u.index: part(leaf_of(u), steps[u.index]) for u in program.uses}
    return uses, {leaf: part(leaf, 1) for leaf in program.opaque}


def _sum_opaque(part: Part, whole: WholeBatch, gradient: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the clipped sum of per-example gradients (B, …)."""
    clipped = clip_each(part.clip, [gradient], mask, tau=part.tau(whole))
    return block_sums.sum_weighted(clipped.coefficients[0], clipped.units[0])
