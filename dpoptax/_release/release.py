"""Releases clipped sums, in the same way for all noise stages."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from dpoptax._clipped_sum.clipped_sum import ClippedSum, check_clipped_sum
from dpoptax._clips.clip import Clip
from dpoptax._random.keys import fold_in
from dpoptax._release.ledger import (
    Mechanism,
    State,
    check_scale,
    check_state,
    count_release,
    refusals,
)
from dpoptax._support.marks import NOISE, RELEASE, mark
from dpoptax._support.tree import PyTree, kind_of

Extra = TypeVar("Extra")


def release(
    updates: PyTree,
    state: State,
    params: PyTree,
    mechanism: Mechanism,
    noisy_mean: Callable[[ClippedSum, jax.Array], tuple[PyTree, Extra]],
    *,
    clip: Clip | None = None,
) -> tuple[PyTree, tuple[PyTree, Extra], State]:
    """Checks a clipped sum, adds a stage's noise, and counts the release.

    If the state does not belong to the run, the release is NaN. The new state records the reason
    for `ledgers`. The derivative of a release with respect to the sum is zero, because a sealed
    array has no derivative.

    Args:
      updates: the argument of `update`, which must be a `ClippedSum`.
      state: the stage's state before the release.
      params: the parameters, for the dtypes of the result, or `None`.
      mechanism: the stage's mechanism.
      noisy_mean: maps the clipped sum and the step's key to the noisy mean and an extra value.
      clip: the only geometry that the stage adds noise for; `None` for all but those with their own
        stage.

    Returns:
      The release; the pair of the mean before decoding and the extra value; and the next state.
    """
    clipped = check_clipped_sum(updates)
    terms = clipped.terms
    if terms.grid is not None and not mechanism.fixed_point:
        raise TypeError(
            f"The clipped sum is on grid={terms.grid}, but this stage adds noise in floating "
            "point. Use `dpoptax.gaussian_noise(..., fixed_point=True)`, or omit `grid` in "
            "`dpoptax.clipped_grad`."
        )
    _check_clip(terms.clip, clip)
    # Without a mask, nothing shows which rows are padding, so the batch must have B rows.
    if terms.unmasked and terms.examples != mechanism.batch_size:
        raise ValueError(
            f"Without a mask, the batch must have batch_size={mechanism.batch_size:g} rows, got "
            f"{terms.examples}. Padding would count as examples, and the stated epsilon would "
            "not hold. Pass the sampler's mask to `grad_fn` or to the `update` of "
            f"`clip_and_noise`, or `mask=jnp.ones({terms.examples}, bool)` if every row is an "
            "example."
        )
    check_scale(mechanism, terms.clip.sensitivity)
    check_state(state, mechanism)
    # The reasons depend on the key only by whether its fingerprint is right. Without the mark, they
    # would count as secret.
    refused = mark_released(refusals(state, mechanism), mechanism)
    # The count before this release makes the key, so a repeated step gets the same noise.
    mean, extra = noisy_mean(clipped, mark(fold_in(state.key, state.count), NOISE))
    mean = mark_released(_nan_where(refused != 0, mean), mechanism)
    decoded = clipped.decode(mean)
    # `decode` may turn NaN into a number.
    released = mean if decoded is mean else _nan_where(refused != 0, decoded)
    # Rounding to the parameters' dtype is post-processing.
    if params is not None:
        released = _in_dtypes_of(params, released)
    return released, (mean, extra), count_release(state, refused, terms.points_code)


def mark_released(tree: PyTree, mechanism: Mechanism) -> PyTree:
    """Marks arrays as released by a mechanism, if it has a guarantee."""
    # `information_flow` must not call a sum without noise, or without a proof, released.
    private = mechanism.noise_multiplier > 0.0 and not mechanism.unproven
    return mark(tree, RELEASE) if private else tree


def _check_clip(used: Clip, clip: Clip | None) -> None:
    """Raises an error if a sum was not clipped by the stage's geometry, or needs another stage."""
    if clip is not None and used != clip:
        raise TypeError(
            f"The clipped sum was made with {used}, but this stage was made with {clip}. Pass the "
            "same clip to both."
        )
    if clip is None and (stage := used.own_stage):
        raise TypeError(
            f"The clipped sum was made with {used}, whose only noise stage is `{stage}`. Use that "
            "stage, or a clip with a fixed bound, such as `dpoptax.l2_clip`."
        )


def _in_dtypes_of(params: PyTree, released: PyTree) -> PyTree:
    try:
        return jax.tree.map(lambda m, p: m.astype(p.dtype), released, params)
    except (AttributeError, ValueError) as error:
        raise TypeError(
            f"`params` must have the structure of the gradients, got {kind_of(params)}. An "
            "optimizer with its own parameters goes around the chain, as in "
            "`optax.lookahead(optax.chain(noise, optimizer), …)`, in a loop that takes gradients "
            "at `dpoptax.gradient_points(opt_state, params.fast)`."
        ) from error


def _nan_where(refused: jax.Array, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.where(refused, jnp.full((), jnp.nan, x.dtype), x), tree)
