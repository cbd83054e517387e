"""What is known of a data set, and of a step on it, without any values."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from dpoptax.training.config import TrainConfig
from dpoptax.training.data import features
from dpoptax.training.data.dataset import FILE_DATASETS, Dataset, Kind, Unit
from dpoptax.training.data.streaming import read
from dpoptax.training.models import models
from dpoptax.training.run.resolved import Run
from dpoptax.training.run.step import Loaded
from dpoptax.training.sharing import once


class Shapes(NamedTuple):
    """What is known of a data set without its values.

    Attributes:
        units: Number of training examples, or of users where these are what ε is about.
        example: Shapes and types of one.
        num_classes: Number of classes; 0 for generation.
        kind: What an example is.
    """

    units: int
    example: dict[str, jax.ShapeDtypeStruct]
    num_classes: int
    kind: Kind


def published_shapes(config: TrainConfig) -> Shapes | None:
    """Those that the files of a config's data set have, as published; None of others.

    None too where the unit is a user: how many there are is known from the data alone.
    """
    published = FILE_DATASETS.get(config.dataset)
    if published is None or config.unit == "user":
        return None
    example = published.example(config.sequence_length)
    shapes = Shapes(published.train_size, example, published.num_classes, published.kind)
    return with_features(shapes, config)


def with_features(shapes: Shapes, config: TrainConfig) -> Shapes:
    """Those of a data set of images after its images have given way to a config's features.

    Raises:
        ConfigError: Examples that have no such features.
    """
    wanted = config.feature_map
    if wanted is None:
        return shapes
    return shapes._replace(example=features.example(wanted, shapes.example))


def shapes_of(dataset: Dataset, unit: Unit = "example") -> Shapes:
    """Those of a data set that was read."""
    record = read(dataset.train, np.zeros(1, np.int64))
    example = {
        name: jax.ShapeDtypeStruct(values.shape[1:], values.dtype)
        for name, values in record.items()
    }
    return Shapes(dataset.units(unit), example, dataset.num_classes, dataset.kind)


def step_arguments(run: Run, shapes: Shapes) -> tuple[Any, ...]:
    """Shapes and types of a step's arguments, the batch `Loaded`."""
    params, frozen = variables(run.model, shapes.example["inputs"])
    state = jax.eval_shape(run.chain.optimizer.init, params)
    rows = run.plan.sampler.padded_size
    indices = jax.ShapeDtypeStruct((rows,), np.int32)
    of_each: tuple[int, ...] = (rows,)
    rows_mask = None
    if run.config.records_per_user is not None:
        of_each = (rows, run.config.records_per_user)
        rows_mask = jax.ShapeDtypeStruct(of_each, np.bool_)
    loaded = _stacked(shapes.example, *of_each)
    batch = Loaded(loaded if rows_mask is None else (loaded, rows_mask), indices)
    return params, state, batch, jax.ShapeDtypeStruct((rows,), np.bool_), frozen


@once(maxsize=64)
def variables(model: nn.Module, inputs: jax.ShapeDtypeStruct) -> models.Variables:
    """Shapes and types of what a model computes with."""
    init = functools.partial(models.init_variables, model)
    key = jax.eval_shape(jax.random.key, 0)
    shapes: models.Variables = jax.eval_shape(init, inputs, key)
    return shapes


def _stacked(example: dict[str, jax.ShapeDtypeStruct], *counts: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*counts, *x.shape), x.dtype), example)
