"""Configures correlated noise on digits; later steps cancel part of the noise."""

from digits_parts.run import DigitsRun

import dpoptax
from dpoptax import matrix
from dpoptax.training import Task


def correlated_noise(run: DigitsRun = DigitsRun(), bands: int = 4, preset: str = "none") -> Task:
    """Returns the task, whose groups of examples take turns.

    Args:
        run: Settings of the run.
        bands: Number of successive steps over which noise is correlated, and of groups.
        preset: Name of a filter after the noise, such as "momentum"; see dpoptax.filters.presets.
    """
    sampler = matrix.CyclicPoissonSampler(run.data.train_size, run.batch_size, cycle_length=bands)
    strategy = matrix.optimal_banded_toeplitz(run.steps, min(bands, run.steps))
    method = dpoptax.doppler(*dpoptax.filters.preset(preset))
    plan = run.plan(sampler=sampler, strategy=strategy)
    return run.task(method, plan, name="Correlated noise")
