"""Sums the weighted gradients of one use during the backward pass."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from dpoptax._gradients.clip import block_sums
from dpoptax._gradients.clip.block_sums import WholeBatch
from dpoptax._gradients.clip.bounds import NormBounds, Scales
from dpoptax._gradients.ghost_clipping.backward.batch_devices import BatchDevices, Slices
from dpoptax._gradients.ghost_clipping.backward.use_places import leaf_of, view_of_use
from dpoptax._gradients.ghost_clipping.norms.factor_products import FactoredGradients, Segment
from dpoptax._gradients.ghost_clipping.passes.run_passes import recorded_dtype
from dpoptax._gradients.ghost_clipping.plan import PlannedUse, choose_product_method
from dpoptax._gradients.ghost_clipping.sums import weighted_products
from dpoptax._gradients.ghost_clipping.sums.ghost_clipped_sum import product_rounding, sum_products
from dpoptax._gradients.ghost_clipping.sums.scaled_gradients import (
    UseOperands,
    largest_entries,
    make_product_scales,
    scale_segment,
)
from dpoptax._gradients.ghost_clipping.trace.program import Use
from dpoptax._gradients.ghost_clipping.trace.rules import FactorLayout
from dpoptax._gradients.points import weigh
from dpoptax._support.tree import PyTree
from dpoptax._support.xla import materialize, round_to_dtype

# Sums that devices share and that are larger than this are computed in slices. A slice fits in the
# vector memory of a TPU, where devices add it up, so main memory holds only each device's part.
_SLICE_ENTRIES = 2**22


class MeasuredUse(NamedTuple):
    """Holds the gradients of a use for some examples, as factors, and their size.

    Attributes:
      factored: the factors.
      layout: the layout of the factors.
      scales: the powers of two by which they are divided.
      size: bounds on the norms of the divided gradients.
    """

    factored: FactoredGradients
    layout: FactorLayout
    scales: Scales
    size: NormBounds

    @property
    def examples(self) -> int:
        """Returns the number of examples."""
        return self.size.square.shape[0]

    @property
    def ratio(self) -> float:
        """Returns M of the sum of the gradients."""
        return weighted_products.absolute_ratio(self.factored)

    @property
    def sum_error(self) -> float:
        """Returns the error of a weighted gradient, relative to S."""
        return weighted_products.sum_error(self.factored)


@dataclasses.dataclass(frozen=True, eq=False)
class UseSum:
    """Sums the weighted gradients of one use, in each step of its scans.

    Attributes:
      use: the use.
      bound: an upper bound of the norm of a weighted gradient.
      factor_dtype: the dtype that factors are rounded to; `None` for no rounding.
      devices: the devices that share the batch.
      spec: how the sum is sharded over the devices, with the axes of the rule's layout.
    """

    use: Use
    bound: float
    factor_dtype: DTypeLike | None
    devices: BatchDevices
    spec: P

    def coefficients(self, measured: MeasuredUse, given: PyTree) -> jax.Array:
        """Returns the weights of the gradients, (B,), from given arrays (B, …)."""
        raise NotImplementedError

    def batch_sum(self, operand: jax.Array, cotangent: jax.Array, given: PyTree) -> jax.Array:
        """Returns the weighted sum in float32, with the axes of the rule's layout."""
        arrays = operand, cotangent, given
        slices = self._slices(operand.shape[0] // self.devices.count)
        if slices is None:
            return self.devices.add(lambda *arrays: self._device_sum(*arrays)(), self.spec)(*arrays)
        return self.devices.add_slices(
            lambda *arrays: self._device_sum(*arrays, slices=slices), self.spec, slices
        )(*arrays)

    def measure(self, operand: jax.Array, cotangent: jax.Array) -> MeasuredUse:
        """Returns the gradients from operands and cotangents (B, …)."""
        # One step of the scans, in the layout of its rule.
        step = dataclasses.replace(self.use, loops=(), rule=self.use.step_rule)
        member = PlannedUse(step, leaf_of(self.use), step.rule.layout, view_of_use(self.use))
        examples = operand.shape[0]
        operand, cotangent = materialize((self._rounded(operand), self._rounded(cotangent)))
        pair = UseOperands(member, operand, weigh(cotangent, 1.0, member.scale))
        scales, exponents = make_product_scales([largest_entries([pair])])
        segment = scale_segment(*pair, exponents[0]).rounded(self.factor_dtype)
        factored = FactoredGradients([segment], step.rule.layout.sizes)
        method = choose_product_method([member], examples, 1)
        size = weighted_products.measure_product(factored, "form" if method == "keep" else method)
        return MeasuredUse(factored, step.rule.layout, scales, size)

    def rounding(self, measured: MeasuredUse) -> block_sums.Rounding:
        """Bounds how one example changes the rounding of the sum.

        Each block has examples of one device. The totals of devices are added afterwards.
        """
        # Each entry is of one slice, and blocks have the same bound for one slice as for all. The
        # rounding of lookups grows with the number of columns, so all columns count.
        lookup = self.use.rule.is_lookup
        slices = None if lookup else self._slices(measured.examples)
        sliced = _Slicing(measured.layout, slices)
        return product_rounding(sliced.factors(measured.factored, 0), measured.examples)

    def _slices(self, examples: int) -> Slices | None:
        """Returns the slices in which to sum a device's examples, or `None` for no slices.

        A large sum that devices share is computed in slices, so that no device holds all of it. The
        sharded axis must be the only axis of the rows or columns, and these must not be one-hot.
        Each slice reads the other side again, so it has at least half as many entries.
        """
        layout = self.use.step_rule.layout
        shared = [i for i in range(len(layout.split)) if self.devices.shards(self.spec, i) > 1]
        if len(shared) != 1:
            return None
        (axis,) = shared
        one_hot = self.use.rule.is_lookup and layout.rows == (axis,)
        if one_hot or (axis,) not in (layout.rows, layout.columns):
            return None
        entries, length = math.prod(layout.split), layout.split[axis]
        other = examples * self.use.step_rule.positions * entries // length
        count = -(-entries // max(_SLICE_ENTRIES, other // 2))
        return Slices.even(axis, length, self.devices.shards(self.spec, axis), count)

    def _device_sum(
        self,
        operand: jax.Array,
        cotangent: jax.Array,
        given: PyTree,
        *,
        slices: Slices | None = None,
    ) -> Callable[..., jax.Array]:
        """Returns `total(start)`, the sum over a device's examples, or a slice of it."""
        measured = self.measure(operand, cotangent)
        sliced = _Slicing(measured.layout, slices)
        coefficients = self.coefficients(measured, given)

        def total(start: jax.Array | int = 0) -> jax.Array:
            found = sum_products(
                sliced.factors(measured.factored, start),
                coefficients,
                bound=self.bound,
                examples=measured.examples,
            )
            return sliced.layout.fold(found.astype(jnp.float32), sliced.layout.split)

        return total

    def _rounded(self, x: jax.Array) -> jax.Array:
        dtype = recorded_dtype(x.dtype, self.factor_dtype)
        return x if dtype == x.dtype else round_to_dtype(x, dtype)


def tau_of_parts(whole: WholeBatch, roundings: Iterable[block_sums.Rounding], added: int) -> float:
    """Returns τ of sums, if up to `added` of them are added to each entry."""
    own = block_sums.tau(whole, roundings, shared=added > 1)
    room = block_sums.parts_rounding(added, whole.examples)
    return (own + room) / (1.0 - room)


class _Slicing:
    """Cuts the factors of a use for a slice of its sum, or leaves them whole.

    Attributes:
      layout: the layout of a slice.
    """

    def __init__(self, layout: FactorLayout, slices: Slices | None) -> None:
        self.layout, self._slices, self._on_rows = layout, slices, False
        if slices is not None:
            axis = slices.axis
            self._on_rows = layout.rows == (axis,)
            split = (*layout.split[:axis], slices.length, *layout.split[axis + 1 :])
            self.layout = dataclasses.replace(layout, split=split)

    def factors(self, whole: FactoredGradients, start: jax.Array | int) -> FactoredGradients:
        """Returns the factors of the slice that starts at `start` in each shard."""
        if self._slices is None:
            return whole
        cut = functools.partial(self._slices.cut, start=start)
        return FactoredGradients(
            [
                Segment(cut(rows), columns) if self._on_rows else Segment(rows, cut(columns))
                for rows, columns in whole.segments
            ],
            self.layout.sizes,
        )
