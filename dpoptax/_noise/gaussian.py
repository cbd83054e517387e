"""Gaussian noise on a clipped sum: the privacy boundary."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax._clip.clip import Clip, as_clip
from dpoptax._clip.clip_per_example import clip_per_example
from dpoptax._clip.clipped_sum import ClippedSum
from dpoptax._noise import fixed_point as _fixed_point
from dpoptax._noise.ledger import Imprint, Mechanism, begin, check_mechanism
from dpoptax._noise.release import release
from dpoptax._pricing.noise_schedule import checked_phases, least
from dpoptax._random.keys import check_noise_key
from dpoptax._random.tree_noise import add_noise
from dpoptax._serialization import serializable
from dpoptax._tree import PyTree


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GaussianNoiseState:
    """State of `gaussian_noise`, and the ledger of its releases.

    Attributes:
      count: the number of noisy releases so far, int32.
      key: the typed key that every step's key is folded from.
      mechanism: what a release is. Static.
      imprint: the same as arrays, which `update` and `ledgers` compare with `mechanism`; and
        whether a release was refused.
    """

    count: jax.Array
    key: jax.Array
    mechanism: Mechanism = dataclasses.field(metadata={"static": True})
    imprint: Imprint | None = None


def gaussian_noise(
    *,
    noise_multiplier: float | Mapping[int, float],
    batch_size: float,
    key: jax.Array,
    fixed_point: bool = False,
) -> optax.GradientTransformation:
    """Adds Gaussian noise to a `ClippedSum` and divides by the expected batch size.

        release_t = (Σ_ξ clip(g(ξ)) + σ C N(0, I)) / B

    with σ = `noise_multiplier`, C the sensitivity that the `ClippedSum` carries and B =
    `batch_size`. Input: a sum. Output: a mean, in the dtype of `params` where `update` gets them
    and in the sum's otherwise. The noise of step t is drawn with `fold_in(key, t)`, in float32 at
    least.

    Privacy: each update is one release of the Gaussian mechanism with noise multiplier σ, for
    adding or removing one example; the state counts the releases, and
    `dpoptax.accounting.epsilon_spent` turns the state and the sampler into ε. Everything behind
    this stage in a chain is post-processing. A sum that is not bit for bit as it was clipped, or a
    state that is not as the run left it, is not released: the update is NaN, and the state says why
    to `ledgers` and `epsilon_spent`.

    Inside `shard_map` the stage is for whole sums, equal on all devices; a device's part of a sum
    is refused, as the seal knows the places of the whole. Sums that each device clipped for itself
    would get the same noise, whose differences have none, which nothing sees: give `clipped_grad`
    the mesh, and put this stage outside, under `jit`, which splits the noise like the sum.

    That is so for real numbers. The noise is drawn by Box and Muller from both words of a hash, 64
    bits for two numbers, so that there are no gaps in it to who sees 10⁻⁵ standard deviations, out
    to 8.8 of them. But the last bits of sum plus noise tell which sum they were added to: to who
    sees every bit of a release, or of parameters that were made of it, the noise is no protection
    (Mironov 2012).
    `fixed_point` answers that threat. Sum and noise become whole multiples of a public power of two
    g, and are added as integers. The noise is a discrete Gaussian whose probabilities are those
    stated to 2⁻⁸⁰, so that ε and δ hold for every bit: n released numbers add at most
    n 2⁻⁷⁹ (1 + e^ε) to δ, such as 6e-12 for 10¹² of them at ε = 1 (docs/privacy/noise.md). The sum
    is rounded before the noise, and the noise scaled up for it: σ(C + √d g), d the number of
    parameters, with g at most the larger of 2⁻¹⁷ σC and 2⁻²⁷ BC. A number takes twice as long
    as one in floating point. It answers neither who learns the key nor who times the step,
    and it takes a clipped sum in floating point as computed. With
    `clipped_grad(..., grid=fixed_point_grid(...))` the sum is of integers, so that its bound,
    C + √d g/2, needs no word about the rounding of sums either.

    Args:
      noise_multiplier: σ, relative to the clip bound; 0 for no noise and ε = ∞. Or a schedule, a
        public one: a dict from the first step of each phase to its σ, such as {0: 2.0, 100: 1.0},
        and each release is priced with its own; of an optax schedule `{t: float(schedule(t)) for t
        in range(0, steps, 50)}`.
      batch_size: B, the expected number of examples, a public number. Never the realised one,
        which is private under Poisson sampling.
      key: a key from `jax.random.key`, or from `dpoptax.random_key_from_os`. Whoever knows it can
        subtract the noise.
      fixed_point: whether the release is safe to show with all its bits; see above. Under a
        schedule the grid is that of the least σ.

    Returns:
      An `optax.GradientTransformation` whose `update` takes a `ClippedSum` and nothing else.

    Raises:
      ValueError: a negative or non-finite multiplier, 0 in a schedule or none from step 0 on, or a
        batch size that is not positive; at `update`, noise too small for float32 (σC < 2⁻¹⁰⁰), a
        leaf of more than 2³² numbers, or in fixed point so many that σ(C + √d g) is above 2²² g.
      TypeError: a traced multiplier or batch size, or a key of no generator of noise; at `update`,
        gradients that are not a `ClippedSum`, or one that is complex, without a seal or visibly
        changed.

    Source: Abadi et al., "Deep Learning with Differential Privacy", 2016, Algorithm 1; Box and
    Muller, "A note on the generation of random normal deviates", 1958. For the
    attack, Mironov, "On significance of the least significant bits for differential privacy", 2012;
    for its answer, Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy",
    2020.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> tx = gaussian_noise(noise_multiplier=1.0, batch_size=32, key=jax.random.key(0))
    >>> state = tx.init({"w": jnp.zeros(2)})
    >>> dpoptax.ledgers(state)[0].releases
    0
    """
    key = check_noise_key(key)
    mechanism = _mechanism(noise_multiplier, batch_size, fixed_point=fixed_point)

    def init_fn(params: PyTree) -> GaussianNoiseState:
        return GaussianNoiseState(**begin(mechanism, key, params))

    def update_fn(
        updates: PyTree, state: GaussianNoiseState, params: PyTree = None
    ) -> tuple[PyTree, GaussianNoiseState]:
        def noisy_mean(clipped: ClippedSum, step_key: jax.Array) -> tuple[PyTree, None]:
            return noisy_mean_of(clipped, mechanism, state.count, step_key), None

        released, _, state = release(
            updates, state, params, mechanism, noisy_mean, on_grid=fixed_point
        )
        return released, state

    return optax.GradientTransformation(init_fn, update_fn)


def clip_and_noise(
    clip: Clip | float,
    *,
    noise_multiplier: float | Mapping[int, float],
    batch_size: float,
    key: jax.Array,
    fixed_point: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Clips per-example gradients, sums them and adds noise: DP-SGD's stage in plain optax form.

        release_t = (Σ_i clip(g_i) + σ C N(0, I)) / B,   for leaves (examples, …)

    The chain of `clip_per_example` and `gaussian_noise`; see there for shapes, units, privacy and
    errors. `update(grads, state, params, mask=mask)` leaves out the padding of a sampler's draw. It
    needs per-example gradients, with their memory; `clipped_grad` does without.

    Args:
      clip: the geometry. A number C means `l2_clip(C)`.
      noise_multiplier: σ, relative to the clip bound, or a schedule.
      batch_size: B, the expected number of examples.
      key: a key from `jax.random.key`.
      fixed_point: whether the release is safe to show with all its bits; see `gaussian_noise`.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> clip = dpoptax.l2_clip(1.0)
    >>> tx = clip_and_noise(clip, noise_multiplier=0.0, batch_size=2, key=jax.random.key(0))
    >>> params = {"w": jnp.zeros(2)}
    >>> grads = {"w": jnp.array([[3.0, 4.0], [0.3, 0.4]])}
    >>> mean, _ = tx.update(grads, tx.init(params), params)
    >>> mean["w"]
    Array([0.449..., 0.599...], dtype=float32)
    """
    return optax.chain(
        clip_per_example(clip),
        gaussian_noise(
            noise_multiplier=noise_multiplier,
            batch_size=batch_size,
            key=key,
            fixed_point=fixed_point,
        ),
    )


def noise_stddev(clip: Clip | float, *, noise_multiplier: float, batch_size: float) -> float:
    """The standard deviation of the noise in each coordinate of a released mean: σ C / B.

    An argument of methods that know the noise, such as `dpoptax.contrib.adam_bc`: absolute, in the
    units of the gradient. A public number.

    Args:
      clip: the geometry; C is its sensitivity. A number C means `l2_clip(C)`.
      noise_multiplier: σ.
      batch_size: B.

    Raises:
      ValueError: a number outside its range, or a geometry that decodes the mean, as its noise is
        not the same in every step and coordinate.

    >>> import dpoptax
    >>> noise_stddev(dpoptax.l2_clip(0.5), noise_multiplier=2.0, batch_size=100)
    0.01
    """
    clip = as_clip(clip)
    if clip.encodes:
        raise ValueError(
            f"clip={clip}: the noisy mean is decoded, so its noise has no single standard deviation"
        )
    noise_multiplier, batch_size = check_mechanism(noise_multiplier, batch_size)
    return noise_multiplier * clip.sensitivity / batch_size


def noisy_mean_of(
    clipped: ClippedSum, mechanism: Mechanism, count: jax.Array, step_key: jax.Array
) -> PyTree:
    """(Σ + σ C N(0, I)) / B, with C the sensitivity of the sum's geometry."""
    add = _add_in_fixed_point if mechanism.fixed_point else _add
    noisy = add(clipped, mechanism, count, step_key)
    return jax.tree.map(lambda total: total / mechanism.batch_size, noisy)


def _mechanism(
    noise_multiplier: float | Mapping[int, float], batch_size: float, *, fixed_point: bool
) -> Mechanism:
    if callable(noise_multiplier):
        raise TypeError(
            f"noise_multiplier={noise_multiplier!r}: the stated ε rests on numbers that are known "
            "before the first step. Give a schedule as a dict from step to multiplier, such as "
            "{t: float(schedule(t)) for t in range(0, steps, 50)}"
        )
    phases = None
    if isinstance(noise_multiplier, Mapping):
        phases = checked_phases(noise_multiplier)
        noise_multiplier = least(phases)
    return Mechanism(
        *check_mechanism(noise_multiplier, batch_size),
        fixed_point=fixed_point,
        schedule=phases if phases is not None and len(phases) > 1 else None,
    )


def _phase(mechanism: Mechanism, count: jax.Array) -> tuple[jax.Array, list[float]]:
    """Which phase a release is in, and the multiplier of each."""
    assert mechanism.schedule is not None
    starts, multipliers = zip(*mechanism.schedule, strict=True)
    later = jnp.asarray(starts[1:], jnp.int32)
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
    if mechanism.noise_multiplier == 0.0 and clipped.grid is None:
        return clipped.sum
    step = _fixed_point.grid_of(clipped, mechanism)
    sensitivity = _fixed_point.sensitivity_on_grid(clipped, step)

    def add(multiplier: float) -> PyTree:
        return _fixed_point.add_noise(clipped.sum, multiplier * sensitivity, key, step)

    if mechanism.schedule is None:
        return add(mechanism.noise_multiplier)
    phase, multipliers = _phase(mechanism, count)
    return jax.lax.switch(phase, [functools.partial(add, each) for each in multipliers])
