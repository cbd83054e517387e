"""Configures DP-SGD on digits."""

import optax
from digits_parts.run import DigitsRun

from dpoptax.training import Task


def dp_sgd(run: DigitsRun = DigitsRun()) -> Task:
    """Returns the task, the baseline of the comparison."""
    return run.task(optax.identity(), name="DP-SGD")
