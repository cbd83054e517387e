"""Recording of what a run releases: random coordinates of the private gradient, at every step.

The record is part of the optimizer's state, behind the noise: checkpoints carry it, and no value
from before the noise can get into it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

_SEED = 20
"""Of the choice of coordinates; the same for all runs of one model, so that they compare."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecorderState:
    """State of `recorder`.

    Attributes:
        count: Number of recorded steps.
        values: (steps, coordinates), float32; rows from `count` on are 0.
        stage: What is recorded. Static.
    """

    count: Any
    values: Any
    stage: str = dataclasses.field(metadata={"static": True})


def recorder(stage: str, steps: int, coordinates: int) -> optax.GradientTransformation:
    """Passes its input on and keeps random coordinates of it in its state.

    Args:
        stage: Name of what is recorded here.
        steps: Number of steps that there is room for; later ones are not recorded.
        coordinates: Number of coordinates, all of them where there are fewer.
    """

    def init(params: Any) -> RecorderState:
        kept = min(coordinates, optax.tree.size(params))
        values = jnp.zeros((steps, kept), jnp.float32)
        return RecorderState(jnp.zeros([], jnp.int32), values, stage)

    def update(updates: Any, state: RecorderState, params: Any = None) -> tuple[Any, RecorderState]:
        del params
        leaves = jax.tree.leaves(updates)
        chosen = choose([leaf.size for leaf in leaves], state.values.shape[1])
        parts = [
            leaf.reshape(-1)[indices].astype(jnp.float32)
            for leaf, indices in zip(leaves, chosen, strict=True)
        ]
        values = state.values.at[state.count].set(jnp.concatenate(parts), mode="drop")
        return updates, RecorderState(optax.safe_increment(state.count), values, stage)

    return optax.GradientTransformation(init, update)


def choose(sizes: list[int], coordinates: int) -> list[np.ndarray]:
    """`coordinates` of all that leaves of these sizes have, as sorted indices into each leaf."""
    ends = np.cumsum(sizes)
    drawn = np.random.default_rng(_SEED).choice(ends[-1], coordinates, replace=False, shuffle=False)
    drawn.sort()
    parts = np.split(drawn, np.searchsorted(drawn, ends[:-1]))
    return [part - (end - size) for part, end, size in zip(parts, ends, sizes, strict=True)]


def recorded(opt_state: Any) -> dict[str, np.ndarray]:
    """The values that an optimizer's state holds, by stage, (recorded steps, coordinates)."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda leaf: isinstance(leaf, RecorderState))
    states = [leaf for leaf in leaves if isinstance(leaf, RecorderState)]
    return {state.stage: np.asarray(state.values)[: int(state.count)] for state in states}


def write(path: Path, values: dict[str, np.ndarray], stddev: float) -> None:
    """Writes what `dpoptax.filters.spectrum.load` reads."""
    np.savez_compressed(path, allow_pickle=False, stddev=np.float64(stddev), **values)
