"""Defines the options of a comparison."""

import dataclasses
import math
from pathlib import Path

from dpoptax.training.errors import ConfigError
from dpoptax.training.run import files


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Options of `dpoptax compare`.

    For every config, each learning rate is first trained on every seed with a fifth of the training
    split held out. The rate with the best mean score on that fifth, by default the accuracy, is
    selected. It is then trained on the whole training split, once per seed. Only these runs use the
    test split. The stated ε is that of one such run. It does not cover the repetitions or the
    selection.
    """

    workdir: Path
    """Directory for results.json, table.md, comparison.png and .pdf, and records in runs/.
    Finished runs with the same code, settings, program and data are not trained again, so the same
    command resumes a comparison, and more configs train only missing runs."""
    seeds: int = 5
    """Number of repetitions, with the seeds 0, 1, 2, ... for every config. These seeds are known,
    so publish none of the models."""
    epsilon: float | None = None
    """ε of every private config. None: the common ε of the configs."""
    factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Grid of learning rates, as multiples of the config's own. With --set learning_rate=1, they
    are the rates themselves."""
    steps: int | None = None
    """Number of steps of every config; None: the configs' own."""
    set: tuple[str, ...] = ()
    """NAME=VALUE for any other argument of every config, such as batch_size=512."""
    trial_seeds: int | None = None
    """Number of seeds to try each learning rate on. None: all."""

    def __post_init__(self) -> None:
        files.check_count("seeds", self.seeds)
        if self.trial_seeds is not None and not 1 <= self.trial_seeds <= self.seeds:
            raise ConfigError(
                f"`trial_seeds` must be between 1 and seeds={self.seeds}, got {self.trial_seeds}."
            )
        if not self.factors or not all(0 < factor < math.inf for factor in self.factors):
            raise ConfigError(f"`factors` must be positive and finite, got {self.factors}.")
