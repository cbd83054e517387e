"""Adds sums over the devices of a mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dpoptax._rounding import block_sums, integer_sums
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._support.tree import PyTree
from dpoptax._support.xla import materialize


def names_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


@dataclasses.dataclass(frozen=True)
class MeshLayout:
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

    def automatic(self, params: PyTree) -> "MeshLayout":
        """Returns the same layout on automatic axes."""
        mesh = self.mesh.abstract_mesh.update_axis_types(
            dict.fromkeys(self.mesh.axis_names, AxisType.Auto)
        )
        return MeshLayout(mesh, self.axes, self.specs(params))

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


def device_adder(
    layout: MeshLayout, whole: WholeBatch, bound: float
) -> Callable[[jax.Array, P], jax.Array]:
    """Returns `add(x, spec)`, which sums over devices, with `bound` per example.

    With many devices and examples, one example could change the rounding of a floating-point sum
    too much. The sum is then computed exactly, in integer steps.
    """
    steps = None
    if block_sums.uses_integer_totals(whole):
        steps = integer_sums.make_steps(whole.examples * bound, layout.shards)

    def sum_devices(x: jax.Array, spec: P) -> jax.Array:
        add = functools.partial(_scatter, spec=spec, layout=layout)
        if steps is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return add(x)
        return materialize(steps.join(*map(add, steps.split(x))))

    return sum_devices


def _scatter(x: jax.Array, spec: P, layout: MeshLayout) -> jax.Array:
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
