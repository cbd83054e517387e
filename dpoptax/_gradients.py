"""The sum of clipped per-example gradients of a loss: microbatches, masks, randomness, outputs."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from optax import microbatching

from dpoptax._bookkeeping import bookkept_sum, join_sums
from dpoptax._clipping import Clip, ClippedSum, batch_axis, check_clip, sum_clipped
from dpoptax._points import GradientPoints
from dpoptax._sharding import check_one_device, make_layout, sum_over_devices
from dpoptax._tracing import check_parameters


def clipped_grad(
    loss_fn: Callable[..., Any],
    clip: Clip,
    *,
    microbatch_size: int | None = None,
    has_aux: bool = False,
    method: Literal["auto", "vmap"] = "auto",
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    axis_name: str | Sequence[str] = "data",
    param_specs: Any = None,
) -> Callable[..., Any]:
    """Returns a function that computes the sum of clipped per-example gradients of `loss_fn`.

        grad_fn(points, batch, mask)  =  Σ_i mask_i clip( Σ_j w_j ∇ℓ(x_j; ξ_i) )

    `loss_fn(params, example)` is the scalar loss of one example; `batch` holds examples along the
    leading axis of every leaf, (B, …). The result is a `ClippedSum`: a sum, not a mean, in float32
    at least.

    Privacy: one example changes the sum by at most `clip.sensitivity` in l2 norm, whatever its
    data; an example whose gradient is not finite, or that `mask` leaves out, adds exactly zero. The
    sum is private until `dpoptax.gaussian_noise` made it public, and so are the auxiliary outputs,
    which nothing here protects.

    Args:
      loss_fn: `loss_fn(params, example)`, or `loss_fn(params, example, key)` when the returned
        function is given a key; a scalar, or (scalar, aux) with `has_aux`.
      clip: the geometry, such as `dpoptax.l2_clip(1.0)`.
      microbatch_size: how many examples a device computes at once; `None` for all. Less memory, and
        often more speed on CPU. The result does not depend on it but for rounding. A batch that it
        does not divide is padded.
      has_aux: whether `loss_fn` returns auxiliary outputs.
      method: "auto" computes norms and sums from the operands and cotangents of each layer, without
        per-example gradients wherever the traced loss allows it; "vmap" has per-example gradients
        for all, the reference. Equal but for rounding.
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
      `grad_fn(points, batch, mask=None, *, key=None)`, with `points` from
      `dpoptax.gradient_points`, `mask` of shape (B,), True for examples and False for padding, and
      `key` for losses with randomness: example i gets `fold_in(key, i)`. It returns a
      `ClippedSum`, or with `has_aux` a pair of it and the auxiliary outputs, (B, …), taken at the
      first point.

    Raises:
      TypeError: `clip` is no geometry; at the call, `points` that are not `GradientPoints`, or
        parameters that are integers, complex, or floats of fewer than 16 bits.
      ValueError: an unknown `method`, `microbatch_size` below 1, an axis that the mesh has not,
        `param_specs` without a mesh; at the call, leaves of `batch` whose leading axes disagree
        with each other or with `mask`, a batch that the devices cannot share evenly, or one that
        is split over devices where no mesh was given (inside `jit` this shows on explicit axes
        only).

    >>> import jax.numpy as jnp
    >>> import dpoptax
    >>> loss_fn = lambda w, x: 0.5 * jnp.sum((w - x) ** 2)
    >>> grad_fn = clipped_grad(loss_fn, dpoptax.l2_clip(1.0))
    >>> points = dpoptax.gradient_points((), jnp.zeros(2))
    >>> grad_fn(points, jnp.array([[-3.0, -4.0], [-0.3, -0.4]])).sum
    Array([0.9..., 1.2...], dtype=float32)
    """
    check_clip(clip)
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size={microbatch_size}: want at least 1, or None for all")
    if method not in ("auto", "vmap"):
        raise ValueError(f"method={method!r}: want 'auto' or 'vmap'")
    by_examples = method == "vmap" or (clip.encodes and not clip.by_norms)
    summed = per_example_sum if by_examples else bookkept_sum

    layout = make_layout(mesh, axis_name, param_specs)

    def local_sum(points, batch, mask, key, first):
        def sums(batch, mask, keys):
            return summed(loss_fn, clip, points, batch, mask, keys, has_aux=has_aux)

        examples = first + jnp.arange(mask.shape[0])
        keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, examples)
        total, aux = _in_microbatches(sums, microbatch_size)(batch, mask, keys)
        return total if by_examples else join_sums(clip, points.points[0], total), aux

    whole_sum = local_sum
    if layout is not None:
        whole_sum = sum_over_devices(local_sum, layout, scatter=not clip.encodes)

    @jax.jit
    def clipped_sum(points, batch, mask, key):
        return whole_sum(points, batch, mask, key, 0)

    def grad_fn(points, batch, mask=None, *, key=None):
        if not isinstance(points, GradientPoints):
            raise TypeError(
                f"points is a {type(points).__name__}: want "
                "dpoptax.gradient_points(opt_state, params)"
            )
        check_parameters(points.points[0])
        if layout is None:
            check_one_device(batch)
        mask = _check_mask(mask, batch_axis(batch))
        total, aux = clipped_sum(points, batch, mask, key)
        clipped = ClippedSum(total, clip, points.reference)
        return (clipped, aux) if has_aux else clipped

    return grad_fn


def per_example_sum(loss_fn, clip, points, batch, mask, keys, *, has_aux):
    """The clipped sum by per-example gradients: the reference, for any program.

    Returns (sum, aux), aux being None without `has_aux`.
    """

    def gradient(example, key):
        args = (example,) if key is None else (example, key)
        grad = jax.grad(lambda params: loss_fn(params, *args), has_aux=has_aux)
        total, aux = None, None
        for j, (point, weight) in enumerate(zip(points.points, points.weights, strict=True)):
            if j == 0 and points.tangent is not None:
                value, derivative, *aux_here = _value_and_jvp(grad, point, points.tangent, has_aux)
                term = jax.tree.map(lambda g, d, w=weight: w * g + d, value, derivative)
            else:
                out = grad(point)
                value, *aux_here = out if has_aux else (out,)
                term = _scale(value, weight)
            total = term if total is None else jax.tree.map(jnp.add, total, term)
            aux = aux_here[0] if j == 0 and has_aux else aux
        return total, aux

    grads, aux = jax.vmap(gradient, in_axes=(0, None if keys is None else 0))(batch, keys)
    return sum_clipped(clip, grads, mask, points.reference), aux


def _value_and_jvp(grad, point, tangent, has_aux):
    """∇ℓ(x) and ∇²ℓ(x) v in one forward-over-reverse pass, and aux where there is one."""
    if has_aux:
        value, derivative, aux = jax.jvp(grad, (point,), (tangent,), has_aux=True)
        return value, derivative, aux
    return jax.jvp(grad, (point,), (tangent,))


def _scale(tree, weight):
    if isinstance(weight, float) and weight == 1.0:
        return tree
    # In float32 at least: weights of DiSK are far above 1 and cancel.
    return jax.tree.map(lambda g: weight * g.astype(jnp.promote_types(g.dtype, jnp.float32)), tree)


def _check_mask(mask, batch_size):
    if mask is None:
        return jnp.ones(batch_size, bool)
    mask = jnp.asarray(mask)
    if mask.shape != (batch_size,):
        raise ValueError(f"mask has shape {mask.shape}: want ({batch_size},), one for each example")
    return mask.astype(bool)


def _in_microbatches(sums, size):
    """`sums(batch, mask, keys)` over microbatches of `size`; padding is masked out."""
    if size is None:
        return sums

    def run(batch, mask, keys):
        examples = mask.shape[0]
        if size >= examples:
            return sums(batch, mask, keys)
        missing = -examples % size
        pad = lambda x: jnp.concatenate([x, jnp.repeat(x[:1], missing, axis=0)])  # noqa: E731
        if missing:
            batch, keys = jax.tree.map(pad, (batch, keys))
            mask = jnp.concatenate([mask, jnp.zeros(missing, bool)])
        kinds = (microbatching.AccumulationType.SUM, microbatching.AccumulationType.CONCAT)
        total, aux = microbatching.microbatch(
            jax.jit(sums),  # traced for its shapes and for the loop: once, not twice
            argnums=(0, 1, 2),
            microbatch_size=size,
            accumulator=kinds,
            in_axes=(0, 0, 0),
        )(batch, mask, keys)
        return total, jax.tree.map(lambda x: x[:examples], aux)

    return run
