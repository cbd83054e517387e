"""Adds noise that is correlated across steps (the matrix mechanism)."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpoptax._clipped_sum.clipped_sum import ClippedSum
from dpoptax._clips.clip import Clip, as_clip
from dpoptax._random.keys import check_noise_key
from dpoptax._random.tree_noise import add_noise
from dpoptax._release.correlated_fixed_point import add_correlated_noise, begin_buffers
from dpoptax._release.ledger import Mechanism, NoiseState, begin, checked_mechanism
from dpoptax._release.release import release
from dpoptax._support.tree import PyTree
from dpoptax.matrix._participation import Strategy
from dpoptax.matrix._strategies import BandedToeplitz

if TYPE_CHECKING:
    from jax_privacy.matrix_factorization.streaming_matrix import StreamingMatrix

    from dpoptax.sampling import Sampler


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CorrelatedNoiseState(NoiseState):
    """Holds the state of `correlated_noise`: that of every noise stage, and buffers.

    Attributes:
      buffers: noise of earlier steps that later steps reuse. Keep it as secret as the key: with
        either, an adversary can subtract the noise.
    """

    buffers: PyTree


class _Noising(NamedTuple):
    """Holds the functions that add one step's noise and update the buffers.

    `init(params)` returns the first buffers. `add(clipped, state, step_key)` returns the noisy sum
    and the next buffers.
    """

    init: Callable[[PyTree], PyTree]
    add: Callable[[ClippedSum, CorrelatedNoiseState, jax.Array], tuple[PyTree, PyTree]]


def correlated_noise(
    strategy: Strategy,
    *,
    noise_multiplier: float,
    batch_size: float,
    key: jax.Array,
    fixed_point_clip: Clip | float | None = None,
    sampler: "Sampler | None" = None,
) -> optax.GradientTransformation:
    """Adds noise that is correlated across steps, instead of `gaussian_noise`.

        release_t = (Σ_ξ clip(g(ξ)) + σ C (A⁻¹ Z)_t) / B,    Z_t ~ N(0, I)

    A is the matrix of `strategy`, σ = `noise_multiplier`, C is the sensitivity of the clip, and B =
    `batch_size`. Input: a `ClippedSum`. Output: a mean, in the dtype of `params` if `update` gets
    them. Z_t is drawn with `fold_in(key, t)`. With one band this is `gaussian_noise`.

    Later steps cancel part of the earlier noise. A single release is noisier than with independent
    noise, mostly at high frequencies. Follow it with `dpoptax.low_pass` or no filter, but not with
    methods that assume white noise (`adaptive_kalman`, `adam_bc`).

    Privacy: the run is one Gaussian mechanism. Its cost depends on the steps in which an example
    can participate. Pass `strategy.under(sampler)` to `dpoptax.accounting.calibrate`. This function
    and `dpoptax.accounting.guarantee` raise an error for samplers without a known bound.

    By default this holds for real numbers, as in `gaussian_noise`. With `fixed_point_clip` it holds
    for every bit of all releases (docs/developers/fixed-point.md), for a `BandedToeplitz` under a
    `CyclicPoissonSampler` whose cycle is at least as long as its bands. Coefficients are then
    rounded to multiples of 2⁻¹¹ of the first. To cover rounding, the noise grows to at most
    σ(C + √d g + √(b d) g), with d parameters, b bands and grid step g.

    Memory: bands − 1 float32 copies of the parameters, or one per buffer.

    Args:
      strategy: a strategy from `dpoptax.matrix`.
      noise_multiplier: σ, relative to the clipping bound, for columns of norm 1. 0 adds no noise.
      batch_size: B, the expected number of examples.
      key: a key from `jax.random.key`. Keep it secret: with it an adversary can subtract the noise.
      fixed_point_clip: the geometry of every released sum, for noise in fixed point; `None` for
        floating point. All steps have the same grid, because later steps reuse earlier noise. A
        number C means `l2_clip(C)`.
      sampler: as for `gaussian_noise`.

    Raises:
      TypeError: `strategy` is not a `Strategy`, or in fixed point not a `BandedToeplitz`; or as in
        `gaussian_noise`. At `update`: a sum was not clipped by `fixed_point_clip`.
      ValueError: as in `gaussian_noise`. At `update`: the buffers were cast or belong to other
        parameters; or, in fixed point, the accumulated noise may exceed int32.
      ImportError: jax_privacy is not installed.

    Source: Denisov et al., "Improved Differential Privacy for SGD via Optimal Private Linear
    Operators on Adaptive Streams", 2022; Choquette-Choo et al., "(Amplified) Banded Matrix
    Factorization", 2023.

    >>> import dpoptax
    >>> strategy = dpoptax.matrix.BandedToeplitz((1.0, 0.5))
    >>> key = jax.random.key(0)
    >>> tx = correlated_noise(strategy, noise_multiplier=1.0, batch_size=32, key=key)
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"`strategy` must be a strategy from `dpoptax.matrix`, such as `BandedToeplitz`, got "
            f"{strategy!r}."
        )
    mechanism = checked_mechanism(noise_multiplier, batch_size, sampler, strategy=strategy)
    key = check_noise_key(key)
    clip = None if fixed_point_clip is None else as_clip(fixed_point_clip)
    if clip is not None:
        if not isinstance(strategy, BandedToeplitz):
            raise TypeError(
                "`strategy` must be a `dpoptax.matrix.BandedToeplitz` for noise in fixed point, "
                f"got {strategy!r}. Otherwise leave out `fixed_point_clip`."
            )
        sensitivity = clip.sensitivity
        mechanism = dataclasses.replace(mechanism, fixed_point=True, sensitivity=sensitivity)
        noising = _fixed_point_noise(strategy, mechanism)
    else:
        with jax.ensure_compile_time_eval():  # constants even if the factory is called under jit
            inverse = strategy.noising_matrix()
        noising = _buffering(inverse)

    def init_fn(params: PyTree) -> CorrelatedNoiseState:
        begun = begin(mechanism, key, params)
        return CorrelatedNoiseState(**vars(begun), buffers=noising.init(params))

    def update_fn(
        updates: PyTree, state: CorrelatedNoiseState, params: PyTree = None
    ) -> tuple[PyTree, CorrelatedNoiseState]:
        def noisy_mean(clipped: ClippedSum, step_key: jax.Array) -> tuple[PyTree, PyTree]:
            # Compared by shape and dtype with new buffers of this sum.
            _check_buffers(state.buffers, jax.eval_shape(noising.init, clipped.sum))
            noisy, buffers = noising.add(clipped, state, step_key)
            return jax.tree.map(lambda total: total / mechanism.batch_size, noisy), buffers

        released, (_, buffers), state = release(
            updates, state, params, mechanism, noisy_mean, clip=clip
        )
        return released, dataclasses.replace(state, buffers=buffers)

    return optax.GradientTransformation(init_fn, update_fn)


def _check_buffers(buffers: PyTree, begun: PyTree) -> None:
    """Raises an error if buffers have another dtype or belong to other parameters."""
    for buffer, wanted in zip(jax.tree.leaves(buffers), jax.tree.leaves(begun), strict=True):
        if buffer.dtype != wanted.dtype:
            raise ValueError(
                f"The buffers of the correlated noise must be {wanted.dtype}, got {buffer.dtype}. "
                "The state was cast. The rounding would leave part of the earlier noise "
                "uncanceled and reveal the sums. Do not cast this state."
            )
        if buffer.shape != wanted.shape:
            raise ValueError(
                f"The buffers of the correlated noise must have shape {wanted.shape}, got "
                f"{buffer.shape}. The state belongs to other parameters. Pass the state of these "
                "parameters, or start a new run with `tx.init` and another key, and account for "
                "both runs."
            )


def _fixed_point_noise(strategy: BandedToeplitz, mechanism: Mechanism) -> _Noising:
    """Returns functions that add a banded strategy's noise in integers."""

    def add(
        clipped: ClippedSum, state: CorrelatedNoiseState, step_key: jax.Array
    ) -> tuple[PyTree, PyTree]:
        if mechanism.noise_multiplier == 0.0 and clipped.terms.grid is None:
            return clipped.sum, state.buffers
        return add_correlated_noise(clipped, strategy, mechanism, state.buffers, step_key)

    return _Noising(lambda params: begin_buffers(strategy, params), add)


def _buffering(noising: "StreamingMatrix") -> _Noising:
    """Returns functions that add σC (A⁻¹ Z)_t, from Z_t and buffers of earlier steps."""

    def add(
        clipped: ClippedSum, state: CorrelatedNoiseState, step_key: jax.Array
    ) -> tuple[PyTree, PyTree]:
        white = add_noise(_zeros(clipped.sum), 1.0, step_key)
        # By default, GPUs and TPUs round the factors of products to 8 or 11 bits. The coefficients
        # would then differ from those in the accounting, and part of the earlier noise would not
        # cancel.
        with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
            noise, buffers = noising.multiply_next(white, state.buffers)
        # Scaling after the matrix uses this step's sensitivity even if the clip changed.
        stddev = state.mechanism.noise_multiplier * clipped.clip.sensitivity
        return jax.tree.map(lambda s, z: s + stddev * z, clipped.sum, noise), buffers

    return _Noising(lambda params: noising.init_multiply(_zeros(params)), add)


def _zeros(like: PyTree) -> PyTree:
    return optax.tree.zeros_like(like, dtype=jnp.float32)  # keeps the sharding
