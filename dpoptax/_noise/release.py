"""One release: what all noise stages check of a clipped sum, and how all of them count it."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from dpoptax._clip.clip import Clip
from dpoptax._clip.clipped_sum import ClippedSum, check_clipped_sum, is_intact
from dpoptax._marks import RELEASE, mark
from dpoptax._noise.ledger import (
    Mechanism,
    State,
    check_scale,
    check_state,
    count_release,
    refusals,
)
from dpoptax._points import note_release
from dpoptax._random.keys import fold_in, marked_as_noise
from dpoptax._tree import PyTree

Extra = TypeVar("Extra")


def release(
    updates: PyTree,
    state: State,
    params: PyTree,
    mechanism: Mechanism,
    noisy_mean: Callable[[ClippedSum, jax.Array], tuple[PyTree, Extra]],
    *,
    on_grid: bool = False,
    belongs: Callable[[ClippedSum], jax.Array] | None = None,
) -> tuple[PyTree, tuple[PyTree, Extra], State]:
    """One release of a noise stage, whatever its noise: what all stages check, and how all count.

    It is NaN throughout where the sum is not as it was sealed, or the state not as it was begun,
    and the state says so to `ledgers`.

    Args:
      updates: what `update` got, to be a `ClippedSum`.
      state: the stage's, as it was before.
      params: the parameters for the dtypes of the result, or `None`.
      mechanism: the stage's own.
      noisy_mean: from the clipped sum and the step's key the noisy mean, and anything beside it.
      on_grid: whether the noise is one for sums of integers on a grid.
      belongs: whether a sum's rows were selected for this release, for the stage that prices that
        selection too; `None` for all others.

    Returns:
      The release, the mean as it was before decoding with what is beside it, and the next state.
    """
    clipped = check_clipped_sum(updates)
    if clipped.grid is not None and not on_grid:
        raise TypeError(
            f"the clipped sum counts steps of grid={clipped.grid}, and this noise stage adds noise "
            "in floating point: use dpoptax.gaussian_noise(..., fixed_point=True), or leave out "
            "the grid of dpoptax.clipped_grad"
        )
    if clipped.clip.selects != (belongs is not None):
        raise TypeError(
            f"the clipped sum was made with {clipped.clip}: rows that were selected in a step, and "
            "the noise of their gradient, are one release, by dpoptax.tables.row_selecting_noise "
            "with that same row_selecting_clip; no other stage prices both"
        )
    if clipped.unmasked and clipped.examples != mechanism.batch_size:
        raise ValueError(
            f"no mask was given, so that all {clipped.examples} rows of the batch are examples, "
            f"and the noise stage expects batch_size={mechanism.batch_size:g}: the padding of a "
            "sampler's draw would count, and the stated epsilon not hold. Give grad_fn, or the "
            "update of clip_and_noise, the draw's mask, or "
            f"mask=jnp.ones({clipped.examples}, bool) where every row is an example"
        )
    check_scale(mechanism, clipped.clip.sensitivity)
    check_state(state, mechanism)
    intact = is_intact(clipped)
    if belongs is not None:
        intact &= belongs(clipped)
    refused = mark_released(refusals(state, mechanism, intact), mechanism)
    clipped = dataclasses.replace(clipped, sum=_refuse_derivatives(clipped.sum))
    mean, beside = noisy_mean(clipped, marked_as_noise(fold_in(state.key, state.count)))
    mean = mark_released(_nan_where(refused != 0, mean), mechanism)
    decoded = clipped.decode(mean)
    released = mean if decoded is mean else _nan_where(refused != 0, decoded)
    if params is not None:
        released = jax.tree.map(lambda m, p: m.astype(p.dtype), released, params)
    note_release(released, clipped.origin)
    return released, (mean, beside), count_release(state, refused)


def mark_released(tree: PyTree, mechanism: Mechanism) -> PyTree:
    """The same arrays, marked as having a mechanism's guarantee; unmarked where it has none."""
    private = mechanism.noise_multiplier > 0.0 and not mechanism.unproven
    return mark(tree, RELEASE) if private else tree


def check_same_clip(clipped: ClippedSum, clip: Clip, name: str) -> None:
    """Raises where a sum was not clipped by the geometry that a stage was made for."""
    if clipped.clip != clip:
        raise TypeError(
            f"the clipped sum was made with {clipped.clip}, this stage with {clip}: give "
            f"the same {name} to both"
        )


@jax.custom_jvp
def _refuse_derivatives(total: PyTree) -> PyTree:
    return total


@_refuse_derivatives.defjvp
def _refuse_jvp(primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
    raise TypeError(
        "the noise stage is differentiated: noise is a constant to a derivative, and so that of a "
        "release is that of the clipped sum, private data without noise. Take the release for a "
        "number: tx.update(jax.lax.stop_gradient(grads), opt_state, params)"
    )


def _nan_where(refused: jax.Array, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.where(refused, jnp.full((), jnp.nan, x.dtype), x), tree)
