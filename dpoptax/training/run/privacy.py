"""Plans the privacy of a run: sampler, noise multiplier, permitted steps."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import dpoptax
from dpoptax import matrix, sampling
from dpoptax.training.config import TrainConfig
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.training.run import devices, seeds

if TYPE_CHECKING:
    from dpoptax import accounting


def _in_order(dataset_size: int, batch_size: int, **rest: Any) -> sampling.Sampler:
    """Draws whole groups in turns. The last examples, fewer than a batch, are never drawn."""
    groups = dataset_size // batch_size
    return matrix.CyclicPoissonSampler(groups * batch_size, batch_size, cycle_length=groups, **rest)


SAMPLERS: dict[str, Callable[..., sampling.Sampler]] = {
    "poisson": sampling.PoissonSampler,
    "fixed_size": sampling.FixedSizeSampler,
    "shuffled": sampling.ShuffledSampler,
    "cyclic": matrix.CyclicPoissonSampler,
    "in_order": _in_order,
    "balls_in_bins": sampling.RandomAllocationSampler,
    "random_allocation": sampling.RandomAllocationSampler,
    "min_separation": sampling.MinSeparationSampler,
}


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The privacy of a run, as it is fixed before the first step.

    Attributes:
        sampler: Draws the batches and owns the matching accounting event. It holds the run's seed,
            or one that is derived from it.
        noise_multiplier: Noise standard deviation relative to the clip norm; 0 if not private.
        permitted_steps: Number of steps that the budget allows, at most those of the config.
        delta: Failure probability; None if not private.
        accountant: "pld", "rdp" or "monte_carlo".
        unproven: Reason why no ε may be stated in spite of noise. None: one may be stated.
        strategy: Strategy of correlated noise. None for independent noise.
        seed: The config's seed, or the one that was drawn.
    """

    sampler: sampling.Sampler
    noise_multiplier: float
    permitted_steps: int
    delta: float | None
    accountant: "accounting.Accountant"
    unproven: str | None = None
    strategy: matrix.Strategy | None = None
    seed: int = dataclasses.field(default=0, repr=False)

    @property
    def priced(self) -> Any:
        """The sampler, or with correlated noise the participation, as the accounting takes it."""
        return _priced(self.sampler, self.strategy)

    @property
    def cost(self) -> tuple[Any, ...]:
        """Everything that ε follows from: equal for plans with the same price."""
        return (*self._release.values(), self.permitted_steps, self.unproven)

    def epsilon(self, steps: int) -> float | None:
        """Returns ε after `steps` steps, or None without a promise."""
        if self.delta is None or self.noise_multiplier == 0:
            return None
        return _epsilon(**self._release, steps=steps)

    def bounds(self, steps: Sequence[int]) -> dict[int, float | None]:
        """Returns an upper bound on ε after each of `steps` steps, cheap enough to show at each.

        See `accounting.Guarantee.epsilon_curve`. Budgets and summaries rest on `epsilon`.
        """
        if self.delta is None or self.noise_multiplier == 0:
            return dict.fromkeys(steps)
        return dict(zip(steps, _curve(**self._release, steps=tuple(steps)), strict=True))

    @property
    def _release(self) -> dict[str, Any]:
        return {
            "sampler": _without_seed(self.priced),
            "noise_multiplier": self.noise_multiplier,
            "delta": self.delta,
            "accountant": self.accountant,
        }


def make_plan(config: TrainConfig, dataset_size: int) -> RunPlan:
    """Plans sampler, noise and steps of a run on `dataset_size` training examples.

    If ε protects users, it is the number of users.

    Raises:
        ConfigError: A batch larger than the data, or an unknown sampling.
        ValueError: From the accounting: private training on shuffled batches, a target ε that no
            noise reaches, a budget that not even one step fits into.
    """
    if config.batch_size > dataset_size:
        raise ConfigError(
            f"batch_size={config.batch_size} exceeds the {dataset_size} {_counted(config)} of "
            f"dataset={config.dataset!r}; give at most {dataset_size}"
        )
    if config.sampling not in SAMPLERS:
        raise unknown_name("sampling", config.sampling, SAMPLERS)
    seed = config.seed
    if seed is None:
        seed = devices.fresh_seed(seeds.bits(config.generator))
    sampler = SAMPLERS[config.sampling](
        dataset_size,
        config.batch_size,
        seed=seeds.of_batches(seed, config.generator),
        multiple_of=config.microbatch_size or 1,
        unit=config.unit,
        **_turns(config, dataset_size),
    )
    if not config.method.private:
        return RunPlan(sampler, 0.0, config.steps, None, config.accountant, seed=seed)
    if (unproven := config.method.unproven()) is not None:
        if config.noise_multiplier is None:
            raise ConfigError(
                f"noise_multiplier=None, and no noise can be calibrated for {config.method.name}: "
                f"{unproven}. Give noise_multiplier to reproduce the paper; no ε will be stated"
            )
        return RunPlan(
            sampler,
            config.noise_multiplier,
            config.steps,
            None,
            config.accountant,
            unproven,
            seed=seed,
        )
    if config.sampling == "shuffled":
        raise ConfigError(
            "sampling='shuffled' has no privacy guarantee: batches of a shuffled epoch depend on "
            "each other, and ε of Poisson samples would be too small for them; give "
            "sampling='poisson', or sampling='balls_in_bins' for each example once an epoch"
        )
    strategy = config.method.strategy(config.steps)
    priced = _priced(sampler, strategy)  # raises, with the reason, where the two do not fit
    if config.fixed_point and isinstance(priced, matrix.Participation):
        try:
            priced.check_fixed_point()
        except ValueError as error:
            raise ConfigError(
                f"fixed_point=True for method={config.method.name} with sampling="
                f"{config.sampling!r}: {error}; give sampling='cyclic', or fixed_point=False"
            ) from error
    noise_multiplier, permitted = _noise_and_steps(
        _without_seed(priced),
        epsilon=config.epsilon,
        delta=config.delta,
        noise_multiplier=config.noise_multiplier,
        steps=config.steps,
        accountant=config.accountant,
    )
    return RunPlan(
        sampler,
        noise_multiplier,
        permitted,
        config.delta,
        config.accountant,
        strategy=strategy,
        seed=seed,
    )


def _turns(config: TrainConfig, dataset_size: int) -> dict[str, int]:
    """Returns the options of samplers on how often an example takes part."""
    if config.sampling == "cyclic":
        return {"cycle_length": config.method.cycle_length}
    if config.sampling == "min_separation":
        return {"separation": config.method.cycle_length}
    if config.sampling != "random_allocation":
        return {}
    # As often as the run has epochs: the steps in which it does so are then those of the run.
    floor = max(1, config.steps * config.batch_size // dataset_size)
    runs = {-(-k * dataset_size // config.batch_size): k for k in (floor, floor + 1)}
    if config.steps not in runs:
        steps = " or ".join(str(steps) for steps in runs)
        raise ConfigError(
            f"steps={config.steps} at batch_size={config.batch_size} are not a whole number of "
            f"epochs of {dataset_size} {_counted(config)}, and random allocation lets each take "
            f"part equally often: give steps={steps}, or sampling='balls_in_bins'"
        )
    return {"participations": runs[config.steps]}


def _counted(config: TrainConfig) -> str:
    return "users" if config.unit == "user" else "training examples"


@functools.lru_cache(maxsize=256)
def _noise_and_steps(
    sampler: Any,
    *,
    epsilon: float | None,
    delta: float,
    noise_multiplier: float | None,
    steps: int,
    accountant: "accounting.Accountant",
) -> tuple[float, int]:
    """Returns the noise multiplier, and how many of `steps` steps stay within `epsilon`."""
    sampler.dp_event(1.0, 1)  # raises, with the reason, where the sampling has no guarantee
    release: Any = {"sampler": sampler, "delta": delta, "accountant": accountant}
    if noise_multiplier is None:
        assert epsilon is not None  # a config has one of the two
        noise_multiplier = dpoptax.accounting.calibrate_noise_multiplier(
            **release, epsilon=epsilon, steps=steps
        )
    # By the function that counts the spent ε, also for a calibrated multiplier and without a
    # budget, so that errors of the accounting show before the first step.
    release["noise_multiplier"] = noise_multiplier
    spent = _epsilon(**release, steps=steps)
    if epsilon is not None and spent > epsilon:
        steps = dpoptax.accounting.calibrate_steps(**release, epsilon=epsilon)
    return noise_multiplier, steps


@functools.lru_cache(maxsize=4096)
def _epsilon(**release: Any) -> float:
    return dpoptax.accounting.epsilon(**release)


@functools.lru_cache(maxsize=256)
def _curve(*, steps: tuple[int, ...], delta: float, **release: Any) -> tuple[float, ...]:
    planned = dpoptax.accounting.planned_guarantee(
        steps=max(steps, default=0), delta=delta, **release
    )
    return tuple(planned.epsilon_curve(steps, delta).tolist())


def _priced(sampler: sampling.Sampler, strategy: matrix.Strategy | None) -> Any:
    return sampler if strategy is None else strategy.under(sampler)


def _without_seed(sampler: Any) -> Any:
    """Removes the seed, on which ε does not depend, so that runs over seeds share the caches."""
    if isinstance(sampler, matrix.Participation):
        return dataclasses.replace(sampler, sampler=_without_seed(sampler.sampler))
    return dataclasses.replace(sampler, seed=0)
