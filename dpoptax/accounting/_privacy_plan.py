"""The plan of a private run: its sampler, noise and guarantee."""

import bisect
import copy
import dataclasses
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from dpoptax._pricing.checks import Accountant
from dpoptax._pricing.privacy_event import (
    Composable,
    PrivacyEvent,
    composed,
    key_fingerprint,
    other_events,
)
from dpoptax._release.gaussian import gaussian_noise
from dpoptax._release.random.keys import check_noise_key, words_of
from dpoptax.accounting._calibration import calibrate
from dpoptax.accounting._guarantee import Guarantee
from dpoptax.accounting._runs import guarantee as run_guarantee
from dpoptax.accounting._runs import planned_guarantee
from dpoptax.sampling._base import SEED_BYTES, Sampler
from dpoptax.sampling._batches import Batch, example_loader, read_ahead
from dpoptax.sampling._poisson import PoissonSampler

if TYPE_CHECKING:
    from dpoptax._gradients.clip.clip import Clip
    from dpoptax._support.tree import PyTree
    from dpoptax.matrix._participation import Participation
    from dpoptax.matrix._strategies import Strategy
    from dpoptax.users import UserTable


@dataclasses.dataclass(frozen=True, init=False)
class PrivacyPlan:
    """Holds the sampler, the noise and the privacy budget of a run.

        release_t = (Σ_ξ clip(g(ξ)) + σ C N(0, I)) / B,   t = 0, …, T − 1

    The plan calibrates σ to a target ε, makes the sampler and the noise transform, draws and
    gathers the batches, and states the guarantee. `print(plan)` shows all of them. The plan uses
    these parts: `accounting.calibrate`, a sampler of `dpoptax.sampling`,
    `gaussian_noise` or `correlated_noise`, and `accounting.guarantee`.

    Units: σ is relative to the clipping bound C. N and B count examples, or users if the sampler
    draws users.

    Privacy: if a run draws its batches from the plan, clips with `clipped_grad` and starts its
    chain with `plan.noise(key)`, it has the guarantee `plan.guarantee(opt_state)`. The key and the
    sampler's seed are secret, and each run has its own.

    **Seeds.** Without `seed`, a plan may serve several runs. Each call of `batches`, `draws` or
    `dpoptax.training.fit` is a new run and draws a fresh seed. `new_run()` returns the plan of one
    run, with a fresh seed in `plan.sampler`. Use it to repeat or continue draws. Two runs of a plan
    with a seed draw equal batches: composing their guarantees raises an error.

    Attributes:
      sampler: the sampler of the batches.
      steps: T, the number of noisy releases.
      noise_multiplier: σ, or a schedule from the first step of each phase to its σ, read-only.
      delta: δ of the target and of the statement.
      strategy: the strategy of correlated noise; None for independent noise.
      fixed_point: whether the guarantee holds for every bit of a release.
      accountant: "pld", "rdp" or "monte_carlo".
      also: the events of other releases on the same data.

    Args:
      steps: T.
      dataset_size: N. Required unless `sampler` is an object.
      batch_size: B, the expected batch size. Required unless `sampler` is an object.
      epsilon: the ε that the whole plan may spend, which determines σ.
      delta: in (0, 1). Required with `epsilon`. By default, the largest power of ten below 1/N, at
        most 1e-5.
      noise_multiplier: σ or a schedule, as for `gaussian_noise`. With `epsilon`, omit it, or pass a
        schedule, which the plan scales to spend `epsilon`.
      sampler: a sampler object, or a function or class of `dpoptax.sampling` that makes one from
        `dataset_size`, `batch_size` and `seed`. An object from `UserTable.sampler` draws users.
      seed: the seed of the sampler, for one run. By default, each run draws its own.
      strategy: a strategy of `dpoptax.matrix`.
      fixed_point: whether the guarantee holds for every bit of a release. `noise`, `grid` and
        `dpoptax.training.fit` follow.
      accountant: as for `accounting.guarantee`.
      also: as for `accounting.guarantee`, such as the guarantee of an earlier run. `epsilon`
        includes these events.

    Raises:
      TypeError: `sampler` is neither a sampler nor makes one.
      ValueError: an argument is missing, out of range, given twice, or differs from the sampler's;
        no σ spends `epsilon`; the sampler has no event, or none for the strategy in fixed point; or
        its seed is also that of an event of `also`, or its unit is another one.

    >>> import dpoptax, jax, optax
    >>> plan = dpoptax.PrivacyPlan(dataset_size=1000, batch_size=50, steps=40, noise_multiplier=1)
    >>> tx = optax.chain(plan.noise(jax.random.key(0)), optax.sgd(0.1))
    >>> batch = next(plan.batches(np.zeros((1000, 3))))
    >>> batch.step, batch.examples.shape == (plan.sampler.padded_size, 3)
    (0, True)
    >>> print(plan)
    PrivacyPlan
      data     N = 1,000 examples
      batches  B = 50 expected, q = B/N = 0.05, drawn by PoissonSampler
      steps    T = 40, 2 expected epochs
      noise    multiplier 1, σC/B = 0.02 C in each coordinate of a mean
      privacy  (2.47, 1e-05)-differentially private for one example more or less
    """

    sampler: Sampler
    steps: int
    noise_multiplier: float | Mapping[int, float]
    delta: float
    strategy: "Strategy | None"
    fixed_point: bool
    accountant: Accountant
    also: tuple[PrivacyEvent, ...]

    def __init__(
        self,
        *,
        steps: int,
        dataset_size: int | None = None,
        batch_size: int | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | Mapping[int, float] | None = None,
        sampler: Sampler | Callable[..., Sampler] = PoissonSampler,
        seed: int | bytes | None = None,
        strategy: "Strategy | None" = None,
        fixed_point: bool = False,
        accountant: Accountant = "pld",
        also: Sequence[Composable] = (),
    ) -> None:
        made = _make_sampler(sampler, dataset_size, batch_size, seed)
        given = {"noise_multiplier": noise_multiplier, "delta": delta, "also": other_events(also)}
        terms = {"steps": steps, "strategy": strategy, "accountant": accountant}
        self.__dict__.update(given, sampler=made, fixed_point=fixed_point, **terms)
        if strategy is not None:
            self._check_strategy(strategy)
        if epsilon is None:
            self._check_noise()
        else:
            self._calibrate(epsilon)

    def _calibrate(self, epsilon: float) -> None:
        """Sets the least noise multiplier within `epsilon`, or scales the schedule to it."""
        if self.delta is None:
            raise ValueError("`delta` must be given with `epsilon`, well below 1/N.")
        schedule = self.noise_multiplier
        if not (schedule is None or isinstance(schedule, Mapping)):
            raise ValueError(
                "`noise_multiplier` must be None or a relative schedule with `epsilon`, which "
                f"determines it, got {schedule}."
            )
        terms = {"steps": self.steps, **self._terms}
        sigma = calibrate(epsilon=epsilon, schedule=schedule, sampler=self._sampling, **terms)
        self.__dict__["noise_multiplier"] = sigma
        if schedule is not None:
            phases = {first: sigma * ratio for first, ratio in schedule.items()}
            self.__dict__["noise_multiplier"] = _frozen(phases)

    def _check_noise(self) -> None:
        """Checks the given noise, and sets the default δ."""
        if self.noise_multiplier is None:
            raise ValueError("Pass `epsilon` or `noise_multiplier`, got neither.")
        if isinstance(self.noise_multiplier, Mapping):
            self.__dict__["noise_multiplier"] = _frozen(self.noise_multiplier)
        self.__dict__["delta"] = self.guarantee().stated_delta

    def _check_strategy(self, strategy: "Strategy") -> None:
        """Raises if no ε is known for the strategy with the other arguments."""
        if isinstance(self.noise_multiplier, Mapping):
            raise ValueError(
                "`strategy` must be None under a schedule: correlated noise has one multiplier."
            )
        sampling = strategy.under(self.sampler)
        if self.fixed_point:
            sampling.check_fixed_point()

    @property
    def _sampling(self) -> "Sampler | Participation":
        """The sampler for the accounting, with the strategy if there is one."""
        return self.sampler if self.strategy is None else self.strategy.under(self.sampler)

    @property
    def _terms(self) -> dict[str, Any]:
        """The arguments that calibration and guarantees share."""
        return {"delta": self.delta, "accountant": self.accountant, "also": self.also}

    @property
    def epsilon(self) -> float:
        """ε of the whole plan at `delta`."""
        return self.guarantee().stated_epsilon

    @property
    def expected_epochs(self) -> float:
        """T B / N."""
        return self.steps * self.sampler.sampling_probability

    def noise(
        self, key: "jax.Array", *, clip: "Clip | float | None" = None
    ) -> optax.GradientTransformation:
        """Returns the noise transform, the first transform of the chain.

        This is `correlated_noise` if the plan has a strategy, `adaptive_gaussian_noise` if `clip`
        is an `adaptive_clip`, and `gaussian_noise` otherwise.

        Args:
          key: from `dpoptax.random_key_from_os`; a new one for each run.
          clip: the clip of all sums. Required for an `adaptive_clip`, and for correlated noise in
            fixed point.

        Raises:
          ValueError: `clip` is missing, or is adaptive under a schedule or a strategy; or `key` is
            the key of an event of `also`.

        >>> import dpoptax, jax
        >>> plan = PrivacyPlan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=1.0)
        >>> state = plan.noise(jax.random.key(0)).init(jax.numpy.zeros(3))
        >>> dpoptax.ledgers(state)[0].mechanism.batch_size
        10
        """
        if self.also:
            self._check_new(check_noise_key(key))
        noise: dict[str, Any] = {
            "noise_multiplier": self.noise_multiplier,
            "batch_size": self.sampler.batch_size,
            "key": key,
        }
        if self.strategy is not None:
            return self._correlated_noise(self.strategy, clip, noise)
        if clip is None or isinstance(clip, int | float):
            return gaussian_noise(**noise, fixed_point=self.fixed_point)
        return self._noise_of(clip, noise)

    def _noise_of(self, clip: "Clip", noise: Mapping[str, Any]) -> optax.GradientTransformation:
        """Returns independent noise for a clip, which may be adaptive."""
        from dpoptax._release.adaptive import QuantileClip, adaptive_gaussian_noise

        if not isinstance(clip, QuantileClip):
            return gaussian_noise(**noise, fixed_point=self.fixed_point)
        if isinstance(self.noise_multiplier, Mapping):
            raise _not_adaptive(clip)
        return adaptive_gaussian_noise(clip, **noise, fixed_point=self.fixed_point)

    def _correlated_noise(
        self, strategy: "Strategy", clip: "Clip | float | None", noise: Mapping[str, Any]
    ) -> optax.GradientTransformation:
        from dpoptax._release.adaptive import QuantileClip
        from dpoptax._release.correlated import correlated_noise

        if isinstance(clip, QuantileClip):
            raise _not_adaptive(clip)
        if self.fixed_point and clip is None:
            raise ValueError(
                "`clip` must be the clip of all sums for correlated noise in fixed point, got None."
            )
        fixed = clip if self.fixed_point else None
        return correlated_noise(strategy, **noise, fixed_point_clip=fixed)

    def _check_new(self, key: "jax.Array") -> None:
        """Raises if the key is that of an event of `also`."""
        if not isinstance(key, jax.core.Tracer):
            keys = frozenset([key_fingerprint(words_of(key))])
            composed(PrivacyEvent(self.also[0].dp_event, keys=keys), self.also)

    def grid(self, clip: "Clip | float") -> float | None:
        """Returns `grid` for `clipped_grad`, with which sums in fixed point are exact.

        It is None without `fixed_point`. See `dpoptax.extend.fixed_point_grid`.

        Raises:
          ValueError: the noise multiplier is 0.

        >>> run = {"dataset_size": 100, "batch_size": 10, "steps": 5, "noise_multiplier": 1.0}
        >>> PrivacyPlan(**run).grid(1.0), PrivacyPlan(**run, fixed_point=True).grid(1.0) == 2**-18
        (None, True)
        """
        if not self.fixed_point:
            return None
        from dpoptax._release.fixed_point import fixed_point_grid

        return fixed_point_grid(
            clip, noise_multiplier=self.noise_multiplier, batch_size=self.sampler.batch_size
        )

    def new_run(self) -> "PrivacyPlan":
        """Returns the plan of a new run, with a fresh secret seed in its sampler.

        The seed is `secrets.randbits(128)`, or 32 bytes if the plan's seed is of that type.

        Raises:
          RuntimeError: there are several processes, and each would draw another seed.

        >>> plan = PrivacyPlan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=3.0)
        >>> first, second = plan.new_run(), plan.new_run()
        >>> both = dataclasses.replace(second, also=[first.guarantee()])
        >>> round(first.epsilon, 2), round(both.epsilon, 2)  # independent batches
        (0.33, 0.44)
        >>> dataclasses.replace(first, also=[first.guarantee()])
        Traceback (most recent call last):
        ...
        ValueError: Two of the events must not have the same sampler seed. ...
        """
        if jax.process_count() > 1:
            raise RuntimeError(
                f"`new_run` must be called in a single process, got {jax.process_count()} "
                "processes, and each would draw another seed. Use `seed, key = "
                "dpoptax.training.hosts.shared_secrets()`, and pass the seed to the plan."
            )
        hashed = isinstance(self.sampler.seed, bytes)
        seed = secrets.token_bytes(SEED_BYTES) if hashed else secrets.randbits(128)
        run = copy.copy(self)
        run.__dict__["sampler"] = dataclasses.replace(self.sampler, seed=seed)
        return run

    def batches(
        self,
        data: "PyTree",
        *,
        start: int = 0,
        users: "UserTable | None" = None,
        sharding: "jax.sharding.NamedSharding | None" = None,
    ) -> Iterator[Batch]:
        """Yields the `Batch` of each step of a run: its rows of the data, mask and ids.

        Each leaf of the data must have N rows. A wrong N is an error, since JAX clamps indices
        beyond the end. Rows are gathered in a thread, one step ahead. The batches of a plan and
        their order depend on its seed only. Without a seed, each call is a new run.

        Args:
          data: a tree of NumPy arrays, JAX arrays or memory-mapped arrays, with N rows each.
          start: the first step. A restored run continues at the number of its releases,
            `ledgers(opt_state)[0].releases`, and needs the plan with its seed.
          users: the table of owners that made the sampler, if the plan draws users. The data then
            have a row for each record.
          sharding: how the batch is split over devices, such as `NamedSharding(mesh, P("data"))`.
            Each host reads only the rows of its devices. All hosts need the same data and a plan
            with the same seed, such as one from `dpoptax.training.hosts.shared_secrets`.

        Raises:
          TypeError: a leaf of `data` is not an array with rows.
          ValueError: a leaf of `data` has another number of rows, `users` does not fit the sampler,
            or `start` is not 0 for a plan without a seed.

        >>> plan = PrivacyPlan(dataset_size=100, batch_size=10, steps=2, noise_multiplier=1.0)
        >>> [batch.step for batch in plan.batches({"x": np.zeros((100, 3)), "y": np.zeros(100)})]
        [0, 1]
        >>> plan.batches(np.zeros((90, 3)))
        Traceback (most recent call last):
        ...
        ValueError: `data` must have 100 rows, one for each example of the plan, got 90. ...
        """
        run = self._run(start)
        load = example_loader(data, run.sampler, users, sharding)
        return read_ahead(load, range(start, self.steps))

    def draws(self, start: int = 0) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields `(step, indices, mask)` for the plan's steps, to gather rows by hand.

        Check that the data have N rows. The arguments and errors are those of `batches`.
        """
        run = self._run(start)
        return ((step, *run.sampler.sample(step)) for step in range(start, self.steps))

    def _run(self, start: int) -> "PrivacyPlan":
        """Returns the plan of the run that starts or continues at a step."""
        if self.sampler.seed is not None:
            return self
        if start:
            raise ValueError(
                f"`start` must be 0 for a plan without a seed, got {start}. To continue a run, "
                "keep its plan, `run = plan.new_run()`, or make the plan with the run's `seed`."
            )
        return self.new_run()

    def steps_within(self, budget: float) -> int:
        """Returns the number of the plan's steps that spend at most the ε `budget`.

        Raises:
          ValueError: one step spends more.

        >>> plan = PrivacyPlan(dataset_size=90, batch_size=9, steps=40, noise_multiplier=2.0)
        >>> plan.steps_within(1.0), plan.steps_within(2.0)
        (16, 40)
        """
        if self.epsilon <= budget:
            return self.steps
        planned = self.guarantee()

        def spent(steps: int) -> float:
            assert planned.event_after is not None  # a plan has a sequence of steps
            return dataclasses.replace(planned, event=planned.event_after(steps)).stated_epsilon

        steps = bisect.bisect_right(range(1, self.steps), budget, key=spent)
        if not steps:
            raise ValueError(
                f"One step spends ε = {spent(1):.4g}, more than the budget of {budget}. Raise the "
                "budget, `delta` or the noise multiplier."
            )
        return steps

    def guarantee(
        self, opt_state: "PyTree" = None, *, same_batches: bool | None = None
    ) -> Guarantee:
        """Returns the guarantee of a run that follows the plan, or of the whole plan.

        Args:
          opt_state: the run's optimizer state, whose ledgers are read. By default, the guarantee is
            that of all planned steps.
          same_batches: as for `accounting.guarantee`.

        Raises:
          ValueError: `accounting.guarantee` raises it.
        """
        if opt_state is None:
            noise, sampler = self.noise_multiplier, self._sampling
            return planned_guarantee(
                noise_multiplier=noise, steps=self.steps, sampler=sampler, **self._terms
            )
        return run_guarantee(opt_state, self.sampler, same_batches=same_batches, **self._terms)

    def __str__(self) -> str:
        from dpoptax.accounting._statement import claim_text, multipliers_text

        planned, sampler = self.guarantee(), self.sampler
        size, batch_size = sampler.dataset_size, sampler.batch_size
        (stage,) = planned.releases
        q = sampler.sampling_probability
        # Random allocation draws slightly fewer than B, if B does not divide N.
        expected = "" if math.isclose(size * q, batch_size) else f", {round(size * q, 1):,.12g}"
        rate = f"{q:.4g}" if expected else f"B/N = {q:.4g}"
        lines = {
            "data": f"N = {size:,} {sampler.unit}s",
            "batches": f"B = {batch_size:,}{expected} expected, q = {rate}, drawn by "
            f"{type(sampler).__name__}",
            "steps": f"T = {self.steps:,}, {self.expected_epochs:.4g} expected epochs",
            "noise": multipliers_text(stage.phases)
            + (
                _stddevs([sigma / batch_size for _, sigma in stage.phases])
                if self.strategy is None
                else f", correlated by {self.strategy}"
            )
            + (", in fixed point" if self.fixed_point else ""),
            "privacy": claim_text(
                planned.stated_epsilon, self.delta, sampler.unit, sampler.neighboring_relation
            ),
        }
        return "\n".join(["PrivacyPlan", *(f"  {name:7}  {text}" for name, text in lines.items())])


def _frozen(schedule: Mapping[int, float]) -> Mapping[int, float]:
    """Returns a copy of a schedule that cannot be changed."""
    from dpoptax._pricing.noise_schedule import Schedule

    return Schedule(tuple(schedule.items()))


def _not_adaptive(clip: "Clip") -> ValueError:
    return ValueError(
        "`clip` must not be adaptive under a schedule of noise or with correlated noise, got "
        f"{clip}."
    )


def _stddevs(values: Sequence[float]) -> str:
    most, least = max(values), min(values)
    text = f"{most:.4g} C" if most == least else f"{most:.4g} C to {least:.4g} C"
    return f", σC/B = {text} in each coordinate of a mean"


def _make_sampler(
    sampler: Sampler | Callable[..., Sampler],
    dataset_size: int | None,
    batch_size: int | None,
    seed: int | bytes | None,
) -> Sampler:
    sizes = {"dataset_size": dataset_size, "batch_size": batch_size}
    if isinstance(sampler, Sampler):
        for name, size in sizes.items():
            if size not in (None, own := getattr(sampler, name)):
                raise ValueError(f"`{name}` must be the sampler's, {own}, got {size}.")
        if seed is not None:
            raise ValueError("`seed` must be None if `sampler` is an object, which has its own.")
        return sampler
    if not callable(sampler):
        raise TypeError(
            f"`sampler` must be a sampler or make one, got {sampler!r}. Pass a strategy of "
            "correlated noise as `strategy`."
        )
    for name, size in sizes.items():
        if size is None:
            raise ValueError(f"`{name}` must be given unless `sampler` is an object.")
    made = sampler(**sizes, seed=seed)
    if not isinstance(made, Sampler):
        raise TypeError(f"`sampler` must make a sampler of dpoptax.sampling, got {made!r}.")
    return made
