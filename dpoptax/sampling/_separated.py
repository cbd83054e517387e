"""Minimum separation: each record is drawn at most once in any b steps."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpoptax import _pricing
from dpoptax._pricing.participation_chains import SeparatedChain
from dpoptax.sampling._chain_sampler import ChainSampler, LastStretch, Stretch, batches_of

if TYPE_CHECKING:
    import dp_accounting as dpa


@dataclass(frozen=True, kw_only=True)
class MinSeparationSampler(ChainSampler):
    """Draws each record with probability p, unless drawn in the last b − 1 steps.

        p = B/(N − (b − 1) B)

    Records are independent of each other. The run starts in the stationary distribution, so a
    record is in every step with probability B/N. b = 1 is Poisson sampling. If b = N/B, p is 1:
    every record takes part in every b-th step, and its first step is secret and uniform. With a
    larger b, the number of participations of a record varies less, and correlated noise may have
    more bands (`dpoptax.matrix`).

    The sampler keeps about 2N numbers. It draws steps in their order, so a distant step takes the
    time of those before it.

    A draw larger than `max_batch_size` is cut to a uniformly random subset. By default a step is
    cut with probability 10^-18. All accountants include this probability in δ.

    Privacy: "replace-special": a record is replaced by one that contributes zero; N is public. ε is
    for consecutive releases from step 0 on. "monte_carlo" prices the sampling nearly tightly. "pld"
    and "rdp" use an upper bound: Poisson sampling with probability p, or, for correlated noise, one
    Gaussian of the greatest sensitivity.

    Attributes:
      seed: an integer, for NumPy's PCG64.
      separation: b; b · batch_size is at most dataset_size.
      max_batch_size: draws are cut to this size, rounded up to a multiple of `multiple_of`;
        between B and N. None: so large that 1 draw in 10^18 is cut.

    Raises:
      ValueError: an argument is out of range.

    Source: Dong and Ganesh, "Privacy amplification for BandMF via b-min-sep subsampling" (2026).

    >>> sampler = MinSeparationSampler(dataset_size=6, batch_size=2, seed=0, separation=3)
    >>> sampler.participation_probability
    1.0
    >>> sorted(int(i) for s in sampler.samples(0, 3) for i in s.indices[s.mask])
    [0, 1, 2, 3, 4, 5]
    """

    separation: int = 1
    max_batch_size: int | None = None

    _described = ("overflow_probability", "separation", "participation_probability")
    _counts: ClassVar = {"separation": "1 is Poisson sampling"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.seed, bytes):
            raise ValueError(
                "`seed` must be an integer: minimum separation is drawn by NumPy's PCG64. Take one "
                "from secrets.randbits(128)."
            )
        if self.separation * self.batch_size > self.dataset_size:
            raise ValueError(
                "`separation` times `batch_size` must be at most `dataset_size`, "
                f"{self.dataset_size}, got {self.separation} times {self.batch_size}. Records that "
                "rest for separation − 1 steps cannot fill the batches."
            )

    @property
    def participation_probability(self) -> float:
        """p, the probability that a record takes part in a step if it may."""
        resting = (self.separation - 1) * self.batch_size
        return self.batch_size / (self.dataset_size - resting)

    @property
    def chain(self) -> SeparatedChain:
        """The law of a record's participations: probability p, then b − 1 steps of rest."""
        return SeparatedChain(self.separation, self.participation_probability)

    @property
    def _stretch(self) -> int:
        return -(-self.dataset_size // self.batch_size)

    def _draw_stretch(self, index: int, last: LastStretch | None) -> Stretch:
        """Draws the waits between the participations of each record, which are independent."""
        if last is None or last[0] > index:
            last = -1, Stretch([], self._first_waits())
        begun, stretch = last
        for i in range(begun + 1, index + 1):
            stretch = self._next_stretch(self._pcg64(i), stretch.waits)
        return stretch

    def _first_waits(self) -> np.ndarray:
        """Draws the first step of each record in the stationary distribution.

        It is 0, …, b − 1 with probability B/N each, and b + j with probability (B/N) (1 − p)^(j+1).
        """
        rng, size = self._pcg64(), self.dataset_size
        soon = rng.random(size) < self.separation * self.batch_size / size
        late = self.separation - 1 + rng.geometric(self.participation_probability, size)
        return np.where(soon, rng.integers(self.separation, size=size), late)

    def _next_stretch(self, rng: np.random.Generator, waits: np.ndarray) -> Stretch:
        waits, steps, records = waits.copy(), [], []
        now = np.arange(len(waits))
        while len(now := now[waits[now] < self._stretch]):
            steps.append(waits[now])
            records.append(now)
            tries = rng.geometric(self.participation_probability, len(now))
            waits[now] += self.separation - 1 + tries
        batches = batches_of(_joined(steps), _joined(records), self._stretch)
        return Stretch(batches, waits - self._stretch)

    def _bound(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        return _pricing.custom_events.separated_event(
            noise_multiplier,
            steps,
            probability=self.participation_probability,
            separation=self.separation,
            overflow=self.full_probability,
        )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *parts])
