"""Where gradients are taken: the points, and the transform whose state remembers iterates."""

import contextvars
import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from dpoptax._linear_map import LinearMap, LinearMapState
from dpoptax._serialization import register, serializable
from dpoptax._tree import PyTree, find_state, is_masked, no_params, widen

# A fixed weight or several, or a function of the step count that returns them.
Weight = ArrayLike | Sequence[float] | Callable[[jax.Array], ArrayLike]


class Origin(NamedTuple):
    """How gradient points were made: static, so that a stage can check it before anything runs.

    Attributes:
      rows: the mixing coefficients of iterates, as of `track_iterates`, without trailing zeros.
      tangent_row: the same for the direction of the Hessian-vector product; `None` for none.
      reference: whether the state of `track_reference` was read.
      linear_map: whether the state of `linear_map` was read.
    """

    rows: tuple[tuple[float, ...], ...] = ((1.0,),)
    tangent_row: tuple[float, ...] | None = None
    reference: bool = False
    linear_map: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientPoints:
    """The public points at which an example's gradients are taken, and their weights.

    The per-example quantity that `dpoptax.clipped_grad` clips is

        g(ξ) = Σ_j w_j ∇ℓ(x_j; ξ)  [+ ∇²ℓ(x_0; ξ) v],

    a fixed linear combination of that example's gradients at released parameters. Its sensitivity
    is therefore the clip bound, whatever the points and weights are. With a linear map T it is
    T g(ξ) that is clipped, summed and noised, and the release is mapped back. Made by
    `dpoptax.gradient_points`; points and map may cost utility when they are wrong, never privacy,
    as long as they are computed from public values: parameters that were released, and no data.

    Attributes:
      points: the x_j, each shaped like the parameters.
      weights: the w_j, scalars; Python floats or float32 arrays.
      tangent: v, shaped like the parameters; adds a per-example Hessian-vector product at the first
        point. `None` for none.
      reference: public data for clip geometries that follow the run, `None` for none; see
        `ReferenceState`.
      linear_map: T, for the parameters; `None` for the identity.
      origin: how the points were made, for the methods that choose them; `None` for points made by
        hand, which no method checks. Static.
    """

    points: tuple[PyTree, ...]
    weights: tuple[float | jax.Array, ...]
    tangent: PyTree = None
    reference: PyTree = None
    linear_map: LinearMap | None = None
    origin: Origin | None = dataclasses.field(default=None, metadata={"static": True})


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrackIteratesState:
    """State of `track_iterates`.

    Attributes:
      count: the number of updates so far, int32.
      iterates: x_{t−1}, x_{t−2}, …, newest first, each shaped like the parameters.
      weights: the weights of the next step's points, float32 of shape (points,).
      tangent_weight: the weight of the Hessian-vector product, float32 scalar, or `None`.
      rows: the mixing coefficients: point j is Σ_i `rows[j][i]` x_{t−i}. Static.
      tangent_row: the same for the direction of the Hessian-vector product. Static.
    """

    count: jax.Array
    iterates: tuple[PyTree, ...]
    weights: jax.Array
    tangent_weight: jax.Array | None
    rows: tuple[tuple[float, ...], ...] = dataclasses.field(metadata={"static": True})
    tangent_row: tuple[float, ...] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReferenceState:
    """State that holds what clip geometries follow; `gradient_points` finds it by its type.

    Attributes:
      reference: public data: computed from releases, never from data.
    """

    reference: PyTree


def track_iterates(
    rows: Sequence[Sequence[float]],
    weights: Sequence[float] | Callable[[jax.Array], ArrayLike],
    *,
    tangent_row: Sequence[float] | None = None,
    tangent_weight: float | Callable[[jax.Array], ArrayLike] | None = None,
) -> optax.GradientTransformation:
    """Passes updates through and remembers the iterates that the gradient points are made of.

    With iterates x_t, x_{t−1}, …, x_{t−k+1}, the points are x_j = Σ_i `rows[j][i]` x_{t−i} and the
    clipped quantity is Σ_j weights[j] ∇ℓ(x_j; ξ) + tangent_weight · ∇²ℓ(x_0; ξ) Σ_i tangent_row[i]
    x_{t−i}. The iterates are the `params` given to `update`, so the points are right whatever the
    optimizer behind does with learning rates, schedules or weight decay. Before step k the missing
    iterates are x_0. `dpoptax.gradient_points` reads the state, wherever it is in the optimizer's.

    Memory: k − 1 copies of the parameters. The newest of them is the array of `params`: in a step
    that donates both and returns the optimizer's state before the parameters, `jax.jit` hands that
    array on; in the other order it is copied twice. Privacy: the state holds released parameters
    only.

    Args:
      rows: the mixing weights, k a point: `rows[j][i]` is how much of x_{t−i} is in point j.
        Where a row sums to 1, the point is an affine combination of iterates.
      weights: one weight a point, or a function of the step count that returns them (JAX scalars).
      tangent_row: k coefficients, for the Hessian-vector product.
      tangent_weight: its weight, or a function of the step count.

    Returns:
      An `optax.GradientTransformation`; `update` needs `params`.

    Raises:
      ValueError: rows of different or zero length, weights that are not one a row, or one of the
        two tangent arguments without the other.

    >>> tx = track_iterates(rows=[(1.5, -0.5)], weights=[1.0])   # the look-ahead x + (x − x')/2
    """
    mixing = tuple(tuple(float(c) for c in row) for row in rows)
    if not mixing or not mixing[0] or len({len(row) for row in mixing}) != 1:
        raise ValueError(f"rows={rows}: want at least one row, all of one length k >= 1")
    if not callable(weights) and len(weights) != len(mixing):
        raise ValueError(f"weights={weights}: want one weight for each of the {len(mixing)} rows")
    if (tangent_row is None) != (tangent_weight is None):
        raise ValueError(
            f"tangent_row={tangent_row}, tangent_weight={tangent_weight}: give both or neither"
        )
    direction = None if tangent_row is None else tuple(float(c) for c in tangent_row)
    if direction is not None and len(direction) != len(mixing[0]):
        raise ValueError(f"tangent_row={tangent_row}: want {len(mixing[0])} coefficients")

    def scheduled(value: Weight, count: jax.Array) -> jax.Array:
        now = value(count) if callable(value) else value
        return jnp.asarray(now, jnp.float32)

    def scheduled_tangent(count: jax.Array) -> jax.Array | None:
        return None if tangent_weight is None else scheduled(tangent_weight, count)

    def init_fn(params: PyTree) -> TrackIteratesState:
        register()
        count = jnp.zeros([], jnp.int32)
        # Copies, because a donated state must not share buffers with the parameters.
        iterates = tuple(
            jax.tree.map(lambda p: jnp.array(p, copy=True), params) for _ in mixing[0][1:]
        )
        return TrackIteratesState(
            count,
            iterates,
            scheduled(weights, count),
            scheduled_tangent(count),
            mixing,
            direction,
        )

    def update_fn(
        updates: PyTree, state: TrackIteratesState, params: PyTree = None
    ) -> tuple[PyTree, TrackIteratesState]:
        if params is None:
            raise no_params("track_iterates")
        wanted = _origin(state)[:2]
        check_origin(updates, lambda origin: origin[:2] == wanted)
        count = optax.safe_increment(state.count)
        state = dataclasses.replace(
            state,
            count=count,
            iterates=(params, *state.iterates)[: len(state.iterates)],
            weights=scheduled(weights, count),
            tangent_weight=scheduled_tangent(count),
        )
        return updates, state

    return optax.GradientTransformation(init_fn, update_fn)


def gradient_points(opt_state: PyTree, params: PyTree) -> GradientPoints:
    """Returns the points at which this step's per-example gradients are to be taken.

    Finds the states of `track_iterates`, `track_reference` and `linear_map` in `opt_state` by their
    types, however deep they are; without the first the point is `params` itself, as in DP-SGD.
    Every point is made of `params` and of earlier parameters, all public, so the call touches no
    private data.

    Args:
      opt_state: the state of the optimizer that holds the method, or any pytree around it.
      params: the current parameters x_t.

    Returns:
      `GradientPoints` for `dpoptax.clipped_grad`.

    Raises:
      ValueError: two `track_iterates` states in `opt_state`, two references or two linear maps,
        named by their paths.

    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.ones(3)}
    >>> len(gradient_points(optax.sgd(0.1).init(params), params).points)
    1
    """
    state = find_state(opt_state, TrackIteratesState)
    followed = find_state(opt_state, ReferenceState)
    reference = None if followed is None else followed.reference
    mapped = find_state(opt_state, LinearMapState)
    linear_map = None if mapped is None else mapped.of(params)
    origin = _origin(state)._replace(reference=followed is not None, linear_map=mapped is not None)
    if state is None:
        return GradientPoints((params,), (1.0,), None, reference, linear_map, origin)
    iterates = (params, *state.iterates)
    try:
        points = tuple(_combine(row, iterates) for row in state.rows)
    except (TypeError, ValueError) as error:
        error.add_note("opt_state holds earlier parameters of other shapes or names than params")
        raise
    tangent = None
    if state.tangent_row is not None:
        tangent = _combine(state.tangent_row, iterates, scale=state.tangent_weight)
    return GradientPoints(points, tuple(state.weights), tangent, reference, linear_map, origin)


def ensure_points(params: PyTree) -> GradientPoints:
    """Returns `params` itself if it is `GradientPoints`, or else the one point `params`."""
    if isinstance(params, GradientPoints):
        return params
    return GradientPoints((params,), (1.0,), origin=Origin())


def _origin(state: TrackIteratesState | None) -> Origin:
    """Returns the origin of the points that a state of `track_iterates` makes."""

    def stripped(row: tuple[float, ...]) -> tuple[float, ...]:
        while row and row[-1] == 0.0:
            row = row[:-1]
        return row

    if state is None:
        return Origin()
    tangent = None if state.tangent_row is None else stripped(state.tangent_row)
    return Origin(tuple(map(stripped, state.rows)), tangent)


# The arrays of the last release, as weak references, and the origin of its gradients. A chain
# passes bare arrays on, which have no place for the origin.
_last_release: contextvars.ContextVar[tuple[list[weakref.ref[jax.Array]], Origin | None]]
_last_release = contextvars.ContextVar("last_release", default=([], None))


def note_release(released: PyTree, origin: Origin | None) -> None:
    """Notes where the gradients in a release were taken, for `check_origin`."""
    _last_release.set(([weakref.ref(x) for x in jax.tree.leaves(released)], origin))


def check_origin(updates: PyTree, fits: Callable[[Origin], bool]) -> None:
    """Raises if `updates` is a release of gradients whose points do not fit the method.

    It knows a release by its arrays. Updates that another stage changed first, and releases of
    gradients at points made by hand, pass without a check.
    """
    references, origin = _last_release.get()
    arrays = [reference() for reference in references]
    if origin is None or not all(any(x is y for y in arrays) for x in jax.tree.leaves(updates)):
        return
    if not fits(origin):
        raise ValueError(
            "the gradients were not taken at this method's points, and it would have no effect: "
            "call grad_fn(dpoptax.gradient_points(opt_state, params), batch, mask) with the state "
            "of the whole chain. dpoptax.clip_and_noise takes gradients at the parameters only"
        )


def weigh(value: jax.Array, *weights: float | jax.Array) -> jax.Array:
    """A gradient times weights of points: itself for 1.0, else in float32 at least.

    In bfloat16 weights that are far above 1 and cancel, such as DiSK's, would leave nothing.
    """
    if all(isinstance(w, float) and w == 1.0 for w in weights):
        return value
    return widen(value) * math.prod(weights)


def _combine(
    row: tuple[float, ...], iterates: tuple[PyTree, ...], scale: jax.Array | None = None
) -> PyTree:
    """Mixes iterates: scale · Σ_i row[i] · iterates[i], leaf by leaf."""
    if row[0] == 1.0 and not any(row[1:]) and scale is None:
        return iterates[0]

    def mix(*history: jax.Array) -> jax.Array:
        total = sum(c * x for c, x in zip(row, history, strict=True) if c)
        scaled = jnp.asarray(total if scale is None else scale * total)
        return scaled.astype(history[0].dtype)

    def node(*nodes: PyTree) -> PyTree:
        *older, newest = nodes
        # Under optax.masked, a parameter that is not trained does not move: x_{t−1} = x_t.
        older = [newest if is_masked(x) else x for x in older]
        return jax.tree.map(mix, newest, *older)

    newest, *older = iterates
    return jax.tree.map(node, *older, newest, is_leaf=is_masked)
