"""Computes clipped sums over the devices of a mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dpoptax._clipped_grad.microbatches import BatchSum
from dpoptax._points.points import GradientPoints
from dpoptax._rounding import block_sums, integer_sums
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._support.tree import PyTree, kind_of

# `sums(points, batch, mask, key)` of `clipped_grad` returns the clipped sum and aux.
DeviceSum = Callable[[GradientPoints, PyTree, jax.Array, jax.Array | None], tuple[PyTree, PyTree]]


def names_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


@dataclasses.dataclass(frozen=True)
class Layout:
    """Describes how a computation is sharded over a mesh.

    Attributes:
      mesh: the devices.
      axes: the mesh axes that the examples are sharded over.
      param_specs: a tree prefix of `PartitionSpec`s for the parameters; `None` to read explicit
        axes from the types.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    axes: tuple[str, ...]
    param_specs: PyTree = None

    @property
    def shards(self) -> int:
        """Returns the number of shards of the examples."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def is_explicit(self) -> bool:
        """Returns whether the types of arrays state how they are sharded over the mesh."""
        return AxisType.Explicit in self.mesh.axis_types

    def automatic(self, params: PyTree) -> "Layout":
        """Returns the same layout on automatic axes."""
        mesh = self.mesh.abstract_mesh.update_axis_types(
            dict.fromkeys(self.mesh.axis_names, AxisType.Auto)
        )
        return Layout(mesh, self.axes, self.specs(params))

    def check_batch(self, examples: int) -> None:
        """Raises an error if the devices cannot share the examples evenly."""
        if examples % self.shards:
            raise ValueError(
                f"The batch must split evenly over the {self.shards} devices of axis "
                f"{'+'.join(self.axes)}, got {examples} examples. Pad it with masked examples, for "
                f"example by a sampler with multiple_of={self.shards}."
            )

    def specs(self, params: PyTree) -> PyTree:
        """Returns a `PartitionSpec` for each leaf of `params`."""
        if self.param_specs is None:
            return jax.tree.map(lambda x: P(*jax.typeof(x).sharding.spec), params)
        return jax.tree.broadcast(self.param_specs, params)

    def batch_part(self, spec: P) -> P:
        """Returns a spec with only the axes that the examples are sharded over."""
        kept = [tuple(name for name in names_of(entry) if name in self.axes) for entry in spec]
        return P(*(names or None for names in kept))

    def constrain(self, tree: PyTree, params: PyTree) -> PyTree:
        """Shards a tree on automatic axes like the parameters, if their specs are given."""
        if self.param_specs is None:
            return tree
        return jax.tree.map(
            lambda x, spec: lax.with_sharding_constraint(
                x, jax.sharding.NamedSharding(self.mesh, spec)
            ),
            tree,
            self.specs(params),
        )

    def place(self, tree: PyTree, specs: PyTree) -> PyTree:
        """Reshards `tree` for `shard_map`, which does so itself only for automatic axes.

        `specs` is one spec for all leaves, or one for each.
        """
        if not self.is_explicit:
            return tree
        if isinstance(specs, P):
            specs = jax.tree.broadcast(specs, tree)
        return jax.tree.map(
            lambda x, spec: jax.sharding.reshard(x, jax.sharding.NamedSharding(self.mesh, spec)),
            tree,
            specs,
        )


def make_layout(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axis_name: str | Sequence[str],
    param_specs: PyTree,
) -> Layout:
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
    return Layout(mesh, axes, param_specs)


def sum_over_devices(sums: BatchSum, layout: Layout, *, scatter: bool, bound: float) -> DeviceSum:
    """Runs `sums(points, batch, mask, key)` on each device and adds the results.

    Each device computes its own examples. Sharded parameters are all-gathered first, and the sums
    are added once over `layout.axes`. With `scatter`, each device keeps the part of the sum that
    belongs to its part of the parameters. With many devices and examples, one example could change
    the rounding of a floating-point sum too much. The sum is then computed exactly, in integer
    steps, for summands of at most `bound`.

    `check_vma=False` is required. Otherwise the derivative with respect to replicated parameters is
    the sum over devices, before anything is clipped. The clip would then bound sums of several
    examples, and the result would have no finite sensitivity.
    """
    rows = P(layout.axes)

    def run(
        points: GradientPoints, batch: PyTree, mask: jax.Array, key: jax.Array | None
    ) -> tuple[PyTree, PyTree]:
        layout.check_batch(mask.shape[0])
        specs = layout.specs(points.points[0])
        everywhere = jax.tree.broadcast(P(), points)
        point_specs = dataclasses.replace(
            everywhere,
            points=tuple(specs for _ in points.points),
            tangent=None if points.tangent is None else specs,
        )

        whole = WholeBatch(mask.shape[0], layout.shards)
        sum_devices = device_adder(layout, whole, bound)

        def local(
            points: GradientPoints, batch: PyTree, mask: jax.Array, key: jax.Array | None
        ) -> tuple[PyTree, PyTree]:
            points = jax.tree.map(_gather, points, point_specs)
            total, aux = sums(points, batch, mask, key, whole)
            own = specs if scatter else jax.tree.broadcast(P(), total)
            return jax.tree.map(sum_devices, total, own), aux

        mapped = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=(point_specs, rows, rows, P()),
            out_specs=(specs if scatter else P(), rows),
            check_vma=False,
        )
        return mapped(
            layout.place(points, point_specs),
            layout.place(batch, rows),
            layout.place(mask, rows),
            None if key is None else layout.place(key, P()),
        )

    return run


def device_adder(
    layout: Layout, whole: WholeBatch, bound: float
) -> Callable[[jax.Array, P], jax.Array]:
    """Returns `add(x, spec)`, which sums over devices, with `bound` per example."""
    steps = None
    if block_sums.uses_integer_totals(whole):
        steps = integer_sums.make_steps(whole.examples * bound, layout.shards)

    def sum_devices(x: jax.Array, spec: P) -> jax.Array:
        add = functools.partial(_scatter, spec=spec, layout=layout)
        if steps is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return add(x)
        return steps.join(*map(add, steps.split(x)))

    return sum_devices


def _gather(x: jax.Array, spec: P) -> jax.Array:
    for axis, names in enumerate(spec):
        if names is not None:
            x = lax.all_gather(x, names, axis=axis, tiled=True)
    return x


def _scatter(x: jax.Array, spec: P, layout: Layout) -> jax.Array:
    """Sums `x` over devices. Each device keeps its part according to `spec`."""
    missing = list(layout.axes)
    for axis, names in enumerate(spec):
        for name in names_of(names):
            if name in missing:
                missing.remove(name)
                x = lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
            else:  # all devices along this axis have the same sum
                size = x.shape[axis] // layout.mesh.shape[name]
                x = lax.dynamic_slice_in_dim(x, lax.axis_index(name) * size, size, axis)
    return lax.psum(x, tuple(missing)) if missing else x
