"""Clipped gradients of table rows that are selected in each step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpoptax._clipped_grad.clipped_grad import clipped_grad
from dpoptax._clipped_sum.clipped_sum import ClippedSum
from dpoptax._points.points import GradientPoints, TrackIteratesState
from dpoptax._support.tree import PyTree, check_mask, find_state, kind_of
from dpoptax.tables._lookups import (
    UNSUPPORTED_USE,
    TrainedRows,
    locate,
    place_of,
    take_rows,
)
from dpoptax.tables._row_selecting_noise import (
    RowSelectingNoiseState,
    SelectedRows,
    release_context,
    select_release_rows,
)
from dpoptax.tables._row_selection import RowSelectingClip


class SelectedGrad(NamedTuple):
    """Result of the function that `selected_grad` returns.

    Attributes:
      sum: the `ClippedSum` of the gradients with respect to `params`, for the noise stage. Private.
      params: the parameters with the selected rows, (k, d), instead of the table. Pass them to
        `tx.update`, whose updates have their shapes.
      rows: the `SelectedRows`, public once the step is counted.
    """

    sum: ClippedSum
    params: PyTree
    rows: SelectedRows


def selected_grad(
    loss_fn: Callable[..., Any],
    clip: RowSelectingClip,
    *,
    where: Callable[[PyTree], Any],
    microbatch_size: int | None = None,
) -> Callable[..., SelectedGrad]:
    """Returns a `clipped_grad` for a large table that selects rows in each step.

        S = rows of the batch, by noisy counts;  Σ_i mask_i clip( ∇_{table[S], others} ℓ(x; ξ_i) )

    Time and memory are those of `clipped_grad` with a table of k = `capacity` rows, and do not
    depend on the size of the table. Rows outside S are looked up unchanged and are not trained.

    Privacy: `row_selecting_noise` prices rows and sum together as one release with its noise
    multiplier. Both are private until its `update` has counted them, so do not publish them before.

    Args:
      loss_fn: `loss_fn(params, (lookups, rest))`, or with a third argument `key`. Returns a scalar.
        It must read the table only by `look_up(table, lookups)`; other uses raise an error.
      clip: a `row_selecting_clip`.
      where: selects the table in a tree shaped like the parameters, such as `lambda p: p["table"]`.
      microbatch_size: as in `clipped_grad`.

    Returns:
      `grad_fn(opt_state, params, batch, mask=None, *, key=None, ids=None)`. `params` hold the whole
      table, (V, d). The batch is a pair: integers (B, …), the rows that each example looks up, and
      any tree of leaves (B, …). The other arguments are those of `clipped_grad`.

    Raises:
      TypeError: `clip` is not a `row_selecting_clip`. At the call: the loss uses the table in
        another way, or comes from `dpoptax.users.per_user_loss`.
      ValueError: the state does not contain that of `row_selecting_noise`, or the method or
        optimizer keeps state per table entry, although the rows change in each step.

    Source: Ghazi et al., 2023, Algorithm 1 (DP-AdaFEST).

    >>> import dpoptax
    >>> from dpoptax import tables
    >>> clip = tables.row_selecting_clip(
    ...     dpoptax.l2_clip(1.0), tables.RowSelection(table_size=1000, capacity=4, threshold=1.5)
    ... )
    >>> tx = tables.row_selecting_noise(
    ...     clip, noise_multiplier=0.1, batch_size=3, key=jax.random.key(0)
    ... )
    >>> params = jnp.zeros((1000, 2))
    >>> def loss_fn(table, example):
    ...     row, target = example
    ...     return jnp.sum((tables.look_up(table, row) - target) ** 2)
    >>> grad_fn = tables.selected_grad(loss_fn, clip, where=lambda p: p)
    >>> batch = jnp.array([7, 7, 8]), jnp.ones((3, 2))
    >>> found = grad_fn(tx.init(params), params, batch)
    >>> found.rows.rows.tolist(), found.params.shape
    ([7, 1000, 1000, 1000], (4, 2))
    """
    if not isinstance(clip, RowSelectingClip):
        raise TypeError(f"`clip` must be a `dpoptax.tables.row_selecting_clip`, got {clip!r}.")

    @jax.jit
    def select_and_sum(
        state: RowSelectingNoiseState,
        params: PyTree,
        batch: tuple[jax.Array, PyTree],
        mask: jax.Array | None,
        key: jax.Array | None,
        ids: jax.Array | None,
    ) -> SelectedGrad:
        place, (lookups, rest) = place_of(params, where), batch
        leaves, structure = jax.tree.flatten(params)
        which = check_mask(mask, lookups.shape[0])
        selected = select_release_rows(state, clip, lookups, which)
        located = locate(lookups, selected.rows, leaves[place])
        leaves[place] = take_rows(leaves[place], selected.rows)
        small = jax.tree.unflatten(structure, leaves)
        loss = _loss_of_rows(loss_fn, place)
        points = GradientPoints((small,), (1.0,), reference=release_context(state))
        sum_of = clipped_grad(loss, clip, microbatch_size=microbatch_size)
        clipped = sum_of(points, (located, rest), mask, key=key, ids=ids)
        return SelectedGrad(clipped, small, selected)

    def grad_fn(
        opt_state: PyTree,
        params: PyTree,
        batch: tuple[ArrayLike, PyTree],
        mask: ArrayLike | None = None,
        *,
        key: jax.Array | None = None,
        ids: ArrayLike | None = None,
    ) -> SelectedGrad:
        state = _find_noise_state(opt_state)
        place = place_of(params, where)
        _check_table_size(jax.tree.leaves(params)[place].shape[0], clip)
        _check_memory(opt_state, params, place, clip)
        lookups, rest = _checked(batch)
        if mask is not None:
            mask = check_mask(mask, lookups.shape[0])
        return select_and_sum(state, params, (lookups, rest), mask, key, ids)

    return grad_fn


def _loss_of_rows(loss_fn: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Returns a loss of the selected rows that permits only `look_up` in the table."""

    def loss(params: PyTree, example: PyTree, *key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(params)
        leaves[place] = TrainedRows(leaves[place])
        try:
            return loss_fn(jax.tree.unflatten(structure, leaves), example, *key)
        except TypeError as error:
            # JAX names only the type that it cannot use. The note explains its purpose.
            if TrainedRows.__name__ in str(error):
                error.add_note(UNSUPPORTED_USE)
            raise

    return loss


def _find_noise_state(opt_state: PyTree) -> RowSelectingNoiseState:
    """Returns the state of the noise that selects the rows."""
    state = find_state(opt_state, RowSelectingNoiseState)
    if state is None:
        raise ValueError(
            "`opt_state` must contain the state of `dpoptax.tables.row_selecting_noise`, whose "
            "noise selects the rows. Start the chain with it instead of `gaussian_noise`."
        )
    return state


def _check_table_size(rows: int, clip: RowSelectingClip) -> None:
    """Raises if the table does not have the number of rows that the clip's noise is drawn for."""
    size = clip.selection.table_size
    if rows != size:
        raise ValueError(
            f"The table must have table_size={size} rows, as in the clip's selection, got "
            f"{rows}. The noise is drawn for that many rows."
        )


def _checked(batch: object) -> tuple[jax.Array, PyTree]:
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise TypeError(
            f"`batch` must be a pair (lookups, rest) of integers (B, …) and the other inputs of "
            f"the loss, got {kind_of(batch)}."
        )
    lookups = jnp.asarray(batch[0])
    if lookups.ndim == 0 or not jnp.issubdtype(lookups.dtype, jnp.integer):
        raise TypeError(
            "The lookups must be integers (B, …), the rows that each example looks up, got "
            f"{lookups.dtype}{list(lookups.shape)}."
        )
    return lookups, batch[1]


def _check_memory(opt_state: PyTree, params: PyTree, place: int, clip: RowSelectingClip) -> None:
    """Raises an error if the optimizer keeps state per table entry.

    Its entries would belong to other rows in each step.
    """
    if find_state(opt_state, TrackIteratesState) is not None:
        raise ValueError(
            "`opt_state` must not have gradient points of other iterates (disk, pmlf, "
            "inner_outer), because the rows of the table change in each step. Remove it, or select "
            "the rows once with `dpoptax.tables.select_rows`."
        )
    sizes = [(clip.selection.capacity,), (clip.selection.table_size,)]
    name = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(params)[place][0])
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        inside = jax.tree_util.keystr(path).endswith(name)
        number = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        if inside and number and jnp.shape(leaf)[:1] in sizes:
            raise ValueError(
                "The optimizer must not keep state per table entry (like momentum or Adam), "
                "because the rows change in each step, but "
                f"opt_state{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}. For the "
                "table, use `optax.sgd` without momentum, by `optax.partition`, or "
                "`dpoptax.tables.rowwise_adagrad`. Or select the rows once with "
                "`dpoptax.tables.select_rows`."
            )
