"""Tracks a moving average of the parameters for evaluation and release."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AverageState(NamedTuple):
    """State of `average_params`.

    Attributes:
        averaged_count: Number of updates so far.
        averaged_params: The average, shaped like the parameters, at least float32.
    """

    averaged_count: Any
    averaged_params: Any


def average_params(decay: float) -> optax.GradientTransformation:
    """Tracks the average x̄_{t+1} = μ_t x̄_t + (1 − μ_t) x_{t+1} of the parameters.

    Updates pass through. The average starts at x̄_0 = x_0, and μ_t = min(decay, (1 + t)/(10 + t))
    forgets the first parameters quickly. Use it as the last stage of a chain; `update` needs
    `params`.

    Privacy: post-processing of releases.

    Source: De et al., "Unlocking High-Accuracy Differentially Private Image Classification through
    Scale", 2022, with the warm-up of their published code.
    """
    if not 0 < decay < 1:
        raise ValueError(f"`decay` must be strictly between 0 and 1, got {decay}.")

    def init(params: Any) -> AverageState:
        # Copy, because a step donates parameters and state, and a buffer cannot be donated twice.
        copies = jax.tree.map(
            lambda p: jnp.array(p, jnp.promote_types(p.dtype, jnp.float32), copy=True), params
        )
        return AverageState(jnp.zeros([], jnp.int32), copies)

    def update(updates: Any, state: AverageState, params: Any = None) -> tuple[Any, AverageState]:
        if params is None:
            raise ValueError(
                "`params` must be given to average_params, got None. Call `update(updates, state, "
                "params)`."
            )
        count = state.averaged_count
        kept = jnp.minimum(decay, (1.0 + count) / (10.0 + count))
        moved = optax.apply_updates(params, updates)
        average = jax.tree.map(
            lambda old, new: old + (1.0 - kept) * (new.astype(old.dtype) - old),
            state.averaged_params,
            moved,
        )
        return updates, AverageState(optax.safe_increment(count), average)

    return optax.GradientTransformation(init, update)


def averaged(params: Any, opt_state: Any) -> Any:
    """Returns the average in the dtypes of `params`, or `params` without one."""
    average = optax.tree.get(opt_state, "averaged_params")
    return params if average is None else optax.tree.cast_like(average, params)
