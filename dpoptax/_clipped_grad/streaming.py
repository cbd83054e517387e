"""Computes clipped sums during the backward pass, one parameter use at a time.

`per_layer_clip(…, streaming=True)` clips each part of a gradient separately. `method="recompute"`
clips whole gradients, and computes them twice.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from dpoptax._clip.block_sums import WholeBatch
from dpoptax._clip.clip import Clip
from dpoptax._clip.clipping_functions import PerLayerClip
from dpoptax._clipped_grad.microbatches import in_microbatches
from dpoptax._clipped_grad.sharding import (
    DeviceSum,
    Layout,
    device_adder,
    names_of,
    take_fixed_weights,
)
from dpoptax._ghost_clipping.sums.batch_devices import BatchDevices, DeviceFunction, Slices
from dpoptax._ghost_clipping.sums.recomputed_sum import recomputed_sum
from dpoptax._ghost_clipping.sums.streamed_sum import streamed_sum
from dpoptax._ghost_clipping.sums.use_places import UseTotal
from dpoptax._ghost_clipping.trace.read_program import Examples
from dpoptax._points import GradientPoints
from dpoptax._tree import PyTree


def select_use_sum(
    clip: Clip,
    method: str,
    grid: float | None,
    microbatch_size: int | None,
    mesh: Mesh | AbstractMesh | None,
) -> Callable[..., tuple[UseTotal, PyTree]] | None:
    """Returns the function for sums in the backward pass, or `None` if not requested.

    Raises:
      ValueError: other options exclude it.
    """
    layers = isinstance(clip, PerLayerClip) and clip.streaming
    if not layers and method != "recompute":
        return None
    option = "`per_layer_clip(streaming=True)`" if layers else "`method='recompute'`"
    if method == "vmap" or grid is not None or (clip.encodes and not clip.by_norms):
        raise ValueError(
            f"{option} must be computed without per-example gradients, got method={method!r}, "
            f"grid={grid} and clip={clip}."
        )
    if layers and method == "recompute":
        raise ValueError(
            f"{option} must have method='auto', got 'recompute'. Streaming needs no second turn."
        )
    if mesh is not None and microbatch_size is not None:
        raise ValueError(
            f"`microbatch_size` must be `None` for {option} on a mesh, got {microbatch_size}. Use "
            "`jax.checkpoint` in the loss to save memory."
        )
    return streamed_sum if layers else recomputed_sum


def streaming_sum(
    use_sum: Callable[..., tuple[UseTotal, PyTree]],
    loss_fn: Callable[..., PyTree],
    clip: Clip,
    layout: Layout | None,
    *,
    has_aux: bool,
    microbatch_size: int | None,
    factor_dtype: Callable[[], DTypeLike | None],
) -> DeviceSum:
    """Returns `sums(points, records, mask, key)`, which runs `use_sum` on all devices.

    The compiler shards the loss. Only the sums over examples run in `shard_map`. Explicit axes
    become automatic for this computation, whose results have explicit shardings again.
    """

    def sum_parts(
        layout: Layout | None,
        points: GradientPoints,
        records: PyTree,
        mask: jax.Array,
        key: jax.Array | None,
    ) -> tuple[UseTotal, PyTree]:
        batch, ids = records
        whole, devices = WholeBatch(mask.shape[0]), BatchDevices()
        if layout is not None:
            whole = WholeBatch(mask.shape[0], layout.shards)
            specs = layout.specs(points.points[0])
            devices = MeshDevices(layout, whole, clip.sensitivity, specs)
        keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
        by_use = functools.partial(
            use_sum, loss_fn, clip, points,
            has_aux=has_aux, devices=devices, factor_dtype=factor_dtype(),
        )  # fmt: skip
        (total, statistic), aux = in_microbatches(
            lambda inputs, mask: by_use(Examples(inputs[0], mask, inputs[1], whole)),
            microbatch_size,
        )((batch, keys), mask)
        if layout is not None:
            total = layout.constrain(total, points.points[0])
        return (total, statistic), aux

    def sums(
        points: GradientPoints, records: PyTree, mask: jax.Array, key: jax.Array | None
    ) -> tuple[PyTree, PyTree]:
        run: Callable[..., tuple[UseTotal, PyTree]] = functools.partial(sum_parts, layout)
        if layout is not None:
            layout.check_batch(mask.shape[0])
            if layout.is_explicit:
                run = _on_automatic_axes(sum_parts, layout, points.points[0])
        (total, statistic), aux = run(points, records, mask, key)
        return clip.join(total, statistic), aux

    return sums


def _on_automatic_axes(
    sum_parts: Callable[..., tuple[UseTotal, PyTree]], layout: Layout, params: PyTree
) -> Callable[..., tuple[UseTotal, PyTree]]:
    """Runs `sum_parts(layout, points, …)` of explicitly sharded arrays on automatic axes."""
    automatic = layout.automatic(params)
    specs = (automatic.param_specs, P()), P(layout.axes)

    def run(points: GradientPoints, *rest: PyTree) -> tuple[UseTotal, PyTree]:
        points, with_weights = take_fixed_weights(points)
        sums = jax.sharding.auto_axes(
            lambda points, *rest: sum_parts(automatic, with_weights(points), *rest),
            out_sharding=jax.tree.map(functools.partial(NamedSharding, layout.mesh), specs),
        )
        return sums(points, *rest)

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
