"""Clips and sums each use of a parameter during the backward pass, without keeping its factors.

With the clip `per_layer_clip(…, streaming=True)`, the norm of one part of the gradient needs no
other part. So the derivative by a used value is replaced. Where automatic differentiation would sum
the gradients of all examples, `use_clip.UseClip` clips and sums them. A scan stacks the results
as it would stack gradients, and `jax.checkpoint` computes operands again. A step then needs
little more memory than one without privacy.

The bound of the whole sum follows from the bounds of its parts:

- Leaves of a layer, and slices of a scan over stacked parameters, share no coordinate: their bounds
  add up as squares.
- Uses of one parameter share coordinates: their bounds add up.
- Sums of several uses round once more for each addition.

Source: He et al., "Exploring the Limits of Differentially Private Deep Learning with Group-wise
Clipping", 2023. The bounds of rounding, and the reading of arbitrary programs are new here.
"""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from dpoptax._clip import block_sums
from dpoptax._clip.block_sums import WholeBatch
from dpoptax._clip.clip_per_example import clip_each
from dpoptax._clip.clipping_functions import PerLayerClip
from dpoptax._ghost_clipping.passes.interpreter import (
    Arrays,
    ByIndex,
    make_environment,
    opaque_zeros,
)
from dpoptax._ghost_clipping.plan import read_use
from dpoptax._ghost_clipping.sums.use_clip import BatchDevices, Part, Streamer, UseClip
from dpoptax._ghost_clipping.trace.program import Program, Use
from dpoptax._ghost_clipping.trace.read_program import read_batch_program
from dpoptax._ghost_clipping.trace.views import View
from dpoptax._points import GradientPoints
from dpoptax._tree import PyTree, float32_at_least


def streamed_sum(
    loss_fn: Callable[..., PyTree],
    clip: PerLayerClip,
    points: GradientPoints,
    batch: PyTree,
    mask: jax.Array,
    keys: jax.Array | None,
    *,
    has_aux: bool,
    whole: WholeBatch,
    devices: BatchDevices,
    specs: PyTree = None,
    factor_dtype: DTypeLike | None = None,
) -> tuple[PyTree, PyTree]:
    """Computes the clipped sum of a batch; arguments as for `ghost_clipped_sum`.

    `devices` share the batch, and `specs` says how each parameter is sharded over them.

    Returns:
      The sum, shaped like the parameters, and the auxiliary outputs, `None` without `has_aux`.

    Raises:
      ValueError: there are several gradient points, or the loss computes on a parameter before the
        parameter meets data.
    """
    params = points.points[0]
    program = read_batch_program(loss_fn, points, batch, keys, has_aux=has_aux)
    mask = program.separate(mask)
    _check_streams(program, points, params)
    leaves = jax.tree.leaves(params)
    parts, opaque_parts = _split_bounds(program, clip, params)
    shapes = [tuple(x.shape) for x in program.parameters]
    leaf_specs = [P()] * len(leaves) if specs is None else jax.tree.leaves(specs)
    axes = {use.index: _parameter_axes(use, shapes[_leaf(use)]) for use in program.uses}
    clips = {
        use.index: UseClip(
            use,
            parts[use.index],
            whole,
            factor_dtype,
            devices,
            _use_spec(use, axes[use.index], leaf_specs),
        )
        for use in program.uses
    }

    def example(
        probes: ByIndex, parameter_zeros: ByIndex, inputs: Arrays, live: jax.Array
    ) -> Arrays:
        known = make_environment(program, leaves, parameter_zeros)
        return Streamer(probes, known, clips, live).run(program.block, inputs)

    def total(probes: ByIndex, parameter_zeros: ByIndex) -> tuple[jax.Array, Arrays]:
        every = jax.vmap(example, (None, 0, 0, 0), spmd_axis_name=devices.axes)
        results = every(probes, parameter_zeros, jax.tree.leaves((batch, keys)), mask)
        return results[0].sum(), results

    probes = {u.index: jnp.zeros(_probe_shape(u), jnp.float32) for u in program.uses}
    parameter_zeros = opaque_zeros(program, mask.shape[0])
    (sums, gradients), results = jax.grad(total, argnums=(0, 1), has_aux=True)(
        probes, parameter_zeros
    )
    found: dict[int, list[jax.Array]] = collections.defaultdict(list)
    for use in program.uses:
        found[_leaf(use)].append(_place(use, sums[use.index], axes[use.index], shapes[_leaf(use)]))
    for i, gradient in gradients.items():
        sum_opaque = functools.partial(_sum_opaque, opaque_parts[i], whole)
        found[i].append(devices.add(sum_opaque, leaf_specs[i])(gradient, mask))
    zero = lambda x: [jnp.zeros(x.shape, float32_at_least(x))]  # noqa: E731
    added = [functools.reduce(operator.add, found.get(i, zero(x))) for i, x in enumerate(leaves)]
    aux = jax.tree.unflatten(program.result_tree, results)[1]
    return jax.tree.unflatten(jax.tree.structure(params), added), aux


def _split_bounds(
    program: Program, clip: PerLayerClip, params: PyTree
) -> tuple[dict[int, Part], dict[int, Part]]:
    """Returns the part of each use and, by leaf, of each opaque parameter."""
    groups = clip.groups(params)
    leaves_of = collections.Counter(groups)
    uses_of = collections.Counter([_leaf(use) for use in program.uses] + list(program.opaque))

    def part(leaf: int, steps: int) -> Part:
        group, added = groups[leaf], uses_of[leaf]
        split = clip.split(group, 1 + max(groups), leaves_of[group] * added**2 * steps)
        return Part(split, added)

    steps = {u.index: math.prod(n for n, _ in u.loops) for u in program.uses}
    uses = {u.index: part(_leaf(u), steps[u.index]) for u in program.uses}
    return uses, {leaf: part(leaf, 1) for leaf in program.opaque}


def _leaf(use: Use) -> int:
    """Returns the one parameter of a use."""
    (leaf,) = use.value.leaves
    return leaf


def _check_streams(program: Program, points: GradientPoints, params: PyTree) -> None:
    # A weight of 1.0 is a number at trace time; see `clipped_grad`.
    weighted = len(points.weights) > 1 or not isinstance(points.weights[0], float)
    if weighted or points.tangent is not None or points.linear_map is not None:
        raise ValueError(
            "`per_layer_clip(streaming=True)` must have one gradient point of weight 1.0 without a "
            "linear map. "
            "Clip without streaming for methods with several points, such as `dpoptax.disk`."
        )
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for use in program.uses:
        planned = read_use(use)
        names = ", ".join(paths[leaf] for leaf in sorted(use.value.leaves))
        if len(planned) != 1 or planned[0].cut is not None:
            raise ValueError(
                f"`per_layer_clip(streaming=True)` must have parameters that are only moved or "
                f"scaled before they meet data, and {names} is computed on before {use.rule.name}. "
                "Clip without streaming."
            )
        if not all(stacked for _, stacked in use.loops):
            raise ValueError(
                f"`per_layer_clip(streaming=True)` must have a slice of each parameter for each "
                f"step of a loop, and all steps use the whole {names}. Clip without streaming."
            )


def _probe_shape(use: Use) -> tuple[int, ...]:
    """Returns the shape of the sum of a use, cut by its rule, with the steps of its scans."""
    return (*(n for n, _ in use.loops), *use.rule.layout.split)


def _parameter_axes(use: Use, shape: tuple[int, ...]) -> list[int | None] | None:
    """Returns the parameter's axis for each axis of the sum of a use, `None` for size 1.

    The result is `None` if the sum is not the parameter with its axes permuted.
    """
    axes = View.identity(0, shape).axes
    (planned,) = read_use(use)
    if any(runs and runs not in axes for runs in planned.view.axes):
        return None
    found = [axes.index(runs) if runs else None for runs in planned.view.axes]
    missing = {i for i, runs in enumerate(axes) if runs} - set(found)
    return None if missing else found


def _use_spec(use: Use, axes: list[int | None] | None, leaf_specs: list[P]) -> P:
    """Returns how the sum of a use in one step of its scans is sharded."""
    if axes is None:
        return P()
    spec = leaf_specs[_leaf(use)]
    names = [None if i is None or i >= len(spec) else spec[i] for i in axes]
    return P(*names[len(use.loops) :])


def _place(
    use: Use, total: jax.Array, axes: list[int | None] | None, shape: tuple[int, ...]
) -> jax.Array:
    """Returns the sum of a use in the shape of its parameter."""
    if axes is not None:  # without reshapes, which would gather sharded axes
        unit = tuple(i for i, axis in enumerate(axes) if axis is None)
        kept = [axis for axis in axes if axis is not None]
        order = sorted(range(len(kept)), key=kept.__getitem__)
        return jnp.squeeze(total, unit).transpose(order).reshape(shape)
    (planned,) = read_use(use)
    view = dataclasses.replace(planned.view, scale=1.0)  # the factors include the scale
    return view.scatter(total, shape)


def _sum_opaque(part: Part, whole: WholeBatch, gradient: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the clipped sum of per-example gradients (B, …)."""
    clipped = clip_each(part.clip, [gradient], mask, tau=part.tau(whole))
    return block_sums.sum_weighted(clipped.coefficients[0], clipped.units[0])
