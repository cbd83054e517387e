"""Configures correlated noise on digits, followed by a low-pass filter."""

from correlated_noise import correlated_noise
from digits_parts.run import DigitsRun

from dpoptax.training import Task


def correlated_noise_filtered(run: DigitsRun = DigitsRun(), bands: int = 4) -> Task:
    """Returns the task; the filter removes high frequencies, which hold the noise.

    Args:
        run: Settings of the run.
        bands: Number of successive steps over which noise is correlated, and of groups.
    """
    return correlated_noise(run, bands, "momentum")
