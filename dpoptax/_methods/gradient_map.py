"""Linear maps of gradients before the clip: the transform whose state holds one."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpoptax._clip.clipped_sum import check_released
from dpoptax._linear_map import LinearMapState, identity, resolve, sound
from dpoptax._points import check_origin
from dpoptax._serialization import register
from dpoptax._tree import PyTree, no_params


class FollowedMapState(NamedTuple):
    """State of `linear_map` where its factors are a function of the parameters.

    Attributes:
      count: the number of updates so far, int32.
      state: the map of the next step.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count
    state: LinearMapState


def linear_map(
    factors: PyTree | Callable[[PyTree], PyTree], *, every: int = 1, back: bool = True
) -> optax.GradientTransformation:
    """Passes updates through, and has gradients mapped before they are clipped.

        release_t = T⁻¹ (Σ_ξ clip(T g(ξ)) + σ C N(0, I)) / B

    T is public and maps each parameter's gradient by itself: by a scale of every entry or of each
    side of a kernel (`dpoptax.extend.Diagonal`), or by a matrix on each side, U g V
    (`dpoptax.extend.Sides`). It is the geometry of the clip that changes: norms are those of T g,
    the noise is the same in all directions there, and T⁻¹ stretches it: σ C/(s B) in a coordinate
    of scale s. The clip norm is in the units of T g. Every clip goes with it, and acts on T g; the
    noise stage maps back. `dpoptax.gradient_points` finds the state, so that the map travels to
    `dpoptax.clipped_grad`; per-example gradients given to `dpoptax.clip_and_noise` see none.

    Scales that are one for each side, and matrices, keep book-keeping as it is: rows and columns
    are mapped apart. A scale of every entry, and matrices on sides that the loss does not contract
    whole, need the parameter's per-example gradients; `dpoptax.explain(..., linear_map=...)` says
    which.

    Privacy: one example moves the mapped sum by at most the clip's sensitivity C, as the clip is
    behind the map, so that the guarantee is the one without a map. T must be public: a constant, or
    made of releases, parameters and public data. Mapping back is post-processing.

    Args:
      factors: a tree that is a prefix of the parameters, or a function of the parameters that
        returns one, computed of them and public data. Its leaves are numbers (a scale of all that
        is below), arrays that broadcast to the parameter, `Diagonal` or `Sides`. Scales are in
        [1e-9, 1e9]: one of 0 would drop a coordinate's gradient, and give infinite noise back.
      every: for a function, the number of steps after which it is called again.
      back: whether the release is mapped back by T⁻¹, to a gradient; or is T g as it is, which as a
        descent direction is a gradient preconditioned by T.

    Returns:
      An `optax.GradientTransformation`, to stand behind the noise stage.

    Raises:
      ValueError: `every` below 1; at `init`, factors that do not fit the parameters, or are not
        finite, not positive, or singular. Where those of a function are so later, or while `init`
        is compiled, the factors before are kept, at first the identity.
      TypeError: at `update`, a `ClippedSum`, which is private: the stage is in front of the noise.

    >>> import dpoptax
    >>> params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    >>> rows = jnp.array([[1.0], [2.0], [4.0]])
    >>> tx = linear_map({"w": dpoptax.extend.Diagonal((rows, jnp.array([1.0, 0.5]))), "b": 0.1})
    >>> points = dpoptax.gradient_points(tx.init(params), params)
    >>> points.linear_map.forward(params)["w"][2]
    Array([4., 2.], dtype=float32)
    """
    if every < 1:
        raise ValueError(f"every={every}: want an integer >= 1")

    def resolved(params: PyTree) -> tuple[PyTree, jax.Array]:
        if callable(factors):
            found = resolve(factors(params), params)
            return found, sound(found)
        with jax.ensure_compile_time_eval():  # constants, also where `init` is compiled
            found = resolve(factors, params)
            return found, sound(found)

    def init_fn(params: PyTree) -> LinearMapState | FollowedMapState:
        register()
        found, usable = resolved(params)
        if not isinstance(usable, jax.core.Tracer) and not usable:
            raise ValueError(
                f"factors={factors}: want finite scales in [1e-9, 1e9] and matrices that can be "
                "inverted; a scale of 0 would drop a coordinate and give infinite noise back"
            )
        # In arrays of their own: a state may be donated.
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
