"""Computes image features of a data set once and caches them on disk."""

import contextlib
import functools
import hashlib
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.training import ConfigError, cache_folder
from dpoptax.training.data import streaming

LARGEST = 12 * 2**30
"""Maximum bytes of features in the cache folder. The least recently used are deleted."""

IN_MEMORY = 2**28
"""Maximum bytes of a split's features that are held in memory like other examples."""

_AT_ONCE = 256
"""Images per update of the progress bar."""

OPPONENT = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]]) / np.sqrt([[3], [2], [6]])
"""Orthonormal map of one pixel: intensity, red minus blue, and both minus twice green."""


class FeatureMap(Protocol):
    """A function of one image, fixed by its attributes; hashable and comparable."""

    @property
    def name(self) -> str:
        """The value of a config's `features`."""

    def __hash__(self) -> int: ...

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the features of an image, or raises a `ConfigError`."""

    def transform(self, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        """Returns the compiled map from images (N, *shape) to (N, *self.shape(shape))."""


def in_chunks(
    together: Callable[[jax.Array], jax.Array], values: jax.Array, size: int
) -> jax.Array:
    """Applies `together`, (size, …), to `values`, (N, …), in chunks padded with zeros."""
    missing = [(0, -len(values) % size)] + [(0, 0)] * (values.ndim - 1)
    found = jax.lax.map(together, jnp.pad(values, missing).reshape(-1, size, *values.shape[1:]))
    return found.reshape(-1, *found.shape[2:])[: len(values)]


def featured(source: streaming.Source, wanted: FeatureMap, *, name: str) -> streaming.Source:
    """Replaces the images of the records with features, in float16.

    Features are computed one image at a time and kept in the user's cache folder. Their file name
    depends on the images, the parameters and the code. Only the user can read the folder, since the
    features are as private as the images. Small data sets are held in memory; large ones are read
    when needed.

    Args:
        source: Arrays by name. "inputs" are images (N, height, width, channels).
        wanted: The map from images to features.
        name: Name of the data set, for messages.

    Raises:
        ConfigError: The records are not images in arrays, or `wanted` rejects them.
    """
    from dpoptax.training.bars import Bar  # needs an extra, which this module does not

    if not isinstance(source, Mapping):
        raise ConfigError(
            f"`features` must be 'none' for dataset={name!r}, which is a source of records, got "
            f"{wanted.name!r}. Features need images in arrays."
        )
    images = source["inputs"]
    shape = (len(images), *wanted.shape(images.shape[1:]))
    bar = Bar(total=len(images), unit="image", desc=f"features of {name}", delay=1)
    path = cache_folder.cache_folder("features") / f"{_identity(images, wanted)}.npy"
    with bar:
        features = _kept(path, shape)
        if features is None:
            features = _computed(path, shape, images, wanted, bar)
    small = 2 * math.prod(shape) <= IN_MEMORY
    return {**source, "inputs": np.asarray(features).copy() if small else features}


def _computed(
    path: Path, shape: tuple[int, ...], images: np.ndarray, wanted: FeatureMap, bar: Any
) -> np.ndarray:
    """Returns features from a new file, or from memory if the file cannot be written."""
    features, done = np.empty(shape, np.float16), 0
    for part in _parts(images, wanted):
        features[done : done + len(part)] = part
        done += len(part)
        bar.update(len(part))
    try:
        cache_folder.prepare(path.parent)
        handle, partial = tempfile.mkstemp("-partial.npy", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                np.save(file, features)
            os.replace(partial, path)
        finally:
            Path(partial).unlink(missing_ok=True)
        cache_folder.keep_newest(path.parent, "*.npy", LARGEST)
        kept: np.ndarray = np.load(path, mmap_mode="r")
        return kept
    except OSError as error:
        warnings.warn(
            f"Features are held in memory and not kept for the next start ({error}). Set the "
            "environment variable XDG_CACHE_HOME to another folder.",
            stacklevel=2,
        )
        return features


def _parts(images: np.ndarray, wanted: FeatureMap) -> Iterator[np.ndarray]:
    """Yields the features of all images in order, as float16."""
    rounded = _rounded(wanted, images.shape[1:])
    for start in range(0, len(images), _AT_ONCE):
        part = np.asarray(images[start : start + _AT_ONCE])
        missing = [(0, _AT_ONCE - len(part))] + [(0, 0)] * (part.ndim - 1)
        yield np.asarray(rounded(np.pad(part, missing)))[: len(part)]


@functools.lru_cache(maxsize=4)
def _rounded(wanted: FeatureMap, shape: tuple[int, ...]) -> Callable[[np.ndarray], jax.Array]:
    """Returns the transform to float16, which clips values that are too large."""
    transform, largest = wanted.transform(shape), float(np.finfo(np.float16).max)
    return jax.jit(lambda part: jnp.clip(transform(part), -largest, largest).astype(np.float16))


def _kept(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns the features in a complete file of an earlier run, or None."""
    try:
        cache_folder.prepare(path.parent)  # rejects files of other users
        features: np.ndarray = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    if features.shape != shape or features.dtype != np.float16:
        return None
    with contextlib.suppress(OSError):
        path.touch()  # the folder keeps files by last use
    return features


def _identity(images: np.ndarray, wanted: FeatureMap) -> str:
    """Returns a name for the features of these images by this map, code and backend."""
    digest = hashlib.sha256()
    for module in (__name__, type(wanted).__module__):
        digest.update(Path(str(sys.modules[module].__file__)).read_bytes())
    described = (wanted, images.shape, images.dtype.str, jax.__version__, jax.default_backend())
    digest.update(repr(described).encode())
    for start in range(0, len(images), _AT_ONCE):
        digest.update(images[start : start + _AT_ONCE].tobytes())
    return digest.hexdigest()[:32]
