"""Sums the weighted gradients of one use during the backward pass."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from dpoptax._ghost_clipping.backward.batch_devices import BatchDevices, Slices
from dpoptax._ghost_clipping.factor_products import (
    FactoredGradients,
    formed_square,
    formed_together,
    multiply_factors,
)
from dpoptax._ghost_clipping.plan import PlannedUse, choose_product_method, is_precise
from dpoptax._ghost_clipping.records.record_points import recorded
from dpoptax._ghost_clipping.sums.example_gradients import make_segment
from dpoptax._ghost_clipping.sums.product_sums import (
    absolute_ratio,
    measure_product,
    product_rounding,
    sum_error,
    sum_products,
)
from dpoptax._losses.traced_program import Use
from dpoptax._losses.views import View
from dpoptax._points.points import weigh
from dpoptax._rounding import block_sums
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._rounding.bounds import FLOAT32_ERROR, NormBounds, Piece, formed_bounds, within_range
from dpoptax._support.tree import PyTree, widen
from dpoptax._support.xla import materialize

# Sums that devices share and that are larger than this are computed in slices. A slice fits in the
# vector memory of a TPU, where devices add it up, so main memory holds only each device's part.
_SLICE_ENTRIES = 2**22


class UseGradients(NamedTuple):
    """Holds the gradients of a use for some examples, as factors.

    Attributes:
      factored: the factors.
      method: the method for the norm. With "keep", the gradients of a few examples at a time are
        formed, measured and added, so that norm and sum read the same numbers.
    """

    factored: FactoredGradients
    method: str

    @property
    def examples(self) -> int:
        """Returns the number of examples."""
        return self.factored.segments[0].rows.shape[0]

    @property
    def is_formed(self) -> bool:
        """Returns whether formed gradients are added."""
        return self.method == "keep"

    def piece(self) -> Piece:
        """Returns the measured gradients."""
        if self.is_formed:
            square = formed_square(self.factored.segments, self.factored.sizes)
            return _formed_piece(NormBounds(square, jnp.sqrt(square)))
        return Piece(
            measure_product(self.factored, self.method),
            ratio=absolute_ratio(self.factored),
            sum_error=sum_error(self.factored),
        )


class Weighing(NamedTuple):
    """Says how the gradients of one part are weighted in a sum.

    Attributes:
      bound: an upper bound of the norm of a weighted gradient.
      coefficients: `coefficients(piece, given, rounding)` returns the weights of measured
        gradients, (B,), from given arrays (B, …). `rounding` is that of the sum over a device's
        examples.
    """

    bound: float
    coefficients: Callable[[Piece, PyTree, block_sums.Rounding], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class UseSum:
    """Sums the weighted gradients of one use, in each step of its scans.

    Attributes:
      use: the use.
      view: the entries of its only parameter.
      factor_dtype: the dtype that factors are rounded to; `None` for no rounding.
      devices: the devices that share the batch.
      spec: how the sum is sharded over the devices, with the axes of the rule's layout.
    """

    use: Use
    view: View
    factor_dtype: DTypeLike | None
    devices: BatchDevices
    spec: P

    def batch_sum(
        self, weighing: Weighing, operand: jax.Array, cotangent: jax.Array, given: PyTree
    ) -> jax.Array:
        """Returns the weighted sum in float32, with the axes of the rule's layout."""
        slices = self._slices(operand.shape[0] // self.devices.count)
        local = functools.partial(self._device_sum, weighing, slices)
        return self.devices.add(local, self.spec, slices)(operand, cotangent, given)

    def gradients(self, operand: jax.Array, cotangent: jax.Array) -> UseGradients:
        """Returns the gradients from operands and cotangents (B, …)."""
        member, examples, dtype = self._member, operand.shape[0], self.factor_dtype
        # `use_runner` keeps cotangents in the working range, but not those that are scaled here.
        changed = cotangent.dtype == jnp.float16 or member.scale != 1.0
        cotangent = weigh(cotangent, 1.0, member.scale)
        operand, cotangent = materialize(
            (recorded(operand, dtype, finite=True), recorded(cotangent, dtype, finite=changed))
        )
        # Stored above, so that the norm and the sum read the same numbers.
        segment = make_segment(member, operand, cotangent).rounded(self.factor_dtype)
        factored = FactoredGradients([segment], member.layout.sizes)
        method = choose_product_method([member], examples, 1)
        if method == "keep" and self._slices(examples) is not None:
            method = "form"  # the norm of a whole gradient is known before its slices are summed
        return UseGradients(factored, method)

    @property
    def _member(self) -> PlannedUse:
        """Returns the use in one step of its scans, in the layout of its rule."""
        step = dataclasses.replace(self.use, loops=(), rule=self.use.step_rule)
        return PlannedUse(step, step.rule.layout, self.view.leaf, self.view)

    def rounding(self, measured: UseGradients) -> block_sums.Rounding:
        """Bounds how one example changes the rounding of the sum.

        Each block has examples of one device. The totals of devices are added afterwards.
        """
        if measured.is_formed:
            return block_sums.block_rounding(measured.examples, _formed_block(measured))
        # Each entry is of one slice, and blocks have the same bound for one slice as for all. The
        # rounding of lookups grows with the number of columns, so all columns count.
        lookup = self.use.rule.is_lookup
        slices = None if lookup else self._slices(measured.examples)
        whole = measured.factored
        factored = whole if slices is None else slices.take(whole, 0)
        return product_rounding(factored, measured.examples)

    def _slices(self, examples: int) -> Slices | None:
        """Returns the slices in which to sum a device's examples, or `None` for no slices.

        A large sum that devices share is computed in slices, so that no device holds all of it. The
        sharded axis must be the only axis of the rows or columns, and these must not be one-hot.
        Each slice reads the other side again, so it has at least half as many entries. Gradients of
        very many positions are formed, and are not cut.
        """
        layout, positions = self.use.step_rule.layout, self.use.step_rule.positions
        if not is_precise("form", positions, *layout.sizes[1:]):
            return None
        shared = [i for i in range(len(layout.split)) if self.devices.shards(self.spec, i) > 1]
        if len(shared) != 1:
            return None
        (axis,) = shared
        one_hot = self.use.rule.is_lookup and layout.rows == (axis,)
        if one_hot or (axis,) not in (layout.rows, layout.columns):
            return None
        entries, shards = math.prod(layout.split), self.devices.shards(self.spec, axis)
        # The entries of the other factor for all examples, which each slice reads again.
        other = examples * positions * entries // layout.split[axis]
        count = -(-entries // max(_SLICE_ENTRIES, other // 2))
        return Slices.even(layout, axis, shards, count)

    def _device_sum(
        self,
        weighing: Weighing,
        slices: Slices | None,
        operand: jax.Array,
        cotangent: jax.Array,
        given: PyTree,
    ) -> Any:
        """Returns the sum over a device's examples; with slices, `total(start)` of each slice."""
        measured = self.gradients(operand, cotangent)
        rounding = self.rounding(measured)
        layout = self.use.step_rule.layout if slices is None else slices.layout

        def fold(total: jax.Array) -> jax.Array:
            return layout.fold(total.astype(jnp.float32), layout.split)

        if measured.is_formed:  # and not in slices
            return fold(_form_and_sum(weighing, measured, given, rounding))
        coefficients = weighing.coefficients(measured.piece(), given, rounding)

        def total(start: jax.Array | int = 0) -> jax.Array:
            whole = measured.factored
            factored = whole if slices is None else slices.take(whole, start)
            examples = measured.examples
            return fold(
                sum_products(factored, coefficients, bound=weighing.bound, examples=examples)
            )

        return total() if slices is None else total


def _form_and_sum(
    weighing: Weighing, measured: UseGradients, given: PyTree, rounding: block_sums.Rounding
) -> jax.Array:
    """Returns the weighted sum of gradients, each formed and measured when it is added."""
    sizes, (segment,) = measured.factored.sizes, measured.factored.segments
    arrays, structure = jax.tree.flatten((segment, given))

    def block_sum(*arrays: jax.Array) -> jax.Array:
        segment, given = jax.tree.unflatten(structure, arrays)
        return sum_formed(weighing, rounding, multiply_factors([segment], sizes), given)

    return block_sums.sum_in_blocks(block_sum, *arrays, block=_formed_block(measured))


def sum_formed(
    weighing: Weighing, rounding: block_sums.Rounding, gradient: jax.Array, given: PyTree
) -> jax.Array:
    """Returns the weighted sum of formed gradients, (B, …), measured as they are added."""
    formed, piece = store_and_measure(gradient)
    return block_sums.sum_weighted(weighing.coefficients(piece, given, rounding), formed)


def store_and_measure(gradient: jax.Array) -> tuple[jax.Array, Piece]:
    """Returns formed gradients, (B, …), in the working range, and their sizes."""
    formed = materialize(within_range(widen(gradient)))
    return formed, _formed_piece(formed_bounds(formed))


def tau_of_parts(whole: WholeBatch, roundings: Iterable[block_sums.Rounding], added: int) -> float:
    """Returns τ of sums, if up to `added` of them are added to each entry."""
    own = block_sums.tau(whole, roundings, shared=added > 1)
    room = block_sums.parts_rounding(added, whole.examples)
    # The sums that are added are off by up to τ themselves: τ = own + room (1 + τ).
    return (own + room) / (1.0 - room)


def _formed_piece(size: NormBounds) -> Piece:
    """Describes gradients that are added as they were measured."""
    return Piece(size, sum_error=FLOAT32_ERROR)


def _formed_block(measured: UseGradients) -> int:
    return min(block_sums.BLOCK_LENGTH, formed_together(measured.factored.sizes))


def spec_of_sum(view: View, shape: tuple[int, ...], spec: P) -> P:
    """Returns how the sum of a use is sharded, with the axes of the view.

    It is sharded like the parameter if it is the parameter with permuted axes.
    """
    # Axes of size 1 have no runs, and are not sharded.
    axes, view_axes = View.identity(0, shape).axes, view.axes
    if {runs for runs in view_axes if runs} != {runs for runs in axes if runs}:
        return P()
    return P(
        *(
            spec[axes.index(runs)] if runs and axes.index(runs) < len(spec) else None
            for runs in view_axes
        )
    )
