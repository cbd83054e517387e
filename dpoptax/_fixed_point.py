"""Noise in fixed point: no bit of the release tells what the noise was added to."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from dpoptax import _random
from dpoptax._sharding import out_sharding

# At most so many steps of the grid per standard deviation of the noise: the finer the grid, the
# less of the sum is lost, and the rougher is the noise's distribution on it.
_STEPS_PER_STDDEV = 2.0**18
# A clamped sum and the noise on it, at most 11 standard deviations, stay within int32.
_LARGEST = 2**30
_DRAWS = 4


def grid(sensitivity: float, noise_multiplier: float, batch_size: float) -> float:
    """The public power of two that sums and noise are multiples of.

    Fine against the noise, and so coarse that four times the largest expected sum fits in an int32.
    """
    steps = max(noise_multiplier / _STEPS_PER_STDDEV, 4.0 * batch_size / _LARGEST)
    return 2.0 ** math.ceil(math.log2(sensitivity * steps))


def sensitivity_on_grid(tree: Any, sensitivity: float, step: float) -> float:
    """What one example moves the rounded sum by: C + √d g, as each entry's rounding moves by g."""
    size = sum(leaf.size for leaf in jax.tree.leaves(tree))
    return sensitivity + math.sqrt(size) * step


def add_noise(tree: Any, stddev: float, key: jax.Array, step: float) -> Any:
    """Returns g · (round(tree/g) + N) with N integer noise of standard deviation stddev/g.

    N is the sum of four rounded normals of half the standard deviation. A float32 normal has 2²³
    values, unevenly spaced and none beyond 5.4 standard deviations; sums of four have no gaps. On
    2¹⁸ integers per standard deviation their probabilities differ from a smooth density's by a
    relative 7e-9 within three standard deviations and 5e-7 beyond six, root mean square (computed
    by Fourier transform from all 2²³ values). What that tells adds a privacy loss of standard
    deviation 8e-9 for a number, 8e-9 √n for n of them: 0.01 for 10¹², such as 10⁸ parameters and
    10⁴ steps.

    Args:
      tree: finite sums; entries beyond 2³⁰ g are clamped, which no pair of sums is moved apart by.
      stddev: positive.
      key: split among the leaves and their draws.
      step: g, a power of two, from `grid`.
    """
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in leaves]
    keys = jax.random.split(key, (len(leaves), _DRAWS))
    scale = stddev / step / math.sqrt(_DRAWS)

    def noisy(leaf, keys):
        # Division by a power of two is exact, and so is everything from here to the last line.
        total = jnp.clip(jnp.rint(leaf / step), -_LARGEST, _LARGEST).astype(jnp.int32)
        for i in range(_DRAWS):
            draw = _random.normal(keys[i], leaf.shape, jnp.float32, out_sharding=out_sharding(leaf))
            total += jnp.rint(scale * draw).astype(jnp.int32)
        return step * total.astype(leaf.dtype)

    return jax.tree.unflatten(treedef, [noisy(*pair) for pair in zip(leaves, keys, strict=True)])
