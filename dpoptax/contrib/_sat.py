"""Sharpness-aware training with the last release as the direction of ascent."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from dpoptax._gradients.clip.clipped_sum import check_released
from dpoptax._gradients.points import Origin, TrackIteratesState, check_origin
from dpoptax._support.serialization import register
from dpoptax._support.tree import PyTree, no_params


def dp_sat(rho: float = 0.05) -> optax.GradientTransformation:
    """Takes gradients at a point ascended along the last release (DP-SAT).

        g_t = privatized mean of ∇ℓ(x_t + ρ g_{t−1}/‖g_{t−1}‖; ξ),    g_{−1} = 0

    Sharpness-aware minimization takes two gradients for each example and step. Here the ascent uses
    the release of the step before, so it needs one, and no privacy budget. Place it directly behind
    the noise stage, and pass `dpoptax.gradient_points(opt_state, params)` to the gradient function.
    Updates pass through.

    Privacy: the point is computed from releases, so the cost is that of DP-SGD. Memory: one copy of
    the parameters.

    Args:
      rho: ρ ≥ 0, the length of the ascent, in the units of the parameters. 0 gives DP-SGD.

    Returns:
      An `optax.GradientTransformation`; `update` needs `params`.

    Raises:
      ValueError: ρ is negative or not finite.

    Source: Park et al., "Differentially Private Sharpness-Aware Training", 2023.

    >>> tx = dp_sat(rho=0.05)
    """
    rho = float(rho)
    if not (math.isfinite(rho) and rho >= 0.0):
        raise ValueError(f"`rho` must be a finite number of at least 0, got {rho}.")
    rows = ((1.0, rho),)

    def init_fn(params: PyTree) -> TrackIteratesState:
        register()
        direction = optax.tree.zeros_like(params)
        count, weights = jnp.zeros([], jnp.int32), jnp.ones([1])
        return TrackIteratesState(count, (direction,), weights, None, rows, directions=True)

    def update_fn(
        updates: PyTree, state: TrackIteratesState, params: PyTree = None
    ) -> tuple[PyTree, TrackIteratesState]:
        check_released("dp_sat", updates)
        if params is None:
            raise no_params("dp_sat")
        wanted = Origin(rows if rho else ((1.0,),))
        check_origin(updates, lambda origin: origin[:2] == wanted[:2])
        norm = optax.tree.norm(optax.tree.cast(updates, jnp.float32))
        scale = jnp.where(norm > 0, 1.0 / jnp.where(norm > 0, norm, 1.0), 0.0)
        direction = jax.tree.map(lambda u, p: (scale * u).astype(p.dtype), updates, params)
        count = optax.safe_increment(state.count)
        return updates, dataclasses.replace(state, count=count, iterates=(direction,))

    return optax.GradientTransformation(init_fn, update_fn)
