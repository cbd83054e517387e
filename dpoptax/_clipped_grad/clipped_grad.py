"""Computes the sum of clipped per-example gradients of a loss."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpoptax import _rounding
from dpoptax._clipped_grad.engines import Options, choose_engine
from dpoptax._clipped_grad.microbatches import BatchSum
from dpoptax._clipped_sum.clipped_sum import ClippedSum, Terms, sealed
from dpoptax._clips.clip import Clip, as_clip
from dpoptax._losses.check_loss import check_parameters
from dpoptax._points.points import GradientPoints, ensure_points
from dpoptax._random.keys import check_key
from dpoptax._support.host_communication import check_same_on_hosts
from dpoptax._support.marks import EXAMPLES, UNCLIPPED, mark
from dpoptax._support.tree import PyTree, batch_length, check_mask
from dpoptax._support.xla import out_sharding


def clipped_grad(
    loss_fn: Callable[..., PyTree],
    clip: Clip | float,
    *,
    microbatch_size: int | None = None,
    has_aux: bool = False,
    return_values: bool = False,
    method: Literal["auto", "vmap", "recompute", "streaming"] = "auto",
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

    An example adds exactly zero, like a masked one, if its gradient is not finite or longer than
    2³⁹ ≈ 5·10¹¹, or if the input of a layer is 2⁴⁰ ≈ 10¹² or more. This is silent, because an error
    or a warning would reveal private data. In float16 it can drop many examples: a
    loss scaled by 2¹⁶ overflows if a cotangent exceeds 65,504. `dpoptax.dropped_examples` counts
    them.

    Args:
      loss_fn: `loss_fn(params, example)`, or `loss_fn(params, example, key)` if `grad_fn` is given
        a key. Returns a scalar, or (scalar, aux) with `has_aux`.
      clip: the clipping geometry. A number C means `dpoptax.l2_clip(C)`.
      microbatch_size: the number of examples that a device computes at once. Small values need less
        memory. They change the result by rounding only. A batch that is not a multiple of it is
        padded. `None` means all examples on GPU and TPU, and on CPU a size for its caches, from
        shapes alone (docs/guides/memory.md). The platform is that of `mesh`, or JAX's default. For
        all examples on any platform, pass the batch size.
      has_aux: whether `loss_fn` returns auxiliary outputs.
      return_values: whether `grad_fn` also returns the losses of all examples, (B,).
      method: "auto" computes norms and sums from the operands and cotangents of each layer (ghost
        clipping), and forms per-example gradients only where the traced loss requires it. "vmap"
        forms all of them and is the reference. The two differ by rounding. If large terms of a
        gradient nearly cancel, "auto" clips it to less than C. "recompute" runs the forward and
        backward passes twice, first for the norms and then for the sum, and keeps nothing in
        between. "streaming" requires a `per_layer_clip`, and clips and sums each layer during one
        backward pass. With `jax.checkpoint` or sharded parameters, both save memory
        (docs/guides/memory.md). For "streaming", each part of a layer is clipped separately: each
        parameter, each step of a `lax.scan` over stacked parameters, and each use of a parameter
        that is used several times. The bound C_l of a layer is divided by √k for k parameters or
        steps, and by k for k uses. The non-finite parts of an example's gradient add zero, and its
        other parts are still added.
      precision: the dtype in which "auto" measures and contracts operands and cotangents. "float32"
        keeps them. "bfloat16" rounds them first, and per-example gradients that are formed from
        them, which halves their memory and takes one pass of a matrix unit instead of six. It
        rounds gradients and does not affect the bound. `None` is the device's precision:
        "bfloat16" where JAX rounds the operands of matrix products in float32 by default, and
        "float32" elsewhere. It rounds on TPU, and on NVIDIA GPUs of compute capability 8.0 or
        higher. The device is that of `mesh`, or JAX's default.
      grid: g, from `dpoptax.extend.fixed_point_grid`. Each clipped gradient is rounded to whole
        multiples of g, and these are added as integers, exactly. Requires
        `gaussian_noise(fixed_point=True)`. A grid requires per-example gradients, so it excludes
        the methods "recompute" and "streaming".
      mesh: the devices that share the batch; `None` for one device. Each device clips and sums the
        gradients of its share of examples, and one all-reduce adds the sums. Noise is added
        afterwards, so its standard deviation does not depend on the number of devices. Axes may be
        automatic or explicit.
      axis_name: the mesh axis or axes that the examples are sharded over, evenly. Other axes repeat
        the work: to use all devices, name all axes.
      param_specs: how the parameters are sharded over the mesh: a `PartitionSpec`, or a tree prefix
        of them. Parameters are all-gathered for the gradient, and the sum is sharded like them,
        except with clips that encode gradients. `None` reads explicit axes from the types,
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
        the generator "rbg", a loop that runs until the last example has converged, or on a GPU a
        sparse array of `jax.experimental.sparse`.
      ValueError: `method` is unknown, or excludes the clip or the `grid`; `microbatch_size` is
        below 1, `mesh` lacks an axis, or `param_specs` is given without a mesh. At the call: `key`
        is given without `ids` or the reverse; `ids` are not (B,) integers; leading axes of `batch`
        differ from each other or from `mask`; the devices cannot share the batch evenly; or a batch
        is sharded although no mesh was given (inside `jit` this is visible on explicit axes only).

    Warns:
      UserWarning: the gradients of some parameters are exactly zero, because the loss does not use
        them or stops their gradients. "vmap" does not look for them, and `dpoptax.explain` finds
        more. Or the loss closes over more than 16 MB of arrays: make frozen weights an argument of
        the jitted step, and call `clipped_grad` inside it. The warning is given when the loss is
        compiled.

    >>> import jax.numpy as jnp
    >>> import dpoptax
    >>> loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
    >>> grad_fn = clipped_grad(loss_fn, 1.0)
    >>> grad_fn(jnp.zeros(2), jnp.array([[-3.0, -4.0], [-0.3, -0.4]])).sum
    Array([0.899..., 1.199...], dtype=float32)
    """
    if mesh is None and param_specs is not None:
        raise ValueError(f"`param_specs` needs a `mesh`, got param_specs={param_specs}.")
    clip = as_clip(clip)
    engine = choose_engine(Options(clip, method, precision, grid, microbatch_size, mesh))
    if return_values:
        loss_fn, has_aux = _with_value(loss_fn, has_aux), True
    sums = BatchSum(loss_fn, has_aux, engine, microbatch_size, mesh)
    batch_sum = sums if mesh is None else _over_devices(sums, clip, mesh, axis_name, param_specs)
    # Terms are static: they are part of the dtype of the sealed sum.
    total = jax.jit(functools.partial(sealed_sum, batch_sum), static_argnames="terms")

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
        _check_devices(points, batch, mesh)
        is_example = check_mask(mask, batch_length(batch))
        if key is not None or ids is not None:
            key, ids = _check_randomness(key, ids, is_example.shape[0])
        if grid is not None:
            _rounding.integer_sums.check_capacity(clip, grid, is_example.shape[0])
        # Masked rows count as summands, since the number of examples is private.
        terms = Terms(clip, grid, is_example.shape[0], mask is None, points.code)
        clipped, aux = total(points, (batch, ids), is_example, key, terms=terms)
        return (clipped, aux) if has_aux else clipped

    return grad_fn


def sealed_sum(
    batch_sum: Callable[..., tuple[PyTree, PyTree]],
    points: GradientPoints,
    records: tuple[PyTree, jax.Array | None],
    mask: jax.Array,
    key: jax.Array | None,
    *,
    terms: Terms,
) -> tuple[ClippedSum, PyTree]:
    """Returns the sealed sum of a batch, and the auxiliary outputs."""
    records, mask = mark((records, mask), EXAMPLES)
    total, aux = batch_sum(points, records, mask, key)
    # `BatchSum` and the sums over devices store their totals.
    return sealed(total, terms, points.reference, stored=True), mark(aux, UNCLIPPED)


def _check_randomness(
    key: jax.Array | None, ids: ArrayLike | None, batch_size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the key and the records' numbers, or raises if they do not fit the batch."""
    key = None if key is None else check_key(key)
    if key is None or ids is None:
        given, missing = ("key", "ids") if ids is None else ("ids", "key")
        raise ValueError(
            f"`{missing}` must be given with `{given}`. Each example gets the key "
            "fold_in(key, id), so that records do not change each other's randomness. Pass "
            "`key=key, ids=indices` with the sampler's indices. Pass `ids=jnp.arange(B)` only if "
            "row i of every batch is record i."
        )
    ids = jnp.asarray(ids)
    if ids.shape != (batch_size,) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"`ids` must be integers of shape ({batch_size},), the index of each example's record, "
            f"got {ids.dtype}{list(ids.shape)}."
        )
    return key, ids


def _check_devices(
    points: GradientPoints,
    batch: PyTree,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
) -> None:
    """Raises an error if a sum over devices would come before the clip, or without a mesh.

    Inside `jax.shard_map`, parameters must vary like the examples. The derivative with respect to
    another parameter would be the sum over devices; see `sum_over_devices`.
    """
    examples = jax.tree.leaves(batch)
    # Outside `shard_map`, nothing varies over manual axes.
    if batch_axes := frozenset().union(*map(_varying, examples)):
        leaves = jax.tree_util.tree_leaves_with_path(points.points)
        for (_, *path), leaf in leaves:
            if missing := batch_axes - _varying(leaf):
                name = jax.tree_util.keystr(tuple(path)) or "the parameter"
                raise ValueError(
                    f"Inside `jax.shard_map`, the batch varies over {sorted(missing)}, but {name} "
                    "does not. Its derivative is the sum over devices before the clip, which would "
                    "bound sums of several examples. Call `dpoptax.clipped_grad(..., mesh=mesh, "
                    "axis_name=...)` outside `jax.shard_map` instead."
                )
    if mesh is None and (sharding := next(filter(None, map(_known_sharding, examples)), None)):
        raise ValueError(
            f"A sharded batch needs a mesh, got a batch sharded by {sharding}. Call "
            "`dpoptax.clipped_grad(..., mesh=mesh, axis_name=...)`. Without a mesh the compiler "
            "shards the work, and its per-example gradients of convolutions are wrong."
        )


def _known_sharding(x: jax.Array) -> jax.sharding.Sharding | None:
    """Returns the sharding of an array; `None` if it is whole, or its type does not tell."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return None if x.sharding.is_fully_replicated else x.sharding
    return out_sharding(x)


def _varying(x: jax.Array) -> frozenset[str]:
    """Returns the manual axes that an array varies over, if `shard_map` tracks them."""
    kind: Any = jax.typeof(x)
    return kind.manual_axis_type.varying


def _over_devices(
    sums: BatchSum,
    clip: Clip,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    axis_name: str | Sequence[str],
    param_specs: PyTree,
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns `sums` over the devices of a mesh."""
    from dpoptax._clipped_grad import sharding

    layout = sharding.make_layout(mesh, axis_name, param_specs)
    if sums.engine.in_backward:
        total = sharding.sum_in_backward(sums, layout, clip.sensitivity)
    else:
        total = sharding.sum_over_devices(
            sums, layout, scatter=not clip.encodes, bound=clip.sensitivity
        )
    return _compared_on_hosts(total, clip) if jax.process_count() > 1 else total


def _compared_on_hosts(
    total: Callable[..., tuple[PyTree, PyTree]], clip: Clip
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns a sum that hosts compare when they trace it, because each compiles its own."""
    from dpoptax._support.digests import digest_of  # only runs on several hosts need it

    def compared(*args: PyTree) -> tuple[PyTree, PyTree]:
        # The program holds the arrays that the loss closes over, and the Python branches it took.
        program = digest_of(jax.make_jaxpr(total)(*args))
        check_same_on_hosts({"`clip`": clip, "`loss_fn`, with all it closes over": program})
        return total(*args)

    return compared


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
