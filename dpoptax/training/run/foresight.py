"""What a run will need before its first step, prepared in threads while something else happens.

All that is prepared lands in the caches of the functions that the run calls afterwards, in its own
order: it finds the result, waits for it, or, where preparing failed, fails itself with the same
error. A run on the same arguments is the same without foresight, only later.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from dpoptax.training.config import TrainConfig
from dpoptax.training.data.dataset import FILE_DATASETS, Dataset, Kind
from dpoptax.training.data.streaming import in_memory, read
from dpoptax.training.models import models
from dpoptax.training.run.chain import build_chain
from dpoptax.training.run.evaluation import evaluated_steps
from dpoptax.training.run.phases import Phases
from dpoptax.training.run.privacy import PrivacyPlan, make_plan
from dpoptax.training.run.step import Loaded, Resident, compile_step


class Shapes(NamedTuple):
    """What is known of a data set without its values.

    Attributes:
        train_size: Number of training examples.
        example: Shapes and types of one.
        num_classes: Number of classes; 0 for generation.
        kind: What an example is.
        resident: Whether the training split will be on the device.
    """

    train_size: int
    example: dict[str, jax.ShapeDtypeStruct]
    num_classes: int
    kind: Kind
    resident: bool


def published_shapes(config: TrainConfig) -> Shapes | None:
    """Those of a data set of files that are there, before they are read; None of others.

    The files decide in the end: where they hold something else, what was prepared is not used.
    """
    published = FILE_DATASETS.get(config.dataset)
    if published is None or config.data_dir is None or not config.data_dir.is_dir():
        return None
    try:
        published.find(config.data_dir)
    except ValueError:
        return None  # the run says so
    example = published.example(config.sequence_length)
    return Shapes(
        published.train_size, example, published.num_classes, published.kind, published.in_memory
    )


def shapes_of(dataset: Dataset) -> Shapes:
    """Those of a data set that was read."""
    record = read(dataset.train, np.zeros(1, np.int64))
    example = {
        name: jax.ShapeDtypeStruct(values.shape[1:], values.dtype)
        for name, values in record.items()
    }
    return Shapes(
        dataset.train_size,
        example,
        dataset.num_classes,
        dataset.kind,
        in_memory(dataset.train),
    )


@contextlib.contextmanager
def preparing(config: TrainConfig, shapes: Shapes | None, phases: Phases) -> Iterator[None]:
    """Prepares a run on one device in the background of the context; nothing without `shapes`.

    `phases` gets what this costs, as time aside.

    The accounting, and then the compilation of the step, happen next to that of the parameters'
    initialisation and the curve of ε that the run will show.
    """
    if shapes is None:
        yield
        return
    # The seed changes no program and no ε, and drawing one here would not be the run's.
    config = dataclasses.replace(config, seed=0)
    pool = ThreadPoolExecutor(2, thread_name_prefix="foresight")
    for work in (_step, _init):
        pool.submit(_quietly, work, config, shapes, phases)
    try:
        yield
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _quietly(work: Callable[..., object], *arguments: Any) -> None:
    # The run makes the same calls, and fails where it would have failed without foresight.
    with contextlib.suppress(Exception):
        work(*arguments)


def _step(config: TrainConfig, shapes: Shapes, phases: Phases) -> None:
    with phases.aside("accounting"):
        plan = make_plan(config, shapes.train_size)
    with phases.aside("compile"):
        _compile_step(config, shapes, plan)


def _compile_step(config: TrainConfig, shapes: Shapes, plan: PrivacyPlan) -> None:
    model = models.build_model(config, shapes.num_classes, shapes.kind)
    chain = build_chain(config, plan.noise_multiplier, jax.random.key(0))
    init = functools.partial(models.init_variables, model)
    params, frozen = jax.eval_shape(init, shapes.example["inputs"], jax.random.key(0))
    state = jax.eval_shape(chain.optimizer.init, params)
    rows = plan.sampler.padded_size
    indices = jax.ShapeDtypeStruct((rows,), np.int32)
    batch: Any = Loaded(_stacked(shapes.example, rows), indices)
    if shapes.resident:
        batch = Resident(_stacked(shapes.example, shapes.train_size), indices)
    mask = jax.ShapeDtypeStruct((rows,), np.bool_)
    compile_step(chain, model, (params, state, batch, mask, frozen))


def _init(config: TrainConfig, shapes: Shapes, phases: Phases) -> None:
    with phases.aside("init"):
        model = models.build_model(config, shapes.num_classes, shapes.kind)
        inputs = shapes.example["inputs"]
        models.compiled_init(model, inputs.shape, inputs.dtype, jax.random.key(0).dtype)
    with phases.aside("accounting"):
        plan = make_plan(config, shapes.train_size)
    with phases.aside("telemetry"):
        plan.bounds(evaluated_steps(config, plan.permitted_steps))


def _stacked(example: dict[str, jax.ShapeDtypeStruct], count: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), example)
