"""Sizes and types of the arguments of a step, without any values."""

import functools
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from dpoptax.training import models
from dpoptax.training.data.dataset import Shapes
from dpoptax.training.run.resolved import ResolvedRun
from dpoptax.training.run.step import Loaded


def step_arguments(run: ResolvedRun, shapes: Shapes) -> tuple[Any, ...]:
    """Returns shapes and types of a step's arguments, with a batch of type `Loaded`."""
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


@functools.lru_cache(maxsize=64)
def variables(model: nn.Module, inputs: jax.ShapeDtypeStruct) -> models.Variables:
    """Returns shapes and types of the variables of a model."""
    init = functools.partial(models.init_variables, model)
    key = jax.eval_shape(jax.random.key, 0)
    shapes: models.Variables = jax.eval_shape(init, inputs, key)
    return shapes


def _stacked(example: dict[str, jax.ShapeDtypeStruct], *counts: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*counts, *x.shape), x.dtype), example)
