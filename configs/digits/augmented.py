"""Configures gradients on digits that are means over shifted copies of an example."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from digits_parts.run import DigitsRun

import dpoptax
from dpoptax.training import Task


def augmented(
    run: DigitsRun = DigitsRun(learning_rate=0.75), copies: int = 4, shift: int = 1
) -> Task:
    """Returns the task (De et al., 2022).

    Args:
        run: Settings of the run.
        copies: Number of copies. Each costs one gradient.
        shift: Maximum shift of a copy along each axis, in pixels.
    """

    def moved(example: Any, key: jax.Array) -> Any:
        image = example["inputs"]
        padded = jnp.pad(image, ((shift, shift), (shift, shift), (0, 0)))
        down, right = jax.random.randint(key, (2,), 0, 2 * shift + 1)
        return {**example, "inputs": jax.lax.dynamic_slice(padded, (down, right, 0), image.shape)}

    return run.task(
        optax.identity(),
        name="Augmented",
        transform_loss=lambda loss: dpoptax.augmented(loss, moved, copies),
    )
