"""Compares ways to protect a person with k records, by the noise that each needs for one ε.

All runs take the same number of steps, with the same number of records in an expected batch. With
users as rows, a user is drawn with the probability with which a record would be drawn.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from scipy import optimize
from tqdm import tqdm

from dpoptax import accounting
from dpoptax._pricing.events import GroupDpEvent
from dpoptax.accounting import Guarantee
from dpoptax.training.run import files
from dpoptax.training.run.figures import COLORS

SETTINGS = (
    (1_438, 256, 120, 3.0, 1e-5),
    (60_000, 600, 1_000, 1.0, 1e-5),
    (60_000, 600, 1_000, 8.0, 1e-5),
    (1_000_000, 2_000, 2_000, 8.0, 1e-7),
)
"""N, B, T, ε and δ. ε is that of the person with k records."""
RECORDS = (1, 2, 4, 8, 16)
HEADER = ("N", "B", "T", "ε", "σ for k = 1", "protection", *(f"k = {k}" for k in RECORDS[1:]))
WAYS = (
    "examples, group privacy",
    "examples, `for_records(k)`",
    "users, all have k, alike",
    "users, all have k, unrelated",
    "users, few have k",
)
"""The ways of protection."""


Noises = dict[int, tuple[float, ...]]
"""For each k, the noise on the mean gradient of each way, relative to that for k = 1.

With users as rows, the bound of a user is C if the records are alike or if few users have several,
and C/√k if they are unrelated.
"""


def table(*, rows: int = len(SETTINGS), figure: Path | None = None) -> str:
    """Prints the noise that protects a person with k records, by the way of protection.

    Args:
        rows: Number of settings.
        figure: A .png file with a panel for each setting; None draws nothing.
    """
    lines, found = [], {}
    for setting in SETTINGS[:rows]:
        one, found[setting] = _noises(*setting)
        size, batch, steps, epsilon, _ = setting
        told = f"{size:,}", f"{batch:,}", f"{steps:,}", f"{epsilon:g}", f"{one:.3f}"
        for i, way in enumerate(WAYS):
            noises = (f"{found[setting][k][i]:.2f}" for k in RECORDS[1:])
            lines.append((*(("",) * len(told) if i else told), way, *noises))
    if figure is not None:
        plot(found, figure)
    return files.markdown_table(HEADER, lines)


def _noises(
    size: int, batch: int, steps: int, epsilon: float, delta: float
) -> tuple[float, Noises]:
    """Returns σ for k = 1, and the noise of each k."""

    def price(sigma: float) -> Guarantee:
        return accounting.planned_guarantee(
            noise_multiplier=sigma, sampling_probability=batch / size, steps=steps
        )

    def group(k: int, sigma: float) -> float:
        event = accounting.PrivacyEvent(GroupDpEvent(price(sigma).event.dp_event, k))
        return Guarantee(event, accountant="pld").epsilon(delta)

    def several(k: int, sigma: float) -> float:
        return price(sigma).for_records(k).epsilon(delta)

    one = _least(lambda sigma: price(sigma).epsilon(delta), epsilon, 0.3)
    examples = {
        k: [_least(functools.partial(way, k), epsilon, one) / one for way in (group, several)]
        for k in tqdm(RECORDS, unit="k", leave=False)
    }
    return one, {k: (*examples[k], float(k), math.sqrt(k), 1.0) for k in RECORDS}


def _least(price: Callable[[float], float], epsilon: float, start: float) -> float:
    """Returns the least σ of at least `start` with this ε, to 0.1 %."""

    def excess(log: float) -> float:
        return min(price(math.exp(log)), 1e3) - epsilon

    low = math.log(start) - 1e-2
    high = low + 0.5
    while excess(high) > 0:
        low, high = high, high + 0.5
    return math.exp(optimize.brentq(excess, low, high, xtol=1e-3))


def plot(found: dict[tuple, Noises], path: Path) -> None:
    """Draws the noise over k, one panel for each setting."""
    figure = Figure(figsize=(3.4 * len(found), 3.6), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, ((size, batch, steps, epsilon, _), noises) in zip(panels, found.items(), strict=True):
        ks = list(noises)
        for i, (way, color) in enumerate(zip(WAYS, COLORS, strict=False)):
            values = [noises[k][i] for k in ks]
            axes.plot(ks, values, "o-", color=color, label=way.replace("`", ""), markersize=4)
        unrelated = [math.sqrt(k) for k in ks]
        axes.fill_between(ks, unrelated, ks, color=COLORS[2], alpha=0.12, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(ks, [f"{k}" for k in ks])
        axes.set_yticks(ks, [f"{k}" for k in ks])
        axes.set_title(f"N = {size:,}, B = {batch:,}, T = {steps:,}, ε = {epsilon:g}", fontsize=8)
        axes.set_xlabel("k, records of the person")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("noise on the mean gradient")
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=130)
