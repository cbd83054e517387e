"""Noise in fixed point: no bit of the release tells what the noise was added to."""

import math

import jax
import jax.numpy as jnp

from dpoptax._clips.base import Clip, check_clip
from dpoptax._clips.clipped_sum import ClippedSum
from dpoptax._clips.grid import LARGEST
from dpoptax._noise import normal
from dpoptax._noise.ledger import check_mechanism
from dpoptax._trees import PyTree, float32_at_least, out_sharding

# At most so many steps of the grid per standard deviation of the noise: the finer the grid, the
# less of the sum is lost, and the rougher is the noise's distribution on it.
_STEPS_PER_STDDEV = 2.0**18
# Beyond it draws are no integers in float32, and later leave int32: the noise would be less.
_MOST_STEPS_PER_STDDEV = 2.0**22
_DRAWS = 4


def grid(sensitivity: float, noise_multiplier: float, batch_size: float) -> float:
    """The public power of two that sums and noise are multiples of.

    Fine against the noise, and so coarse that four times the largest expected sum fits in an int32.
    """
    steps = max(noise_multiplier / _STEPS_PER_STDDEV, 4.0 * batch_size / LARGEST)
    return 2.0 ** math.ceil(math.log2(sensitivity * steps))


def fixed_point_grid(clip: Clip, *, noise_multiplier: float, batch_size: float) -> float:
    """The grid g of `gaussian_noise(fixed_point=True)`, for `clipped_grad(..., grid=g)`.

    Clipped gradients that are rounded to whole multiples of g before they are summed add up as
    integers: exactly, in any order and on any number of devices. The sensitivity of such a sum is
    C + √d g/2, d the number of parameters, with no word about the rounding of sums. A public
    number: a power of two, at most the larger of 2⁻¹⁷ σC and 2⁻²⁷ BC.

    Args:
      clip: the geometry; C is its sensitivity.
      noise_multiplier: σ, that of the noise stage.
      batch_size: B, that of the noise stage.

    Raises:
      TypeError: `clip` is no geometry.
      ValueError: a number outside its range, or no noise, for which no grid is needed.

    >>> import dpoptax
    >>> g = fixed_point_grid(dpoptax.l2_clip(1.0), noise_multiplier=1.0, batch_size=256)
    >>> g == 2.0**-18
    True
    """
    noise_multiplier, batch_size = check_mechanism(noise_multiplier, batch_size)
    if noise_multiplier == 0.0:
        raise ValueError("noise_multiplier=0: want noise, which is what the grid is made for")
    return grid(check_clip(clip).sensitivity, noise_multiplier, batch_size)


def sensitivity_on_grid(clipped: ClippedSum, step: float) -> float:
    """What one example moves a sum on the grid by.

    C + √d g where the sum is rounded, as one example can move each entry's rounding by g; C + √d
    g/2 where every summand was, by g/2 an entry.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(clipped.sum))
    share = 1.0 if clipped.grid is None else 0.5
    return clipped.clip.sensitivity + share * math.sqrt(size) * step


def add_noise(tree: PyTree, stddev: float, key: jax.Array, step: float) -> PyTree:
    """Returns g · (round(tree/g) + N) with N integer noise of standard deviation stddev/g.

    N is the sum of four rounded normals of half the standard deviation. A float32 normal has 2²³
    values, unevenly spaced and none beyond 5.4 standard deviations; sums of four have no gaps. On
    2¹⁸ integers per standard deviation their probabilities differ from a smooth density's by a
    relative 7e-9 within three standard deviations and 5e-7 beyond six, root mean square (computed
    by Fourier transform from all 2²³ values). What that tells adds a privacy loss of standard
    deviation 8e-9 for a number, 8e-9 √n for n of them: 0.01 for 10¹², such as 10⁸ parameters and
    10⁴ steps.

    Args:
      tree: finite sums, or integers that count g; entries beyond 2³⁰ g are clamped, which no pair
        of sums is moved apart by.
      stddev: positive.
      key: split among the leaves and their draws.
      step: g, a power of two, from `grid`.

    Raises:
      ValueError: more than 2²² steps of the grid in a standard deviation, as the room for rounding
        that many parameters need makes them.
    """
    if stddev > _MOST_STEPS_PER_STDDEV * step:
        raise ValueError(
            f"noise of standard deviation {stddev:.3g} on grid={step:.3g}: of so many parameters, "
            "at so large a noise_multiplier, the room for rounding is a multiple of the noise, and "
            f"integers with it out of float32's; want at most {_MOST_STEPS_PER_STDDEV:.3g} steps. "
            "Take a smaller noise_multiplier, or fixed_point=False"
        )
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(key, (len(leaves), _DRAWS))
    scale = stddev / step / math.sqrt(_DRAWS)

    def noisy(leaf: jax.Array, keys: jax.Array) -> jax.Array:
        # Division by a power of two is exact, and so is everything from here to the last line.
        dtype = float32_at_least(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.integer):
            leaf = jnp.rint(leaf.astype(dtype) / step)
        total = jnp.clip(leaf, -LARGEST, LARGEST).astype(jnp.int32)
        for i in range(_DRAWS):
            draw = normal.normal(keys[i], leaf.shape, jnp.float32, out_sharding=out_sharding(leaf))
            total += jnp.rint(scale * draw).astype(jnp.int32)
        return step * total.astype(dtype)

    return jax.tree.unflatten(treedef, [noisy(*pair) for pair in zip(leaves, keys, strict=True)])
