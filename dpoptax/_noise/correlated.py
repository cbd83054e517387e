"""Noise that is correlated over steps: the privacy boundary with a matrix mechanism."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpoptax._clips.clipped_sum import ClippedSum
from dpoptax._noise.draws import add_noise, draw_once
from dpoptax._noise.keys import check_noise_key
from dpoptax._noise.ledger import Imprint, Mechanism, begin, check_mechanism
from dpoptax._noise.release import release
from dpoptax._serialization import serializable
from dpoptax._strategies import Strategy
from dpoptax._trees import PyTree


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
    """How the noise of a step is made: `init(zeros)`, and `next(zeros, state, step_key)`."""

    init: Callable[[PyTree], PyTree]
    next: Callable[[PyTree, CorrelatedNoiseState, jax.Array], tuple[PyTree, PyTree]]


def correlated_noise(
    strategy: Strategy, *, noise_multiplier: float, batch_size: float, key: jax.Array
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

    Memory: bands − 1 copies of the parameters, or one a buffer, in float32; none with a strategy
    whose inverse is banded (`dpoptax.matrix.BandedInverseToeplitz`): then Z_{t−1}, Z_{t−2}, … are
    drawn again from their keys, and a step draws once for each of its bands.

    Args:
      strategy: from `dpoptax.matrix`.
      noise_multiplier: σ, relative to the clip bound, for columns of norm 1; 0 for no noise.
      batch_size: B, the expected number of examples.
      key: a key from `jax.random.key`. Whoever knows it can subtract the noise.

    Raises:
      TypeError: a strategy that is none; as `gaussian_noise`.
      ValueError: as `gaussian_noise`; at `update`, a state whose buffers were cast.
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
    add = _redrawing(strategy.redrawn) if strategy.redrawn else _buffering(strategy)

    def init_fn(params: PyTree) -> CorrelatedNoiseState:
        zeros = optax.tree.zeros_like(params, dtype=jnp.float32)
        return CorrelatedNoiseState(buffers=add.init(zeros), **begin(mechanism, key, params))

    def update_fn(
        updates: PyTree, state: CorrelatedNoiseState, params: PyTree = None
    ) -> tuple[PyTree, CorrelatedNoiseState]:
        def noisy_mean(clipped: ClippedSum, step_key: jax.Array) -> tuple[PyTree, PyTree]:
            zeros = optax.tree.zeros_like(clipped.sum, dtype=jnp.float32)  # sharded like the sum
            _check_buffers(state.buffers, jax.eval_shape(add.init, zeros))
            noise, buffers = add.next(zeros, state, step_key)
            # Scaled after the matrix: the scale is this step's own even if the clip changed.
            stddev = mechanism.noise_multiplier * clipped.clip.sensitivity
            mean = jax.tree.map(
                lambda s, z: (s + stddev * z) / mechanism.batch_size, clipped.sum, noise
            )
            return mean, buffers

        released, (_, buffers), state = release(updates, state, params, mechanism, noisy_mean)
        return released, dataclasses.replace(state, buffers=buffers)

    return optax.GradientTransformation(init_fn, update_fn)


def _check_buffers(buffers: PyTree, begun: PyTree) -> None:
    """Raises where what is kept of earlier noise has been rounded to another type."""
    for buffer, own in zip(jax.tree.leaves(buffers), jax.tree.leaves(begun), strict=True):
        if buffer.dtype != own.dtype and jnp.issubdtype(own.dtype, jnp.inexact):
            raise ValueError(
                f"a buffer of the correlated noise is {buffer.dtype}, not {own.dtype}: the state "
                "was cast, and what is rounded off the noise of earlier steps would tell it from "
                "the sums that it was added to. Leave this state as it is"
            )


def _buffering(strategy: Strategy) -> _Noising:
    """(M⁻¹ Z)_t from Z_t and what is kept of the steps before."""
    with jax.ensure_compile_time_eval():  # constants, also where the factory is called under jit
        noising = strategy.noising_matrix()

    def next_fn(
        zeros: PyTree, state: CorrelatedNoiseState, step_key: jax.Array
    ) -> tuple[PyTree, PyTree]:
        white = draw_once(lambda: add_noise(zeros, 1.0, step_key), zeros, state.count)
        # By default GPUs and TPUs round factors of products to 8 or 11 bits: the strategy's numbers
        # would be others than those that are priced, and what is rounded off the noise of earlier
        # steps would tell it from the sums that it was added to.
        with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
            noise, buffers = noising.multiply_next(white, state.buffers)
        return noise, buffers

    return _Noising(noising.init_multiply, next_fn)


def _redrawing(weights: tuple[float, ...]) -> _Noising:
    """(M⁻¹ Z)_t = Σ_i w_i Z_{t−i}, each drawn with its own step's key, and nothing kept.

    In a loop: written out, every draw would be compiled, and all could be in memory at once.
    """

    def next_fn(
        zeros: PyTree, state: CorrelatedNoiseState, step_key: jax.Array
    ) -> tuple[PyTree, PyTree]:
        del step_key

        def add(i: jax.Array, total: PyTree) -> PyTree:
            white = add_noise(zeros, 1.0, jax.random.fold_in(state.key, state.count - i))
            weight = jnp.asarray(weights, jnp.float32)[i]
            return jax.tree.map(lambda x, z: x + weight * z, total, white)

        steps = jnp.minimum(state.count + 1, len(weights))
        return jax.lax.fori_loop(0, steps, add, zeros), ()

    return _Noising(lambda zeros: (), next_fn)
