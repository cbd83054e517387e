"""The sum of clipped per-example gradients of a loss: microbatches, masks, randomness, outputs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpoptax._clip.block_sums import WholeBatch
from dpoptax._clip.clip import Clip, as_clip
from dpoptax._clip.clip_per_example import batch_axis, check_mask
from dpoptax._clip.clipped_sum import ClippedSum, as_made, sealed
from dpoptax._clip.grid import check_capacity
from dpoptax._clipped_grad.microbatches import check_microbatch_size, in_microbatches
from dpoptax._clipped_grad.per_example_sum import per_example_sum
from dpoptax._clipped_grad.sharding import (
    Sums,
    check_one_device,
    check_same_axes,
    make_layout,
    sum_over_devices,
)
from dpoptax._ghost_clipping.sums.ghost_clipped_sum import ghost_clipped_sum, join_sums
from dpoptax._ghost_clipping.trace.check_loss import check_parameters
from dpoptax._marks import EXAMPLES, UNCLIPPED, mark
from dpoptax._points import GradientPoints
from dpoptax._random.check_key import check_key
from dpoptax._tree import PyTree, kind_of


def clipped_grad(
    loss_fn: Callable[..., PyTree],
    clip: Clip | float,
    *,
    microbatch_size: int | None = None,
    has_aux: bool = False,
    method: Literal["auto", "vmap"] = "auto",
    precision: Literal["float32", "bfloat16"] = "float32",
    grid: float | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    axis_name: str | Sequence[str] = "data",
    param_specs: PyTree = None,
) -> Callable[..., Any]:
    """Returns a function that computes the sum of clipped per-example gradients of `loss_fn`.

        grad_fn(points, batch, mask)  =  Σ_i mask_i clip( Σ_j w_j ∇ℓ(x_j; ξ_i) )

    `loss_fn(params, example)` is the scalar loss of one example; `batch` holds examples along the
    leading axis of every leaf, (B, …). The result is a `ClippedSum`: a sum, not a mean, in float32
    at least.

    Privacy: one example changes the sum by at most C = `clip.sensitivity` in l2 norm, whatever the
    data. This holds for the numbers as the machine computes them, with all rounding of the sum:
    examples are clipped to C/(1 + τ), where τ depends on public shapes only and is about 0.01 for
    batches of hundreds (docs/bound.md). All other examples must keep their places in the batch when
    one is masked out, as they do in the draws of `dpoptax.sampling`. The sum is private until
    `dpoptax.gaussian_noise` adds noise. The auxiliary outputs are private and stay so.

    An example whose gradient is not finite adds exactly zero, like one that `mask` leaves out.
    There is no error and no warning, as either would show private data. In float16 this can drop
    many examples: a loss scaled by 2¹⁶ overflows where a cotangent exceeds 65,504.
    `dpoptax.dropped_examples` counts them.

    Args:
      loss_fn: `loss_fn(params, example)`, or `loss_fn(params, example, key)` when the returned
        function is given a key; a scalar, or (scalar, aux) with `has_aux`.
      clip: the geometry. A number C means `dpoptax.l2_clip(C)`.
      microbatch_size: how many examples a device computes at once; `None` for all. Less memory, and
        often more speed on CPU. The result does not depend on it but for rounding. A batch that it
        does not divide is padded.
      has_aux: whether `loss_fn` returns auxiliary outputs.
      method: "auto" computes norms and sums from the operands and cotangents of each layer, without
        per-example gradients wherever the traced loss allows it; "vmap" has per-example gradients
        for all, the reference. Equal but for rounding, the room that is left for it, and examples
        whose gradient is a small rest of large terms, which "auto" clips more.
      precision: what "auto" rounds the operands and cotangents to, once, before it measures and
        contracts them: "float32", as they are, at the platform's full precision; or "bfloat16",
        which halves their memory and takes one pass on matrix units where float32 takes three to
        six. It rounds gradients and leaves the bound as it is.
      grid: g, from `dpoptax.extend.fixed_point_grid`: each clipped gradient is rounded to whole
        multiples of g, and these are summed as integers, exactly. For
        `gaussian_noise(fixed_point=True)`, and a bound without room for rounding. It needs
        per-example gradients.
      mesh: the devices that share the batch; `None` for one device. Every device clips and sums the
        gradients of its own examples, and the sums are added over the devices once. Noise comes
        after that, so that its standard deviation does not depend on the number of devices. The
        axes may be automatic or explicit.
      axis_name: the mesh axis, or axes, over which the examples are split, evenly. Over other axes
        the work is repeated: to use all devices, name all axes.
      param_specs: how the parameters are split over the mesh, a `PartitionSpec` or a tree prefix of
        them. They are gathered for the gradient, and the sum is split like them (but for
        geometries that encode). `None` for what the types say on explicit axes, and for parameters
        that are the same everywhere on automatic ones.

    Returns:
      `grad_fn(points, batch, mask=None, *, key=None, ids=None)`, with `points` from
      `dpoptax.gradient_points`, `mask` of shape (B,), True for examples and False for padding. It
      returns a `ClippedSum`, or with `has_aux` a pair of it and the auxiliary outputs, (B, …),
      taken at the first point. Without a mask every row is an example, once, and the noise stage
      wants as many as it expects: a sampler's draw is padded with repetitions of a record, which
      its mask, and nothing else, leaves out.

      `key` is for losses with randomness, and `ids`, (B,), integers, says which record each example
      is: the sampler's indices. Record i gets `fold_in(key, i)`, wherever it stands in the batch.
      By position, one record more in a Poisson draw would give all behind it other keys, and so
      change what the *others* contribute, which no clip bounds. For the same reason the key must
      be fresh for each step and secret: a record's randomness is its own only for who cannot
      compute it, and a key that was used before repeats it.

      For several losses on one batch let one `loss_fn` return their sum: its gradient is the joint
      one, and clipped as one vector. Two sums would move by C each.

    Raises:
      TypeError: `clip` is neither a `Clip` nor a number, `mesh` no mesh; at the call, `points` that
        are not `GradientPoints`, parameters that are integers, complex, or floats of fewer than 16
        bits, a `mask` of floats, a loss that is no scalar or with `has_aux` no pair, or one that
        may mix the examples it is mapped over: with a collective over devices, a vmap rule of its
        own, a callback for a whole batch, random numbers by the generator "rbg", or a series that
        goes on until the last example has converged.
      ValueError: an unknown `method`, `microbatch_size` below 1, an axis that the mesh has not,
        `param_specs` without a mesh; at the call, a `key` without `ids` or the other way around,
        `ids` that are not (B,) integers, leaves of `batch` whose leading axes disagree
        with each other or with `mask`, a batch that the devices cannot share evenly, or one that
        is split over devices where no mesh was given (inside `jit` this shows on explicit axes
        only).

    Warns:
      UserWarning: when a loss is compiled that makes the gradients of some parameters exactly zero,
        as batch normalization of a single example does; see `dpoptax.explain`.

    >>> import jax.numpy as jnp
    >>> import dpoptax
    >>> loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
    >>> grad_fn = clipped_grad(loss_fn, dpoptax.l2_clip(1.0))
    >>> points = dpoptax.gradient_points((), jnp.zeros(2))
    >>> grad_fn(points, jnp.array([[-3.0, -4.0], [-0.3, -0.4]])).sum
    Array([0.899..., 1.199...], dtype=float32)
    """
    clip = as_clip(clip)
    check_microbatch_size(microbatch_size)
    _check_options(method, precision, grid)
    by_examples = method == "vmap" or grid is not None or (clip.encodes and not clip.by_norms)
    if by_examples and precision != "float32":
        raise ValueError(
            f"precision={precision!r} is for book-keeping, and here per-example gradients are "
            f"taken (method={method!r}, grid={grid}, clip={clip}): leave it out"
        )
    layout = make_layout(mesh, axis_name, param_specs)

    def local_sum(
        points: GradientPoints, rows: PyTree, mask: jax.Array, key: jax.Array | None
    ) -> tuple[PyTree, PyTree]:
        batch, ids = rows
        devices = 1 if layout is None else layout.shards
        whole = WholeBatch(devices * mask.shape[0], devices)

        def sums(rows: PyTree, mask: jax.Array) -> PyTree:
            batch, keys = rows
            given = loss_fn, clip, points, batch, mask, keys
            if by_examples:
                return per_example_sum(*given, has_aux=has_aux, whole=whole, grid=grid)
            dtype = jnp.bfloat16 if precision == "bfloat16" else None
            return ghost_clipped_sum(*given, has_aux=has_aux, whole=whole, factor_dtype=dtype)

        keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
        total, aux = in_microbatches(sums, microbatch_size)((batch, keys), mask)
        return total if by_examples else join_sums(clip, points.points[0], total), aux

    whole_sum: Sums = local_sum
    if layout is not None:
        whole_sum = sum_over_devices(
            local_sum, layout, scatter=not clip.encodes, bound=clip.sensitivity
        )

    @functools.partial(jax.jit, static_argnames="unweighted")
    def clipped_sum(
        points: GradientPoints,
        batch: PyTree,
        mask: jax.Array,
        key: jax.Array | None,
        ids: jax.Array | None,
        *,
        unweighted: bool,
    ) -> tuple[ClippedSum, PyTree]:
        if unweighted:  # known to the compiler, which multiplies by no weight then
            points = dataclasses.replace(points, weights=(1.0,))
        points = _with_mapped_reference(points, clip)
        rows, mask = mark(((batch, ids), mask), EXAMPLES)
        total, aux = whole_sum(points, rows, mask, key)
        reference, linear_map = points.reference, points.linear_map
        clipped = sealed(total, clip, reference, grid, linear_map, mask.shape[0])
        return clipped, mark(aux, UNCLIPPED)

    def grad_fn(
        points: GradientPoints,
        batch: PyTree,
        mask: ArrayLike | None = None,
        *,
        key: jax.Array | None = None,
        ids: ArrayLike | None = None,
    ) -> ClippedSum | tuple[ClippedSum, PyTree]:
        if not isinstance(points, GradientPoints):
            raise TypeError(
                f"points is {kind_of(points)}: want dpoptax.gradient_points(opt_state, params)"
            )
        check_parameters(points.points[0])
        for point in points.points:
            check_same_axes(point, batch)
        if layout is None:
            check_one_device(batch)
        which = check_mask(mask, batch_axis(batch))
        key = None if key is None else check_key(key)
        records = _check_ids(ids, key, which.shape[0])
        if grid is not None:
            check_capacity(clip, grid, which.shape[0])
        first = points.weights[0]
        unweighted = len(points.weights) == 1 and isinstance(first, float) and first == 1.0
        clipped, aux = clipped_sum(points, batch, which, key, records, unweighted=unweighted)
        clipped = as_made(dataclasses.replace(clipped, unmasked=mask is None))
        return (clipped, aux) if has_aux else clipped

    return grad_fn


def _with_mapped_reference(points: GradientPoints, clip: Clip) -> GradientPoints:
    """The points with a gradient for reference, a release mapped back, mapped as gradients are."""
    linear_map, reference = points.linear_map, points.reference
    if linear_map is None or not linear_map.back or clip.followed:
        return points

    def shapes(tree: PyTree) -> PyTree:
        return jax.tree.structure(tree), [jnp.shape(x) for x in jax.tree.leaves(tree)]

    if shapes(reference) != shapes(points.points[0]):
        return points  # no gradient, but something of a geometry's own
    return dataclasses.replace(points, reference=linear_map.forward(reference))


def _check_options(method: str, precision: str, grid: float | None) -> None:
    if method not in ("auto", "vmap"):
        raise ValueError(f"method={method!r}: want 'auto' or 'vmap'")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision={precision!r}: want 'float32' or 'bfloat16'")
    if grid is not None and not (grid > 0.0 and math.frexp(grid)[0] == 0.5):
        raise ValueError(
            f"grid={grid}: want a power of two, as from dpoptax.extend.fixed_point_grid"
        )


def _check_ids(ids: ArrayLike | None, key: jax.Array | None, batch_size: int) -> jax.Array | None:
    if (ids is None) != (key is None):
        given, missing = ("key", "ids") if ids is None else ("ids", "key")
        raise ValueError(
            f"{given} without {missing}: the randomness of an example is fold_in(key, its record's "
            "index), so that no record changes another's. Give key=key, ids=indices with the "
            "sampler's indices; ids=jnp.arange(B) only where row i of every batch is record i"
        )
    if ids is None:
        return None
    ids = jnp.asarray(ids)
    if ids.shape != (batch_size,) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"ids are {ids.dtype}{list(ids.shape)}: want integers of shape ({batch_size},), the "
            "index of each example's record"
        )
    return ids
