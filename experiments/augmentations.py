"""Shifts and flips images at random."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpoptax.training import ConfigError

Augment = Callable[[Any, jax.Array], Any]
"""`augment(example, key)` returns the example with a changed image as its `inputs`."""


def shifted(most: int, *, mirrored: bool = False) -> Augment:
    """Returns an augmentation that shifts the image by up to `most` pixels.

    Along each axis, shifts from -most to most are equally likely. Pixels from outside are zero, or
    the reflected image if `mirrored`. `inputs` are an image (height, width, channels).
    """
    if not isinstance(most, int) or most < 0:
        raise ConfigError(f"`shift` must be a nonnegative integer, got {most!r}.")

    def augment(example: Any, key: jax.Array) -> Any:
        image = example["inputs"]
        if image.ndim != 3:
            raise ConfigError(
                "The inputs must be images (height, width, channels) to be shifted, got shape "
                f"{image.shape}. Use another method."
            )
        down, right = jax.random.randint(key, (2,), 0, 2 * most + 1)
        mode = "symmetric" if mirrored else "constant"
        padded = jnp.pad(image, ((most, most), (most, most), (0, 0)), mode)
        moved = jax.lax.dynamic_slice(padded, (down, right, 0), image.shape)
        return {**example, "inputs": moved}

    return augment


def flipped(augment: Augment) -> Augment:
    """Returns an augmentation that also mirrors half of the images at random."""

    def flip(example: Any, key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        changed = augment(example, first)
        image = changed["inputs"]
        image = jnp.where(jax.random.bernoulli(second), image[:, ::-1], image)
        return {**changed, "inputs": image}

    return flip
