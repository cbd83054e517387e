"""Compares prices: random allocation, tuning and several records of one person."""

from collections.abc import Iterator

from tqdm import tqdm

from dpoptax import PrivacyPlan, accounting, sampling
from dpoptax._pricing.events import GroupDpEvent
from dpoptax.accounting import Guarantee, selection
from dpoptax.training.run import files

SETTINGS = (
    (1_438, 256, 15, 3.0, 1e-5),
    (1_438, 256, 120, 1.0, 1e-5),
    (1_438, 256, 120, 8.0, 1e-5),
    (60_000, 600, 1_000, 1.0, 1e-5),
    (60_000, 600, 1_000, 8.0, 1e-5),
    (60_000, 2_400, 500, 3.0, 1e-5),
    (50_000, 1_000, 2_500, 1.0, 1e-5),
    (50_000, 1_000, 2_500, 8.0, 1e-5),
    (50_000, 5_000, 500, 3.0, 1e-5),
    (120_000, 1_000, 600, 3.0, 1e-6),
    (120_000, 4_000, 300, 1.0, 1e-6),
    (1_000_000, 10_000, 1_000, 3.0, 1e-7),
)
"""N, B, T, ε and δ."""
HEADER = (
    *("N", "B", "T", "ε", "Poisson, σ/q", "once per epoch, σ/q"),
    *("best of 20, Rényi", "best of 20, here", "4 records, group", "4 records, here"),
)


def table(*, rows: int = len(SETTINGS)) -> str:
    """Prints σ or ε of several settings by an earlier theorem and by dpoptax.

    Args:
        rows: Number of settings.
    """
    chosen = tqdm(SETTINGS[:rows], unit="setting", leave=False)
    return files.markdown_table(HEADER, [tuple(_row(*setting)) for setting in chosen])


def _row(size: int, batch: int, steps: int, epsilon: float, delta: float) -> Iterator[str]:
    yield from (f"{size:,}", f"{batch:,}", f"{steps:,}", f"{epsilon:g}")
    plans = [
        PrivacyPlan(sampler=kind(size, batch), steps=steps, epsilon=epsilon, delta=delta)
        for kind in (sampling.PoissonSampler, sampling.RandomAllocationSampler)
    ]
    for plan in plans:
        assert isinstance(plan.noise_multiplier, float)
        yield f"{plan.noise_multiplier / plan.sampler.sampling_probability:.4g}"
    run = plans[0].guarantee()
    best = selection.best_of_random([run], mean=20, distribution="geometric")
    for accountant in ("rdp", "pld"):
        yield f"{Guarantee(best, accountant=accountant).epsilon(delta):.2f}"
    group = accounting.PrivacyEvent(GroupDpEvent(run.event.dp_event, 4))
    yield f"{Guarantee(group, accountant='pld').epsilon(delta):.2f}"
    yield f"{run.for_records(4).epsilon(delta):.2f}"
