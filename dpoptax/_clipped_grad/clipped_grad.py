"""Computes the sum of clipped per-example gradients of a loss."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from dpoptax._clip.block_sums import WholeBatch
from dpoptax._clip.clip import Clip, as_clip
from dpoptax._clip.clip_per_example import batch_length, check_mask
from dpoptax._clip.clipped_sum import ClippedSum, sealed
from dpoptax._clip.integer_sums import check_capacity
from dpoptax._clipped_grad.microbatches import check_microbatch_size, in_microbatches
from dpoptax._clipped_grad.per_example_sum import per_example_sum
from dpoptax._clipped_grad.sharding import (
    DeviceSum,
    check_one_device,
    check_same_axes,
    make_layout,
    sum_over_devices,
)
from dpoptax._clipped_grad.streaming import select_use_sum, streaming_sum
from dpoptax._ghost_clipping.sums.batch_devices import BatchDevices
from dpoptax._ghost_clipping.sums.ghost_clipped_sum import (
    GradientSums,
    ghost_clipped_sum,
    join_sums,
)
from dpoptax._ghost_clipping.sums.recomputed_sum import is_needed, recomputed_sum
from dpoptax._ghost_clipping.trace.check_loss import check_parameters
from dpoptax._ghost_clipping.trace.read_program import Examples
from dpoptax._marks import EXAMPLES, UNCLIPPED, mark
from dpoptax._points import GradientPoints, ensure_points
from dpoptax._random.check_key import check_key
from dpoptax._tree import PyTree
from dpoptax._xla import rounds_products

# Values of `jax_default_matmul_precision` for which TPUs round operands in float32 to bfloat16, and
# recent GPUs to TF32.
_ONE_PASS = (None, "default", "bfloat16", "BF16_BF16_F32")


def clipped_grad(
    loss_fn: Callable[..., PyTree],
    clip: Clip | float,
    *,
    microbatch_size: int | None = None,
    has_aux: bool = False,
    return_values: bool = False,
    method: Literal["auto", "vmap", "recompute", "integers"] = "auto",
    precision: Literal["float32", "bfloat16"] | None = None,
    grid: float | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    axis_name: str | Sequence[str] = "data",
    param_specs: PyTree = None,
) -> Callable[..., Any]:
    """Returns a function for the sum of clipped per-example gradients of `loss_fn`.

        grad_fn(params, batch, mask)  =  Σ_i mask_i clip(∇ℓ(params; ξ_i))
        grad_fn(points, batch, mask)  =  Σ_i mask_i clip(Σ_j w_j ∇ℓ(x_j; ξ_i))

    `loss_fn(params, example)` is the scalar loss of one example. `batch` holds the examples along
    the leading axis of every leaf, (B, …). The result is a `ClippedSum`: a sum, not a mean, in
    float32 or wider.

    Privacy: one example changes the sum by at most C = `clip.sensitivity` in l2 norm, whatever its
    data. The bound includes floating-point rounding. To make room for it, gradients are clipped to
    C/(1 + τ). τ depends only on public shapes and is about 0.01 for batches of hundreds of examples
    (docs/developers/bound.md). If an example is masked out, all others must keep their places in
    the batch, as in the draws of `dpoptax.sampling`. The sum is private until
    `dpoptax.gaussian_noise` adds noise. Auxiliary outputs and losses are private and get no noise.

    An example whose gradient is not finite adds exactly zero, like a masked one. This is silent,
    because an error or a warning would reveal private data. In float16 it can drop many examples: a
    loss scaled by 2¹⁶ overflows if a cotangent exceeds 65,504. `dpoptax.dropped_examples` counts
    them.

    Args:
      loss_fn: `loss_fn(params, example)`, or `loss_fn(params, example, key)` if `grad_fn` is given
        a key. Returns a scalar, or (scalar, aux) with `has_aux`.
      clip: the clipping geometry. A number C means `dpoptax.l2_clip(C)`.
      microbatch_size: the number of examples that a device computes at once; `None` for all. Small
        values need less memory and are often faster on CPU. They change the result by rounding
        only. A batch that is not a multiple of it is padded.
      has_aux: whether `loss_fn` returns auxiliary outputs.
      return_values: whether `grad_fn` also returns the losses of all examples, (B,).
      method: "auto" computes norms and sums from the operands and cotangents of each layer (ghost
        clipping), and forms per-example gradients only where the traced loss requires it. "vmap"
        forms all of them and is the reference. The two differ by rounding. If large terms of a
        gradient nearly cancel, "auto" clips it to less than C. "recompute" runs the forward and
        backward passes twice, first for the norms and then for the sum, and keeps nothing in
        between. With `jax.checkpoint` or sharded parameters this saves memory
        (docs/guides/memory.md), and "auto" does it for single examples of more than 8 GiB.
        "integers" needs a `grid`. It rounds operands and cotangents to integers, of 8 and 16 bits,
        and measures and sums their products in integers, without per-example gradients. The bound
        then holds without an assumption on rounding (docs/developers/exact-sums.md).
      precision: the dtype in which "auto" measures and contracts operands and cotangents. "float32"
        keeps them. "bfloat16" rounds them first, and per-example gradients that are formed from
        them, which halves their memory and takes one pass of a matrix unit instead of six. It
        rounds gradients and does not affect the bound. `None` is the device's precision:
        "bfloat16" where JAX rounds the operands of matrix products in float32 by default, and
        "float32" elsewhere. It rounds on TPU, and on NVIDIA GPUs of compute capability 8.0 or
        higher. The device is that of `mesh`, or JAX's default.
      grid: g, from `dpoptax.extend.fixed_point_grid`. Each clipped gradient is rounded to whole
        multiples of g, and these are added as integers, exactly. Required by
        `gaussian_noise(fixed_point=True)`. Except with method="integers", a grid requires
        per-example gradients.
      mesh: the devices that share the batch; `None` for one device. Each device clips and sums the
        gradients of its share of examples, and one all-reduce adds the sums. Noise is added
        afterwards, so its standard deviation does not depend on the number of devices. Axes may be
        automatic or explicit.
      axis_name: the mesh axis or axes that the examples are sharded over, evenly. Other axes repeat
        the work: to use all devices, name all axes.
      param_specs: how the parameters are sharded over the mesh: a `PartitionSpec`, or a tree prefix
        of them. Parameters are all-gathered for the gradient, and the sum is sharded like them,
        except with clips that encode (`Clip.encodes`). `None` reads explicit axes from the types,
        and means replicated parameters on automatic axes.

    Returns:
      `grad_fn(params, batch, mask=None, *, key=None, ids=None)`. `params` are the parameters.
      Methods that evaluate gradients at other points (`disk`, `pmlf`) need the `GradientPoints`
      from `dpoptax.gradient_points(opt_state, params)` instead. `mask`, (B,), is True for examples
      and False for padding. The result is a `ClippedSum`, or a pair of it and further outputs at
      the first point: auxiliary outputs (B, …) with `has_aux`, losses with `return_values`, or
      (losses, aux) with both.

      Without a mask every row counts as an example, and the noise stage requires as many rows as
      its `batch_size`. The draws of a sampler are padded with repeated records, so they need their
      mask.

      `key` is for losses with randomness, and `ids`, (B,) integers, are the sampler's indices of
      the records. Record i gets `fold_in(key, i)`, wherever it is in the batch. If keys depended on
      positions, one more record in a Poisson draw would change the randomness of all later records,
      and no clip bounds the change of their gradients. The key must be secret and new in each step.

      For several losses on one batch, let one `loss_fn` return their sum. Its gradient is clipped
      as one vector. With two clipped sums, one example could change each by C.

    Raises:
      TypeError: `clip` is neither a `Clip` nor a number, or `mesh` is not a mesh. At the call:
        parameters are integers, complex, or floats of fewer than 16 bits; `mask` holds floats; the
        loss is not a scalar, or not a pair with `has_aux`; or the loss may mix examples through a
        collective over devices, a custom vmap rule, a callback for a whole batch, random numbers of
        the generator "rbg", or a loop that runs until the last example has converged.
      ValueError: `method` is unknown, or "integers" with no `grid` or with a clip that encodes
        gradients; `microbatch_size` is below 1, `mesh` lacks an axis, or
        `param_specs` is given without a mesh. At the call: `key` is given without `ids` or the
        reverse; `ids` are not (B,) integers; leading axes of `batch` differ from each other or from
        `mask`; the devices cannot share the batch evenly; or a batch is sharded although no mesh
        was given (inside `jit` this is visible on explicit axes only).

    Warns:
      UserWarning: the gradients of some parameters are exactly zero (see `dpoptax.explain`),
        because the loss does not use them, stops their gradients, or normalizes a batch of one
        example. Or the loss closes over more than 16 MB of arrays: make frozen weights an argument
        of the jitted step, and call `clipped_grad` inside it. Or the grid is too coarse for
        method="integers". The warning is given when the loss is compiled.

    >>> import jax.numpy as jnp
    >>> import dpoptax
    >>> loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
    >>> grad_fn = clipped_grad(loss_fn, 1.0)
    >>> grad_fn(jnp.zeros(2), jnp.array([[-3.0, -4.0], [-0.3, -0.4]])).sum
    Array([0.899..., 1.199...], dtype=float32)
    """
    clip = as_clip(clip)
    check_microbatch_size(microbatch_size)
    _check_options(method, precision, grid, clip)
    by_examples = method != "integers" and (
        method == "vmap" or grid is not None or (clip.encodes and not clip.by_norms)
    )
    if by_examples and precision == "bfloat16":
        raise ValueError(
            f"`precision` must be 'float32' for per-example gradients, got {precision!r}. They are "
            f"taken for method={method!r}, grid={grid}, clip={clip}."
        )
    layout = make_layout(mesh, axis_name, param_specs)
    use_sum = select_use_sum(clip, method, grid, microbatch_size, mesh)
    if return_values:
        loss_fn, has_aux = _with_value(loss_fn, has_aux), True

    # From the inside out: a micro-batch, a device, all devices, and the returned function.
    def device_sum(
        points: GradientPoints, records: PyTree, mask: jax.Array, key: jax.Array | None
    ) -> tuple[PyTree, PyTree]:
        batch, ids = records  # one tree, since both are sharded over the devices
        devices = 1 if layout is None else layout.shards
        whole = WholeBatch(devices * mask.shape[0], devices)
        keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, ids)

        def microbatch_sum(batch_and_keys: PyTree, mask: jax.Array) -> tuple[PyTree, PyTree]:
            batch, keys = batch_and_keys
            examples = Examples(batch, mask, keys, whole)
            if by_examples:
                return per_example_sum(loss_fn, clip, points, examples, has_aux=has_aux, grid=grid)
            reading: Any = {"has_aux": has_aux, "factor_dtype": _factor_dtype(precision, mesh)}
            if grid is None and is_needed(loss_fn, points, examples, **reading):
                (total, statistic), aux = recomputed_sum(
                    loss_fn, clip, points, examples, devices=BatchDevices(), **reading
                )
                return (GradientSums.from_tree(total), statistic), aux
            return ghost_clipped_sum(loss_fn, clip, points, examples, grid=grid, **reading)

        total, aux = in_microbatches(microbatch_sum, microbatch_size)((batch, keys), mask)
        if not by_examples:  # after the loop over micro-batches, which carries fewer arrays
            total = join_sums(clip, points.points[0], total)
        return total, aux

    if use_sum is not None:
        batch_sum: DeviceSum = streaming_sum(
            use_sum, loss_fn, clip, layout, has_aux=has_aux, microbatch_size=microbatch_size,
            factor_dtype=functools.partial(_factor_dtype, precision, mesh),
        )  # fmt: skip
    elif layout is not None:
        batch_sum = sum_over_devices(
            device_sum, layout, scatter=not clip.encodes, bound=clip.sensitivity
        )
    else:
        batch_sum = device_sum

    @functools.partial(jax.jit, static_argnames="unweighted")
    def sealed_sum(
        points: GradientPoints,
        records: tuple[PyTree, PyTree],
        mask: jax.Array,
        key: jax.Array | None,
        *,
        unweighted: bool,
    ) -> tuple[ClippedSum, PyTree]:
        if unweighted:  # a constant weight of 1 costs no multiplication
            points = dataclasses.replace(points, weights=(1.0,))
        points = _with_mapped_reference(points, clip)
        records, mask = mark((records, mask), EXAMPLES)
        total, aux = batch_sum(points, records, mask, key)
        clipped = sealed(
            total,
            clip,
            reference=points.reference,
            grid=grid,
            linear_map=points.linear_map,
            examples=mask.shape[0],
        )
        clipped = dataclasses.replace(clipped, origin=points.origin)
        return clipped, mark(aux, UNCLIPPED)

    def grad_fn(
        params: PyTree | GradientPoints,
        batch: PyTree,
        mask: ArrayLike | None = None,
        *,
        key: jax.Array | None = None,
        ids: ArrayLike | None = None,
    ) -> ClippedSum | tuple[ClippedSum, PyTree]:
        points = ensure_points(params)
        check_parameters(points.points[0])
        for point in points.points:
            check_same_axes(point, batch)
        if layout is None:
            check_one_device(batch)
        is_example = check_mask(mask, batch_length(batch))
        key = None if key is None else check_key(key)
        records = batch, _check_ids(ids, key, is_example.shape[0])
        if grid is not None:
            check_capacity(clip, grid, is_example.shape[0])
        first = points.weights[0]
        # Static, because `jit` turns the number 1.0 into an array.
        unweighted = len(points.weights) == 1 and isinstance(first, float) and first == 1.0
        clipped, aux = sealed_sum(points, records, is_example, key, unweighted=unweighted)
        clipped = dataclasses.replace(clipped, unmasked=mask is None)
        return (clipped, aux) if has_aux else clipped

    return grad_fn


def _with_value(loss_fn: Callable[..., PyTree], has_aux: bool) -> Callable[..., PyTree]:
    """Returns a loss with its value, or (value, aux), as auxiliary output."""

    @functools.wraps(loss_fn)
    def loss(*args: PyTree) -> PyTree:
        found = loss_fn(*args)
        if not has_aux:
            return found, found
        if not (isinstance(found, tuple) and len(found) == 2):
            return found  # `grad_fn` raises an error that names the pair
        value, aux = found
        return value, (value, aux)

    return loss


def _with_mapped_reference(points: GradientPoints, clip: Clip) -> GradientPoints:
    """Maps a reference that is a gradient with the linear map of the points."""
    linear_map, reference = points.linear_map, points.reference
    if linear_map is None or not linear_map.back or clip.followed:
        return points

    def shapes(tree: PyTree) -> PyTree:
        return jax.tree.structure(tree), [jnp.shape(x) for x in jax.tree.leaves(tree)]

    if shapes(reference) != shapes(points.points[0]):
        return points  # data of the clip that is not a gradient
    return dataclasses.replace(points, reference=linear_map.forward(reference))


def _check_options(method: str, precision: str | None, grid: float | None, clip: Clip) -> None:
    if method not in ("auto", "vmap", "recompute", "integers"):
        raise ValueError(
            f"`method` must be 'auto', 'vmap', 'recompute' or 'integers', got {method!r}."
        )
    if method == "integers" and (grid is None or clip.encodes):
        raise ValueError(
            "method='integers' needs a `grid`, and a clip that does not encode gradients, got "
            f"grid={grid} and clip={clip}."
        )
    if precision not in (None, "float32", "bfloat16"):
        raise ValueError(f"`precision` must be 'float32', 'bfloat16' or `None`, got {precision!r}.")
    if grid is not None and not (grid > 0.0 and math.frexp(grid)[0] == 0.5):
        raise ValueError(
            f"`grid` must be a power of two, got {grid}. Take it from "
            "`dpoptax.extend.fixed_point_grid`."
        )


def _factor_dtype(
    precision: str | None, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None
) -> DTypeLike | None:
    """Returns the dtype that factors are rounded to, `None` for no rounding."""
    default: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision is None and default in _ONE_PASS:
        device = mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else jax.devices()[0]
        precision = "bfloat16" if rounds_products(device) else "float32"
    return jnp.bfloat16 if precision == "bfloat16" else None


def _check_ids(ids: ArrayLike | None, key: jax.Array | None, batch_size: int) -> jax.Array | None:
    if (ids is None) != (key is None):
        given, missing = ("key", "ids") if ids is None else ("ids", "key")
        raise ValueError(
            f"`{missing}` must be given with `{given}`. Each example gets the key "
            "fold_in(key, id), so that records do not change each other's randomness. Pass "
            "`key=key, ids=indices` with the sampler's indices. Pass `ids=jnp.arange(B)` only if "
            "row i of every batch is record i."
        )
    if ids is None:
        return None
    ids = jnp.asarray(ids)
    if ids.shape != (batch_size,) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"`ids` must be integers of shape ({batch_size},), the index of each example's record, "
            f"got {ids.dtype}{list(ids.shape)}."
        )
    return ids
