"""Compares correlated noise, a low-pass filter and both at equal ε."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import signal

from dpoptax import accounting, filters, matrix
from dpoptax._gradients.clip.clipping_functions import automatic_clip
from dpoptax._gradients.clipped_grad.clipped_grad import clipped_grad
from dpoptax._gradients.points import gradient_points
from dpoptax._release import correlated
from dpoptax.filters import _low_pass


def iterate_noise(
    strategy: matrix.Strategy, filt: filters.Filter | None, *, curvature: float, steps: int
) -> float:
    """Returns the exact variance of SGD's last iterate on a quadratic, due to noise.

        x_{t+1} = x_t − m_t,    m = filter(curvature · x + M⁻¹ Z),    Var[x_T] for unit-variance Z

    The unit is (η σ C/B)², and curvature = η λ. SGD without a filter is stable below 2. The filter
    starts from zero. To compare two arms at equal ε, compare multiplier² · variance.

    >>> independent = matrix.BandedToeplitz((1.0,))
    >>> iterate_noise(independent, None, curvature=1.0, steps=50)
    1.0
    """
    b, a = ((1.0,), ()) if filt is None else filt
    numerator = -np.concatenate([[0.0], b])
    # (1 − z⁻¹) A(z) y = −z⁻¹ B(z) (curvature · y + noise), with A = 1 + Σ a_τ z^−τ.
    denominator = np.polynomial.polynomial.polysub(
        np.convolve([1.0, -1.0], [1.0, *a]), curvature * numerator
    )
    impulse = np.eye(1, steps + 1)[0]
    inverse = signal.lfilter([1.0], strategy.column(steps), impulse)
    response = signal.lfilter(numerator, denominator, inverse)
    return float(np.sum(response**2))


class Arm(NamedTuple):
    """One combination of noise, sampler and filter.

    Attributes:
      strategy: the correlation of the noise.
      sampler: the sampler. Each run replaces its seed.
      filter: the filter after the noise, or `None`.
    """

    strategy: matrix.Strategy
    sampler: matrix.CyclicPoissonSampler
    filter: filters.Filter | None


class ArmResult(NamedTuple):
    """Results of an arm at the learning rate of least mean training loss.

    Attributes:
      noise_multiplier: the multiplier calibrated to the ε of all arms.
      learning_rate: the best learning rate.
      accuracy: test accuracy in percent for each seed, (seeds,).
      training_loss: training loss for each seed, (seeds,).
      losses: mean training loss of every learning rate, (learning_rates,).
    """

    noise_multiplier: float
    learning_rate: float
    accuracy: np.ndarray
    training_loss: np.ndarray
    losses: np.ndarray

    def __str__(self) -> str:
        mean, spread = np.mean(self.accuracy), np.std(self.accuracy, ddof=1)
        return (
            f"{mean:.1f} ± {spread:.1f} %, training loss {np.mean(self.training_loss):.3f}, "
            f"multiplier {self.noise_multiplier:.2f}, learning rate {self.learning_rate:g}"
        )


def digits_arms(
    *, batch_size: int = 64, steps: int = 120, bands: Sequence[int] = (2, 4, 8, 16)
) -> dict[str, Arm]:
    """Returns the arms of `compare_correlated_noise`, with and without the filter.

    - "poisson": independent noise with Poisson sampling, which is DP-SGD.
    - "banded b": cyclic Poisson sampling with the optimal b bands.
    - "fixed": full groups in a fixed order without amplification. The noise is independent, has as
      many bands as groups, or follows the optimal buffered strategy.
    """
    size = len(_digits()["train"]["labels"])
    groups = size // batch_size

    def cyclic(length):
        return matrix.CyclicPoissonSampler(size, batch_size, seed=0, cycle_length=length)

    fixed = matrix.CyclicPoissonSampler(size, size // groups, seed=0, cycle_length=groups)
    independent = matrix.BandedToeplitz((1.0,))
    kinds = {
        "poisson": (independent, cyclic(1)),
        **{f"banded {b}": (matrix.optimal_banded_toeplitz(steps, b), cyclic(b)) for b in bands},
        "fixed": (independent, fixed),
        f"fixed, banded {groups}": (matrix.optimal_banded_toeplitz(steps, groups), fixed),
        "fixed, buffered": (matrix.optimal_buffered_toeplitz(steps, groups), fixed),
    }
    smooth = {"": None, " + filter": filters.preset("momentum")}
    return {
        kind + name: Arm(strategy, sampler, filt)
        for kind, (strategy, sampler) in kinds.items()
        for name, filt in smooth.items()
    }


def compare_correlated_noise(
    arms: Mapping[str, Arm],
    *,
    epsilon: float = 1.0,
    steps: int = 120,
    learning_rates: Sequence[float] = (0.125, 0.25, 0.5, 1.0, 2.0),
    seeds: int = 5,
) -> dict[str, ArmResult]:
    """Trains a network on digits with every arm, at equal ε (δ = 1e-4).

    The network is an MLP 64-64-10 with tanh, trained by SGD with automatic clipping. All arms use
    the same learning rates, selected by training loss, and the same seeds for parameters, batches
    and noise.

    With the defaults, test accuracy in percent over 5 seeds:

        noise (multiplier)        alone         with filter
        poisson (1.81)            89.1 ± 1.2    89.5 ± 1.7
        banded 4 (3.38)           88.0 ± 1.5    89.3 ± 1.9
        banded 16 (6.63)          80.7 ± 3.4    88.0 ± 1.7
        fixed (7.80)              62.3 ± 2.4    63.1 ± 4.0
        fixed, banded 22 (7.80)   78.9 ± 2.3    87.1 ± 1.9
        fixed, buffered (8.37)    77.7 ± 2.3    87.0 ± 2.1

    Without amplification, correlated noise with a filter is much better than either alone, and
    within two points of DP-SGD with Poisson sampling. With amplification, it is not better than the
    filter without correlated noise.
    """
    return {
        name: _compare(arm, epsilon, steps, learning_rates, seeds) for name, arm in arms.items()
    }


def _compare(arm, epsilon, steps, learning_rates, seeds):
    data = _digits()
    multiplier = accounting.calibrate(
        epsilon=epsilon, delta=1e-4, steps=steps, sampler=arm.strategy.under(arm.sampler)
    )
    drawn = [
        list(dataclasses.replace(arm.sampler, seed=seed).samples(0, steps)) for seed in range(seeds)
    ]
    indices = jnp.array([[sample.indices for sample in run] for run in drawn])
    masks = jnp.array([[sample.mask for sample in run] for run in drawn])
    grad_fn = clipped_grad(_loss, automatic_clip(1.0))
    train, test = data["train"], data["test"]

    def train_once(seed, learning_rate, indices, masks):
        key = jax.random.key(seed)
        params = _init(jax.random.fold_in(key, 0))
        tx = optax.chain(
            correlated.correlated_noise(
                arm.strategy,
                noise_multiplier=multiplier,
                batch_size=arm.sampler.batch_size,
                key=jax.random.fold_in(key, 1),
            ),
            optax.identity() if arm.filter is None else _low_pass.low_pass(*arm.filter),
            optax.scale(-1.0),
        )

        def step(carry, sample):
            params, state = carry
            rows, mask = sample
            batch = jax.tree.map(lambda x: x[rows], train)
            clipped = grad_fn(gradient_points(state, params), batch, mask)
            updates, state = tx.update(clipped, state, params)
            updates = jax.tree.map(lambda u: learning_rate * u, updates)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), (indices, masks))
        right = jnp.argmax(_logits(params, test["inputs"]), -1) == test["labels"]
        return 100 * jnp.mean(right), jnp.mean(jax.vmap(_loss, (None, 0))(params, train))

    @jax.jit
    def train_all(learning_rate):
        runs = jax.vmap(train_once, (0, None, 0, 0))
        return runs(jnp.arange(seeds), learning_rate, indices, masks)

    accuracies, losses = zip(*(train_all(rate) for rate in learning_rates), strict=True)
    means = np.array([np.mean(loss) for loss in losses])
    best = int(np.argmin(np.where(np.isfinite(means), means, np.inf)))
    return ArmResult(
        multiplier,
        learning_rates[best],
        np.asarray(accuracies[best]),
        np.asarray(losses[best]),
        means,
    )


def _digits() -> dict[str, Any]:
    from dpoptax.training import load_dataset

    data = load_dataset("digits")
    splits = cast(dict[str, dict[str, np.ndarray]], {"train": data.train, "test": data.test})
    return {
        name: {
            "inputs": jnp.asarray(split["inputs"].reshape(len(split["labels"]), -1) - 0.3),
            "labels": jnp.asarray(split["labels"]),
        }
        for name, split in splits.items()
    }


def _init(key):
    first, second = jax.random.split(key)
    return {
        "first": {"w": jax.random.normal(first, (64, 64)) / 8, "b": jnp.zeros(64)},
        "last": {"w": jax.random.normal(second, (64, 10)) / 8, "b": jnp.zeros(10)},
    }


def _logits(params, inputs):
    hidden = jnp.tanh(inputs @ params["first"]["w"] + params["first"]["b"])
    return hidden @ params["last"]["w"] + params["last"]["b"]


def _loss(params, example):
    return optax.losses.softmax_cross_entropy_with_integer_labels(
        _logits(params, example["inputs"]), example["labels"]
    )
