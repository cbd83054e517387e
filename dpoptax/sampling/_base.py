"""What all samplers share."""

import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from dpoptax._pricing.checks import integer
from dpoptax._pricing.participation_chains import Chain
from dpoptax._random.shake256 import SEED_BYTES, Shake256, shake256
from dpoptax.sampling._draws import (
    Draws,
    Pcg64,
    checked_largest,
    largest_rare_draw,
    largest_usual_draw,
)

if TYPE_CHECKING:
    import dp_accounting as dpa

Unit = Literal["example", "user"]


def checked_step(step: int) -> int:
    """The number of a step, as an int."""
    remedy = "steps are counted from 0, and drawn outside of jit, ahead of a scan by samples(0, T)"
    return integer("step", step, 0, remedy)


class Sample(NamedTuple):
    """The records of one step.

    Attributes:
      indices: (padded_size,) int64 in [0, dataset_size), in random order; 0 where `mask` does not
        hold, so that gathering with them is always valid.
      mask: (padded_size,) bool, True for the entries that were drawn.
    """

    indices: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True)
class Sampler(abc.ABC):
    """What all samplers share.

    Attributes:
      dataset_size: N, the number of records; of users with `dpoptax.users`, and so below.
      batch_size: B, the expected number of records in a step; the divisor of the noisy sum.
      seed: secret. A non-negative integer of any size, for NumPy's PCG64; or 32 bytes, from
        `secrets.token_bytes(32)`, for SHAKE-256: a cryptographic generator, of whose bits every
        draw has exactly the law that is priced, in time and memory of the order of N.
      multiple_of: `padded_size` is a multiple of this; give the microbatch size.
      unit: what an index stands for, "example" or "user". The privacy guarantee is about one of
        them. `dpoptax.users.UserTable.sampler` sets it.
    """

    dataset_size: int
    batch_size: int
    seed: int | bytes = field(repr=False)  # secret: it is in no message
    multiple_of: int = 1
    unit: Unit = field(default="example", kw_only=True)

    neighbouring_relation: ClassVar[str]

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise ValueError(f"`unit` must be one of {get_args(Unit)}, got {self.unit!r}.")
        limits = {
            "dataset_size": (1, "count the training records, or users"),
            "batch_size": (1, "choose between 1 and dataset_size"),
            "multiple_of": (1, "give the microbatch size, or 1"),
        }
        for name, (minimum, remedy) in limits.items():
            # NumPy integers become Python's, for the sake of hashing, equality and JSON.
            object.__setattr__(self, name, integer(name, getattr(self, name), minimum, remedy))
        object.__setattr__(self, "seed", _checked_seed(self.seed))
        if self.batch_size > self.dataset_size:
            raise ValueError(
                f"batch_size={self.batch_size} is above dataset_size={self.dataset_size}; "
                "lower it, or take dataset_size for full batches"
            )

    @property
    def generator(self) -> str:
        """What draws, which the seed decides: "PCG64", or the cryptographic "SHAKE-256"."""
        return "SHAKE-256" if isinstance(self.seed, bytes) else "PCG64"

    @abc.abstractmethod
    def sample(self, step: int) -> Sample:
        """The records of a step, a function of (seed, step) alone.

        For one release: a ledger takes each for one of a draw of its own, and several of one draw
        cost more. So count steps on through all epochs.
        """

    @abc.abstractmethod
    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """What `steps` noisy clipped sums over this sampler's batches reveal."""

    @property
    def padded_size(self) -> int:
        """The length of every sample, a static shape."""
        return self._padded(self.batch_size)

    @property
    def sampling_probability(self) -> float:
        """B / N, the probability that a given record is in a given step."""
        return self.batch_size / self.dataset_size

    @property
    def independent_steps(self) -> bool:
        """Whether any steps of a run can be priced apart from the others, and prices composed."""
        return True

    def samples(self, start: int, stop: int) -> Iterator[Sample]:
        """The samples of steps start, ..., stop - 1."""
        return (self.sample(step) for step in range(start, stop))

    def describe(self) -> dict[str, object]:
        """How batches were drawn, for a run's record: JSON values, and never the seed."""
        return {
            "sampling": type(self).__name__,
            "generator": self.generator,
            "neighbouring_relation": self.neighbouring_relation,
            "dataset_size": self.dataset_size,
            "batch_size": self.batch_size,
            "sampling_probability": self.sampling_probability,
            "padded_size": self.padded_size,
        }

    def _padded(self, length: int) -> int:
        return -(-length // self.multiple_of) * self.multiple_of

    def _draws(self, *key: int) -> Draws:
        """What is drawn by the seed and a key, apart from what is by others."""
        return Pcg64(self._pcg64(*key)) if isinstance(self.seed, int) else self._shake256(*key)

    # The class is part of both, so that two kinds of sampler with one seed are independent.

    def _pcg64(self, *key: int) -> np.random.Generator:
        assert isinstance(self.seed, int)
        # A spawn key is hashed apart from the entropy: seed 1, step 23 is not seed 12, step 3.
        spawn_key = (*type(self).__name__.encode(), *key)
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=spawn_key))

    def _shake256(self, *key: int) -> Shake256:
        assert isinstance(self.seed, bytes)
        return shake256(self.seed, type(self).__name__, key)

    def _pad(self, drawn: np.ndarray, draws: Draws) -> Sample:
        """Records and padding in random order: one record more takes a padded place, or another's.

        All others stay where they were, and their sum is rounded as it was. In ascending order a
        record would push those behind it into other blocks.
        """
        indices = np.zeros(self.padded_size, np.int64)
        indices[: len(drawn)] = np.sort(drawn)
        places = draws.permutation(self.padded_size)
        return Sample(indices[places], (np.arange(self.padded_size) < len(drawn))[places])


def _checked_seed(seed: int | bytes) -> int | bytes:
    if not isinstance(seed, bytes):
        remedy = "take a fresh one from secrets.randbits(128), or secrets.token_bytes(32)"
        return integer("seed", seed, 0, remedy)
    if len(seed) != SEED_BYTES:
        raise ValueError(
            f"seed has {len(seed)} bytes, and SHAKE-256 is keyed by {SEED_BYTES}: take them from "
            f"secrets.token_bytes({SEED_BYTES})"
        )
    return seed


class CutSampler(Sampler):
    """A sampler whose larger draws are cut to a uniformly random subset.

    To `max_batch_size`, or where it is None to what draws hardly ever exceed.
    """

    max_batch_size: int | None
    _hardly_exceeded = staticmethod(largest_usual_draw)

    def __post_init__(self) -> None:
        super().__post_init__()
        largest = checked_largest(self.max_batch_size, self.batch_size, self.dataset_size)
        object.__setattr__(self, "max_batch_size", largest)

    @property
    def padded_size(self) -> int:
        """The length of every sample: that of the largest draw, and more where that is B.

        A draw without its mask would count padding for examples. So it never has the B rows of a
        batch without padding, by which the noise stage tells the two apart.
        """
        padded = self._largest == self.batch_size < self.dataset_size
        return self._largest + self.multiple_of if padded else self._largest

    @property
    def _largest(self) -> int:
        """The size that larger draws are cut to."""
        rates = self.dataset_size, self.sampling_probability
        return self._padded(self.max_batch_size or self._hardly_exceeded(*rates))

    @property
    def overflow_probability(self) -> float:
        """The probability that a step's draw is cut."""
        from scipy import stats

        return float(stats.binom.sf(self._largest, self.dataset_size, self.sampling_probability))

    @property
    def full_probability(self) -> float:
        """The probability that N other records fill a step's batch, which is taken out of δ."""
        from scipy import stats

        return float(
            stats.binom.sf(self._largest - 1, self.dataset_size, self.sampling_probability)
        )


class ChainSampler(CutSampler):
    """A sampler whose records take part by a Markov chain each, apart from all others.

    What correlated noise costs under it is priced by Monte Carlo (`dpoptax.matrix`).
    """

    neighbouring_relation: ClassVar[str] = "replace-special"
    _hardly_exceeded = staticmethod(largest_rare_draw)

    @property
    def independent_steps(self) -> bool:
        """Not: a record's steps depend on each other."""
        return False

    @property
    @abc.abstractmethod
    def chain(self) -> Chain:
        """When a record takes part."""

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """The first `steps` noisy sums, the overflow of batches included."""
        from dpoptax._pricing import events

        return events.participation_event(
            noise_multiplier,
            steps,
            column=(1.0,),
            chain=self.chain,
            overflow=self.full_probability,
            bound=self._bound(noise_multiplier, steps),
        )

    @abc.abstractmethod
    def _bound(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """What reveals no less and can be composed."""
