"""Configures DP-SGD with momentum on digits."""

import optax
from digits_parts.run import DigitsRun

from dpoptax.training import Task


def momentum(run: DigitsRun = DigitsRun(optimizer="momentum", learning_rate=0.3)) -> Task:
    """Returns the task: DP-SGD with momentum 0.9."""
    return run.task(optax.identity(), name="DP-SGD, momentum")
