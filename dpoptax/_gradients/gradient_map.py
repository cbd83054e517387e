"""A transform whose state holds a linear map of gradients before clipping."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpoptax._gradients.clip.clipped_sum import check_released
from dpoptax._gradients.linear_map import LinearMapState, identity, resolve, sound
from dpoptax._gradients.points import check_origin
from dpoptax._support.serialization import register
from dpoptax._support.tree import PyTree, no_params


class FollowedMapState(NamedTuple):
    """State of `linear_map` if its factors are a function of the parameters.

    Attributes:
      count: the number of updates so far, int32.
      state: the map of the next step.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count
    state: LinearMapState


def linear_map(
    factors: PyTree | Callable[[PyTree], PyTree], *, every: int = 1, back: bool = True
) -> optax.GradientTransformation:
    """Maps gradients linearly before they are clipped; passes updates through.

        release_t = T⁻¹ (Σ_ξ clip(T g(ξ)) + σ C N(0, I)) / B

    T is public and maps each parameter's gradient separately: by scales of entries or of sides of a
    kernel (`dpoptax.extend.Diagonal`), or by a matrix on each side, U g V (`dpoptax.extend.Sides`).
    It changes the geometry of the clip: norms are those of T g, and the clipping bound is in the
    units of T g. The noise is isotropic there, and T⁻¹ scales it to standard deviation σ C/(s B) in
    a coordinate of scale s. T works with every clip. `dpoptax.gradient_points` passes it to
    `dpoptax.clipped_grad`; `dpoptax.clip_and_noise` does not apply it.

    Ghost clipping supports matrices and one scale per side, because rows and columns are mapped
    separately. A scale for every entry, or a matrix on a side that the loss does not contract as a
    whole, needs the parameter's per-example gradients. `dpoptax.explain(..., linear_map=...)` lists
    these parameters.

    Privacy: the clip follows the map, so one example changes the mapped sum by at most C, and the
    guarantee is the same as without a map. T must be public: a constant, or a function of releases,
    parameters and public data. Mapping back is post-processing.

    Args:
      factors: a tree prefix of the parameters, or a function that computes one from the parameters
        and public data. Leaves are numbers (one scale for a subtree), arrays that broadcast to the
        parameter, `Diagonal` or `Sides`. Scales are in [1e-9, 1e9].
      every: the number of steps between calls of a function.
      back: whether to map the release back by T⁻¹ to a gradient. If false, the release is T g, a
        gradient preconditioned by T.

    Returns:
      An `optax.GradientTransformation` to place after the noise stage.

    Raises:
      ValueError: `every` is below 1. At `init`: the factors do not fit the parameters, are not
        finite or not positive, or are singular. If a function returns such factors later, or while
        `init` is compiled, the previous factors stay, initially the identity.
      TypeError: at `update`, this stage precedes the noise stage and gets a private `ClippedSum`.

    >>> import dpoptax
    >>> params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    >>> rows = jnp.array([[1.0], [2.0], [4.0]])
    >>> tx = linear_map({"w": dpoptax.extend.Diagonal((rows, jnp.array([1.0, 0.5]))), "b": 0.1})
    >>> points = dpoptax.gradient_points(tx.init(params), params)
    >>> points.linear_map.forward(params)["w"][2]
    Array([4., 2.], dtype=float32)
    """
    if every < 1:
        raise ValueError(f"`every` must be at least 1, got {every}.")

    def resolved(params: PyTree) -> tuple[PyTree, jax.Array]:
        if callable(factors):
            found = resolve(factors(params), params)
            return found, sound(found)
        with jax.ensure_compile_time_eval():  # constants even if `init` is compiled
            found = resolve(factors, params)
            return found, sound(found)

    def init_fn(params: PyTree) -> LinearMapState | FollowedMapState:
        register()
        found, usable = resolved(params)
        if not isinstance(usable, jax.core.Tracer) and not usable:
            raise ValueError(
                "`factors` must be finite scales in [1e-9, 1e9] or invertible matrices, got "
                f"{factors}. A scale of 0 would drop a coordinate and make its noise infinite."
            )
        # `where` makes new arrays, because a state may be donated.
        state = LinearMapState(optax.tree.where(usable, found, identity(found)), back)
        return FollowedMapState(jnp.zeros([], jnp.int32), state) if callable(factors) else state

    def update_fn(
        updates: PyTree, state: LinearMapState | FollowedMapState, params: PyTree = None
    ) -> tuple[PyTree, LinearMapState | FollowedMapState]:
        check_released("linear_map", updates)
        check_origin(updates, lambda origin: origin.linear_map)
        if isinstance(state, LinearMapState):
            return updates, state
        if params is None:
            raise no_params("linear_map")
        count, before = optax.safe_increment(state.count), state.state.factors

        def again() -> PyTree:
            found, usable = resolved(params)
            return optax.tree.where(usable, found, before)

        found = jax.lax.cond(count % every == 0, again, lambda: before)
        return updates, FollowedMapState(count, LinearMapState(found, back))

    return optax.GradientTransformation(init_fn, update_fn)
