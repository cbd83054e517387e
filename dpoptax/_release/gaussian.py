"""Adds Gaussian noise to clipped sums."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax._clipped_sum.clipped_sum import ClippedSum
from dpoptax._clips.clip import Clip, as_clip
from dpoptax._pricing.noise_schedule import checked_phases, least
from dpoptax._random.keys import check_noise_key
from dpoptax._random.tree_noise import add_noise
from dpoptax._release.ledger import Mechanism, NoiseState, begin, checked_mechanism
from dpoptax._release.release import release
from dpoptax._support.tree import PyTree

if TYPE_CHECKING:
    from dpoptax.sampling import Sampler


def gaussian_noise(
    *,
    noise_multiplier: float | Mapping[int, float],
    batch_size: float,
    key: jax.Array,
    fixed_point: bool = False,
    sampler: "Sampler | None" = None,
) -> optax.GradientTransformation:
    """Adds Gaussian noise to a `ClippedSum` and divides by the expected batch size.

        release_t = (Σ_ξ clip(g(ξ)) + σ C N(0, I)) / B

    σ = `noise_multiplier`, C is the sensitivity that the `ClippedSum` carries, and B =
    `batch_size`. Input: a sum. Output: a mean, in the dtype of `params` if `update` gets them and
    in the dtype of the sum otherwise. The noise of step t is drawn with `fold_in(key, t)`, in
    float32 or wider.

    Privacy: each update is one release of the Gaussian mechanism with noise multiplier σ, for
    adding or removing one example. The state counts the releases, and
    `dpoptax.accounting.guarantee` computes ε from the state and the sampler. All later
    transforms in the chain are post-processing.

    If the state does not belong to the run, the update is NaN. `ledgers` and `guarantee` then
    raise an error with the reason.

    By default the guarantee holds for real numbers; the last bits of floating-point releases reveal
    the sum (Mironov 2012). With `fixed_point` it holds for every bit. Sum and noise are then
    integer multiples of a public power of two g, at most the larger of 2⁻¹⁷ σC and 2⁻²⁷ BC, and the
    noise is a discrete Gaussian. To cover rounding, the noise grows to σ(C + √d g) for d
    parameters. n released numbers add at most n 2⁻⁷⁹ (1 + e^ε) to δ. With
    `clipped_grad(..., grid=fixed_point_grid(...))` the sum has the bound C + √d g/2 and is exact.
    docs/privacy/floating-point.md has measurements and links to the proofs. Neither mode protects
    against a leaked key or against timing.

    Do not clip separately on each device inside `shard_map`. All devices would add the same noise,
    which cancels in differences, and no check detects this. Pass the mesh to `clipped_grad`, and
    call this stage outside `shard_map`, under `jit`, which shards the noise like the sum.

    Args:
      noise_multiplier: σ, relative to the clipping bound. 0 adds no noise and gives ε = ∞. A public
        schedule is a dict from the first step of each phase to its σ, such as {0: 2.0, 100: 1.0},
        and each release is priced with its own σ. For an optax schedule, write
        `{t: float(schedule(t)) for t in range(0, steps, 50)}`.
      batch_size: B, the expected number of examples, which is public. The realized number is
        private under Poisson sampling.
      key: a key from `jax.random.key` or `dpoptax.random_key_from_os`. Keep it secret: with it an
        adversary can subtract the noise.
      fixed_point: whether the guarantee holds for every bit of the release; see above. A schedule
        uses the grid of its smallest σ.
      sampler: the sampler of the batches, if the ledger shall hold it. `guarantee` then refuses
        another one.

    Returns:
      An `optax.GradientTransformation` whose `update` accepts only a `ClippedSum`.

    Raises:
      ValueError: the multiplier is negative or not finite; a schedule contains 0 or has no entry
        for step 0; or `batch_size` is not positive. At `update`: the noise is too small for float32
        (σC < 2⁻¹⁰⁰); a leaf has more than 2³² numbers; or, in fixed point, σ(C + √d g) exceeds 2²²
        g.
      TypeError: the multiplier or batch size is traced, or the key does not belong to a supported
        generator. At `update`: the gradients are not a `ClippedSum`, or it was changed or assembled
        by hand.

    Source: Abadi et al., "Deep Learning with Differential Privacy", 2016, Algorithm 1; Box and
    Muller, "A note on the generation of random normal deviates", 1958; Mironov, "On significance of
    the least significant bits for differential privacy", 2012; Canonne, Kamath and Steinke, "The
    discrete Gaussian for differential privacy", 2020.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> tx = gaussian_noise(noise_multiplier=1.0, batch_size=32, key=jax.random.key(0))
    >>> state = tx.init({"w": jnp.zeros(2)})
    >>> dpoptax.ledgers(state)[0].releases
    0
    """
    key = check_noise_key(key)
    mechanism = _mechanism(noise_multiplier, batch_size, fixed_point, sampler)

    def init_fn(params: PyTree) -> NoiseState:
        return begin(mechanism, key, params)

    def update_fn(
        updates: PyTree, state: NoiseState, params: PyTree = None
    ) -> tuple[PyTree, NoiseState]:
        def noisy_mean(clipped: ClippedSum, step_key: jax.Array) -> tuple[PyTree, None]:
            return noisy_mean_of(clipped, mechanism, state.count, step_key), None

        released, _, state = release(updates, state, params, mechanism, noisy_mean)
        return released, state

    return optax.GradientTransformation(init_fn, update_fn)


def noise_stddev(clip: Clip | float, *, noise_multiplier: float, batch_size: float) -> float:
    """Returns the standard deviation of each coordinate of a released mean, σ C / B.

    It is absolute, in the units of the gradient, and public. Pass it to methods that correct for
    the noise, such as `dpoptax.contrib.adam_bc`.

    Args:
      clip: the geometry; C is its sensitivity. A number C means `l2_clip(C)`.
      noise_multiplier: σ.
      batch_size: B.

    Raises:
      ValueError: a number is out of range, or the geometry decodes the mean, so that the noise
        differs between steps and coordinates.

    >>> import dpoptax
    >>> noise_stddev(dpoptax.l2_clip(0.5), noise_multiplier=2.0, batch_size=100)
    0.01
    """
    clip = as_clip(clip)
    if clip.encodes:
        raise ValueError(
            f"`clip` must not decode the noisy mean, got {clip}. Its noise does not have a single "
            "standard deviation."
        )
    mechanism = checked_mechanism(noise_multiplier, batch_size)
    return mechanism.noise_multiplier * clip.sensitivity / mechanism.batch_size


def noisy_mean_of(
    clipped: ClippedSum, mechanism: Mechanism, count: jax.Array, step_key: jax.Array
) -> PyTree:
    """Returns (Σ + σ C N(0, I)) / B, with C the sensitivity of the sum's geometry."""
    add = _add_in_fixed_point if mechanism.fixed_point else _add
    noisy = add(clipped, mechanism, count, step_key)
    return jax.tree.map(lambda total: total / mechanism.batch_size, noisy)


def _mechanism(
    noise_multiplier: float | Mapping[int, float],
    batch_size: float,
    fixed_point: bool,
    sampler: "Sampler | None",
) -> Mechanism:
    if callable(noise_multiplier):
        raise TypeError(
            "`noise_multiplier` must be a number or a dict from step to multiplier, got "
            f"{noise_multiplier!r}. The accounting needs the numbers before the first step. Write "
            "`{t: float(schedule(t)) for t in range(0, steps, 50)}`."
        )
    if isinstance(noise_multiplier, Mapping):
        phases = checked_phases(noise_multiplier)
    else:
        phases = ((0, noise_multiplier),)  # checked below
    schedule = phases if len(phases) > 1 else None
    return checked_mechanism(
        least(phases), batch_size, sampler, fixed_point=fixed_point, schedule=schedule
    )


def _phase(mechanism: Mechanism, count: jax.Array) -> tuple[jax.Array, list[float]]:
    """Returns the phase of a release and the multipliers of all phases."""
    assert mechanism.schedule is not None
    starts, multipliers = zip(*mechanism.schedule, strict=True)
    later = jnp.asarray(starts[1:], jnp.int32)
    # The number of later phases that have begun is the index of the current one.
    return jnp.sum(count >= later), list(multipliers)


def _add(clipped: ClippedSum, mechanism: Mechanism, count: jax.Array, key: jax.Array) -> PyTree:
    sensitivity = clipped.clip.sensitivity
    if mechanism.schedule is None:
        return add_noise(clipped.sum, mechanism.noise_multiplier * sensitivity, key)
    phase, multipliers = _phase(mechanism, count)
    return add_noise(clipped.sum, jnp.asarray(np.array(multipliers) * sensitivity)[phase], key)


def _add_in_fixed_point(
    clipped: ClippedSum, mechanism: Mechanism, count: jax.Array, key: jax.Array
) -> PyTree:
    # Without noise, nothing is rounded. If the sum has a grid, `grid_of` raises an error.
    if mechanism.noise_multiplier == 0.0 and clipped.terms.grid is None:
        return clipped.sum
    from dpoptax._release import fixed_point  # few runs need it

    g = fixed_point.grid_of(clipped, mechanism)
    sensitivity = fixed_point.sensitivity_on_grid(clipped, g)

    def add(multiplier: float) -> PyTree:
        return fixed_point.add_noise(clipped.sum, multiplier * sensitivity, key, g)

    if mechanism.schedule is None:
        return add(mechanism.noise_multiplier)
    phase, multipliers = _phase(mechanism, count)
    # Discrete noise needs a Python number as its σ, so each phase is a branch.
    return jax.lax.switch(phase, [functools.partial(add, each) for each in multipliers])
