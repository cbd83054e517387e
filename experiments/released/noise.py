"""Measures the noise and the sensitivity of an update rule, and prices them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpoptax import accounting
from dpoptax.accounting import Accountant
from experiments.released import rules
from experiments.released.rules import Array, ClippedSums, Points, Rule

_DIMENSION, _STEPS, _LARGE = 2001, 60, 1e6


class Measured(NamedTuple):
    """Noise and sensitivity of a rule, both relative to σC and C.

    Attributes:
        noise: Standard deviation of the noise on the released sum, from the second step on.
        same: Change of the sum by an example whose gradient has one direction everywhere.
        opposite: The largest change by an example whose gradient turns around between two of the
            points. NaN for rules with a single point.
        first: noise / sensitivity of the first step.
    """

    noise: float
    same: float
    opposite: float
    first: float

    @property
    def multiplier(self) -> float:
        """The noise multiplier of a release, relative to the calibrated one."""
        return self.noise / float(np.fmax(self.same, self.opposite))


def measure(rule: Rule, *, seed: int = 0) -> Measured:
    """Measures a rule on a random walk by adding an example to an empty batch."""
    rng = np.random.default_rng(seed)
    steps = 0.1 * rng.normal(size=(_STEPS, _DIMENSION))
    steps[:, 0] = 1.0 + rng.random(_STEPS)  # the direction of the example's gradient
    walk = list(np.cumsum(steps, axis=0))
    quiet = np.zeros(_DIMENSION)

    def release(t: int, clipped_sums: ClippedSums, noise: Array) -> Array:
        weights, points = zip(*rule.combinations(walk[: t + 1], t), strict=True)
        return rule.release(clipped_sums(points), weights, t, noise)

    noisy = [
        release(t, lambda points: [quiet for _ in points], rng.normal(size=_DIMENSION))
        for t in range(_STEPS)
    ]

    def moved(t: int, turn: float) -> float:
        return float(np.linalg.norm(release(t, _example(turn), quiet)))

    t = 10
    places = sorted({float(x[0]) for _, x in rule.points(walk[: t + 1], t)})
    turns = [(low + high) / 2 for low, high in zip(places, places[1:], strict=False)]
    return Measured(
        noise=float(np.std(noisy[1:])),
        same=moved(t, -np.inf),
        opposite=max((moved(t, turn) for turn in turns), default=np.nan),
        first=float(np.std(noisy[0])) / moved(0, -np.inf),
    )


def _example(turn: float) -> ClippedSums:
    """Returns the clipped sums of one example with the loss 10⁶ |x_1 − turn|."""

    def clipped_sum(points: Points) -> Array:
        gradient = np.zeros(_DIMENSION)
        gradient[0] = sum(w * _LARGE * (1.0 if x[0] > turn else -1.0) for w, x in points)
        return gradient / max(1.0, float(np.linalg.norm(gradient)))

    return lambda combinations: [clipped_sum(points) for points in combinations]


class Setting(NamedTuple):
    """A training run that a paper's code calibrates.

    Attributes:
        name: Its name in the table.
        rule: The update rule.
        examples: N.
        batch_size: B.
        epochs: Number of epochs.
        accountant: The accountant with which the noise is calibrated.
    """

    name: str
    rule: Rule
    examples: int
    batch_size: int
    epochs: int
    accountant: Accountant

    def prices(self, epsilon: float, measured: Measured) -> tuple[float, float]:
        """Returns σ for a stated ε, and the true ε, at δ = N^−1.1 under Poisson sampling.

        The true ε holds for adding or removing an example.
        """
        run = {
            "delta": self.examples**-1.1,
            "steps": self.epochs * self.examples // self.batch_size,
            "sampling_probability": self.batch_size / self.examples,
        }
        sigma = accounting.calibrate(epsilon=epsilon, accountant=self.accountant, **run)
        noise = {0: sigma * measured.first, 1: sigma * measured.multiplier}
        return sigma, accounting.planned_guarantee(noise_multiplier=noise, **run).stated_epsilon


def settings() -> Sequence[Setting]:
    """Returns the settings of the papers' image experiments."""
    mnist, cifar = 60_000, 50_000
    disk, pmlf = rules.released_disk, rules.released_pmlf
    return (
        Setting("DP-SGD, LP-DPSGD; MNIST", rules.dp_sgd(), mnist, 1000, 25, "rdp"),
        Setting("DP-PMLF, k = 2; MNIST", pmlf(2), mnist, 1000, 25, "rdp"),
        Setting("DP-PMLF, k = 3; MNIST", pmlf(3), mnist, 1000, 25, "rdp"),
        Setting("DP-PMLF, k = 2; CIFAR", pmlf(2), cifar, 1000, 50, "rdp"),
        Setting("DP-PMLF, k = 3; CIFAR", pmlf(3), cifar, 1000, 50, "rdp"),
        Setting("DP-PMLF, k = 4; CIFAR", pmlf(4), cifar, 1000, 20, "rdp"),
        Setting("DiSK, κ = 0.7, γ = 0.5; MNIST", disk(0.7, 0.5), mnist, 5000, 40, "pld"),
        Setting("DiSK, κ = 0.7, γ = 0.5; CIFAR", disk(0.7, 0.5), cifar, 5000, 80, "pld"),
        Setting("DiSK, κ = 0.5, γ = 0.7; CIFAR", disk(0.5, 0.7), cifar, 1000, 120, "pld"),
        Setting("DiSK, κ = 0.9, γ = 0.5; CIFAR", disk(0.9, 0.5), cifar, 5000, 80, "pld"),
        Setting("DiSK, κ = 0.7, γ = 3/7; CIFAR", disk(0.7, 3 / 7), cifar, 5000, 80, "pld"),
    )
