"""Defines gradient points, the states they are computed from, and a check of their use.

If gradients were not taken at the points that an optimizer's state asks for, a method such as
`disk` has no effect. The code of the points is static in a `ClippedSum`, and an array in the state
of the noise stage that released the sum.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax._support.serialization import SerializableState, register
from dpoptax._support.tree import PyTree, find_state, is_masked, no_params, widen

# The flags of a code: 1 is always set, so no code is 0, and 2 says that there is a reference.
# `_FLAG_BITS` is their number.
_KNOWN, _REFERENCE, _FLAG_BITS = 1, 2, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientPoints:
    """Holds the public points and weights at which per-example gradients are taken.

    `dpoptax.clipped_grad` clips the per-example quantity

        g(ξ) = Σ_j w_j ∇ℓ(x_j; ξ),

    a fixed linear combination of that example's gradients at released parameters. Its sensitivity
    is the clipping bound, for any points and weights. `dpoptax.gradient_points` returns instances.

    Privacy: points must be computed from public values, such as released parameters, not from data.
    Wrong values cost utility but not privacy.

    Attributes:
      points: the x_j, each shaped like the parameters.
      weights: the w_j, Python floats. Static: other weights compile a step again.
      reference: public data for a clip that follows the run, see `ReferenceState`; `None` for
        none.
      code: how the points were computed, see `points_code`; `dpoptax.chain` and `ledgers` check
        it. 0 for points made by hand, which are not checked. Static.
    """

    points: tuple[PyTree, ...]
    weights: tuple[float, ...] = dataclasses.field(metadata={"static": True})
    reference: PyTree = None
    code: int = dataclasses.field(default=0, metadata={"static": True})

    def __post_init__(self) -> None:
        if not all(isinstance(weight, float) for weight in self.weights):
            raise TypeError(f"`weights` must be Python floats, got {self.weights}.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrackIteratesState(SerializableState):
    """Holds the state of `track_iterates`.

    Attributes:
      iterates: x_{t−1}, x_{t−2}, …, newest first, each shaped like the parameters.
      rows: the mixing coefficients: point j is Σ_i `rows[j][i]` x_{t−i}. Static.
      weights: the weights of the points. Static.
    """

    iterates: tuple[PyTree, ...]
    rows: tuple[tuple[float, ...], ...] = dataclasses.field(metadata={"static": True})
    weights: tuple[float, ...] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReferenceState(SerializableState):
    """Holds public data for a clip that follows the run.

    `gradient_points` finds it by its type.

    Attributes:
      reference: public data, computed only from releases.
    """

    reference: PyTree


# The states that `gradient_points` reads.
Tracker: TypeAlias = TrackIteratesState | ReferenceState


def track_iterates(
    rows: Sequence[Sequence[float]], weights: Sequence[float]
) -> optax.GradientTransformation:
    """Stores iterates for gradient points, and does not change updates.

    With iterates x_t, x_{t−1}, …, x_{t−k+1}, the points are x_j = Σ_i `rows[j][i]` x_{t−i}. The
    clipped quantity is Σ_j weights[j] ∇ℓ(x_j; ξ). The iterates are the `params` passed to
    `update`, so they are correct for any learning rate, schedule or weight decay. Before step k,
    x_0 replaces the missing iterates. `dpoptax.gradient_points` finds the state in the optimizer's
    state.

    Memory: k − 1 copies of the parameters. A step that donates parameters and optimizer state
    should return the state first; otherwise `jax.jit` copies the parameters twice.

    Privacy: the state holds only released parameters.

    Args:
      rows: the mixing weights, k per point: `rows[j][i]` is the weight of x_{t−i} in point j. If a
        row sums to 1, the point is an affine combination of iterates.
      weights: one weight per point.

    Returns:
      An `optax.GradientTransformation`; `update` needs `params`.

    Raises:
      ValueError: rows are empty or differ in length, or there is not one weight per row.

    >>> tx = track_iterates(rows=[(1.5, -0.5)], weights=[1.0])   # the look-ahead x + (x − x')/2
    """
    mixing = tuple(tuple(float(c) for c in row) for row in rows)
    if not mixing or not mixing[0] or len({len(row) for row in mixing}) != 1:
        raise ValueError(f"`rows` must be nonempty and of equal nonzero length, got {rows}.")
    if len(weights) != len(mixing):
        raise ValueError(f"`weights` must have one weight per row ({len(mixing)}), got {weights}.")
    fixed = tuple(float(w) for w in weights)

    def init_fn(params: PyTree) -> TrackIteratesState:
        register()
        # Copies, because a donated state must not share buffers with the parameters.
        iterates = tuple(
            jax.tree.map(lambda p: jnp.array(p, copy=True), params) for _ in mixing[0][1:]
        )
        return TrackIteratesState(iterates, mixing, fixed)

    def update_fn(
        updates: PyTree, state: TrackIteratesState, params: PyTree = None
    ) -> tuple[PyTree, TrackIteratesState]:
        if params is None:
            raise no_params("track_iterates")
        # `params` is x_t, the newest earlier iterate of the next step. The oldest is dropped.
        iterates = (params, *state.iterates)[: len(state.iterates)]
        return updates, dataclasses.replace(state, iterates=iterates)

    return optax.GradientTransformation(init_fn, update_fn)


def gradient_points(opt_state: PyTree, params: PyTree) -> GradientPoints:
    """Returns the points at which this step takes per-example gradients.

    The function finds the states of `track_iterates` and of an adaptive clip in `opt_state` by
    their types, at any depth. Without `track_iterates` the point is `params`, as in DP-SGD.

    Privacy: all points are computed from current and earlier parameters, which are public.

    Args:
      opt_state: the optimizer's state, or any pytree that contains it.
      params: the current parameters x_t.

    Returns:
      `GradientPoints` for `dpoptax.clipped_grad`.

    Raises:
      ValueError: `opt_state` contains two states of one of these types. The message gives their
        paths.

    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.ones(3)}
    >>> len(gradient_points(optax.sgd(0.1).init(params), params).points)
    1
    """
    state = find_state(opt_state, TrackIteratesState)
    followed = find_state(opt_state, ReferenceState)
    reference = None if followed is None else followed.reference
    code = points_code(state, followed)
    if state is None:
        return GradientPoints((params,), (1.0,), reference, code)
    iterates = (params, *state.iterates)
    try:
        points = tuple(_combine(row, iterates) for row in state.rows)
    except (TypeError, ValueError) as error:
        error.add_note("The iterates in `opt_state` must have the structure of `params`.")
        raise
    return GradientPoints(points, state.weights, reference, code)


def ensure_points(params: PyTree) -> GradientPoints:
    """Returns `params` if it is `GradientPoints`, otherwise the single point `params`."""
    if isinstance(params, GradientPoints):
        return params
    return GradientPoints((params,), (1.0,), code=AT_PARAMETERS)


def points_code(tracked: TrackIteratesState | None, followed: ReferenceState | None) -> int:
    """Returns a uint32 that identifies how points were computed, never 0.

    It is part of the format of checkpoints. The lowest bits are flags, and the others a checksum of
    the coefficients, without trailing zeros.
    """
    rows = ((1.0,),) if tracked is None else tracked.rows
    # Adding 0.0 makes −0.0 positive.
    texts = [[(c + 0.0).hex() for c in np.trim_zeros(row, "b")] for row in rows]
    checked = zlib.crc32(f"points/1 {len(rows)} {texts}".encode())
    return checked >> _FLAG_BITS << _FLAG_BITS | _KNOWN | _REFERENCE * (followed is not None)


def fits(tracker: Tracker, code: int) -> bool:
    """Returns whether points with a code were computed from a state; code 0 fits every state."""
    if code == 0:
        return True
    # A reference is only present or absent: its values change in each step.
    if isinstance(tracker, ReferenceState):
        return bool(code & _REFERENCE)
    return code >> _FLAG_BITS == points_code(tracker, None) >> _FLAG_BITS


AT_PARAMETERS = points_code(None, None)

POINTS_REMEDY = (
    "otherwise it has no effect. Call `grad_fn(dpoptax.gradient_points(opt_state, params), batch, "
    "mask)` with the state of the whole chain. `dpoptax.clip_and_noise` supports only gradients at "
    "the parameters."
)


def unused_trackers(opt_state: PyTree, releases: Sequence[tuple[tuple[Any, ...], int]]) -> str:
    """Returns the places of trackers whose points no release used; an empty text for none.

    A tracker is compared with the noise stages of its chain, the smallest subtree that has one.

    Args:
      opt_state: the optimizer's state, or any pytree that contains it.
      releases: the path in `opt_state` and the code of the points for each noise stage.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_tracker)
    unused = []
    for path, tracker in leaves:
        if not (_is_tracker(tracker) and releases):
            continue
        shared = [_shared_length(path, stage) for stage, _ in releases]
        codes = {code for n, (_, code) in zip(shared, releases, strict=True) if n == max(shared)}
        if not any(fits(tracker, code) for code in codes):
            unused.append(f"opt_state{jax.tree_util.keystr(path)}")
    return ", ".join(unused)


def _is_tracker(x: object) -> bool:
    return isinstance(x, Tracker)


def _shared_length(path: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """Returns the length of the common beginning of two paths."""
    pairs = zip(path, other, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(path), len(other)))


def weigh(value: jax.Array, *weights: float) -> jax.Array:
    """Multiplies a gradient by weights of points.

    The result is float32 or wider, unless all weights are 1.0. In bfloat16, large weights that
    cancel, such as those of DiSK, would lose all precision.
    """
    if all(w == 1.0 for w in weights):
        return value
    return widen(value) * math.prod(weights)


def _combine(row: tuple[float, ...], iterates: tuple[PyTree, ...]) -> PyTree:
    """Returns Σ_i row[i] · iterates[i], leaf by leaf."""
    # x_t itself, also bit by bit.
    if row[0] == 1.0 and not any(row[1:]):
        return iterates[0]

    def mix(*history: jax.Array) -> jax.Array:
        total = jnp.asarray(sum(c * x for c, x in zip(row, history, strict=True) if c))
        return total.astype(history[0].dtype)

    def node(*nodes: PyTree) -> PyTree:
        newest = nodes[-1]
        # Under `optax.masked`, an untrained parameter does not change: x_{t−1} = x_t.
        return jax.tree.map(mix, newest, *(newest if is_masked(x) else x for x in nodes[:-1]))

    # The first tree gives the structure. Stored iterates may be masked, but the parameters are not.
    return jax.tree.map(node, *iterates[1:], iterates[0], is_leaf=is_masked)
