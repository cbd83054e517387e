"""Derives a key for each step, for losses with randomness."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class StepKeysState(NamedTuple):
    """State of `step_keys`.

    Attributes:
        step_base_key: Base key. Each step folds its number into it.
        step_key_count: Number of updates so far.
    """

    step_base_key: Any
    step_key_count: Any


def step_keys(key: jax.Array) -> optax.GradientTransformation:
    """Passes updates through and counts steps for `step_key`."""

    def init(params: Any) -> StepKeysState:
        del params
        return StepKeysState(key, jnp.zeros([], jnp.int32))

    def update(updates: Any, state: StepKeysState, params: Any = None) -> tuple[Any, StepKeysState]:
        del params
        count = optax.safe_increment(state.step_key_count)
        return updates, state._replace(step_key_count=count)

    return optax.GradientTransformation(init, update)


def step_key(opt_state: Any) -> jax.Array | None:
    """Returns the key of the next step, or None if the optimizer has no `step_keys`."""
    key = optax.tree.get(opt_state, "step_base_key")
    if key is None:
        return None
    return jax.random.fold_in(key, optax.tree.get(opt_state, "step_key_count"))
