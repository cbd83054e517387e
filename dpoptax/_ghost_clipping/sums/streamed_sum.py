"""Clips and sums each use of a parameter during the backward pass, without keeping its factors.

With the clip `per_layer_clip(…, streaming=True)`, the norm of one part of the gradient needs no
other part. So the derivative by a used value is replaced. Where automatic differentiation would sum
the gradients of all examples, `_UseClip.batch_sum` clips and sums them. A scan stacks the results
as it would stack gradients, and `jax.checkpoint` computes operands again. The memory of a step is
then that of a step without privacy.

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
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from dpoptax._clip import block_sums, bounds
from dpoptax._clip.block_sums import WholeBatch
from dpoptax._clip.clip import Clip
from dpoptax._clip.clip_per_example import clip_each
from dpoptax._clip.clipping_functions import PerLayerClip
from dpoptax._ghost_clipping.norms import factor_products
from dpoptax._ghost_clipping.norms.pulled_back_norms import FactoredGradients
from dpoptax._ghost_clipping.passes.interpreter import (
    Arrays,
    ByIndex,
    Environment,
    Interpreter,
    make_environment,
)
from dpoptax._ghost_clipping.passes.run_passes import recorded_dtype
from dpoptax._ghost_clipping.plan import PlannedUse, Product, read_use
from dpoptax._ghost_clipping.sums import weighted_products
from dpoptax._ghost_clipping.sums.ghost_clipped_sum import measure_product
from dpoptax._ghost_clipping.sums.scaled_gradients import (
    UseOperands,
    largest_entries,
    make_product_scales,
    scale_segment,
)
from dpoptax._ghost_clipping.trace.entry_rules import Lookup
from dpoptax._ghost_clipping.trace.program import Program, Step, Use
from dpoptax._ghost_clipping.trace.read_program import read_batch_program
from dpoptax._ghost_clipping.trace.views import View
from dpoptax._jaxprs import bind
from dpoptax._points import GradientPoints, weigh
from dpoptax._tree import PyTree, float32_at_least
from dpoptax._xla import materialize, round_to_dtype

# `on_devices(local, spec)` returns a function of arrays (B, …) that runs `local` on each device's
# own examples, and adds the results of all devices. The sum is sharded by `spec`.
OnDevices = Callable[[Callable[..., jax.Array], P], Callable[..., jax.Array]]


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
    on_devices: OnDevices,
    specs: PyTree = None,
    batch_axes: tuple[str, ...] | None = None,
    factor_dtype: DTypeLike | None = None,
) -> tuple[PyTree, PyTree]:
    """Computes the clipped sum of a batch; arguments as for `ghost_clipped_sum`.

    `on_devices` runs a sum over examples on the devices that share the batch, which is sharded over
    the mesh axes `batch_axes`, `None` for one device. `specs` says how each parameter is sharded
    over these axes.

    Returns:
      The sum, shaped like the parameters, and the auxiliary outputs, `None` without `has_aux`.

    Raises:
      ValueError: there are several gradient points, or the loss computes on a parameter before the
        parameter meets data.
    """
    params = points.points[0]
    program = read_batch_program(loss_fn, points, batch, keys, has_aux=has_aux)
    _check_streams(program, points, params)
    leaves = jax.tree.leaves(params)
    parts, opaque_parts = _split_bounds(program, clip, params)
    shapes = [tuple(x.shape) for x in program.parameters]
    leaf_specs = [P()] * len(leaves) if specs is None else jax.tree.leaves(specs)
    axes = {use.index: _parameter_axes(use, shapes[_leaf(use)]) for use in program.uses}
    clips = {
        use.index: _UseClip(
            use,
            parts[use.index],
            whole,
            factor_dtype,
            on_devices,
            _use_spec(use, axes[use.index], leaf_specs),
        )
        for use in program.uses
    }

    def example(
        probes: ByIndex, parameter_zeros: ByIndex, inputs: Arrays, live: jax.Array
    ) -> Arrays:
        shifted = [
            x + parameter_zeros[i] if i in parameter_zeros else x for i, x in enumerate(leaves)
        ]
        known = make_environment(program, leaves, shifted)
        return _Streamer(probes, known, clips, live).run(program.block, inputs)

    def total(probes: ByIndex, parameter_zeros: ByIndex) -> tuple[jax.Array, Arrays]:
        every = jax.vmap(example, (None, 0, 0, 0), spmd_axis_name=batch_axes)
        results = every(probes, parameter_zeros, jax.tree.leaves((batch, keys)), mask)
        return results[0].sum(), results

    probes = {u.index: jnp.zeros(_probe_shape(u), jnp.float32) for u in program.uses}
    parameter_zeros = {
        i: jnp.zeros((mask.shape[0], *program.parameters[i].shape), program.parameters[i].dtype)
        for i in program.opaque
    }
    (sums, gradients), results = jax.grad(total, argnums=(0, 1), has_aux=True)(
        probes, parameter_zeros
    )
    found: dict[int, list[jax.Array]] = collections.defaultdict(list)
    for use in program.uses:
        found[_leaf(use)].append(_place(use, sums[use.index], axes[use.index], shapes[_leaf(use)]))
    for i, gradient in gradients.items():
        sum_opaque = functools.partial(_sum_opaque, opaque_parts[i], whole)
        found[i].append(on_devices(sum_opaque, leaf_specs[i])(gradient, mask))
    zero = lambda x: [jnp.zeros(x.shape, float32_at_least(x))]  # noqa: E731
    added = [functools.reduce(operator.add, found.get(i, zero(x))) for i, x in enumerate(leaves)]
    aux = jax.tree.unflatten(program.result_tree, results)[1]
    return jax.tree.unflatten(jax.tree.structure(params), added), aux


@dataclasses.dataclass(frozen=True)
class _Part:
    """Holds the clip of one part of the gradient, and how many parts are added to each entry."""

    clip: Clip
    added: int

    def tau(self, whole: WholeBatch, *roundings: block_sums.Rounding) -> float:
        """Returns τ of the sum of the part, with room for the additions of the other parts."""
        own = block_sums.tau(whole, roundings)
        room = block_sums.parts_rounding(self.added, whole.examples)
        return (own + room) / (1.0 - room)


def _split_bounds(
    program: Program, clip: PerLayerClip, params: PyTree
) -> tuple[dict[int, _Part], dict[int, _Part]]:
    """Returns the part of each use and, by leaf, of each opaque parameter."""
    groups = clip.groups(params)
    leaves_of = collections.Counter(groups)
    uses_of = collections.Counter([_leaf(use) for use in program.uses] + list(program.opaque))

    def part(leaf: int, steps: int) -> _Part:
        group, added = groups[leaf], uses_of[leaf]
        split = clip.split(group, 1 + max(groups), leaves_of[group] * added**2 * steps)
        return _Part(split, added)

    steps = {u.index: math.prod(n for n, _ in u.loops) for u in program.uses}
    uses = {u.index: part(_leaf(u), steps[u.index]) for u in program.uses}
    return uses, {leaf: part(leaf, 1) for leaf in program.opaque}


def _leaf(use: Use) -> int:
    """Returns the one parameter of a use."""
    (leaf,) = use.value.leaves
    return leaf


def _check_streams(program: Program, points: GradientPoints, params: PyTree) -> None:
    if len(points.points) > 1 or points.tangent is not None or points.linear_map is not None:
        raise ValueError(
            "`per_layer_clip(streaming=True)` must have one gradient point without a linear map. "
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


def _sum_opaque(part: _Part, whole: WholeBatch, gradient: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the clipped sum of per-example gradients (B, …)."""
    clipped = clip_each(part.clip, [gradient], mask, tau=part.tau(whole))
    return block_sums.sum_weighted(clipped.coefficients[0], clipped.units[0])


@dataclasses.dataclass(frozen=True, eq=False)
class _UseClip:
    """Clips and sums the gradients of one use, in each step of its scans."""

    use: Use
    part: _Part
    whole: WholeBatch
    factor_dtype: DTypeLike | None
    on_devices: OnDevices
    spec: P

    def batch_sum(self, operand: jax.Array, cotangent: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns Σ_i mask_i clip(G_i), cut by the rule, in float32, from arrays (B, …)."""
        return self.on_devices(self._device_sum, self.spec)(operand, cotangent, mask)

    def _device_sum(self, operand: jax.Array, cotangent: jax.Array, mask: jax.Array) -> jax.Array:
        (planned,) = read_use(self.use)
        # One step of the scans, in the layout of the rule.
        step = dataclasses.replace(self.use, loops=())
        member = PlannedUse(step, planned.view, step.layout)
        operand, cotangent = materialize((self._rounded(operand), self._rounded(cotangent)))
        pair = UseOperands(member, operand, weigh(cotangent, 1.0, planned.view.scale))
        scales, sides = make_product_scales([largest_entries([pair])])
        segment = scale_segment(*pair, sides[0]).rounded(self.factor_dtype)
        piece = FactoredGradients([segment])
        product = Product((member,), self._method(mask.shape[0]), ())
        sizes, examples = step.layout.sizes, self.whole.examples
        rounding = weighted_products.product_rounding(piece, sizes, examples)
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
        bound = self.part.clip.sensitivity
        total = weighted_products.sum_products(
            piece, coefficients[0], sizes, bound=bound, examples=examples
        )
        return step.layout.fold(total.astype(jnp.float32), step.layout.split)

    def _rounded(self, x: jax.Array) -> jax.Array:
        dtype = recorded_dtype(x.dtype, self.factor_dtype)
        return x if dtype == x.dtype else round_to_dtype(x, dtype)

    def _method(self, examples: int) -> str:
        rule = self.use.rule
        _, rows, columns = rule.layout.sizes
        method = factor_products.choose_method(examples, rule.positions, rows, columns, segments=1)
        if isinstance(rule, Lookup):
            return "outer" if method == "outer" else "gram"
        return "form" if method == "keep" else method


class _Streamer(Interpreter):
    """Runs uses so that the derivative by a probe is the clipped sum of the batch.

    `by_use` holds the probes: zeros in the shape of the sum. `live` is the example's entry of the
    mask.
    """

    def __init__(
        self, by_use: ByIndex, known: Environment, clips: dict[int, _UseClip], live: jax.Array
    ) -> None:
        super().__init__(by_use, known)
        self.clips = clips
        self.live = live

    def inner(self, by_use: ByIndex, known: Environment) -> "_Streamer":
        return _Streamer(by_use, known, self.clips, self.live)

    def use(self, step: Step, use: Use, operands: Arrays) -> jax.Array:
        apply = _clipped_use(step, self.clips[use.index])
        return apply(operands, self.by_use[use.index], self.live)


def _clipped_use(step: Step, clip: _UseClip) -> Callable[..., jax.Array]:
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
