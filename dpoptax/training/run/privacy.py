"""Plans the privacy of a config: sampler, noise multiplier and permitted steps."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import dpoptax
from dpoptax import matrix, sampling
from dpoptax.training.config import TrainConfig
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.training.run import devices, seeds
from dpoptax.training.run.run_plan import RunPlan

if TYPE_CHECKING:
    from dpoptax.training.data.dataset import Dataset


def _in_order(dataset_size: int, batch_size: int, **rest: Any) -> sampling.Sampler:
    """Returns a sampler of whole groups in turn, without an incomplete last group."""
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


def make_run_plan(config: TrainConfig, dataset_size: int, *, owners: str | None = None) -> RunPlan:
    """Plans sampler, noise and steps of a run.

    `dataset_size` is the number of training examples, or of users if the unit is a user. `owners`
    is the hash of their table, which only drawing needs.

    Raises:
        ConfigError: The batch is larger than the data, the sampling is unknown, or it has no
            guarantee.
        ValueError: No noise reaches the target ε, or one step exceeds the budget.
    """
    _check_batches(config, dataset_size)
    seed = config.seed
    if seed is None:
        seed = devices.fresh_seed(bits=256 if config.generator == "chacha20" else 63)
    sampler = _make_sampler(config, dataset_size, seed, owners)
    if not config.method.private:
        return RunPlan(sampler, 0.0, config.steps, None, seed=seed)
    if (unproven := config.method.unproven()) is not None:
        if config.noise_multiplier is None:
            raise ConfigError(
                f"`noise_multiplier` must be given for {config.method.name}, got None. No noise "
                f"can be calibrated for this method: {unproven}. Set noise_multiplier to reproduce "
                "the paper. No ε will be stated."
            )
        return RunPlan(sampler, config.noise_multiplier, config.steps, None, unproven, seed)
    if config.sampling == "shuffled":
        raise ConfigError(
            "`sampling` must not be 'shuffled' for a private method, because the batches of a "
            "shuffled epoch depend on each other. Use sampling='poisson', or use "
            "sampling='balls_in_bins' to draw each example once per epoch."
        )
    promise = _make_privacy_plan(config, sampler)
    steps = _steps_within_budget(config, promise)
    multiplier = promise.noise_multiplier
    assert not isinstance(multiplier, Mapping)  # a config has no schedule of noise
    return RunPlan(sampler, multiplier, steps, promise, seed=seed)


def plan_on_data(config: TrainConfig, dataset: "Dataset") -> RunPlan:
    """Plans a run on a data set, which may draw its users; raises as `make_run_plan`."""
    size, owners = dataset.units(config.unit), dataset.user_owners(config.unit)
    return make_run_plan(config, size, owners=owners)


def _check_batches(config: TrainConfig, dataset_size: int) -> None:
    """Raises if the batch is larger than the data, or the sampling is unknown."""
    if config.batch_size > dataset_size:
        raise ConfigError(
            f"`batch_size` must be at most {dataset_size}, the number of {_counted(config)} of "
            f"dataset={config.dataset!r}, got {config.batch_size}."
        )
    if config.sampling not in SAMPLERS:
        raise unknown_name("sampling", config.sampling, SAMPLERS)


def _make_sampler(
    config: TrainConfig, dataset_size: int, seed: int, owners: str | None
) -> sampling.Sampler:
    """Returns the sampler of a config, with a seed derived from that of the run."""
    return SAMPLERS[config.sampling](
        dataset_size,
        config.batch_size,
        seed=seeds.of_batches(seed, config.generator),
        multiple_of=config.microbatch_size or 1,
        unit=config.unit,
        owners=owners,
        **_turns(config, dataset_size),
    )


def _make_privacy_plan(config: TrainConfig, sampler: sampling.Sampler) -> "dpoptax.PrivacyPlan":
    """Returns the plan of the config's steps, with calibrated or given noise."""
    strategy = config.method.strategy(config.steps)
    if config.fixed_point and strategy is not None:
        try:
            strategy.under(sampler).check_fixed_point()
        except ValueError as error:
            raise ConfigError(
                f"`fixed_point` must be False for method={config.method.name} with "
                f"sampling={config.sampling!r}, got True. {error} Use sampling='cyclic' or "
                "fixed_point=False."
            ) from error
    # `dpoptax` loads the accounting lazily, so that help, which imports this module, stays fast.
    return dpoptax.PrivacyPlan(
        sampler=dataclasses.replace(sampler, seed=None),
        steps=config.steps,
        epsilon=config.epsilon if config.noise_multiplier is None else None,
        delta=config.delta,
        noise_multiplier=config.noise_multiplier,
        strategy=strategy,
        fixed_point=config.fixed_point,
        accountant=config.accountant,
    )


def _steps_within_budget(config: TrainConfig, promise: "dpoptax.PrivacyPlan") -> int:
    """Returns the number of the config's steps that its budget permits."""
    # Computed even without a budget, so that errors of the accounting precede the first step.
    spent = promise.guarantee().epsilon(config.delta)
    if config.epsilon is not None and spent > config.epsilon:
        return promise.steps_within(config.epsilon)
    return config.steps


def _turns(config: TrainConfig, dataset_size: int) -> dict[str, int]:
    """Returns the sampler options on the participation of an example."""
    if config.sampling == "cyclic":
        return {"cycle_length": config.method.cycle_length}
    if config.sampling == "min_separation":
        return {"separation": config.method.cycle_length}
    if config.sampling != "random_allocation":
        return {}
    # Participations equal epochs, so that the period of the sampler is the whole run.
    floor = max(1, config.steps * config.batch_size // dataset_size)
    runs = {-(-k * dataset_size // config.batch_size): k for k in (floor, floor + 1)}
    if config.steps not in runs:
        steps = " or ".join(str(steps) for steps in runs)
        raise ConfigError(
            "`steps` must be a whole number of epochs with sampling='random_allocation', got "
            f"{config.steps} steps of batch_size={config.batch_size} for {dataset_size} "
            f"{_counted(config)}. Set steps={steps}, or use sampling='balls_in_bins'."
        )
    return {"participations": runs[config.steps]}


def _counted(config: TrainConfig) -> str:
    return "users" if config.unit == "user" else "training examples"
