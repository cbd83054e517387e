"""What a run will need before its first step, prepared in threads while something else happens.

All that is prepared lands in the caches of the functions that the run calls afterwards, in its own
order: it finds the result, waits for it, or, where preparing failed, fails itself with the same
error. A run on the same arguments is the same without foresight, only later.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from dpoptax.training.config import TrainConfig
from dpoptax.training.models import models
from dpoptax.training.run.evaluation import evaluated_steps
from dpoptax.training.run.phases import Phases
from dpoptax.training.run.privacy import make_plan
from dpoptax.training.run.resolved import resolve
from dpoptax.training.run.shapes import Shapes, key_type, step_arguments, variables
from dpoptax.training.run.step import compile_steps


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
        # What it raises nobody asks for: the run makes the same calls, and fails where it would
        # have failed without foresight.
        pool.submit(work, config, shapes, phases)
    try:
        yield
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _step(config: TrainConfig, shapes: Shapes, phases: Phases) -> None:
    with phases.aside("accounting"):
        plan = make_plan(config, shapes.units)
    with phases.aside("compile"):
        run = resolve(config, plan, num_classes=shapes.num_classes, kind=shapes.kind)
        params, state, *common = step_arguments(run, shapes, resident=shapes.resident)
        compile_steps(run.chain, run.model, (((params, state),), *common))


def _init(config: TrainConfig, shapes: Shapes, phases: Phases) -> None:
    with phases.aside("init"):
        model = models.build_model(config, shapes.num_classes, shapes.kind)
        inputs = shapes.example["inputs"]
        models.compiled_init(model, inputs.shape, inputs.dtype, key_type())
    with phases.aside("accounting"):
        plan = make_plan(config, shapes.units)
    with phases.aside("init"):
        run = resolve(config, plan, num_classes=shapes.num_classes, kind=shapes.kind)
        run.chain.compiled_begin(variables(run.model, inputs).params)
    with phases.aside("telemetry"):
        plan.bounds(evaluated_steps(config, plan.permitted_steps))
