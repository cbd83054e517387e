"""Builds the clip and the optax chain of a config."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import optax

import dpoptax
from dpoptax.training import config_files
from dpoptax.training.config import TrainConfig
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.training.methods import Method
from dpoptax.training.run.averaging import average_params
from dpoptax.training.run.seeds import Keys
from dpoptax.training.run.step_keys import step_keys

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
    "auto_v": lambda l2_clip_norm: dpoptax.automatic_clip(l2_clip_norm, gamma=0.0),
    "psac": dpoptax.contrib.psac_clip,
    "normalized": dpoptax.normalized_clip,
    "per_layer": dpoptax.per_layer_clip,
    "auto_s_per_layer": lambda l2_clip_norm: dpoptax.per_layer_clip(
        dpoptax.automatic_clip(l2_clip_norm)
    ),
    "auto_v_per_layer": lambda l2_clip_norm: dpoptax.per_layer_clip(
        dpoptax.automatic_clip(l2_clip_norm, gamma=0.0)
    ),
}
"""Functions from the clip norm to a clip, by name."""


@dataclasses.dataclass(frozen=True)
class TrainingChain:
    """The clip and the optax chains of a config at a noise multiplier.

    Chains of configs that differ in learning rate and seed only are equal and share one compiled
    step, because learning rate and keys are in the optimizer state.

    Attributes:
        config: The config, with learning rate 1 and without a seed.
        noise_multiplier: Noise standard deviation relative to the clip norm; 0 if not private.
        clip: The method's own clip, or the clip that the config names.
        filtered_stddev: Standard deviation of the noise in each coordinate of a release, for the
            method's filter. 0 if not private, NaN if the clip encodes gradients or no ε holds.
        learning_rate: The peak learning rate.
        keys: Keys of the noise and of random losses.
        random: Whether the loss takes a key.
    """

    config: TrainConfig
    noise_multiplier: float
    clip: dpoptax.Clip = dataclasses.field(compare=False)
    filtered_stddev: float = dataclasses.field(compare=False)
    learning_rate: Any = dataclasses.field(compare=False)
    keys: Keys = dataclasses.field(compare=False, repr=False)
    random: bool = False

    @functools.cached_property
    def release(self) -> optax.GradientTransformation:
        """Noise and filter. The output at each step is public."""
        method = self.config.method
        return optax.chain(
            *([noise_stage(self)] if method.private else []),
            method.filter(self.filtered_stddev),
        )

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The release and the following transforms."""
        return optax.chain(self.release, *self.following)

    @functools.cached_property
    def following(self) -> list[optax.GradientTransformation]:
        """Optimizer, learning rate, and the average of the parameters if any."""
        config, method = self.config, self.config.method
        own_direction = method.direction(self.filtered_stddev) if method.private else None
        return [
            *([step_keys(self.keys.random)] if self.random else []),
            _direction(config.optimizer) if own_direction is None else own_direction,
            optax.scale_by_schedule(SCHEDULES[config.schedule](config.steps)),
            optax.inject_hyperparams(optax.scale_by_learning_rate)(self.learning_rate),
            *([] if config.parameter_ema is None else [average_params(config.parameter_ema)]),
        ]

    def begin(self, params: Any) -> Any:
        """Returns the initial optimizer state on one device, by one program."""
        return _begin(self, params, self.keys, self.learning_rate)


@functools.partial(jax.jit, static_argnums=0)
def _begin(chain: TrainingChain, params: Any, keys: Keys, learning_rate: jax.Array) -> Any:
    # Keys and rate are arguments, so that all runs share the program and its copy on disk contains
    # no key.
    of_run = dataclasses.replace(chain, keys=keys, learning_rate=learning_rate)
    return of_run.optimizer.init(params)


def check_names(config: TrainConfig) -> None:
    """Raises a ConfigError for an unknown clip, optimizer or schedule."""
    for field, available in (("clip", CLIPS), ("schedule", SCHEDULES)):
        if getattr(config, field) not in available:
            raise unknown_name(field, getattr(config, field), available)
    _direction(config.optimizer)


def _direction(name: str) -> optax.GradientTransformation:
    """Returns the named optimizer without a learning rate."""
    found = config_files.named("optimizer", name, DIRECTIONS)()
    if not isinstance(found, optax.GradientTransformation):
        raise ConfigError(
            f"`optimizer` must name a function that returns an optax transformation, got {name!r}, "
            f"which returned {found!r}."
        )
    return found


def build_chain(
    config: TrainConfig, noise_multiplier: float, keys: Keys, *, random: bool = False
) -> TrainingChain:
    """Builds the chain of a config.

    Args:
        config: The config.
        noise_multiplier: Noise standard deviation relative to the clip norm; 0 if not private.
        keys: Keys of the steps.
        random: Whether the model's loss takes a key.

    Raises:
        ConfigError: A name is unknown, or a method overrides the noise without a reason from
            `unproven`.
    """
    check_names(config)
    method, rate = config.method, config.learning_rate
    random = random or method.random
    config = dataclasses.replace(config, learning_rate=1.0, seed=None)
    own_clip = method.clip(config.l2_clip_norm)
    clip = CLIPS[config.clip](config.l2_clip_norm) if own_clip is None else own_clip
    stddev = 0.0
    encodes = getattr(clip, "encodes", False)
    if method.private and (encodes or method.unproven() is not None):
        stddev = math.nan  # the noise has no single standard deviation, or no ε holds
    elif method.private:
        stddev = dpoptax.extend.noise_stddev(
            clip, noise_multiplier=noise_multiplier, batch_size=config.batch_size
        )
    chain = TrainingChain(config, noise_multiplier, clip, stddev, rate, keys, random)
    if method.unproven() is None and type(method).noise is not Method.noise:
        raise ConfigError(
            f"method={method.name} must not override noise(), because the run is priced for the "
            f"noise of its plan. Remove {type(method).__name__}.noise(), or return the reason why "
            "no ε holds from unproven()."
        )
    _ = chain.optimizer  # raises errors of the transforms early
    return chain


def noise_stage(chain: TrainingChain) -> optax.GradientTransformation:
    """Builds the noise stage of a chain."""
    config = chain.config
    return config.method.noise(
        chain.clip,
        config.steps,
        noise_multiplier=chain.noise_multiplier,
        batch_size=config.batch_size,
        key=chain.keys.noise,
        **({"fixed_point": True} if config.fixed_point else {}),
    )
