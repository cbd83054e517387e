"""Configures DP-AdamBC on digits: Adam with noise-corrected second moments."""

from digits_parts.run import DigitsRun

import dpoptax
from dpoptax.training import Task


def adam_bc(
    run: DigitsRun = DigitsRun(learning_rate=0.005), b1: float = 0.9, b2: float = 0.999
) -> Task:
    """Returns the task (Tang et al., 2024).

    Args:
        run: Settings of the run.
        b1: Decay of the first moment, in [0, 1).
        b2: Decay of the second moment, in [0, 1).
    """
    plan = run.plan()
    method = dpoptax.extend.scale_by_lp_adam((1.0 - b1,), (-b1,), b2=b2, stddev=run.stddev(plan))
    return run.task(method, plan, name="DP-AdamBC", is_optimizer=True)
