"""Noise that is correlated over steps: the privacy boundary with a matrix mechanism."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpoptax._clip.clip import Clip, as_clip
from dpoptax._clip.clipped_sum import ClippedSum
from dpoptax._noise.correlated_fixed_point import add_correlated_noise, begin_buffers
from dpoptax._noise.ledger import Imprint, Mechanism, begin, check_mechanism
from dpoptax._noise.release import check_same_clip, release
from dpoptax._random.keys import check_noise_key, fold_in
from dpoptax._random.tree_noise import add_noise
from dpoptax._serialization import serializable
from dpoptax._tree import PyTree
from dpoptax.matrix._strategies import BandedToeplitz, Strategy


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CorrelatedNoiseState:
    """State of `correlated_noise`, and the ledger of its releases.

    Attributes:
      count: the number of noisy releases so far, int32.
      key: the typed key that every step's key is folded from.
      buffers: what the noise of the next steps takes from that of the last ones; nothing where that
        is drawn again. As secret as the key: whoever knows them can subtract noise.
      mechanism: what a release is, with its strategy. Static.
      imprint: as in `GaussianNoiseState`.
    """

    count: jax.Array
    key: jax.Array
    buffers: PyTree
    mechanism: Mechanism = dataclasses.field(metadata={"static": True})
    imprint: Imprint | None = None


class _Noising(NamedTuple):
    """How a sum gets the noise of a step, and what is kept of it.

    `init(params)` and `add(clipped, state, step_key)`: the noisy sum, and the buffers.
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
) -> optax.GradientTransformation:
    """Adds noise that later steps take back in part, in the place of `gaussian_noise`.

        release_t = (Σ_ξ clip(g(ξ)) + σ C (M⁻¹ Z)_t) / B,    Z_t ~ N(0, I)

    with M the strategy's matrix, σ = `noise_multiplier`, C the clip's sensitivity and B =
    `batch_size`. Input: a `ClippedSum`. Output: a mean, in the dtype of `params` where `update`
    gets them. Z_t is drawn with `fold_in(key, t)`, as in `gaussian_noise`, which this is for one
    band. A single release is noisier than with independent noise, and its power lies in the high
    frequencies: put `dpoptax.low_pass` behind it, or nothing; not a method that takes the noise for
    white (`adaptive_kalman`, `adam_bc`).

    Privacy: the run is one Gaussian mechanism, whose cost depends on which steps an example can
    take part in. `strategy.under(sampler)` knows it, `dpoptax.accounting.epsilon_spent` asks it,
    and both refuse a sampler for which nothing is known. Multipliers are calibrated with
    `dpoptax.accounting.calibrate_noise_multiplier(sampler=strategy.under(sampler), …)`.

    That is so for real numbers; in floating point the last bits of a release tell the sum, see
    `gaussian_noise`. With `fixed_point_clip` sums and noise are whole multiples of a public power
    of two g, and the theorem of `gaussian_noise(fixed_point=True)` holds for all releases of a run
    with every bit of them. It is for a `BandedToeplitz` under a `CyclicPoissonSampler` whose cycle
    is as long as its bands; no other is priced with it. Coefficients are taken as multiples of 2⁻¹¹
    of the first, and the noise scaled up for rounding, from σC to at most σ(C + √d g + √(b d) g), d
    the number of parameters.

    Memory: bands − 1 copies of the parameters, or one a buffer, in float32; none with a strategy
    whose inverse is banded (`dpoptax.matrix.BandedInverseToeplitz`): then Z_{t−1}, Z_{t−2}, … are
    drawn again from their keys, and a step draws once for each of its bands.

    Args:
      strategy: from `dpoptax.matrix`.
      noise_multiplier: σ, relative to the clip bound, for columns of norm 1; 0 for no noise.
      batch_size: B, the expected number of examples.
      key: a key from `jax.random.key`. Whoever knows it can subtract the noise.
      fixed_point_clip: for noise in fixed point, the geometry of all sums that will be released:
        the noise of earlier steps counts in its grid. A number C means `l2_clip(C)`. `None` for
        floating point.

    Raises:
      TypeError: a strategy that is none, or in fixed point no `BandedToeplitz`; as
        `gaussian_noise`; at `update`, sums that were clipped otherwise than `fixed_point_clip`.
      ValueError: as `gaussian_noise`; at `update`, a state whose buffers were cast or are for other
        parameters, or in fixed point a strategy that adds up the noise of so many steps that it
        leaves int32.
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
        raise TypeError(f"strategy={strategy!r}: want one of dpoptax.matrix's, as BandedToeplitz")
    mechanism = Mechanism(*check_mechanism(noise_multiplier, batch_size), strategy=strategy)
    key = check_noise_key(key)
    if fixed_point_clip is not None:
        if not isinstance(strategy, BandedToeplitz):
            raise TypeError(
                f"strategy={strategy!r}: noise in fixed point is for a dpoptax.matrix."
                "BandedToeplitz; take one, or leave out fixed_point_clip"
            )
        clip = as_clip(fixed_point_clip)
        sensitivity = clip.sensitivity
        mechanism = dataclasses.replace(mechanism, fixed_point=True, sensitivity=sensitivity)
        noising = _fixed_point_noise(strategy, mechanism, clip)
    else:
        noising = _redrawing(strategy.redrawn) if strategy.redrawn else _buffering(strategy)

    def init_fn(params: PyTree) -> CorrelatedNoiseState:
        return CorrelatedNoiseState(**begin(mechanism, key, params), buffers=noising.init(params))

    def update_fn(
        updates: PyTree, state: CorrelatedNoiseState, params: PyTree = None
    ) -> tuple[PyTree, CorrelatedNoiseState]:
        def noisy_mean(clipped: ClippedSum, step_key: jax.Array) -> tuple[PyTree, PyTree]:
            _check_buffers(state.buffers, jax.eval_shape(noising.init, clipped.sum))
            noisy, buffers = noising.add(clipped, state, step_key)
            return jax.tree.map(lambda total: total / mechanism.batch_size, noisy), buffers

        released, (_, buffers), state = release(
            updates, state, params, mechanism, noisy_mean, on_grid=mechanism.fixed_point
        )
        return released, dataclasses.replace(state, buffers=buffers)

    return optax.GradientTransformation(init_fn, update_fn)


def _check_buffers(buffers: PyTree, begun: PyTree) -> None:
    """Raises where what is kept of earlier noise has another type, or is for other parameters."""
    for buffer, own in zip(jax.tree.leaves(buffers), jax.tree.leaves(begun), strict=True):
        if buffer.dtype != own.dtype:
            raise ValueError(
                f"a buffer of the correlated noise is {buffer.dtype}, not {own.dtype}: the state "
                "was cast, and what is rounded off the noise of earlier steps would tell it from "
                "the sums that it was added to. Leave this state as it is"
            )
        if buffer.shape != own.shape:
            raise ValueError(
                f"a buffer of the correlated noise has shape {buffer.shape}, not {own.shape}: the "
                "state is of a run with other parameters, whose noise is none for this sum. Give "
                "it the parameters that it was made for, or start a new run with tx.init, another "
                "key, and count both"
            )


def _fixed_point_noise(strategy: BandedToeplitz, mechanism: Mechanism, clip: Clip) -> _Noising:
    """The recursion of a banded strategy, in whole numbers; no noise where none is asked for."""

    def add(
        clipped: ClippedSum, state: CorrelatedNoiseState, step_key: jax.Array
    ) -> tuple[PyTree, PyTree]:
        check_same_clip(clipped, clip, "clip")
        if mechanism.noise_multiplier == 0.0 and clipped.grid is None:
            return clipped.sum, state.buffers
        return add_correlated_noise(clipped, strategy, mechanism, state.buffers, step_key)

    return _Noising(lambda params: begin_buffers(strategy, params), add)


def _scaled(
    init: Callable[[PyTree], PyTree],
    noise: Callable[[PyTree, CorrelatedNoiseState, jax.Array], tuple[PyTree, PyTree]],
) -> _Noising:
    """Of the noise of a step at standard deviation 1, `noise(zeros, state, step_key)`."""

    def add(
        clipped: ClippedSum, state: CorrelatedNoiseState, step_key: jax.Array
    ) -> tuple[PyTree, PyTree]:
        unscaled, buffers = noise(_zeros(clipped.sum), state, step_key)
        # Scaled after the matrix: the scale is this step's own even if the clip changed.
        stddev = state.mechanism.noise_multiplier * clipped.clip.sensitivity
        return jax.tree.map(lambda s, z: s + stddev * z, clipped.sum, unscaled), buffers

    return _Noising(lambda params: init(_zeros(params)), add)


def _zeros(like: PyTree) -> PyTree:
    return optax.tree.zeros_like(like, dtype=jnp.float32)  # sharded like them


def _buffering(strategy: Strategy) -> _Noising:
    """(M⁻¹ Z)_t from Z_t and what is kept of the steps before."""
    with jax.ensure_compile_time_eval():  # constants, also where the factory is called under jit
        noising = strategy.noising_matrix()

    def next_fn(
        zeros: PyTree, state: CorrelatedNoiseState, step_key: jax.Array
    ) -> tuple[PyTree, PyTree]:
        white = add_noise(zeros, 1.0, step_key)
        # By default GPUs and TPUs round factors of products to 8 or 11 bits: the strategy's numbers
        # would be others than those that are priced, and what is rounded off the noise of earlier
        # steps would tell it from the sums that it was added to.
        with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
            noise, buffers = noising.multiply_next(white, state.buffers)
        return noise, buffers

    return _scaled(noising.init_multiply, next_fn)


def _redrawing(weights: tuple[float, ...]) -> _Noising:
    """(M⁻¹ Z)_t = Σ_i w_i Z_{t−i}, each drawn with its own step's key, and nothing kept.

    In a loop: written out, every draw would be compiled, and all could be in memory at once.
    """

    def next_fn(
        zeros: PyTree, state: CorrelatedNoiseState, step_key: jax.Array
    ) -> tuple[PyTree, PyTree]:
        del step_key

        def add(i: jax.Array, total: PyTree) -> PyTree:
            white = add_noise(zeros, 1.0, fold_in(state.key, state.count - i))
            weight = jnp.asarray(weights, jnp.float32)[i]
            return jax.tree.map(lambda x, z: x + weight * z, total, white)

        steps = jnp.minimum(state.count + 1, len(weights))
        return jax.lax.fori_loop(0, steps, add, zeros), ()

    return _scaled(lambda zeros: (), next_fn)
