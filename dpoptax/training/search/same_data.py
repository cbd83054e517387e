"""Whether the examples under a name are those that earlier runs were trained on."""

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from dpoptax.training.config import TrainConfig
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Split
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import records
from dpoptax.training.search.trials import dataset_of


def fingerprint(config: TrainConfig, key: int, *, test: bool = False) -> str:
    """A keyed hash of all examples that are trained on or held out, and of owners that count.

    It is kept beside its secret key alone: who knows neither learns nothing from it. With `test`,
    also of the test split, but for features, which another machine may round otherwise.
    """
    dataset = dataset_of(config, held_out=False)
    whole: dict[str, Any] = dict(dataset.computed_from or _checksums(dataset.train))
    if config.unit == "user":
        whole["owners"] = np.asarray(dataset.owners).tolist()
    if test:
        tested = dataset.test
        if dataset.computed_from:
            tested = {"labels": cast(Split, tested)["labels"]}
        whole |= {f"test, {name}": checksum for name, checksum in _checksums(tested).items()}
    secret = hashlib.sha256(str(key).encode()).digest()
    return hashlib.blake2b(records.to_json(whole).encode(), key=secret, digest_size=16).hexdigest()


def _checksums(source: streaming.Source) -> Mapping[str, int]:
    if isinstance(source, Mapping) and streaming.in_memory(source):
        return streaming.checksums(source)
    size = streaming.source_size(source)
    leaves = jax.tree_util.tree_leaves_with_path(streaming.read(source, streaming.spread(size)))
    return streaming.checksums({jax.tree_util.keystr(path): leaf for path, leaf in leaves})


class KnownData:
    """The data sets that the runs in a folder were trained on, each by its name.

    Args:
        path: For their fingerprints and the key of these, a file for its owner alone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = {"key": secrets.randbits(63), "data": {}}
        if path.is_file():
            self._known = json.loads(path.read_text(encoding="utf-8"))

    def check(self, config: TrainConfig) -> None:
        """Raises a `ConfigError` where the examples of a config are not those of its name."""
        wanted = dataclasses.replace(config.data(), data_dir=None, owners=None)
        now = fingerprint(config, self._known["key"], test=True)
        if self._known["data"].setdefault(f"{config.unit}s of {wanted}", now) != now:
            raise ConfigError(
                f"the examples of dataset={config.dataset!r}, or whose they are, differ from those "
                f"that earlier runs in {self._path.parent} were trained or tested on: accuracies "
                "on both do not compare, and runs of one seed would add the same noise to "
                "gradients on two data sets; give the old ones (data_dir, owners), or another "
                "workdir and count both"
            )

    def write(self) -> None:
        """Keeps what was checked."""
        records.write_json(self._path, self._known, secret=True)
