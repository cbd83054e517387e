"""Clips and sums each use of a parameter during the backward pass.

The norm of one part of the gradient does not depend on other parts, so factors are not kept.
Automatic differentiation would sum the gradients of all examples. Instead, `PartSums` clips and
sums them. A scan stacks the results as it would stack gradients, and `jax.checkpoint` computes
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
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpoptax._clips.clipping_functions import PerLayerClip
from dpoptax._ghost_clipping.backward.batch_devices import ONE_DEVICE, BatchDevices
from dpoptax._ghost_clipping.backward.part_sums import GradientPart, PartSums, UseTotal, check_uses
from dpoptax._ghost_clipping.backward.use_sum import Weighing, tau_of_parts
from dpoptax._losses.trace_loss import Examples
from dpoptax._losses.traced_program import Program
from dpoptax._points.points import GradientPoints
from dpoptax._rounding import bounds
from dpoptax._rounding.block_sums import Rounding
from dpoptax._rounding.bounds import Piece
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
    leaves, groups = jax.tree.leaves(params), clip.groups(params)
    mask, leaf_counts = examples.mask, collections.Counter(groups)
    check_uses(program, points, "streaming")
    sums = PartSums(program, leaves, devices, factor_dtype)

    def weigh(part: GradientPart) -> Weighing:
        group, added = groups[part.leaf], sums.added[part.leaf]
        # Parameters and steps share no entry: the squares of k bounds C/√k add up to C². The u uses
        # of a parameter share entries, so each gets 1/u of its bound, which is u² under the root.
        count = leaf_counts[group] * added**2 * math.prod(part.steps)
        part_clip = clip.split(group, 1 + max(groups), count)

        def coefficients(piece: Piece, used: jax.Array, rounding: Rounding) -> jax.Array:
            tau = tau_of_parts(examples.whole, [rounding], added)
            return bounds.clip_coefficients(part_clip, [piece], used, groups=[0], tau=tau)[0][0]

        return Weighing(part_clip.sensitivity, coefficients)

    def mask_of(part: GradientPart) -> jax.Array:
        # Repeated for each step of the scans, which slice it like the use's operands.
        by_step = mask.reshape(-1, *(1 for _ in part.steps))
        return jnp.broadcast_to(by_step, (*mask.shape, *part.steps))

    weighings, masks = list(map(weigh, sums.parts)), list(map(mask_of, sums.parts))
    found, outputs = sums.sum(leaves, examples.inputs, weighings, masks)
    total = jax.tree.unflatten(jax.tree.structure(params), found)
    return (total, None), program.loss.aux(outputs)
