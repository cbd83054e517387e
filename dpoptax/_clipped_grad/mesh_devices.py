"""Adds sums over the devices of a mesh during the backward pass, one parameter use at a time."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dpoptax._clipped_grad.microbatches import BatchSum
from dpoptax._clipped_grad.sharding import (
    DeviceSum,
    Layout,
    device_adder,
    names_of,
)
from dpoptax._ghost_clipping.backward.batch_devices import (
    BatchDevices,
    DeviceFunction,
    Slices,
)
from dpoptax._ghost_clipping.backward.use_places import UseTotal
from dpoptax._points.points import GradientPoints
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._support.tree import PyTree


def sum_in_backward(sums: BatchSum, layout: Layout, bound: float) -> DeviceSum:
    """Returns `total(points, records, mask, key)`, which adds each use over devices.

    The compiler shards the loss. Only the sums over examples run in `shard_map`. Explicit axes
    become automatic for this computation, whose results have explicit shardings again. `bound` is
    the bound of one summand.
    """

    def sum_parts(
        layout: Layout,
        points: GradientPoints,
        records: PyTree,
        mask: jax.Array,
        key: jax.Array | None,
    ) -> tuple[UseTotal, PyTree]:
        params, whole = points.points[0], WholeBatch(mask.shape[0], layout.shards)
        devices = MeshDevices(layout, whole, bound, layout.specs(params))
        (total, statistic), aux = sums.parts(points, records, mask, key, whole, devices=devices)
        return (layout.constrain(total, params), statistic), aux

    def total(
        points: GradientPoints, records: PyTree, mask: jax.Array, key: jax.Array | None
    ) -> tuple[PyTree, PyTree]:
        layout.check_batch(mask.shape[0])
        run: Callable[..., tuple[UseTotal, PyTree]] = functools.partial(sum_parts, layout)
        if layout.is_explicit:
            run = _on_automatic_axes(sum_parts, layout, points.points[0])
        found, aux = run(points, records, mask, key)
        return sums.engine.join(points.points[0], found), aux

    return total


def _on_automatic_axes(
    sum_parts: Callable[..., tuple[UseTotal, PyTree]], layout: Layout, params: PyTree
) -> Callable[..., tuple[UseTotal, PyTree]]:
    """Runs `sum_parts(layout, points, …)` of explicitly sharded arrays on automatic axes."""
    automatic = layout.automatic(params)
    specs = (automatic.param_specs, P()), P(layout.axes)

    run: Callable[..., tuple[UseTotal, PyTree]] = jax.sharding.auto_axes(
        functools.partial(sum_parts, automatic),
        out_sharding=jax.tree.map(functools.partial(NamedSharding, layout.mesh), specs),
    )
    return run


@dataclasses.dataclass(frozen=True)
class MeshDevices(BatchDevices):
    """Adds sums over the devices of a layout, for summands of at most `bound`.

    Mesh axes other than those of the examples stay automatic.
    """

    layout: Layout
    whole: WholeBatch
    bound: float
    specs: PyTree = None

    @property
    def axes(self) -> tuple[str, ...]:
        return self.layout.axes

    @property
    def count(self) -> int:
        return self.layout.shards

    def add(self, local: DeviceFunction, spec: P) -> DeviceFunction:
        spec, add = self.layout.batch_part(spec), device_adder(self.layout, self.whole, self.bound)
        return self._on_each(lambda *arrays: add(local(*arrays), spec), spec)

    def each(self, local: DeviceFunction) -> DeviceFunction:
        return self._on_each(local, P(self.layout.axes))

    def add_slices(
        self, local: Callable[..., DeviceFunction], spec: P, slices: Slices
    ) -> DeviceFunction:
        spec, add = self.layout.batch_part(spec), device_adder(self.layout, self.whole, self.bound)

        def run(*arrays: jax.Array) -> jax.Array:
            slice_at = local(*arrays)

            def turn(own: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
                part = add(slice_at(start), spec)
                return lax.dynamic_update_slice_in_dim(own, part, start, slices.axis), None

            kind = jax.eval_shape(slice_at, 0)
            shape = (*kind.shape[: slices.axis], slices.size, *kind.shape[slices.axis + 1 :])
            own, _ = lax.scan(turn, jnp.zeros(shape, kind.dtype), jnp.array(slices.starts))
            return own

        return self._on_each(run, spec)

    def shards(self, spec: P, axis: int) -> int:
        own = self.layout.batch_part(spec)
        names = names_of(own[axis]) if axis < len(own) else ()
        return math.prod(self.layout.mesh.shape[name] for name in names)

    def _on_each(self, local: DeviceFunction, spec: P) -> DeviceFunction:
        rows = P(self.layout.axes)

        def run(*arrays: jax.Array) -> jax.Array:
            mapped = jax.shard_map(
                local,
                mesh=self.layout.mesh,
                in_specs=rows,
                out_specs=spec,
                axis_names=frozenset(self.layout.axes),
                check_vma=False,
            )
            return mapped(*(self.layout.place(x, rows) for x in arrays))

        return run
