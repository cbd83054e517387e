"""Computes clipped sums of explicit per-example gradients, for any geometry."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from dpoptax._clipped_sum.clipped_sum import ClippedSum, Terms, check_real, sealed
from dpoptax._clips.clip import Clip, as_clip
from dpoptax._points.points import AT_PARAMETERS
from dpoptax._rounding import block_sums, bounds
from dpoptax._support.marks import EXAMPLES, mark
from dpoptax._support.tree import MAX_SHOWN, PyTree, batch_length, check_mask, no_params, widen
from dpoptax._support.xla import materialize


class ClipPerExampleState(NamedTuple):
    """State of `clip_per_example`, which is empty."""


def clip_per_example(clip: Clip | float) -> optax.GradientTransformationExtraArgs:
    """Clips and sums per-example gradients, from leaves (B, …) to a `ClippedSum`.

    This is the first half of `clip_and_noise`. Use it for access to the sum.
    `update(grads, state, params, mask=mask)` leaves out rows where `mask`, (B,), is False, such as
    the padding of a sampler's draw. Without a mask every row counts as one example, and the noise
    stage requires as many rows as its `batch_size`.

    Privacy: the sum is private until noise is added. One example changes it by at most
    `clip.sensitivity`, if a masked row takes the place of a missing example. B must be public, as
    with padded draws, because the allowance for rounding depends on it.

    Each gradient must depend only on its example. This cannot be checked here, but
    `dpoptax.information_flow` can check it. Three cases violate it:

    - `jax.vmap(jax.grad(loss_fn), (None, 0))` with a grouped convolution: if one gradient is not
      finite, XLA makes all of them NaN. `clipped_grad` avoids this.
    - `optax.clip_by_global_norm` before this stage: it scales all rows by a norm of the whole
      batch.
    - `optax.trace` before this stage: it adds the rows of successive batches.

    Args:
      clip: the geometry. A number C means `l2_clip(C)`.

    Returns:
      A stateless `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError: `clip` is neither a `Clip` nor a number. At `update`: `mask` holds floats.
      ValueError: `clip` is an `adaptive_clip`, whose threshold this stage does not know. At
        `update`: `params` is missing; leaves are not those of the parameters with a leading axis of
        examples; or such axes differ from each other or from `mask`.

    >>> import dpoptax, jax.numpy as jnp
    >>> tx = clip_per_example(dpoptax.l2_clip(1.0))
    >>> params = {"w": jnp.zeros(2)}
    >>> grads = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4]])}
    >>> clipped, _ = tx.update(grads, tx.init(params), params)
    >>> clipped.sum["w"]
    Array([0.899..., 1.199...], dtype=float32)
    """
    clip = as_clip(clip)
    if stage := clip.own_stage:
        raise ValueError(
            f"`clip` must work with any noise stage, got {clip}. Use `dpoptax.clipped_grad` and "
            f"`{stage}`."
        )

    def init_fn(params: PyTree) -> ClipPerExampleState:
        del params
        return ClipPerExampleState()

    def update_fn(
        updates: PyTree,
        state: ClipPerExampleState,
        params: PyTree = None,
        *,
        mask: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[ClippedSum, ClipPerExampleState]:
        del extra_args
        if params is None:
            raise no_params("the clip of per-example gradients")
        _check_axis(updates, params)
        check_real(updates)
        examples = batch_length(updates)
        grads, is_example = mark((updates, check_mask(mask, examples)), EXAMPLES)
        terms = Terms(clip, None, examples, mask is None, AT_PARAMETERS)
        return sealed(sum_clipped(clip, grads, is_example), terms), state

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
    """Returns Σ_i mask_i clip(grads_i) for leaves (B, …) of explicit gradients.

    Examples that are masked or not finite add exactly zero. With a grid, a power of two, each
    summand is rounded to whole multiples of it, and the sum of these integers is exact. `whole`
    describes the batch over all micro-batches and devices; `None` means this batch.
    """
    encode = functools.partial(_encode_by_norms, clip) if clip.by_norms else clip.encode
    grads = encode(grads, reference)
    # On a grid, summands are rounded before the sum: `sensitivity_on_grid` adds √d g/2.
    tau = 0.0 if grid else block_sums.tau(whole or block_sums.WholeBatch(batch_length(grads)))
    clipped = clip_each(clip, grads, mask, tau=tau)
    add = block_sums.sum_weighted if grid is None else functools.partial(_sum_steps, grid)
    # Each leaf has its own coefficients, since groups of leaves may have different bounds.
    totals = list(map(add, clipped.coefficients, clipped.units))
    return jax.tree.unflatten(jax.tree.structure(grads), totals)


def _encode_by_norms(clip: Clip, grads: PyTree, reference: PyTree) -> PyTree:
    """Returns the encodings that ghost clipping sums, (B, …); NaN if a gradient is not finite."""
    clipped = clip_each(clip.scaling(reference), grads)
    leaves = [
        unit * bounds.broadcast_examples(coefficient, unit)
        for unit, coefficient in zip(clipped.units, clipped.coefficients, strict=True)
    ]
    statistic = clip.statistic(clipped.norms, reference)
    assert statistic is not None
    # A NaN statistic marks the whole example as not finite, so it adds zero to all parts.
    statistic = jnp.where(clipped.used, statistic, jnp.nan)
    return clip.join(jax.tree.unflatten(jax.tree.structure(grads), leaves), statistic)


def _sum_steps(grid: float, coefficients: jax.Array, units: jax.Array) -> jax.Array:
    """Returns Σ_i coefficients[i] units[i], each rounded to whole multiples of a grid, in int32."""
    clipped = bounds.broadcast_examples(coefficients, units) * units
    steps = clipped * (1.0 / grid)  # exact, unlike a division on GPU
    return jnp.sum(jnp.rint(steps).astype(jnp.int32), axis=0)


class ClippedUnits(NamedTuple):
    """Holds per-example gradients and their coefficients separately.

    Attributes:
      units: leaves (B, …) of gradients, float32 or wider, finite.
      coefficients: (B,) of each leaf. Their products with the units are the clipped gradients.
      norms: (B,), norms of whole gradients if the geometry has one group.
      used: (B,), whether each example is finite and not masked.
    """

    units: list[jax.Array]
    coefficients: list[jax.Array]
    norms: jax.Array
    used: jax.Array


def clip_each(
    clip: Clip, grads: PyTree, mask: jax.Array | None = None, *, tau: float = 0.0
) -> ClippedUnits:
    """Clips explicit gradients, leaves (B, …), using upper bounds of their norms.

    See `bounds`. `tau` is the τ of their sum, if they are summed.
    """
    mask = jnp.ones(batch_length(grads), bool) if mask is None else mask
    # Norms and sum must read the same numbers, or the norms would not bound the summands.
    units = materialize([bounds.within_range(widen(leaf)) for leaf in jax.tree.leaves(grads)])
    groups = clip.groups(grads)
    sizes = map(bounds.formed_bounds, units)
    pieces = [bounds.Piece(size, group) for size, group in zip(sizes, groups, strict=True)]
    # τ makes room in the bound for the rounding of the sum.
    coefficients, norms, used = bounds.clip_coefficients(clip, pieces, mask, groups=groups, tau=tau)
    return ClippedUnits(units, coefficients, norms, used)


def _check_axis(grads: PyTree, params: PyTree) -> None:
    """Raises an error if gradients are not per-example gradients of the parameters.

    The gradient of a mean may also have a leading axis. Clipping its rows would not bound the
    contribution of an example.
    """
    wanted, given = map(dict, map(jax.tree_util.tree_leaves_with_path, (params, grads)))
    if other := wanted.keys() ^ given.keys():
        raise ValueError(
            "The gradients must have the structure of the parameters. Only one of the two has "
            + ", ".join(sorted(map(jax.tree_util.keystr, other))[:MAX_SHOWN])
        )
    for path, param in wanted.items():
        grad = given[path]
        if jnp.shape(grad)[1:] != jnp.shape(param):
            want = ", ".join(["B", *map(str, jnp.shape(param))])
            raise ValueError(
                f"gradient{jax.tree_util.keystr(path)} must have shape ({want}), one gradient for "
                f"each of B examples, got {jnp.shape(grad)}. Use for example "
                "`jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params, batch)`. The gradient of "
                "a whole batch cannot be made private."
            )
