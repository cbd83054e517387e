"""Computes clipped sums over the devices of a mesh."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dpoptax._clipped_grad.microbatches import BatchSum
from dpoptax._ghost_clipping.backward.batch_devices import BatchDevices
from dpoptax._points.points import GradientPoints
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._rounding.device_sums import MeshLayout, device_adder
from dpoptax._support.tree import PyTree, kind_of
from dpoptax._support.xla import materialize

# `sums(points, records, mask, key)` of `clipped_grad` returns the clipped sum and aux.
DeviceSum = Callable[[GradientPoints, PyTree, jax.Array, jax.Array | None], tuple[PyTree, PyTree]]


def make_layout(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axis_name: str | Sequence[str],
    param_specs: PyTree,
) -> MeshLayout:
    """Returns the layout for arguments of `clipped_grad`."""
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(
            f"`mesh` must be a `jax.sharding.Mesh`, got {kind_of(mesh)}. Pass for example "
            '`jax.make_mesh((jax.device_count(),), ("data",))`.'
        )
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    if unknown or not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"`axis_name` must name one or several of the mesh's axes {mesh.axis_names}, got "
            f"{axis_name!r}."
        )
    return MeshLayout(mesh, axes, param_specs)


def sum_over_devices(
    sums: BatchSum, layout: MeshLayout, *, scatter: bool, bound: float
) -> DeviceSum:
    """Runs `sums(points, records, mask, key)` on each device and adds the results.

    Each device computes its own examples. Sharded parameters are all-gathered first, and the sums
    are added once over `layout.axes`, for summands of at most `bound`. With `scatter`, each device
    keeps the part of the sum that belongs to its part of the parameters.

    `check_vma=False` is required. Otherwise the derivative with respect to replicated parameters is
    the sum over devices, before anything is clipped. The clip would then bound sums of several
    examples, and the result would have no finite sensitivity.
    """
    rows = P(layout.axes)

    def run(
        points: GradientPoints, records: PyTree, mask: jax.Array, key: jax.Array | None
    ) -> tuple[PyTree, PyTree]:
        layout.check_batch(mask.shape[0])
        specs = layout.specs(points.points[0])
        everywhere = jax.tree.broadcast(P(), points)
        # The reference is replicated. Only the points have the shardings of the parameters.
        point_specs = dataclasses.replace(everywhere, points=tuple(specs for _ in points.points))
        # Each device needs the size of the whole batch, to allow for the rounding of the whole sum.
        whole = WholeBatch(mask.shape[0], layout.shards)
        sum_devices = device_adder(layout, whole, bound)

        def local(
            points: GradientPoints, records: PyTree, mask: jax.Array, key: jax.Array | None
        ) -> tuple[PyTree, PyTree]:
            points = jax.tree.map(_gather, points, point_specs)
            total, aux = sums(points, records, mask, key, whole)
            sum_specs = specs if scatter else jax.tree.broadcast(P(), total)
            return jax.tree.map(sum_devices, total, sum_specs), aux

        mapped = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(point_specs, rows, rows, P()),
            out_specs=(specs if scatter else P(), rows),
            check_vma=False,
        )
        return mapped(
            layout.place(points, point_specs),
            layout.place(records, rows),
            layout.place(mask, rows),
            None if key is None else layout.place(key, P()),
        )

    return run


def _gather(x: jax.Array, spec: P) -> jax.Array:
    for axis, names in enumerate(spec):
        if names is not None:
            x = lax.all_gather(x, names, axis=axis, tiled=True)
    return x


def sum_in_backward(sums: BatchSum, layout: MeshLayout, bound: float) -> DeviceSum:
    """Returns `total(points, records, mask, key)`, which adds each use over devices.

    The compiler shards the loss. Only the sums over examples run in `shard_map`. Explicit axes
    become automatic for this computation, whose results have explicit shardings again. `bound` is
    the bound of one summand.
    """

    def sum_parts(
        layout: MeshLayout,
        points: GradientPoints,
        records: PyTree,
        mask: jax.Array,
        key: jax.Array | None,
    ) -> tuple[PyTree, PyTree]:
        params, whole = points.points[0], WholeBatch(mask.shape[0], layout.shards)
        devices = BatchDevices(layout, whole, bound, layout.specs(params))
        # Before `join`, a total is the pair of the gradient and a clip's statistic.
        (total, statistic), aux = sums.unjoined(points, records, mask, key, whole, devices=devices)
        return (layout.constrain(total, params), statistic), aux

    def total(
        points: GradientPoints, records: PyTree, mask: jax.Array, key: jax.Array | None
    ) -> tuple[PyTree, PyTree]:
        layout.check_batch(mask.shape[0])
        run: Callable[..., tuple[PyTree, PyTree]] = functools.partial(sum_parts, layout)
        if layout.is_explicit:
            run = _on_automatic_axes(sum_parts, layout, points.points[0])
        found, aux = run(points, records, mask, key)
        return sums.engine.join(points.points[0], materialize(found)), aux

    return total


def _on_automatic_axes(
    sum_parts: Callable[..., tuple[PyTree, PyTree]], layout: MeshLayout, params: PyTree
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Runs `sum_parts(layout, points, …)` of explicitly sharded arrays on automatic axes."""
    automatic = layout.automatic(params)
    specs = (automatic.param_specs, P()), P(layout.axes)

    run: Callable[..., tuple[PyTree, PyTree]] = jax.sharding.auto_axes(
        functools.partial(sum_parts, automatic),
        out_sharding=jax.tree.map(functools.partial(NamedSharding, layout.mesh), specs),
    )
    return run
