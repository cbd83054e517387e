"""Checks that the examples under a name are those that earlier runs were trained on."""

import dataclasses
import json
import secrets
from pathlib import Path
from typing import Any

from dpoptax.training.config import TrainConfig
from dpoptax.training.data.fingerprints import fingerprint
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import records
from dpoptax.training.search.trials import dataset_of


class KnownData:
    """Remembers the data sets that the runs in a folder were trained on, by their names.

    Args:
        path: For their fingerprints and the key of these, a file for its owner alone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = {"key": secrets.randbits(63), "data": {}}
        if path.is_file():
            self._known = json.loads(path.read_text(encoding="utf-8"))

    def check(self, config: TrainConfig) -> None:
        """Raises a `ConfigError` if the examples of a config are not those of its name."""
        wanted = dataclasses.replace(config.data(), data_dir=None, owners=None)
        dataset = dataset_of(config, held_out=False)
        now = fingerprint(dataset, self._known["key"], test=True)
        if self._known["data"].setdefault(f"{config.unit}s of {wanted}", now) != now:
            raise ConfigError(
                f"the examples of dataset={config.dataset!r}, or whose they are, differ from those "
                f"that earlier runs in {self._path.parent} were trained or tested on: accuracies "
                "on both do not compare, and runs of one seed would add the same noise to "
                "gradients on two data sets; give the old ones (data_dir, owners), or another "
                "workdir and count both"
            )

    def write(self) -> None:
        """Writes the fingerprints of all data sets that were checked."""
        records.write_json(self._path, self._known, secret=True)
