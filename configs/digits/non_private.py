"""Configures the same training without privacy, as the accuracy to aim for."""

import optax
from digits_parts.run import DigitsRun

from dpoptax import sampling
from dpoptax.training import PlainPlan, Task


def non_private(run: DigitsRun = DigitsRun(learning_rate=1.0)) -> Task:
    """Returns the task; without clip and noise, epsilon and l2_clip_norm have no effect."""
    plan = PlainPlan(sampling.PoissonSampler(run.data.train_size, run.batch_size), run.steps)
    return run.task(optax.identity(), plan, name="Non-private")
