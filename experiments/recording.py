"""Records random coordinates of released and filtered gradients in every step.

The record is part of the optimizer's state after the noise, so it holds released values only and
costs no privacy.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from dpoptax.filters import spectrum
from dpoptax.training import ConfigError
from dpoptax.training.run import seeds
from dpoptax.training.run.run_task import run_task
from experiments.config import ExperimentConfig

_SEED = 20
"""Seed of the coordinates, the same for all runs, so that runs of a model are comparable."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecorderState:
    """State of `recorder`.

    Attributes:
        count: Number of recorded steps.
        values: (steps, coordinates), float32; rows from `count` on are 0.
        stage: Name of the recorded stage. Static.
    """

    count: Any
    values: Any
    stage: str = dataclasses.field(metadata={"static": True})


def recorder(stage: str, steps: int, coordinates: int) -> optax.GradientTransformation:
    """Passes its input on and records random coordinates of it in its state.

    Args:
        stage: Name of the recorded stage.
        steps: Maximum number of recorded steps. Later steps are not recorded.
        coordinates: Number of coordinates, or all of them if there are fewer.
    """

    def init(params: Any) -> RecorderState:
        kept = min(coordinates, optax.tree.size(params))
        values = jnp.zeros((steps, kept), jnp.float32)
        return RecorderState(jnp.zeros([], jnp.int32), values, stage)

    def update(updates: Any, state: RecorderState, params: Any = None) -> tuple[Any, RecorderState]:
        del params
        leaves = jax.tree.leaves(updates)
        chosen = choose([leaf.size for leaf in leaves], state.values.shape[1])
        parts = [
            leaf.reshape(-1)[indices].astype(jnp.float32)
            for leaf, indices in zip(leaves, chosen, strict=True)
        ]
        values = state.values.at[state.count].set(jnp.concatenate(parts), mode="drop")
        return updates, RecorderState(optax.safe_increment(state.count), values, stage)

    return optax.GradientTransformation(init, update)


def choose(sizes: list[int], coordinates: int) -> list[np.ndarray]:
    """Chooses coordinates of leaves of these sizes, as sorted indices into each leaf."""
    ends = np.cumsum(sizes)
    drawn = np.random.default_rng(_SEED).choice(ends[-1], coordinates, replace=False, shuffle=False)
    drawn.sort()
    parts = np.split(drawn, np.searchsorted(drawn, ends[:-1]))
    return [part - (end - size) for part, end, size in zip(parts, ends, sizes, strict=True)]


def recorded(opt_state: Any) -> dict[str, np.ndarray]:
    """Returns the recorded values by stage, (recorded steps, coordinates)."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda leaf: isinstance(leaf, RecorderState))
    states = [leaf for leaf in leaves if isinstance(leaf, RecorderState)]
    return {state.stage: np.asarray(state.values)[: int(state.count)] for state in states}


class Recording(NamedTuple):
    """A recording of a run.

    Attributes:
        values: Coordinates of the gradients "released" and "filtered", (steps, coordinates) each.
        stddev: Standard deviation of the noise in each coordinate of a release.
        params: Final parameters.
    """

    values: dict[str, np.ndarray]
    stddev: float
    params: Any

    def write(self, folder: Path) -> None:
        """Writes recording.npz, and spectrum.png if there is more than one step."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "recording.npz"
        np.savez_compressed(path, allow_pickle=False, stddev=np.float64(self.stddev), **self.values)
        if len(self.values["released"]) > 1:
            self._draw(folder / "spectrum.png")

    def _draw(self, path: Path, window: int = 50) -> None:
        """Draws power spectra, autocorrelation and signal-to-noise ratio.

        The ratio is left out if the noise does not have a single standard deviation.
        """
        known = np.isfinite(self.stddev) and self.stddev > 0
        figure = Figure(layout="constrained", figsize=(10.5 if known else 7.2, 3.2))
        spectra, correlations, *rest = figure.subplots(1, 3 if known else 2)
        for label, color in (("released", "#0072B2"), ("filtered", "#D55E00")):
            series = self.values[label]
            omega, power = spectrum.power_spectrum(series)
            spectra.semilogy(omega / np.pi, power, color=color, label=label)
            lags = spectrum.autocorrelation(series, min(40, len(series) - 1))
            correlations.plot(lags / lags[0], color=color, label=label, marker=".", markersize=3)
        if known:
            spectra.axhline(
                self.stddev**2, color="#666666", linestyle="--", linewidth=1, label="noise added"
            )
            steps = len(self.values["released"])
            width = min(window, steps)
            ratio = spectrum.running_snr(self.values["released"], self.stddev, window=width)
            rest[0].plot(np.arange(width, steps + 1), ratio, color="#009E73")
            rest[0].set(
                xlabel="step", ylabel=f"signal / noise power, {width} steps", ylim=(0, None)
            )
        spectra.set(xlabel="frequency (π radians per step)", ylabel="power density per coordinate")
        correlations.set(xlabel="lag (steps)", ylabel="autocorrelation (lag 0 = 1)")
        for panel in (spectra, correlations):
            panel.legend(frameon=False, fontsize="small")
        for panel in (spectra, correlations, *rest):
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=200)


def record_run(config: ExperimentConfig, coordinates: int, *, progress: bool = False) -> Recording:
    """Trains a config and records its released gradients.

    Raises:
        ConfigError: The config has no noise, so it releases nothing.
    """
    method = config.method
    if not method.private or config.noise_multiplier == 0:
        raise ConfigError(
            "`config` must have noise to be recorded, because a run without noise releases no "
            "gradients. Use a private method with noise."
        )
    task = config.task()
    stddev, steps = config.stddev(task.plan), config.steps
    recording = optax.chain(
        recorder("released", steps, coordinates),
        method.filter(stddev),
        recorder("filtered", steps, coordinates),
    )
    task = dataclasses.replace(task, optimizer=config.following(task.plan, recording))
    key = None if config.seed is None else seeds.key_of(config.seed, "threefry")
    result = run_task(task, key=key, progress=progress)
    return Recording(recorded(result.opt_state), stddev, result.params)
