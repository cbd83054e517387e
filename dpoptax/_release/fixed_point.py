"""Adds discrete Gaussian noise in fixed point, private in every bit."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from dpoptax._clipped_sum.clipped_sum import ClippedSum
from dpoptax._clips.clip import Clip, as_clip
from dpoptax._pricing.noise_schedule import checked_phases, least
from dpoptax._random import tree_noise
from dpoptax._random.discrete_gaussian import SMOOTHING, discrete_gaussian
from dpoptax._release.ledger import Mechanism, check_noise_and_batch_size
from dpoptax._rounding.integer_sums import LARGEST_GRID_SUM
from dpoptax._support.tree import PyTree, float32_at_least
from dpoptax._support.xla import out_sharding

# The target number of grid steps per standard deviation of the noise. A finer grid rounds the sum
# less, but needs a longer table for the noise.
_STEPS_PER_STDDEV = 2.0**18
# Keeps the table within 2¹⁵ entries and all sums within int32.
_MAX_STEPS_PER_STDDEV = 2.0**22


def grid(sensitivity: float, noise_multiplier: float, batch_size: float) -> float:
    """Returns the public power of two that sums and noise are multiples of.

    It is fine relative to the noise, but so coarse that four times the largest expected sum fits in
    an int32.
    """
    steps = max(noise_multiplier / _STEPS_PER_STDDEV, 4.0 * batch_size / LARGEST_GRID_SUM)
    # Rounded up to a power of two, so that products with g and 1/g are exact.
    return 2.0 ** math.ceil(math.log2(sensitivity * steps))


def fixed_point_grid(
    clip: Clip | float, *, noise_multiplier: float | Mapping[int, float], batch_size: float
) -> float:
    """Returns the grid g of noise in fixed point, for `clipped_grad(..., grid=g)`.

    If clipped gradients are rounded to whole multiples of g before summation, they add exactly, as
    integers, in any order and on any number of devices. The sensitivity of such a sum is C + √d g/2
    for d parameters, without an allowance for the rounding of sums. g is public. It is a power of
    two, at most the larger of 2⁻¹⁷ σC and 2⁻²⁷ BC. `gaussian_noise(fixed_point=True)` uses it.

    Args:
      clip: the geometry; C is its sensitivity. A number C means `l2_clip(C)`.
      noise_multiplier: σ of the noise stage. A schedule uses its smallest σ.
      batch_size: B of the noise stage.

    Raises:
      TypeError: `clip` is neither a `Clip` nor a number.
      ValueError: a number is out of range, or σ = 0, which needs no grid.

    >>> import dpoptax
    >>> g = fixed_point_grid(dpoptax.l2_clip(1.0), noise_multiplier=1.0, batch_size=256)
    >>> g == 2.0**-18
    True
    """
    if isinstance(noise_multiplier, Mapping):
        noise_multiplier = least(checked_phases(noise_multiplier))
    noise_multiplier, batch_size = check_noise_and_batch_size(noise_multiplier, batch_size)
    if noise_multiplier == 0.0:
        raise ValueError("`noise_multiplier` must be positive, got 0. Without noise, omit `grid`.")
    return grid(as_clip(clip).sensitivity, noise_multiplier, batch_size)


def grid_of(clipped: ClippedSum, mechanism: Mechanism) -> float:
    """Returns the grid of a release, or raises an error if the sum has another grid."""
    g = fixed_point_grid(
        clipped.clip,
        noise_multiplier=mechanism.noise_multiplier,
        batch_size=mechanism.batch_size,
    )
    if clipped.terms.grid not in (None, g):
        raise ValueError(
            f"`grid` of the clipped sum must be {g} for this noise stage, got "
            f"{clipped.terms.grid}. Pass `dpoptax.clipped_grad` the grid that "
            "`dpoptax.extend.fixed_point_grid` returns "
            "for this stage's `noise_multiplier` and `batch_size`."
        )
    return g


def sensitivity_on_grid(clipped: ClippedSum, g: float) -> float:
    """Returns the sensitivity of a sum on the grid.

    It is C + √d g if the sum is rounded, because one example can change the rounding of each entry
    by g. It is C + √d g/2 if every summand is rounded, which changes each entry by at most g/2.
    """
    # With g in each of d entries, the norm changes by √d g.
    share = 1.0 if clipped.terms.grid is None else 0.5
    return clipped.clip.sensitivity + share * math.sqrt(optax.tree.size(clipped.sum)) * g


def add_noise(tree: PyTree, stddev: float, key: jax.Array, g: float) -> PyTree:
    """Returns g · (round(tree/g) + N), with N discrete Gaussian integers.

    Their variance is (stddev/g)² + 1.8². Because of the additional 1.8², the guarantee of
    continuous noise holds for integers (docs/developers/fixed-point.md).

    Args:
      tree: finite sums, or integers that count g. Entries beyond 2³⁰ g are clamped, which does not
        increase the distance of two sums.
      stddev: positive.
      key: a key that only this release uses.
      g: a power of two, from `grid`.

    Raises:
      ValueError: as in `stddev_in_steps`.
    """
    noise = integers(stddev_in_steps(stddev, g))
    return tree_noise.each_leaf(tree, key, noise, lambda leaf, drawn: round_to_grid(leaf, drawn, g))


def integers(stddev: float) -> tree_noise.Noise:
    """Returns discrete Gaussian noise that draws each number from its own words."""
    return tree_noise.Noise(
        of=lambda key, leaf, number: discrete_gaussian(
            key, leaf.shape, stddev, leaf=number, out_sharding=out_sharding(leaf)
        ),
        # XLA's CPU loops over an odd number of elements take three times as long.
        vector=lambda key, size, number: discrete_gaussian(
            key, (size + size % 2,), stddev, leaf=number
        )[:size],
    )


def stddev_in_steps(stddev: float, g: float) -> float:
    """Returns the standard deviation of integers that replace noise of `stddev`.

    Raises:
      ValueError: the standard deviation is more than 2²² grid steps, because many parameters need a
        large allowance for rounding; or less than one, as with batches of 10⁸.
    """
    if stddev < g:
        raise ValueError(
            f"The noise must be at least one grid step, got standard deviation {stddev:.3g} on "
            f"grid={g:.3g}. Decrease `batch_size`, or use noise in floating point."
        )
    if stddev > _MAX_STEPS_PER_STDDEV * g:
        raise ValueError(
            f"The noise must be at most {_MAX_STEPS_PER_STDDEV:.3g} grid steps, got standard "
            f"deviation {stddev:.3g} on grid={g:.3g}. With this many parameters, the allowance "
            "for rounding exceeds the noise. Decrease `noise_multiplier`, or use noise in floating "
            "point."
        )
    # Float64 may have rounded `stddev` down by about 2⁻⁵².
    return math.hypot(stddev / g * (1 + 2.0**-50), SMOOTHING)


def round_to_grid(leaf: jax.Array, noise: jax.Array, g: float) -> jax.Array:
    """Returns g · (round(leaf/g) + noise), or g · (leaf + noise) for an integer leaf."""
    # Products with powers of two are exact, so only `rint` rounds. A division would round on GPU.
    dtype = float32_at_least(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        leaf = jnp.rint(leaf.astype(dtype) * (1.0 / g))
    total = jnp.clip(leaf, -LARGEST_GRID_SUM, LARGEST_GRID_SUM).astype(jnp.int32) + noise
    return g * total.astype(dtype)
