"""Settings that all configs of the digits share. It is not a config."""

import dataclasses
from typing import Any, Literal

import optax

import dpoptax
from dpoptax.training import CNN, MLP, PlainPlan, Task, classification
from dpoptax.training.data import Dataset, load_digits

_MODELS = {"mlp": lambda: MLP(10), "cnn": lambda: CNN(10), "linear": lambda: MLP(10, widths=())}
_DIRECTIONS = {
    "sgd": optax.identity,
    "momentum": lambda: optax.trace(decay=0.9),
    "adam": optax.scale_by_adam,
}


@dataclasses.dataclass(frozen=True)
class DigitsRun:
    """A small network on the digits of scikit-learn.

    Attributes:
        epsilon: ε of the run at δ = 1e-5, which determines the noise.
        learning_rate: Learning rate.
        optimizer: Optimizer after the method, unless that is one: sgd, momentum 0.9, or adam.
        model: Network: one hidden layer of 64 (mlp), two convolutions (cnn), or none (linear).
        steps: Number of steps.
        batch_size: Expected number of examples in a batch.
        l2_clip_norm: Bound on the l2 norm of an example's gradient.
        microbatch_size: Number of examples with gradients in memory at once. None: the whole batch.
        fixed_point: Whether to add integer noise, so that ε holds for every bit of the parameters.
        seed: Seed of the initial parameters, batches and noise, to repeat a study. Anyone who knows
            it can subtract the noise. None: batches and noise from the operating system.
        held_out: Whether to train on four fifths of the training examples and test on the others.
    """

    epsilon: float = 3.0
    learning_rate: float = 1.5
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    model: Literal["mlp", "cnn", "linear"] = "mlp"
    steps: int = 120
    batch_size: int = 256
    l2_clip_norm: float = 1.0
    microbatch_size: int | None = None
    fixed_point: bool = False
    seed: int | None = None
    held_out: bool = False

    @property
    def data(self) -> Dataset:
        """The images and their labels."""
        return load_digits(held_out=self.held_out)

    def plan(self, **options: Any) -> dpoptax.PrivacyPlan:
        """Returns the plan, with `options` of `PrivacyPlan` such as `strategy`."""
        size = {"dataset_size": self.data.train_size, "batch_size": self.batch_size}
        size = {} if isinstance(options.get("sampler"), dpoptax.sampling.Sampler) else size
        return dpoptax.PrivacyPlan(
            **{
                **size,
                "steps": self.steps,
                "epsilon": self.epsilon,
                "delta": 1e-5,
                "fixed_point": self.fixed_point,
                **options,
            }
        )

    def stddev(self, plan: dpoptax.PrivacyPlan) -> float:
        """Returns the standard deviation of the noise in each coordinate of a mean gradient."""
        return dpoptax.extend.noise_stddev(
            self.l2_clip_norm,
            noise_multiplier=plan.noise_multiplier,
            batch_size=self.batch_size,
        )

    def task(
        self,
        method: optax.GradientTransformation,
        plan: dpoptax.PrivacyPlan | PlainPlan | None = None,
        *,
        name: str,
        is_optimizer: bool = False,
        **options: Any,
    ) -> Task:
        """Returns the task of a method and the optimizer, unless the method is one."""
        direction = optax.identity() if is_optimizer else _DIRECTIONS[self.optimizer]()
        # The rate is part of the state, so runs with other rates share a compiled step.
        rate = optax.inject_hyperparams(optax.scale_by_learning_rate)(self.learning_rate)
        return classification(
            _MODELS[self.model](),
            self.data,
            self.plan() if plan is None else plan,
            seed=self.seed,
            optimizer=optax.chain(method, direction, rate),
            name=name,
            **{
                "clip": self.l2_clip_norm,
                "microbatch_size": self.microbatch_size,
                "eval_every": 10,
                **options,
            },
        )
