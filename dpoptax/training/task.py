"""Describes a run: the result of a config, and the arguments of `fit`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import optax

import dpoptax
from dpoptax.sampling import Sampler
from dpoptax.training.data import streaming
from dpoptax.users import UserTable

if TYPE_CHECKING:
    from dpoptax.accounting import Guarantee


@dataclasses.dataclass(frozen=True)
class PlainPlan:
    """Batches and steps of a baseline without a guarantee, instead of a `PrivacyPlan`.

    Privacy: none. Models that were trained on private data under it must not be published.

    Attributes:
      sampler: the sampler of the batches, without a seed.
      steps: number of steps.
      noise: `noise(key)` returns the noise stage of a method without a proven ε. None: gradients
        are neither clipped nor noised, and summed over the batch divided by its expected size.
      reason: why no ε is stated.

    >>> from dpoptax.sampling import PoissonSampler
    >>> PlainPlan(PoissonSampler(100, 10), steps=5).reason
    'trained without privacy'
    """

    sampler: Sampler
    steps: int
    noise: Callable[[jax.Array], optax.GradientTransformation] | None = None
    reason: str = "trained without privacy"

    delta: ClassVar[None] = None
    fixed_point: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"`steps` must be at least 1, got {self.steps}.")
        if self.sampler.seed is not None:
            raise ValueError("`sampler` must have no seed, because each run draws its own.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Describes a run: the arguments of `fit` that decide its result.

    A config is a function with keyword arguments that returns a `Task`. See
    `docs/guides/command-line.md`.

    Attributes:
      loss_fn: as for `fit`, like all attributes up to `checkpoint_every`.
      params: the initial parameters.
      data: the training examples.
      plan: the privacy plan, or a `PlainPlan`.
      optimizer: the chain for the noisy mean gradient.
      clip: the clip, or its bound.
      grad_fn: a gradient with other options.
      frozen: arrays that the loss uses and that are not trained.
      users: the owners of the examples.
      microbatch_size: number of examples with gradients in memory at once.
      budget: maximum ε.
      evaluate: metrics of the parameters. `dpoptax compare` and `sweep` need an `Evaluation`,
        whose `score` they compare.
      eval_every: steps between evaluations.
      checkpoint_every: steps between checkpoints.
      name: name of the method in tables and figures.
      dataset: name of the data in tables and figures.

    >>> import jax.numpy as jnp
    >>> data = jnp.arange(100.0)
    >>> plan = dpoptax.PrivacyPlan(dataset_size=100, batch_size=50, steps=8, noise_multiplier=2)
    >>> task = Task(loss_fn=lambda x, d: (x - d) ** 2, params=jnp.zeros(()), data=data, plan=plan)
    >>> task.name, task.is_private
    ('DP-SGD', True)
    """

    loss_fn: Callable[..., Any] | None
    params: Any
    data: streaming.Source
    plan: "dpoptax.PrivacyPlan | PlainPlan"
    optimizer: optax.GradientTransformation = dataclasses.field(
        default_factory=lambda: optax.adam(1e-3)
    )
    clip: dpoptax.Clip | float | None = None
    grad_fn: Callable[..., Any] | None = None
    frozen: Any = None
    users: UserTable | None = None
    microbatch_size: Any = None
    budget: float | None = None
    evaluate: Callable[..., Mapping[str, Any] | None] | None = None
    eval_every: int | None = None
    checkpoint_every: int = 100
    name: str = "DP-SGD"
    dataset: str = "data"

    @property
    def is_private(self) -> bool:
        """Whether a guarantee is stated."""
        return isinstance(self.plan, dpoptax.PrivacyPlan) and least_noise(self.plan) > 0

    @property
    def applied_clip(self) -> dpoptax.Clip | float | None:
        """The clip of `fit`; None for plain gradients, or if a given gradient has its own."""
        if isinstance(self.plan, PlainPlan) and self.plan.noise is None:
            return None
        return 1.0 if self.clip is None and self.grad_fn is None else self.clip

    @property
    def evaluation_interval(self) -> int:
        """Number of steps between evaluations; by default a tenth of the plan's."""
        return max(1, self.plan.steps // 10) if self.eval_every is None else self.eval_every

    @property
    def steps(self) -> int:
        """Number of steps within the budget."""
        if self.budget is None or isinstance(self.plan, PlainPlan):
            return self.plan.steps
        return self.plan.steps_within(self.budget)

    def guarantee(self) -> "Guarantee | None":
        """Returns the guarantee of a run that takes all steps, or None without one."""
        if isinstance(self.plan, PlainPlan) or not self.is_private:
            return None
        return dataclasses.replace(self.plan, steps=self.steps).guarantee()


def least_noise(plan: "dpoptax.PrivacyPlan") -> float:
    """Returns the noise multiplier of a plan, or the least one of a schedule."""
    noise = plan.noise_multiplier
    return min(noise.values()) if isinstance(noise, Mapping) else noise
