"""The clip and the optax chain that a config means."""

import math
from collections.abc import Callable

import jax
import optax

import dpoptax
from dpoptax.training.config import TrainConfig
from dpoptax.training.data.augmentations import step_keys
from dpoptax.training.errors import unknown_name
from dpoptax.training.run.averaging import average_params
from dpoptax.training.run.recording import recorder

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
"""Course of the learning rate by name, as a fraction of the peak."""

CLIPS: dict[str, Callable[[float], dpoptax.Clip]] = {
    "l2": dpoptax.l2_clip,
    "auto_s": dpoptax.automatic_clip,
    "auto_v": lambda l2_clip_norm: dpoptax.automatic_clip(l2_clip_norm, gamma=0.0),
    "psac": dpoptax.psac_clip,
    "normalized": dpoptax.normalized_clip,
    "per_layer": dpoptax.per_layer_clip,
    "auto_s_per_layer": lambda l2_clip_norm: dpoptax.per_layer_clip(
        dpoptax.automatic_clip(l2_clip_norm)
    ),
    "auto_v_per_layer": lambda l2_clip_norm: dpoptax.per_layer_clip(
        dpoptax.automatic_clip(l2_clip_norm, gamma=0.0)
    ),
}
"""Clip geometries by name, from the clip norm."""


def build_clip(config: TrainConfig) -> dpoptax.Clip:
    """The method's own clip, or the one that the config names."""
    if config.clip not in CLIPS:
        raise unknown_name("clip", config.clip, CLIPS)
    own = config.method.clip(config.l2_clip_norm)
    return CLIPS[config.clip](config.l2_clip_norm) if own is None else own


def build_optimizer(
    config: TrainConfig, noise_multiplier: float, key: jax.Array
) -> optax.GradientTransformation:
    """The chain noise, filter, direction, learning rate, and the parameters' average if any.

    The learning rate is part of the state, the key too: runs that differ in these two alone share
    one compiled step.
    """
    if config.optimizer not in DIRECTIONS:
        raise unknown_name("optimizer", config.optimizer, DIRECTIONS)
    if config.schedule not in SCHEDULES:
        raise unknown_name("schedule", config.schedule, SCHEDULES)
    own = None
    if config.method.private:
        own = config.method.direction(noise_stddev(config, noise_multiplier))
    keys = [step_keys(key)] if config.method.random else []
    average = [] if config.parameter_ema is None else [average_params(config.parameter_ema)]
    return optax.chain(
        build_release(config, noise_multiplier, key),
        *keys,
        DIRECTIONS[config.optimizer]() if own is None else own,
        optax.scale_by_schedule(SCHEDULES[config.schedule](config.steps)),
        optax.inject_hyperparams(optax.scale_by_learning_rate)(config.learning_rate),
        *average,
    )


def build_release(
    config: TrainConfig, noise_multiplier: float, key: jax.Array
) -> optax.GradientTransformation:
    """The chain noise, filter: what becomes public of each step."""
    boundary, stddev = [], 0.0
    if config.method.private:
        stddev = noise_stddev(config, noise_multiplier)
        boundary = [
            config.method.noise(
                build_clip(config),
                config.steps,
                noise_multiplier=noise_multiplier,
                batch_size=config.batch_size,
                key=key,
            )
        ]

    def record(stage: str) -> list[optax.GradientTransformation]:
        return [recorder(stage, config.steps, config.record)] if config.record else []

    return optax.chain(
        *boundary, *record("released"), config.method.filter(stddev), *record("filtered")
    )


def noise_stddev(config: TrainConfig, noise_multiplier: float) -> float:
    """Standard deviation of the noise in each coordinate of a release; NaN where it has no one."""
    clip = build_clip(config)
    if clip.encodes or config.method.unproven() is not None:
        return math.nan  # the noise is on magnitude and angles
    return dpoptax.release_stddev(
        clip, noise_multiplier=noise_multiplier, batch_size=config.batch_size
    )
