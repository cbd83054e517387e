"""The plan of a private run: its sampler, noise and guarantee."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpoptax._pricing.checks import Accountant
from dpoptax._pricing.noise_schedule import Schedule
from dpoptax._pricing.privacy_event import Composable, other_events
from dpoptax.accounting._calibration import calibrate
from dpoptax.runs._plan_terms import PlanTerms
from dpoptax.runs._private_run import PrivateRun, continued, shared_key
from dpoptax.sampling._base import Sampler
from dpoptax.sampling._poisson import PoissonSampler

if TYPE_CHECKING:
    import jax

    from dpoptax._random.keys import Generator
    from dpoptax._support.tree import PyTree
    from dpoptax.matrix._participation import Strategy


_LARGEST_MULTIPLIER = 1e4
"""The largest noise multiplier of a run next to other events. No step learns under such noise."""


@dataclasses.dataclass(frozen=True, init=False)
class PrivacyPlan(PlanTerms):
    """Describes a private run before it starts: sampler, noise, steps and privacy budget.

        release_t = (Σ_ξ clip(g(ξ)) + σ C N(0, I)) / B,   t = 0, …, T − 1

    The plan calibrates σ to a target ε and states prices; `print(plan)` shows them. It is a value:
    it holds no secret, and several runs may follow it. `new_run()` starts one use of it, a
    `PrivateRun` with its own noise key and batches.

    Units: σ is relative to the clipping bound C. N and B count examples, or users if the sampler
    draws users.

    Attributes:
      sampler: the sampler of the batches, without a seed.
      steps: T, the number of noisy releases.
      noise_multiplier: σ, or a schedule from the first step of each phase to its σ, read-only.
      delta: δ of the target and of the statement.
      strategy: the strategy of correlated noise; None for independent noise.
      fixed_point: whether the guarantee holds for every bit of a release.
      accountant: "pld" or "rdp".
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
      sampler: a sampler object without a seed, or a function or class of `dpoptax.sampling` that
        makes one from `dataset_size` and `batch_size`. An object from `UserTable.sampler` draws
        users.
      strategy: a strategy of `dpoptax.matrix`.
      fixed_point: whether the guarantee holds for every bit of a release. `PrivateRun.noise`,
        `grid` and `dpoptax.training.fit` follow.
      accountant: as for `accounting.guarantee`.
      also: as for `accounting.guarantee`, such as the guarantee of an earlier run. `epsilon`
        includes these events.

    Raises:
      TypeError: `sampler` is neither a sampler nor makes one.
      ValueError: an argument is missing, out of range, given twice, or differs from the sampler's;
        the sampler has a seed; no σ spends `epsilon`; the sampler has no event, or none for the
        strategy in fixed point; or its unit is not that of an event of `also`.

    >>> plan = PrivacyPlan(dataset_size=1000, batch_size=50, steps=40, noise_multiplier=1)
    >>> plan.sampler.padded_size, round(plan.epsilon, 2)
    (105, 2.47)
    >>> print(plan)
    PrivacyPlan
      data     N = 1,000 examples
      batches  B = 50 expected, q = B/N = 0.05, drawn by PoissonSampler
      steps    T = 40, 2 expected epochs
      noise    multiplier 1, σC/B = 0.02 C in each coordinate of a mean
      privacy  (2.47, 1e-05)-differentially private for one example more or less
    """

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
        strategy: "Strategy | None" = None,
        fixed_point: bool = False,
        accountant: Accountant = "pld",
        also: Sequence[Composable] = (),
    ) -> None:
        made = _make_sampler(sampler, dataset_size, batch_size)
        given = {"noise_multiplier": noise_multiplier, "delta": delta, "also": other_events(also)}
        terms = {"steps": steps, "strategy": strategy, "accountant": accountant}
        # A frozen dataclass with its own `__init__` cannot assign its fields.
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
        sigma = calibrate(epsilon=epsilon, schedule=schedule, sampler=self._scheme, **terms)
        # Other events that spend the whole budget leave a run only under enormous noise.
        if self.also and sigma > _LARGEST_MULTIPLIER:
            raise ValueError(
                f"`epsilon` must leave a budget to the run, got {epsilon}, of which the events in "
                f"`also` spend nearly all: the noise multiplier would be {sigma:.3g}. `epsilon` is "
                "that of the run and of these events together."
            )
        self.__dict__["noise_multiplier"] = sigma
        if schedule is not None:
            # `calibrate` returned the factor of the relative schedule.
            phases = tuple((first, sigma * ratio) for first, ratio in schedule.items())
            self.__dict__["noise_multiplier"] = Schedule(phases)

    def _check_noise(self) -> None:
        """Checks the given noise, and sets the default δ."""
        if self.noise_multiplier is None:
            raise ValueError("Pass `epsilon` or `noise_multiplier`, got neither.")
        if isinstance(self.noise_multiplier, Mapping):
            self.__dict__["noise_multiplier"] = Schedule(tuple(self.noise_multiplier.items()))
        # A guarantee without δ states the default one.
        self.__dict__["delta"] = self.guarantee().stated_delta

    def _check_strategy(self, strategy: "Strategy") -> None:
        """Raises if no ε is known for the strategy with the other arguments."""
        if isinstance(self.noise_multiplier, Mapping):
            raise ValueError(
                "`strategy` must be None under a schedule: correlated noise has one multiplier."
            )
        participation = strategy.under(self.sampler)
        if self.fixed_point:
            participation.check_fixed_point()

    def new_run(
        self, key: "jax.Array | None" = None, *, generator: "Generator" = "threefry"
    ) -> PrivateRun:
        """Starts a run of the plan, with its own secret noise key and batches.

        Several hosts of one run must all call it at the same point of the program: they share the
        key that one of them draws.

        Args:
          key: the noise key, new for each run, such as `jax.random.key(0)` for a run that can be
            repeated. By default, it is drawn from the operating system.
          generator: that of a drawn key, as for `dpoptax.random_key_from_os`. With "chacha20",
            noise and batches are cryptographic.

        Raises:
          ValueError: the key is that of an event of `also`.

        >>> plan = PrivacyPlan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=3.0)
        >>> run, other = plan.new_run(), plan.new_run()
        >>> run.plan == other.plan
        True
        """
        return PrivateRun(self, shared_key(generator) if key is None else key)

    def continue_run(self, opt_state: "PyTree") -> PrivateRun:
        """Returns the run that an optimizer state belongs to, after the steps that it counts.

        The state holds the noise key and the number of releases, so a restored checkpoint is all
        that a run needs. Repeated steps have the same batches and the same noise: continue with the
        same data, loss and optimizer.

        Args:
          opt_state: a state of the chain that starts with `PrivateRun.noise`.

        Raises:
          ValueError: the state holds another number of noise stages than one, or other noise or
            another sampler than that of the plan.
        """
        return continued(self, opt_state)

    def __getattr__(self, name: str) -> Any:
        """Raises for an unknown name, and says where a run has it."""
        run = (
            f". A plan is a value: start a use of it, `run = plan.new_run()`, and take `run.{name}`"
        )
        hint = run if name in ("noise", "batches", "draws") else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


def _make_sampler(
    sampler: Sampler | Callable[..., Sampler],
    dataset_size: int | None,
    batch_size: int | None,
) -> Sampler:
    sizes = {"dataset_size": dataset_size, "batch_size": batch_size}
    if isinstance(sampler, Sampler):
        for name, size in sizes.items():
            if size not in (None, drawn := getattr(sampler, name)):
                raise ValueError(f"`{name}` must be the sampler's, {drawn}, got {size}.")
        return _without_seed(sampler)
    if not callable(sampler):
        raise TypeError(
            f"`sampler` must be a sampler or make one, got {sampler!r}. Pass a strategy of "
            "correlated noise as `strategy`."
        )
    for name, size in sizes.items():
        if size is None:
            raise ValueError(f"`{name}` must be given unless `sampler` is an object.")
    made = sampler(**sizes)
    if not isinstance(made, Sampler):
        raise TypeError(f"`sampler` must make a sampler of dpoptax.sampling, got {made!r}.")
    return _without_seed(made)


def _without_seed(sampler: Sampler) -> Sampler:
    """Returns the sampler of a plan, or raises if it is that of one run."""
    if sampler.seed is not None:
        raise ValueError(
            "`sampler` must have no seed, because a plan may have several runs. Each run draws its "
            "own, `plan.new_run()`, or `plan.new_run(key)` for a run that can be repeated."
        )
    return sampler
