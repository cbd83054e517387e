"""The base classes of samplers."""

import abc
import functools
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, get_args

import numpy as np

from dpoptax import _pricing
from dpoptax._pricing.checks import Unit
from dpoptax._support.argument_checks import integer, seed_integer
from dpoptax.sampling._draws import OVERFLOW_PROBABILITY, Draws, Pcg64, largest_draw

if TYPE_CHECKING:
    import dp_accounting as dpa

    from dpoptax._random.shake256 import Shake256

SEED_BYTES = 32
"""The length of a seed for SHAKE-256."""

# Methods that decide which records are drawn.
_DRAWING = (
    *("sample", "samples", "_draw_period", "_draws", "_keep", "_order", "_pad", "_pcg64"),
    "_shake256",
)
# The entries of `describe` that all samplers have.
_DESCRIBED = (
    *("generator", "neighboring_relation", "dataset_size", "batch_size"),
    *("sampling_probability", "padded_size"),
)


def checked_step(step: int) -> int:
    """Returns the number of a step as an int."""
    remedy = "steps are counted from 0, and drawn outside of jit, ahead of a scan by samples(0, T)"
    return integer("step", step, 0, remedy)


class Sample(NamedTuple):
    """Records of one step.

    Attributes:
      indices: (padded_size,) int64 in [0, dataset_size), in random order. Entries with a False
        `mask` are 0, so all entries are valid indices.
      mask: (padded_size,) bool, True for the entries that were drawn.
    """

    indices: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True)
class Sampler(abc.ABC):
    """Draws the batch of each step and computes the privacy event of the draws.

    All arguments except `dataset_size` and `batch_size` are keywords.

    Attributes:
      dataset_size: N, the number of records. With `dpoptax.users`, a record is a user.
      batch_size: B, the expected number of records in a step; the divisor of the noisy sum.
      seed: secret. Either a non-negative integer of any size, for NumPy's PCG64, or 32 bytes from
        `secrets.token_bytes(32)`, for SHAKE-256, a cryptographic generator. With SHAKE-256, draws
        follow exactly the priced distribution and take time and memory proportional to N. Each
        run needs its own seed: two runs with one seed draw equal batches. By default None, for a
        sampler that is only priced and cannot draw.
      multiple_of: `padded_size` is a multiple of this. Pass the micro-batch size.
      unit: "example" or "user", the meaning of an index and the unit of the privacy guarantee.
        `dpoptax.users.UserTable.sampler` sets it.
      owners: `UserTable.owners` of the table whose users are drawn, or None.
    """

    dataset_size: int
    batch_size: int
    _: KW_ONLY
    seed: int | bytes | None = field(default=None, repr=False)  # secret, so not in messages
    multiple_of: int = 1
    unit: Unit = "example"
    owners: str | None = field(default=None, repr=False)  # computed from private data

    neighboring_relation: ClassVar[str]
    _described: ClassVar[tuple[str, ...]] = ()
    """The further numbers of `describe`."""
    _counts: ClassVar[dict[str, str]] = {
        "dataset_size": "count the training records, or users",
        "batch_size": "choose between 1 and dataset_size",
        "multiple_of": "give the microbatch size, or 1",
    }
    """The fields that are integers of at least 1, each with the remedy of its error."""

    def __init_subclass__(cls, **options: object) -> None:
        """Raises a `TypeError` if the class draws in its own way without stating its event."""
        super().__init_subclass__(**options)
        drawn, stated = min(_place(cls, name) for name in _DRAWING), _place(cls, "dp_event")
        if stated > drawn:
            overridden = next(name for name in _DRAWING if _place(cls, name) == drawn)
            parent = cls.__mro__[stated].__name__
            raise TypeError(
                f"`{cls.__name__}` must define `dp_event`, because it overrides `{overridden}` and "
                f"would be priced as a `{parent}`. If its records are drawn with the same "
                f"probabilities, write `dp_event = {parent}.dp_event` in it."
            )

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise ValueError(f"`unit` must be one of {get_args(Unit)}, got {self.unit!r}.")
        if self.owners is not None and self.unit != "user":
            raise ValueError(f"`unit` must be 'user' with `owners`, got {self.unit!r}.")
        for name, remedy in self._counts.items():
            # NumPy integers become Python integers, for hashing, equality and JSON.
            object.__setattr__(self, name, integer(name, getattr(self, name), 1, remedy))
        object.__setattr__(self, "seed", _checked_seed(self.seed))
        if self.batch_size > self.dataset_size:
            raise ValueError(
                f"`batch_size` must be at most `dataset_size`, {self.dataset_size}, got "
                f"{self.batch_size}."
            )

    @property
    def generator(self) -> str:
        """The generator of the seed's type: "PCG64", or the cryptographic "SHAKE-256"."""
        return "SHAKE-256" if isinstance(self.seed, bytes) else "PCG64"

    @abc.abstractmethod
    def sample(self, step: int) -> Sample:
        """Returns the records of a step, a function of the seed and the step only.

        Use each draw for one release. Ledgers assume a separate draw for each release, and several
        releases of one draw cost more. Continue the count of steps across epochs.

        A class that overrides this method must also define `dp_event`.
        """

    @abc.abstractmethod
    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Returns the event of `steps` noisy clipped sums over this sampler's batches."""

    @property
    def padded_size(self) -> int:
        """The length of every sample, a static shape."""
        return self._padded(self.batch_size)

    @property
    def sampling_probability(self) -> float:
        """B / N, the probability that a given record is in a given step."""
        return self.batch_size / self.dataset_size

    @property
    def law(self) -> str:
        """The distribution of the draws as text, without seed, owners and padding.

        The ledger stores its checksum. A field with its default is left out, so that a new one
        changes no stored text.
        """
        free = ("seed", "multiple_of", "owners")
        values = {f: getattr(self, f.name) for f in fields(self) if f.name not in free}
        given = [f"{f.name}={x!r}" for f, x in values.items() if repr(x) != repr(f.default)]
        return f"{type(self).__name__}({', '.join(given)})"

    @property
    def independent_steps(self) -> bool:
        """True if the steps of a run can be priced one by one and composed."""
        return True

    def samples(self, start: int, stop: int) -> Iterator[Sample]:
        """Yields the samples of steps start, ..., stop − 1."""
        return (self.sample(step) for step in range(start, stop))

    def describe(self) -> dict[str, object]:
        """Returns the sampling as JSON values for a run's record, without the seed."""
        names = (*_DESCRIBED, *self._described)
        return {"sampling": type(self).__name__, **{name: getattr(self, name) for name in names}}

    def _padded(self, length: int) -> int:
        return -(-length // self.multiple_of) * self.multiple_of

    def _draws(self, *key: int) -> Draws:
        """Returns the draws of the seed and a key, independent of those of other keys."""
        if isinstance(self.seed, bytes):
            return self._shake256(*key)
        return Pcg64(self._pcg64(*key))

    # Both keys include the class, so samplers of two classes with one seed are independent.

    def _pcg64(self, *key: int) -> np.random.Generator:
        if self.seed is None:
            raise ValueError(
                "The sampler must have a seed to draw, got None. Pass "
                "`seed=secrets.randbits(128)`, a new one for each run, or use the sampler of "
                "`plan.new_run()`."
            )
        assert isinstance(self.seed, int)
        # The spawn key is hashed separately from the seed: (1, 23) and (12, 3) differ.
        spawn_key = (*type(self).__name__.encode(), *key)
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=spawn_key))

    def _shake256(self, *key: int) -> "Shake256":
        from dpoptax._random.shake256 import shake256

        assert isinstance(self.seed, bytes)
        return shake256(self.seed, type(self).__name__, key)

    def _keep(self, key: int, draw: Callable[[], Any]) -> Any:
        """Returns the result for a key, and keeps it until another key is drawn.

        `draw` must return the same for the same key: each sampler keeps one result for speed only,
        and runs may take turns.
        """
        kept = _kept_results(self)
        last = kept[0]
        if last is None or last[0] != key:
            last = kept[0] = key, draw()
        return last[1]

    def _order(self, key: int) -> np.ndarray:
        """Returns a random order of all records, a function of the seed and a key."""
        # The keys of steps and epochs have one number.
        order: np.ndarray = self._keep(
            key, lambda: self._draws(key, 0).permutation(self.dataset_size)
        )
        return order

    def _pad(self, drawn: np.ndarray, draws: Draws) -> Sample:
        """Returns records and padding in random order.

        An added record replaces padding or another record. All others keep their places, so their
        sum is rounded as before. In ascending order, it would move the records after it into other
        blocks.
        """
        indices = np.zeros(self.padded_size, np.int64)
        indices[: len(drawn)] = np.sort(drawn)
        places = draws.permutation(self.padded_size)
        return Sample(indices[places], (np.arange(self.padded_size) < len(drawn))[places])


# The cached list is mutable: `_keep` replaces its only entry.
@functools.lru_cache(maxsize=64)
def _kept_results(sampler: Sampler) -> list[Any]:
    return [None]


def _place(cls: type, name: str) -> int:
    """Returns the place of the definition of a method in the method resolution order."""
    return next((i for i, c in enumerate(cls.__mro__) if name in vars(c)), len(cls.__mro__))


def _checked_seed(seed: int | bytes | None) -> int | bytes | None:
    if seed is None:
        return None
    if not isinstance(seed, bytes):
        return seed_integer(seed)
    if len(seed) != SEED_BYTES:
        raise ValueError(
            f"`seed` must have {SEED_BYTES} bytes, got {len(seed)}. Take them from "
            f"secrets.token_bytes({SEED_BYTES})."
        )
    return seed


class CutSampler(Sampler):
    """Cuts large draws to a uniformly random subset.

    The largest size is `max_batch_size`. If that is None, draws almost never exceed the largest
    size.
    """

    max_batch_size: int | None = None  # a class that offers the option makes it a field
    _overflow: ClassVar[float] = OVERFLOW_PROBABILITY
    _described: ClassVar[tuple[str, ...]] = ("overflow_probability",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_batch_size is None:
            return
        largest = integer("max_batch_size", self.max_batch_size, 1, "choose at least batch_size")
        if not self.batch_size <= largest <= self.dataset_size:
            raise ValueError(
                f"`max_batch_size` must be between `batch_size`, {self.batch_size}, and "
                f"`dataset_size`, {self.dataset_size}, got {largest}. Leave it out for a safe "
                "default."
            )
        object.__setattr__(self, "max_batch_size", largest)

    def uncut(self) -> Self:
        """Returns the sampler with the default size, which almost never cuts a draw."""
        options: dict[str, Any] = {"max_batch_size": None}
        return replace(self, **options)

    @property
    def _rates(self) -> tuple[int, float]:
        """The number of records that a step may draw, and their mean probability.

        With several probabilities, the size of a draw has a smaller tail above its mean than the
        binomial with their mean (Hoeffding, 1956).
        """
        return self.dataset_size, self.sampling_probability

    @property
    def padded_size(self) -> int:
        """The length of every sample: the size of the largest draw, or more if that is B.

        If the mask of a draw is not used, padding counts as examples. The noise stage detects this
        by the number of rows, so a padded draw never has exactly B rows.
        """
        padded = self._largest == self.batch_size < self._rates[0]
        return self._largest + self.multiple_of if padded else self._largest

    @property
    def _largest(self) -> int:
        """The size to which larger draws are cut."""
        return self._padded(self.max_batch_size or largest_draw(*self._rates, self._overflow))

    @property
    def overflow_probability(self) -> float:
        """The probability that a step's draw is cut."""
        return self._at_least(self._largest + 1)

    @property
    def full_probability(self) -> float:
        """The probability that N other records fill a step's batch, which δ covers.

        It is 0 if the largest batch holds all records, so that no draw can be cut.
        """
        return 0.0 if self._largest >= self._rates[0] else self._at_least(self._largest)

    def _at_least(self, number: int) -> float:
        return _pricing.events.full_probability(*self._rates, number)
