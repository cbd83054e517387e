"""Clipped sums of per-example gradients that are formed: the reference, for any geometry."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from dpoptax._clip import block_sums, bounds
from dpoptax._clip.clip import Clip, as_clip
from dpoptax._clip.clipped_sum import ClippedSum, check_real, sealed
from dpoptax._marks import EXAMPLES, mark
from dpoptax._points import Origin
from dpoptax._tree import PyTree, no_params
from dpoptax._xla import materialize

# Leaves that an error lists; a list of numbers in place of an array has thousands.
_SHOWN = 8


def clip_per_example(clip: Clip | float) -> optax.GradientTransformationExtraArgs:
    """Clips per-example gradients and sums them: leaves (B, …) become a `ClippedSum` of leaves (…).

    `update(grads, state, params, mask=mask)` leaves out the rows where `mask`, (B,), is False: the
    padding of a sampler's draw. Without a mask every row is an example, once, and the noise stage
    wants as many as it expects. The first half of `clip_and_noise`, for who wants to look between
    the two. Privacy: none yet; the sum is private data until noise is added. One example moves it
    by at most `clip.sensitivity` where, without it, a row that is masked stands in its place: B
    must be public, as of padded draws, for how much shorter all are clipped, to leave room for the
    rounding of the sum, depends on it. Each gradient must be of its example alone. Those that
    `jax.vmap(jax.grad(loss_fn), (None, 0))` gives of a grouped convolution are not: where one is
    not finite, XLA makes all of them NaN; `clipped_grad` takes them so that none does. Nor are they
    behind a transform that mixes rows or steps: in front of this one `optax.clip_by_global_norm`
    scales all by a norm of the whole batch, and `optax.trace` adds up the rows of successive
    batches. Nothing here can see that; `dpoptax.information_flow` can.

    Args:
      clip: the geometry. A number C means `l2_clip(C)`.

    Returns:
      A stateless `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError: `clip` is neither a `Clip` nor a number; at `update`, a `mask` of floats.
      ValueError: `clip` is `adaptive_clip`, whose threshold this stage cannot know; at `update`,
        no `params`, leaves that are not theirs with an axis of examples in front, or such axes that
        disagree with each other or with `mask`.

    >>> import dpoptax, jax.numpy as jnp
    >>> tx = clip_per_example(dpoptax.l2_clip(1.0))
    >>> params = {"w": jnp.zeros(2)}
    >>> grads = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4]])}
    >>> clipped, _ = tx.update(grads, tx.init(params), params)
    >>> clipped.sum["w"]
    Array([0.899..., 1.199...], dtype=float32)
    """
    clip = as_clip(clip)
    if clip.followed:
        raise ValueError(
            f"clip={clip} follows a threshold that only its own noise stage knows: take gradients "
            "with dpoptax.clipped_grad, and dpoptax.adaptive_gaussian_noise behind it"
        )

    def init_fn(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update_fn(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree = None,
        *,
        mask: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[ClippedSum, optax.EmptyState]:
        del extra_args
        if params is None:
            raise no_params("the clip of per-example gradients")
        _check_axis(updates, params)
        examples = batch_axis(updates)
        each, which = mark((updates, check_mask(mask, examples)), EXAMPLES)
        clipped = sealed(sum_clipped(clip, each, which), clip, examples=examples)
        clipped = dataclasses.replace(clipped, unmasked=mask is None, origin=Origin())
        return clipped, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def sum_clipped(
    clip: Clip,
    grads: PyTree,
    mask: jax.Array | None = None,
    reference: PyTree = None,
    *,
    grid: float | None = None,
    whole: block_sums.WholeBatch | None = None,
) -> PyTree:
    """Σ_i mask_i clip(grads_i), for leaves (B, …); non-finite and masked examples add exactly zero.

    By formed gradients: what is summed is what was measured. With a grid, a power of two, each
    summand is rounded to whole multiples of it, and the sum is of these integers: it is exact.
    `whole` is the batch of all microbatches and devices, `None` where this is it.
    """

    def summed(coefficient: jax.Array, unit: jax.Array) -> jax.Array:
        if grid is None:
            return block_sums.sum_weighted_examples(coefficient, unit)
        clipped = bounds.broadcast_examples(coefficient, unit) * unit
        steps = clipped * (1.0 / grid)  # exact, as a quotient by itself is not on GPU
        return jnp.sum(jnp.rint(steps).astype(jnp.int32), axis=0)

    grads = clip.encode(grads, reference)
    rounding = 0.0 if grid else block_sums.tau(whole or block_sums.WholeBatch(batch_axis(grads)))
    clipped = clip_each(clip, grads, mask, rounding=rounding)
    totals = list(map(summed, clipped.coefficients, clipped.units))
    return jax.tree.unflatten(jax.tree.structure(grads), totals)


class ClippedUnits(NamedTuple):
    """Per-example gradients, apart from what they are multiplied by.

    Attributes:
      units: leaves (B, …) of gradients over powers of two, float32 at least.
      coefficients: (leaves, B); their products with the units are the clipped gradients.
      norms: (B,), of whole gradients where the geometry has one group.
      used: (B,), which examples are finite and not masked.
    """

    units: list[jax.Array]
    coefficients: jax.Array
    norms: jax.Array
    used: jax.Array


def clip_each(
    clip: Clip, grads: PyTree, mask: jax.Array | None = None, *, rounding: float = 0.0
) -> ClippedUnits:
    """Clips formed gradients, leaves (B, …), by upper bounds of their norms; see `bounds`.

    `rounding` is the τ of their sum, where they are summed.
    """
    batch = batch_axis(grads)
    check_real(grads)
    mask = jnp.ones(batch, bool) if mask is None else mask
    leaves = materialize(jax.tree.leaves(grads))
    exponents, scales = bounds.make_scales([bounds.largest_entry(leaf)[None] for leaf in leaves])
    pieces = list(map(bounds.scale_formed, leaves, jnp.unstack(exponents[:, 0])))
    groups = clip.groups(grads)
    coefficients, norms, used = bounds.clip_coefficients(
        clip,
        scales,
        [size for _, size in pieces],
        groups,
        mask,
        layers=1 + max(groups),
        ratios=[1.0] * len(pieces),
        sum_error=0.0,
        rounding=rounding,
    )
    return ClippedUnits([unit for unit, _ in pieces], coefficients, norms, used)


def _check_axis(grads: PyTree, params: PyTree) -> None:
    """Raises where gradients are no per-example gradients of the parameters.

    The gradient of a mean has an axis in front, too, which is none of examples: it would be clipped
    by its rows, which bounds no example.
    """
    wanted, given = map(dict, map(jax.tree_util.tree_leaves_with_path, (params, grads)))
    if other := wanted.keys() ^ given.keys():
        raise ValueError(
            "the gradients are not of these parameters: only one of the two has "
            + ", ".join(sorted(map(jax.tree_util.keystr, other))[:_SHOWN])
        )
    for path, param in wanted.items():
        grad = given[path]
        if jnp.shape(grad)[1:] != jnp.shape(param):
            want = ", ".join(["B", *map(str, jnp.shape(param))])
            raise ValueError(
                f"gradient{jax.tree_util.keystr(path)} has shape {jnp.shape(grad)}: want ({want}), "
                "a gradient for each of B examples, such as "
                "jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params, batch) gives. The gradient "
                "of a whole batch cannot be made private"
            )


def check_mask(mask: ArrayLike | None, batch_size: int) -> jax.Array:
    """The mask of a batch, (B,) booleans; without one all are examples."""
    if mask is None:
        return jnp.ones(batch_size, bool)
    mask = jnp.asarray(mask)
    if mask.shape != (batch_size,):
        raise ValueError(f"mask has shape {mask.shape}: want ({batch_size},), one for each example")
    if not (jnp.issubdtype(mask.dtype, bool) or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(
            f"mask is of {mask.dtype}: want True for an example and False for padding. Weights of "
            "examples belong into the loss, in front of the clip"
        )
    return mask.astype(bool)


def batch_axis(tree: PyTree) -> int:
    """The length of the leading axis that all leaves share; raises where they do not."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sizes = {jax.tree_util.keystr(path): jnp.shape(leaf)[:1] for path, leaf in leaves}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        shown = [f"{name or 'leaf'}: {size}" for name, size in sizes.items()]
        raise ValueError(
            "every leaf must have the examples as its leading axis, of one length; got "
            + (", ".join(shown[:_SHOWN] + ["…"] * (len(shown) > _SHOWN)) or "no leaf")
            + "; a list of examples is made one array by np.stack" * isinstance(tree, list)
        )
    return next(iter(sizes.values()))[0]
