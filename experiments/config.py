"""Defines the config of an experiment: published data, or published weights."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, cast, get_args

import flax.linen as nn
import jax
import numpy as np
import optax

import dpoptax
from dpoptax import matrix, sampling
from dpoptax.sampling import Sampler
from dpoptax.training import (
    Config,
    ConfigError,
    Dataset,
    PlainPlan,
    Task,
    average_params,
    classification,
    config_of,
    load_configs,
)
from dpoptax.training.classifier import Variables, initial_variables
from dpoptax.training.data import streaming
from dpoptax.training.errors import unknown_name
from dpoptax.training.run.seeds import params_key
from experiments.data import PUBLISHED
from experiments.data.dictionary import Dictionary
from experiments.data.features import FeatureMap
from experiments.data.published_data import PublishedSpec
from experiments.data.scattering import Colors, Scattering
from experiments.data.tokens import Tokens
from experiments.methods import DPSGD, Augmented, Method
from experiments.models import MODELS, pretrained
from experiments.models.published_models import PUBLISHED_MODELS, build_published, check_kind
from experiments.models.transformer import Lora

Features = Literal["none", "scattering", "dictionary"]
"""Features that replace images."""

DIRECTIONS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": optax.identity,
    "momentum": lambda: optax.trace(decay=0.9),
    "adam": optax.scale_by_adam,
    "adamw": lambda: optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.01)),
}
"""Optimizers by name, without their learning rate."""

SCHEDULES: dict[str, Callable[[int], optax.Schedule]] = {
    "constant": lambda steps: optax.constant_schedule(1.0),
    "linear": lambda steps: optax.linear_schedule(1.0, 0.0, steps),
    "cosine": lambda steps: optax.cosine_decay_schedule(1.0, steps),
    "warmup_cosine": lambda steps: optax.warmup_cosine_decay_schedule(
        0.0, 1.0, max(1, steps // 20), max(2, steps)
    ),
}
"""Schedules of the learning rate by name, relative to the peak."""

CLIPS: dict[str, Callable[[float], dpoptax.Clip]] = {
    "l2": dpoptax.l2_clip,
    "auto_s": dpoptax.automatic_clip,
    "auto_v": lambda bound: dpoptax.automatic_clip(bound, gamma=0.0),
    "psac": dpoptax.contrib.psac_clip,
    "normalized": dpoptax.normalized_clip,
    "adaptive": dpoptax.contrib.adaptive_clip,
    "per_layer": dpoptax.per_layer_clip,
    "auto_s_per_layer": lambda bound: dpoptax.per_layer_clip(dpoptax.automatic_clip(bound)),
}
"""Functions from the clip norm to a clip, by name."""


def _in_order(dataset_size: int, batch_size: int, **rest: Any) -> Sampler:
    """Returns a sampler of whole groups in turn, without an incomplete last group."""
    groups = dataset_size // batch_size
    return matrix.CyclicPoissonSampler(groups * batch_size, batch_size, cycle_length=groups, **rest)


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "poisson": sampling.PoissonSampler,
    "fixed_size": sampling.FixedSizeSampler,
    "shuffled": sampling.ShuffledSampler,
    "cyclic": matrix.CyclicPoissonSampler,
    "in_order": _in_order,
    "balls_in_bins": sampling.RandomAllocationSampler,
}
"""Functions from sizes to a sampler, by name."""


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """Configures training on published data or from published weights.

    With `noise_multiplier=None`, the noise is calibrated so that `steps` steps spend `epsilon` at
    `delta`. Otherwise `epsilon` is a budget.

    Attributes:
        method: Method: gradient points, and the filter of the noisy gradient.
        dataset: digits; mnist, fashion_mnist, cifar10 and cifar100; sst2, qnli, mnli and qqp.
        data_dir: Directory with the files of the data set, if it has files.
        model: Name of a model of `experiments.models`.
        steps: Number of optimizer steps.
        batch_size: Expected number of examples per step. Every sum is divided by it.
        microbatch_size: Number of examples with gradients in memory at once. None: the whole batch.
        optimizer: Optimizer of the filtered gradient: sgd, momentum, adam or adamw.
        learning_rate: Peak learning rate.
        schedule: Schedule of the learning rate: constant, linear, cosine or warmup_cosine.
        parameter_ema: Decay of a moving average of the parameters, which is evaluated and saved
            instead of them. None: no average.
        epsilon: Target ε of the calibration, or the budget. None: no budget.
        delta: δ of (ε, δ)-differential privacy.
        noise_multiplier: Noise standard deviation relative to the clip norm. None: calibrated.
        fixed_point: Whether to add integer noise, so that ε holds for every bit.
        clip: Geometry of the clip: l2, auto_s, auto_v, psac, normalized or adaptive. per_layer and
            auto_s_per_layer split the bound over the arrays of parameters.
        l2_clip_norm: Bound on the l2 norm of one example's gradient.
        sampling: poisson, fixed_size, balls_in_bins, cyclic, in_order, or shuffled, which has no
            guarantee.
        accountant: pld or rdp.
        seed: Seed of the initial parameters, the batches and the noise, to repeat a study.
        held_out: Whether to train on four fifths of the training examples and test on the others.
        checkpoint_every: Steps between checkpoints.
        eval_every: Steps between evaluations on the test split.
        features: Features that replace images. none: the images. scattering: fixed means of wavelet
            moduli. dictionary: responses to many patches drawn from a random process.
        feature_groups: Number of groups of scattering channels, each normalized over one example.
        feature_colors: Channels for scattering: given, or opponent for sum and differences.
        pretrained: Folder of a published model, with config.json, model.safetensors and, for texts,
            the files of the tokenizer. Training starts from its weights.
        sequence_length: Number of tokens per example.
        lora_rank: Rank of the trained correction to each projection of a published model. None: all
            weights are trained.
        lora_alpha: The correction is multiplied by lora_alpha / lora_rank.
        lora_projections: Names of the corrected projections. Without names: query and value.

    Raises:
        ConfigError: A field is out of range. The message names field, value and remedy.
    """

    method: Method = DPSGD()
    dataset: str = "digits"
    data_dir: Path | None = None
    model: str = "mlp"
    steps: int = 120
    batch_size: int = 256
    microbatch_size: int | None = None
    optimizer: str = "sgd"
    learning_rate: float = 1.0
    schedule: str = "constant"
    parameter_ema: float | None = None
    epsilon: float | None = 3.0
    delta: float = 1e-5
    noise_multiplier: float | None = None
    fixed_point: bool = False
    clip: str = "l2"
    l2_clip_norm: float = 1.0
    sampling: str = "poisson"
    accountant: Literal["pld", "rdp"] = "pld"
    seed: int | None = None
    held_out: bool = False
    checkpoint_every: int = 100
    eval_every: int = 10
    features: Features = "none"
    feature_groups: int | None = 27
    feature_colors: Colors = "given"
    pretrained: Path | None = None
    sequence_length: int = 128
    lora_rank: int | None = None
    lora_alpha: float = 16.0
    lora_projections: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise ConfigError(f"`method` must be a Method, got {self.method!r}.")
        named: dict[str, Iterable[str]] = {
            "features": get_args(Features),
            "feature_colors": get_args(Colors),
            "clip": CLIPS,
            "schedule": SCHEDULES,
            "optimizer": DIRECTIONS,
            "sampling": SAMPLERS,
        }
        for field, known in named.items():
            if getattr(self, field) not in known:
                raise unknown_name(field, getattr(self, field), known)
        if self.features != "none" and isinstance(self.method, Augmented):
            raise ConfigError(
                f"`features` must be 'none' for method={self.method.name}, which alters the images "
                f"of each step, got {self.features!r}. Features are computed once. Use another "
                "method, or features='none'."
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON values."""
        return {**config_of(self).described(), "seed": self.seed}

    def task(self) -> Task:
        """Returns the task. Without the files of the data, its data are shapes.

        Raises:
            ConfigError: The model does not fit the data or the checkpoint.
            ValueError: The sampling has no guarantee with this method, or no noise reaches ε.
        """
        data, known = self.data(), self._has_data
        model = self.build_model(data.num_classes)
        plan = self.plan(data)
        if self.sampling == "in_order":  # without an incomplete last group
            whole = cast(dict[str, Any], data.train)
            size = plan.sampler.dataset_size
            data = dataclasses.replace(data, train={k: x[:size] for k, x in whole.items()})
        made = classification(
            model,
            data,
            plan,
            seed=self.seed,
            transform_loss=self.method.loss,
            variables=self.variables(model, data),
            optimizer=self.following(plan),
            clip=self._clip,
            microbatch_size=self.microbatch_size,
            budget=self.epsilon if self._has_budget(plan) else None,
            eval_every=self.eval_every,
            checkpoint_every=self.checkpoint_every,
            name=self.method.name,
        )
        if known:
            return made
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made.data)
        return dataclasses.replace(made, data=shapes)

    @property
    def _has_data(self) -> bool:
        return self.data_dir is not None or self.dataset not in PUBLISHED

    def data(self) -> Dataset:
        """Returns the data, or zeros of the published size that take no memory."""
        tokens = Tokens(self.pretrained, self.sequence_length)
        spec = PublishedSpec(self.dataset, self.data_dir, tokens, self._feature_map)
        if not self._has_data:
            return spec.zeros()
        data = _loaded(spec)
        return data.for_selection() if self.held_out else data

    def plan(self, data: Dataset) -> dpoptax.PrivacyPlan | PlainPlan:
        """Returns the plan: sampler, noise and steps."""
        method, size = self.method, data.train_size
        if self.batch_size > size:
            raise ConfigError(
                f"`batch_size` must be at most {size}, the number of training examples of "
                f"dataset={self.dataset!r}, got {self.batch_size}."
            )
        turns = {"cycle_length": method.cycle_length} if self.sampling == "cyclic" else {}
        sampler = SAMPLERS[self.sampling](
            size, self.batch_size, multiple_of=self.microbatch_size or 1, **turns
        )
        if not method.private:
            return PlainPlan(sampler, self.steps)
        if (reason := method.unproven()) is not None:
            return self._unproven(sampler, reason)
        if self.sampling == "shuffled":
            raise ConfigError(
                "`sampling` must not be 'shuffled' for a private method, because the batches of a "
                "shuffled epoch depend on each other. Use sampling='poisson', or use "
                "sampling='balls_in_bins' to draw each example once per epoch."
            )
        return dpoptax.PrivacyPlan(
            sampler=sampler,
            steps=self.steps,
            epsilon=self.epsilon if self.noise_multiplier is None else None,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            strategy=method.strategy(self.steps),
            fixed_point=self.fixed_point,
            accountant=self.accountant,
        )

    def _unproven(self, sampler: Sampler, reason: str) -> PlainPlan:
        """Returns the plan of a method without a proof, by default with the noise of DP-SGD."""
        multiplier = self.noise_multiplier
        if multiplier is None:
            counterpart = dpoptax.PrivacyPlan(
                sampler=sampler,
                steps=self.steps,
                epsilon=self.epsilon,
                delta=self.delta,
                accountant=self.accountant,
            )
            multiplier = cast(float, counterpart.noise_multiplier)

        def noise(key: jax.Array) -> optax.GradientTransformation:
            release = {"noise_multiplier": multiplier, "batch_size": self.batch_size, "key": key}
            return cast(optax.GradientTransformation, self.method.noise(**release))

        return PlainPlan(sampler, self.steps, noise, reason)

    def _has_budget(self, plan: dpoptax.PrivacyPlan | PlainPlan) -> bool:
        return self.noise_multiplier is not None and not isinstance(plan, PlainPlan)

    @property
    def _clip(self) -> dpoptax.Clip:
        return CLIPS[self.clip](self.l2_clip_norm)

    def stddev(self, plan: dpoptax.PrivacyPlan | PlainPlan) -> float:
        """Returns the standard deviation of each coordinate of a release, NaN if it has none."""
        if isinstance(plan, PlainPlan) or getattr(self._clip, "encodes", False):
            return 0.0 if isinstance(plan, PlainPlan) and plan.noise is None else float("nan")
        return dpoptax.extend.noise_stddev(
            self._clip,
            noise_multiplier=cast(float, plan.noise_multiplier),
            batch_size=self.batch_size,
        )

    def following(
        self,
        plan: dpoptax.PrivacyPlan | PlainPlan,
        filter_: optax.GradientTransformation | None = None,
    ) -> optax.GradientTransformation:
        """Returns filter, optimizer, learning rate, and the average of the parameters if any."""
        stddev = self.stddev(plan)
        own = self.method.direction(stddev) if self.method.private else None
        # The rate is part of the state, so runs with other rates share a compiled step.
        rate = optax.inject_hyperparams(optax.scale_by_learning_rate)(self.learning_rate)
        return optax.chain(
            self.method.filter(stddev) if filter_ is None else filter_,
            DIRECTIONS[self.optimizer]() if own is None else own,
            optax.scale_by_schedule(SCHEDULES[self.schedule](self.steps)),
            rate,
            *([] if self.parameter_ema is None else [average_params(self.parameter_ema)]),
        )

    def build_model(self, num_classes: int) -> nn.Module:
        """Builds the model that `model` names, with LoRA if `lora_rank` is given.

        Raises:
            ConfigError: The model does not fit the data or the checkpoint.
        """
        known = PUBLISHED.get(self.dataset)
        check_kind(self.model, self.dataset, "images" if known is None else known.kind)
        if self.model in PUBLISHED_MODELS:
            lora = None
            if self.lora_rank is not None:
                lora = Lora(self.lora_rank, self.lora_alpha, self.lora_projections)
            return build_published(
                self.model, num_classes, self.pretrained, lora, self.sequence_length
            )
        for name in ("pretrained", "lora_rank"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"`{name}` must be None for model={self.model!r}, which has no published "
                    f"weights, got {getattr(self, name)!r}. Omit it."
                )
        return MODELS[self.model](num_classes)

    def variables(self, model: nn.Module, data: Dataset) -> Variables:
        """Returns the initial variables, with the published weights of `pretrained`.

        Without the files of the data, they are shapes.
        """
        if self.pretrained is None and self.model in PUBLISHED_MODELS and self._has_data:
            raise ConfigError(
                f"`pretrained` must be given for model={self.model!r}, which starts from published "
                "weights, got None. Pass --pretrained, a directory with config.json and "
                "model.safetensors."
            )
        inputs = streaming.read(data.train, np.zeros(1, np.int64))["inputs"]
        first = jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype)
        init = functools.partial(initial_variables, model)
        if not self._has_data:
            return cast(Variables, jax.eval_shape(init, first, jax.random.key(0)))
        variables = init(np.zeros(first.shape, first.dtype), params_key(self.seed))
        if self.pretrained is None:
            return variables
        return Variables(**pretrained.load_weights(self.pretrained, model, variables._asdict()))

    @property
    def _feature_map(self) -> FeatureMap | None:
        if self.features == "none":
            return None
        if self.features == "dictionary":
            return Dictionary()
        return Scattering(groups=self.feature_groups, colors=self.feature_colors)


@functools.lru_cache(maxsize=2)
def _loaded(spec: PublishedSpec) -> Dataset:
    """Reads data once in a process, for the many runs of a comparison."""
    return spec.load()


def settings_of(config: Config) -> ExperimentConfig:
    """Returns the experiment that a config runs, with its values.

    Raises:
        ConfigError: The config is not an `ExperimentConfig`.
    """
    names = [field.name for field in dataclasses.fields(ExperimentConfig)]
    if list(config.flags) != names:
        raise ConfigError(f"The config {config.name} of {config.source} is not an experiment.")
    return ExperimentConfig(**{name: flag.default for name, flag in config.flags.items()})


def load_experiments(path: str | Path) -> dict[str, ExperimentConfig]:
    """Reads the experiment configs of a file; see `load_configs`.

    Raises:
        ConfigError: As for `load_configs`, or a config has another class.
    """
    return {name: settings_of(config) for name, config in load_configs(path).items()}
