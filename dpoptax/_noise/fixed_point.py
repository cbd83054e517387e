"""Noise in fixed point: what is proved of real numbers holds for every bit of the release."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from dpoptax._clip.clip import Clip, as_clip
from dpoptax._clip.clipped_sum import ClippedSum
from dpoptax._clip.grid import LARGEST_GRID_SUM
from dpoptax._noise.ledger import Mechanism, check_mechanism
from dpoptax._pricing.noise_schedule import checked_phases, least
from dpoptax._random import tree_noise
from dpoptax._random.discrete_gaussian import SMOOTHING, discrete_gaussian, discrete_gaussian_at
from dpoptax._tree import PyTree, float32_at_least
from dpoptax._xla import out_sharding

# At most so many steps of the grid per standard deviation of the noise: the finer the grid, the
# less of the sum is lost, and the longer is the noise's table.
_STEPS_PER_STDDEV = 2.0**18
# So the table has at most 2¹⁵ entries, and int32 all sums.
_MAX_STEPS_PER_STDDEV = 2.0**22


def grid(sensitivity: float, noise_multiplier: float, batch_size: float) -> float:
    """The public power of two that sums and noise are multiples of.

    Fine against the noise, and so coarse that four times the largest expected sum fits in an int32.
    """
    steps = max(noise_multiplier / _STEPS_PER_STDDEV, 4.0 * batch_size / LARGEST_GRID_SUM)
    return 2.0 ** math.ceil(math.log2(sensitivity * steps))


def fixed_point_grid(
    clip: Clip | float, *, noise_multiplier: float | Mapping[int, float], batch_size: float
) -> float:
    """The grid g of `gaussian_noise(fixed_point=True)`, for `clipped_grad(..., grid=g)`.

    Clipped gradients that are rounded to whole multiples of g before they are summed add up as
    integers: exactly, in any order and on any number of devices. The sensitivity of such a sum is
    C + √d g/2, d the number of parameters, with no word about the rounding of sums. A public
    number: a power of two, at most the larger of 2⁻¹⁷ σC and 2⁻²⁷ BC.

    Args:
      clip: the geometry; C is its sensitivity. A number C means `l2_clip(C)`.
      noise_multiplier: σ, that of the noise stage; of a schedule the least.
      batch_size: B, that of the noise stage.

    Raises:
      TypeError: `clip` is neither a `Clip` nor a number.
      ValueError: a number outside its range, or no noise, for which no grid is needed.

    >>> import dpoptax
    >>> g = fixed_point_grid(dpoptax.l2_clip(1.0), noise_multiplier=1.0, batch_size=256)
    >>> g == 2.0**-18
    True
    """
    if isinstance(noise_multiplier, Mapping):
        noise_multiplier = least(checked_phases(noise_multiplier))
    noise_multiplier, batch_size = check_mechanism(noise_multiplier, batch_size)
    if noise_multiplier == 0.0:
        raise ValueError("noise_multiplier=0: want noise, which is what the grid is made for")
    return grid(as_clip(clip).sensitivity, noise_multiplier, batch_size)


def grid_of(clipped: ClippedSum, mechanism: Mechanism) -> float:
    """The grid of a sum's release; raises where the sum is on another."""
    step = fixed_point_grid(
        clipped.clip,
        noise_multiplier=mechanism.noise_multiplier,
        batch_size=mechanism.batch_size,
    )
    if clipped.grid not in (None, step):
        raise ValueError(
            f"the clipped sum is on grid={clipped.grid}, this noise stage on {step}: give "
            "dpoptax.clipped_grad the grid of dpoptax.extend.fixed_point_grid with this stage's "
            "own noise_multiplier and batch_size"
        )
    return step


def sensitivity_on_grid(clipped: ClippedSum, step: float) -> float:
    """What one example moves a sum on the grid by.

    C + √d g where the sum is rounded, as one example can move each entry's rounding by g; C + √d
    g/2 where every summand was, by g/2 an entry.
    """
    share = 1.0 if clipped.grid is None else 0.5
    return clipped.clip.sensitivity + share * math.sqrt(optax.tree.size(clipped.sum)) * step


def add_noise(tree: PyTree, stddev: float, key: jax.Array, step: float) -> PyTree:
    """Returns g · (round(tree/g) + N), N integers of a discrete Gaussian of variance (stddev/g)².

    Of that, and 1.8² more: so much turns a number with continuous noise into the integer that is
    released, so that what is proved of the former holds for the latter (docs/privacy/noise.md).

    Args:
      tree: finite sums, or integers that count g; entries beyond 2³⁰ g are clamped, which no pair
        of sums is moved apart by.
      stddev: positive.
      key: split among the leaves.
      step: g, a power of two, from `grid`.

    Raises:
      ValueError: as `steps_of`.
    """
    noise = integers(steps_of(stddev, step))
    return tree_noise.each_leaf(
        tree, key, noise, lambda leaf, drawn: round_to_grid(leaf, drawn, step)
    )


def integers(stddev: float) -> tree_noise.Noise:
    """A discrete Gaussian, of which no number is paired with another."""
    return tree_noise.Noise(
        of=lambda key, leaf: discrete_gaussian(
            key, leaf.shape, stddev, out_sharding=out_sharding(leaf)
        ),
        in_rows=lambda keys, rows: discrete_gaussian_at(*rows.drawn_by(keys), stddev),
        halves=lambda shape: (math.prod(shape), math.prod(shape)),
    )


def steps_of(stddev: float, step: float) -> float:
    """The standard deviation of the integers, for noise that is to hide as much as `stddev`.

    Raises:
      ValueError: more than 2²² steps of the grid in a standard deviation, as the room for rounding
        that many parameters need makes them, or less than one, as batches of 10⁸ do.
    """
    if stddev < step:
        raise ValueError(
            f"noise of standard deviation {stddev:.3g} on grid={step:.3g}: so large a batch leaves "
            "steps that are longer than the noise; take a smaller batch_size, or noise in floating "
            "point"
        )
    if stddev > _MAX_STEPS_PER_STDDEV * step:
        raise ValueError(
            f"noise of standard deviation {stddev:.3g} on grid={step:.3g}: of so many parameters, "
            "at so large a noise_multiplier, the room for rounding is a multiple of the noise; "
            f"want at most {_MAX_STEPS_PER_STDDEV:.3g} steps. "
            "Take a smaller noise_multiplier, or noise in floating point"
        )
    # Float64 may have rounded the stddev down by some 2⁻⁵².
    return math.hypot(stddev / step * (1 + 2.0**-50), SMOOTHING)


def round_to_grid(leaf: jax.Array, noise: jax.Array, step: float) -> jax.Array:
    """g · (round(leaf/g) + noise), or g · (leaf + noise) of a leaf that counts g."""
    # A power of two times a number is exact, and so is everything from here to the last line; a
    # quotient, by itself, would not be on GPU.
    dtype = float32_at_least(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        leaf = jnp.rint(leaf.astype(dtype) * (1.0 / step))
    total = jnp.clip(leaf, -LARGEST_GRID_SUM, LARGEST_GRID_SUM).astype(jnp.int32) + noise
    return step * total.astype(dtype)
