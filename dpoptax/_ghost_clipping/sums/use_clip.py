"""Clips and sums the gradients of one use during the backward pass."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from dpoptax._clip import block_sums, bounds
from dpoptax._clip.block_sums import WholeBatch
from dpoptax._clip.clip import Clip
from dpoptax._ghost_clipping.norms.factor_products import Segment
from dpoptax._ghost_clipping.norms.pulled_back_norms import FactoredGradients
from dpoptax._ghost_clipping.passes.interpreter import (
    Arrays,
    ByIndex,
    Environment,
    Interpreter,
)
from dpoptax._ghost_clipping.passes.run_passes import recorded_dtype
from dpoptax._ghost_clipping.plan import (
    PlannedUse,
    Product,
    choose_product_method,
    read_use,
)
from dpoptax._ghost_clipping.sums import weighted_products
from dpoptax._ghost_clipping.sums.ghost_clipped_sum import measure_product
from dpoptax._ghost_clipping.sums.scaled_gradients import (
    UseOperands,
    largest_entries,
    make_product_scales,
    scale_segment,
)
from dpoptax._ghost_clipping.trace.entry_rules import Lookup
from dpoptax._ghost_clipping.trace.program import Step, Use
from dpoptax._ghost_clipping.trace.rules import FactorLayout
from dpoptax._jaxprs import bind
from dpoptax._points import weigh
from dpoptax._xla import materialize, round_to_dtype

# Larger sums that devices share are computed in slices. A layer of a large model is smaller, and a
# table of a vocabulary larger.
_SLICED_ENTRIES = 2**24

DeviceFunction = Callable[..., jax.Array]


class BatchDevices:
    """Describes the devices that share a batch; here one device."""

    @property
    def axes(self) -> tuple[str, ...] | None:
        """Returns the mesh axes that the examples are sharded over, `None` for one device."""
        return None

    def add(self, local: DeviceFunction, spec: P) -> DeviceFunction:
        """Returns a function of arrays (B, …) that adds the results of `local` of all devices.

        `local` gets each device's own examples. The sum is sharded by `spec`.
        """
        del spec
        return local

    def add_slices(
        self, local: Callable[..., DeviceFunction], spec: P, axis: int
    ) -> DeviceFunction:
        """Returns the same where `local(…)(index)` is a slice of the result along `axis`.

        There are as many slices as `spec` has shards along the axis.
        """
        raise NotImplementedError

    def shards(self, spec: P, axis: int) -> int:
        """Returns the number of devices that an axis is sharded over."""
        del spec, axis
        return 1


@dataclasses.dataclass(frozen=True)
class Part:
    """Holds the clip of one part of the gradient, and how many parts are added to each entry."""

    clip: Clip
    added: int

    def tau(self, whole: WholeBatch, *roundings: block_sums.Rounding) -> float:
        """Returns τ of the sum of the part, with room for the additions of the other parts."""
        own = block_sums.tau(whole, roundings)
        room = block_sums.parts_rounding(self.added, whole.examples)
        return (own + room) / (1.0 - room)


@dataclasses.dataclass(frozen=True, eq=False)
class UseClip:
    """Clips and sums the gradients of one use, in each step of its scans.

    Attributes:
      use: the use.
      part: its clip.
      whole: the batch of all devices.
      factor_dtype: the dtype that factors are rounded to, `None` for no rounding.
      devices: the devices that share the batch.
      spec: how the sum, cut by the rule of the use, is sharded over them.
    """

    use: Use
    part: Part
    whole: WholeBatch
    factor_dtype: DTypeLike | None
    devices: BatchDevices
    spec: P

    def batch_sum(self, operand: jax.Array, cotangent: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns Σ_i mask_i clip(G_i), cut by the rule, in float32, from arrays (B, …)."""
        arrays = operand, cotangent, mask
        slices = self._slices()
        if slices is None:
            return self.devices.add(lambda *arrays: self._device_sum(*arrays)(), self.spec)(*arrays)
        return self.devices.add_slices(
            lambda *arrays: self._device_sum(*arrays, slices=slices), self.spec, slices[0]
        )(*arrays)

    def _slices(self) -> tuple[int, int] | None:
        """Returns the axis of the sum to cut in slices, and their number, `None` for no slices.

        A large sum that devices share is computed in slices, so that no device holds all of it. The
        axis is the only one of the rows or of the columns, and these are not one-hot.
        """
        layout = self.use.rule.layout
        shared = [i for i in range(len(layout.split)) if self.devices.shards(self.spec, i) > 1]
        if math.prod(layout.split) < _SLICED_ENTRIES or len(shared) != 1:
            return None
        (axis,) = shared
        one_hot = isinstance(self.use.rule, Lookup) and layout.rows == (axis,)
        if one_hot or (axis,) not in (layout.rows, layout.columns):
            return None
        return axis, self.devices.shards(self.spec, axis)

    def _device_sum(
        self,
        operand: jax.Array,
        cotangent: jax.Array,
        mask: jax.Array,
        *,
        slices: tuple[int, int] | None = None,
    ) -> Callable[..., jax.Array]:
        """Returns `total(index)`: the sum over the examples of a device, or a slice of it."""
        (planned,) = read_use(self.use)
        # One step of the scans, in the layout of the rule.
        step = dataclasses.replace(self.use, loops=())
        member = PlannedUse(step, planned.view, step.layout)
        operand, cotangent = materialize((self._rounded(operand), self._rounded(cotangent)))
        pair = UseOperands(member, operand, weigh(cotangent, 1.0, planned.view.scale))
        scales, sides = make_product_scales([largest_entries([pair])])
        segment = scale_segment(*pair, sides[0]).rounded(self.factor_dtype)
        piece = FactoredGradients([segment])
        method = choose_product_method([member], mask.shape[0], 1)
        product = Product((member,), "form" if method == "keep" else method, ())
        # Blocks are those of this device's examples. The totals of devices are added afterwards.
        examples = mask.shape[0]
        sliced = _Slicing(step.layout, slices)
        # Slices share no entry. Blocks bound each of them by the same number as all of them. The
        # rounding of lookups grows with the number of columns, so all of these count.
        if isinstance(step.rule, Lookup):
            parts = piece, step.layout.sizes
        else:
            parts = sliced.factors(piece, 0), sliced.layout.sizes
        rounding = weighted_products.product_rounding(*parts, examples)
        coefficients, _, _ = bounds.clip_coefficients(
            self.part.clip,
            scales,
            [measure_product(product, piece)],
            [0],
            mask,
            group_count=1,
            ratios=[weighted_products.absolute_ratio(piece)],
            sum_errors=[weighted_products.sum_error(piece)],
            tau=self.part.tau(self.whole, rounding),
        )

        def total(index: jax.Array | int = 0) -> jax.Array:
            found = weighted_products.sum_products(
                sliced.factors(piece, index),
                coefficients[0],
                sliced.layout.sizes,
                bound=self.part.clip.sensitivity,
                examples=examples,
            )
            return sliced.layout.fold(found.astype(jnp.float32), sliced.layout.split)

        return total

    def _rounded(self, x: jax.Array) -> jax.Array:
        dtype = recorded_dtype(x.dtype, self.factor_dtype)
        return x if dtype == x.dtype else round_to_dtype(x, dtype)


class _Slicing:
    """Cuts the sum of a use in slices along one axis, or leaves it whole.

    Attributes:
      layout: the layout of a slice.
    """

    def __init__(self, layout: FactorLayout, slices: tuple[int, int] | None) -> None:
        self.layout = layout
        self._on_rows, self._size = False, 0
        if slices is not None:
            axis, count = slices
            self._on_rows, self._size = layout.rows == (axis,), layout.split[axis] // count
            split = (*layout.split[:axis], self._size, *layout.split[axis + 1 :])
            self.layout = dataclasses.replace(layout, split=split)

    def factors(self, piece: FactoredGradients, index: jax.Array | int) -> FactoredGradients:
        """Returns the factors of a slice."""
        if not self._size:
            return piece

        def cut(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, index * self._size, self._size, axis=-1)

        return FactoredGradients(
            [
                Segment(cut(rows), columns) if self._on_rows else Segment(rows, cut(columns))
                for rows, columns in piece.segments
            ]
        )


class Streamer(Interpreter):
    """Runs uses so that the derivative by a probe is the clipped sum of the batch.

    `by_use` holds the probes: zeros in the shape of the sum. `live` is the example's entry of the
    mask.
    """

    def __init__(
        self, by_use: ByIndex, known: Environment, clips: dict[int, UseClip], live: jax.Array
    ) -> None:
        super().__init__(by_use, known)
        self.clips = clips
        self.live = live

    def inner(self, by_use: ByIndex, known: Environment) -> "Streamer":
        return Streamer(by_use, known, self.clips, self.live)

    def use(self, step: Step, use: Use, operands: Arrays) -> jax.Array:
        apply = _clipped_use(step, self.clips[use.index])
        return apply(operands, self.by_use[use.index], self.live)


def _clipped_use(step: Step, clip: UseClip) -> Callable[..., jax.Array]:
    """Returns `apply(operands, probe, live)`: the output of a use of one example.

    Its derivative by the data operand is that of the operation. By the probe, it is the clipped sum
    over all examples that `jax.vmap` maps it over.
    """

    @jax.custom_batching.custom_vmap
    def clipped_sum(operand: jax.Array, cotangent: jax.Array, live: jax.Array) -> jax.Array:
        del operand, cotangent, live
        return jnp.zeros(clip.use.rule.layout.split, jnp.float32)  # only for its type

    @clipped_sum.def_vmap
    def batch_rule(size: int, mapped: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        whole = [
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_mapped in zip(arrays, mapped, strict=True)
        ]
        return clip.batch_sum(*whole), False

    @jax.custom_vjp
    def apply(operands: Arrays, probe: jax.Array, live: jax.Array) -> jax.Array:
        del probe, live
        (output,) = bind(step.eqn, operands)
        return output

    def forward(operands: Arrays, probe: jax.Array, live: jax.Array) -> tuple[jax.Array, Any]:
        return apply(operands, probe, live), (operands, live)

    def backward(saved: Any, cotangent: jax.Array) -> tuple[Any, jax.Array, None]:
        operands, live = saved
        operand, gradients = operands[step.data], [None] * len(operands)
        if jnp.issubdtype(operand.dtype, jnp.inexact):

            def output(operand: jax.Array) -> jax.Array:
                moved = [*operands[: step.data], operand, *operands[step.data + 1 :]]
                return bind(step.eqn, moved)[0]

            (gradients[step.data],) = jax.vjp(output, operand)[1](cotangent)
        return gradients, clipped_sum(operand, cotangent, live), None

    apply.defvjp(forward, backward)
    return apply
