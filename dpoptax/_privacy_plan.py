"""The plan of a private run: its sampler, noise and guarantee."""

import bisect
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa
import numpy as np
import optax

from dpoptax import accounting
from dpoptax._noise.adaptive import QuantileClip, adaptive_gaussian_noise
from dpoptax._noise.correlated import correlated_noise
from dpoptax._noise.gaussian import gaussian_noise
from dpoptax._pricing.checks import Accountant
from dpoptax.accounting._statement import claim_text, multipliers_text
from dpoptax.matrix._strategies import Strategy
from dpoptax.sampling import PoissonSampler, Sampler

if TYPE_CHECKING:
    import jax

    from dpoptax._clip.clip import Clip
    from dpoptax._tree import PyTree
    from dpoptax.matrix._participation import Participation


@dataclasses.dataclass(frozen=True, init=False)
class PrivacyPlan:
    """Holds the sampler, the noise and the privacy budget of a run.

        release_t = (Σ_ξ clip(g(ξ)) + σ C N(0, I)) / B,   t = 0, …, T − 1

    The plan calibrates σ to a target ε, makes the sampler and the noise transform, draws the
    batches and states the guarantee. `print(plan)` shows all of them. The plan uses these parts:
    `accounting.calibrate_noise_multiplier`, a sampler of `dpoptax.sampling`, `gaussian_noise` or
    `correlated_noise`, and `accounting.guarantee`.

    Units: σ is relative to the clipping bound C. N and B count examples, or users if the sampler
    draws users.

    Privacy: if a run draws its batches from the plan, clips with `clipped_grad` and starts its
    chain with `plan.noise(key)`, it has the guarantee `plan.guarantee(opt_state)`. The key and the
    sampler's seed are secret.

    Attributes:
      sampler: the sampler of the batches.
      steps: T, the number of noisy releases.
      noise_multiplier: σ, or a schedule from the first step of each phase to its σ.
      delta: δ of the target and of the statement.
      strategy: the strategy of correlated noise; None for independent noise.
      accountant: "pld", "rdp" or "monte_carlo".
      also: other events on the same data.

    Args:
      steps: T.
      dataset_size: N. Required unless `sampler` is an object.
      batch_size: B, the expected batch size. Required unless `sampler` is an object.
      epsilon: the ε that the whole plan may spend, which determines σ. Pass either this or
        `noise_multiplier`.
      delta: in (0, 1). Required with `epsilon`. By default, the largest power of ten below 1/N, at
        most 1e-5.
      noise_multiplier: σ or a schedule, as for `gaussian_noise`.
      schedule: with `epsilon`, a relative noise multiplier for the first step of each phase.
      sampler: a sampler object, or a function or class of `dpoptax.sampling` that makes one from
        `dataset_size`, `batch_size` and `seed`. An object from `UserTable.sampler` draws users.
      seed: the seed of the sampler that the plan makes. By default, `secrets.randbits(128)`.
      strategy: a strategy of `dpoptax.matrix`.
      accountant: as for `accounting.guarantee`.
      also: as for `accounting.guarantee`. `epsilon` includes these events.

    Raises:
      TypeError: `sampler` is neither a sampler nor makes one.
      ValueError: an argument is missing, out of range, given twice, or differs from the sampler's;
        no σ spends `epsilon`; or the sampler has no event.

    >>> import dpoptax, jax, optax
    >>> plan = dpoptax.PrivacyPlan(dataset_size=1000, batch_size=50, steps=40, noise_multiplier=1)
    >>> tx = optax.chain(plan.noise(jax.random.key(0)), optax.sgd(0.1))
    >>> step, indices, mask = next(iter(plan))
    >>> step, indices.shape == mask.shape == (plan.sampler.padded_size,)
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
    strategy: Strategy | None
    accountant: Accountant
    also: tuple[dpa.DpEvent, ...]

    def __init__(
        self,
        *,
        steps: int,
        dataset_size: int | None = None,
        batch_size: int | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | Mapping[int, float] | None = None,
        schedule: Mapping[int, float] | None = None,
        sampler: Sampler | Callable[..., Sampler] = PoissonSampler,
        seed: int | bytes | None = None,
        strategy: Strategy | None = None,
        accountant: Accountant = "pld",
        also: Sequence[dpa.DpEvent] = (),
    ) -> None:
        made = _make_sampler(sampler, dataset_size, batch_size, seed)
        priced = _priced(made, strategy)
        if (epsilon is None) == (noise_multiplier is None):
            raise ValueError(
                "Pass one of `epsilon` and `noise_multiplier`, got "
                f"epsilon={epsilon}, noise_multiplier={noise_multiplier}."
            )
        if epsilon is None and schedule is not None:
            raise ValueError(
                "`schedule` must be None without `epsilon`. Pass the noise multipliers of the "
                "phases as `noise_multiplier`."
            )
        if strategy is not None and (schedule or isinstance(noise_multiplier, Mapping)):
            raise ValueError(
                "`strategy` must be None under a schedule: correlated noise has one multiplier."
            )
        if epsilon is not None:
            if delta is None:
                raise ValueError("`delta` must be given with `epsilon`, well below 1/N.")
            sigma = accounting.calibrate_noise_multiplier(
                epsilon=epsilon,
                delta=delta,
                steps=steps,
                sampler=priced,
                schedule=schedule,
                accountant=accountant,
                also=also,
            )
            noise_multiplier = sigma
            if schedule is not None:
                noise_multiplier = {first: sigma * ratio for first, ratio in schedule.items()}
        values = {
            "sampler": made,
            "steps": steps,
            "noise_multiplier": noise_multiplier,
            "delta": delta,
            "strategy": strategy,
            "accountant": accountant,
            "also": tuple(also),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "delta", self.guarantee().stated_delta)  # checked, or the default

    @property
    def epsilon(self) -> float:
        """ε of the whole plan at `delta`."""
        return self.guarantee().stated_epsilon

    @property
    def expected_epochs(self) -> float:
        """T B / N."""
        return self.steps * self.sampler.sampling_probability

    def noise(
        self, key: "jax.Array", *, fixed_point: bool = False, clip: "Clip | float | None" = None
    ) -> optax.GradientTransformation:
        """Returns the noise transform, the first transform of the chain.

        This is `correlated_noise` if the plan has a strategy, `adaptive_gaussian_noise` if `clip`
        is an `adaptive_clip`, and `gaussian_noise` otherwise.

        Args:
          key: from `dpoptax.random_key_from_os`; a new one for each run.
          fixed_point: whether the guarantee holds for every bit of a release.
          clip: the clip of all sums. Required for an `adaptive_clip`, and for correlated noise in
            fixed point.

        Raises:
          ValueError: `clip` is missing, or is adaptive under a schedule or a strategy.

        >>> import dpoptax, jax
        >>> plan = PrivacyPlan(dataset_size=100, batch_size=10, steps=5, noise_multiplier=1.0)
        >>> state = plan.noise(jax.random.key(0)).init(jax.numpy.zeros(3))
        >>> dpoptax.ledgers(state)[0].mechanism.batch_size
        10
        """
        batch_size = self.sampler.batch_size
        if isinstance(clip, QuantileClip):
            if self.strategy is not None or isinstance(self.noise_multiplier, Mapping):
                raise ValueError(
                    "`clip` must not be adaptive under a schedule of noise or with correlated "
                    f"noise, got {clip}."
                )
            return adaptive_gaussian_noise(
                clip,
                noise_multiplier=self.noise_multiplier,
                batch_size=batch_size,
                key=key,
                fixed_point=fixed_point,
            )
        if self.strategy is None:
            return gaussian_noise(
                noise_multiplier=self.noise_multiplier,
                batch_size=batch_size,
                key=key,
                fixed_point=fixed_point,
            )
        if fixed_point and clip is None:
            raise ValueError(
                "`clip` must be the clip of all sums for correlated noise in fixed point, got None."
            )
        assert not isinstance(self.noise_multiplier, Mapping)
        return correlated_noise(
            self.strategy,
            noise_multiplier=self.noise_multiplier,
            batch_size=batch_size,
            key=key,
            fixed_point_clip=clip if fixed_point else None,
        )

    def __iter__(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        return self.batches()

    def batches(self, start: int = 0) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields `(step, indices, mask)` for the plan's steps, from `start` on.

        A restored run continues at the number of its releases, `ledgers(opt_state)[0].releases`.
        """
        for step in range(start, self.steps):
            yield step, *self.sampler.sample(step)

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
    ) -> accounting.Guarantee:
        """Returns the guarantee of a run that follows the plan, or of the whole plan.

        Args:
          opt_state: the run's optimizer state, whose ledgers are read. By default, the guarantee is
            that of all planned steps.
          same_batches: as for `accounting.guarantee`.

        Raises:
          ValueError: `accounting.guarantee` raises it.
        """
        if opt_state is None:
            return accounting.planned_guarantee(
                noise_multiplier=self.noise_multiplier,
                steps=self.steps,
                sampler=_priced(self.sampler, self.strategy),
                delta=self.delta,
                accountant=self.accountant,
                also=self.also,
            )
        return accounting.guarantee(
            opt_state,
            self.sampler,
            delta=self.delta,
            accountant=self.accountant,
            same_batches=same_batches,
            also=self.also,
        )

    def __str__(self) -> str:
        planned, sampler = self.guarantee(), self.sampler
        size, batch_size = sampler.dataset_size, sampler.batch_size
        (stage,) = planned.releases
        lines = {
            "data": f"N = {size:,} {sampler.unit}s",
            "batches": f"B = {batch_size:,} expected, q = B/N = {sampler.sampling_probability:.4g},"
            f" drawn by {type(sampler).__name__}",
            "steps": f"T = {self.steps:,}, {self.expected_epochs:.4g} expected epochs",
            "noise": multipliers_text(stage.phases)
            + (
                _stddevs([sigma / batch_size for _, sigma in stage.phases])
                if self.strategy is None
                else f", correlated by {self.strategy}"
            ),
            "privacy": claim_text(
                planned.stated_epsilon, self.delta, sampler.unit, sampler.neighboring_relation
            ),
        }
        return "\n".join(["PrivacyPlan", *(f"  {name:7}  {text}" for name, text in lines.items())])


def _priced(sampler: Sampler, strategy: Strategy | None) -> "Sampler | Participation":
    """Returns the sampler for the accounting, with the strategy if there is one."""
    return sampler if strategy is None else strategy.under(sampler)


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
    made = sampler(**sizes, seed=secrets.randbits(128) if seed is None else seed)
    if not isinstance(made, Sampler):
        raise TypeError(f"`sampler` must make a sampler of dpoptax.sampling, got {made!r}.")
    return made
