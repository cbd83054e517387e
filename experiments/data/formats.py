"""Reads archives and image formats: IDX, and the pickles of CIFAR.

Every reader takes the bytes of one file, and its path for messages. A file with unexpected content
raises a `ConfigError` that names it.
"""

import gzip
import io
import math
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpoptax.training import ConfigError

CIFAR_SHAPE = (32, 32, 3)
"""Height, width and channels of every CIFAR image."""


def find(data_dir: Path, folders: Sequence[str], names: Sequence[str]) -> Path | None:
    """Returns the first of `names` in one of `folders` or `data_dir`, folders first."""
    candidates = (data_dir / folder / name for folder in (*folders, "") for name in names)
    return next((path for path in candidates if path.exists()), None)


def read_bytes(path: Path) -> bytes:
    """Returns the content of `path`, uncompressed if its name ends in .gz.

    Raises:
        ConfigError: The archive is damaged.
    """
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise damaged(path, f"it is not a complete gzip file ({error})") from error


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Returns the uint8 array of an IDX file, gzipped or not.

    The format: two zero bytes, the type 0x08 (unsigned byte), the number of dimensions, each size
    as a big-endian 32-bit number, then the values, with the last index fastest.

    Raises:
        ConfigError: The type or number of dimensions is wrong, or the number of values differs from
            the announced one.
    """
    content = read_bytes(path)
    if len(content) < 4 + 4 * dimensions or content[:4] != bytes((0, 0, 8, dimensions)):
        raise damaged(path, f"it is not an IDX file of bytes with {dimensions} dimension(s)")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if values.size != math.prod(shape):
        raise damaged(path, f"its header states shape {shape}, but it holds {values.size} values")
    return values.reshape(shape)


def read_cifar(content: bytes, path: Path, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns images and labels of one pickled batch of CIFAR's "python version".

    Pickles can run code. This reader loads the contents of such a batch only: containers, numbers,
    text and uint8 arrays.

    Args:
        content: Bytes of the batch.
        path: File of the batch, for messages.
        label: Key of the labels: "labels" (CIFAR-10) or "fine_labels" (CIFAR-100).

    Returns:
        Images (N, 32, 32, 3) of uint8, and labels (N,).

    Raises:
        ConfigError: The file has other contents.
    """
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        images, labels = np.asarray(batch[b"data"]), np.asarray(batch[label.encode()])
    except Exception as error:  # a damaged pickle can raise any error
        reason = f"{type(error).__name__}: {error}"
        raise damaged(path, f"it is not a pickled batch of CIFAR ({reason})") from error
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != math.prod(CIFAR_SHAPE):
        raise damaged(path, f"its data has shape {images.shape} and type {images.dtype}")
    if len(images) != len(labels):
        raise damaged(path, f"it has {len(images)} images and {len(labels)} labels")
    height, width, channels = CIFAR_SHAPE
    planes = images.reshape(-1, channels, height, width)
    return planes.transpose(0, 2, 3, 1), labels


def members(path: Path, top: str, names: Sequence[str]) -> Iterator[bytes]:
    """Yields the files `names` of a folder, or those in `top` of a .tar.gz or .zip archive.

    Raises:
        ConfigError: A file is missing, or the archive is damaged.
    """
    try:
        if path.is_dir():
            yield from ((path / name).read_bytes() for name in names)
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                yield from (archive.read(f"{top}/{name}") for name in names)
        else:
            with tarfile.open(path) as packed:
                for name in names:
                    file = packed.extractfile(f"{top}/{name}")
                    yield b"" if file is None else file.read()
    except (KeyError, FileNotFoundError) as error:
        raise damaged(path, f"it lacks a file ({error})") from error
    except (
        *(tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile),
        *(zipfile.BadZipFile, NotImplementedError),  # the latter for an unsupported compression
    ) as error:
        raise damaged(path, f"it is not a complete archive ({error})") from error


class _ArrayUnpickler(pickle.Unpickler):
    """Loads builtin containers and uint8 arrays, and rejects everything else."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Returns an allowed object; NumPy and Python have old and new module names."""
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return lambda *_: np.empty(0, np.uint8)
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            # Old pickles store the flags as numbers, and recent NumPy warns about that.
            return lambda code, *_: np.dtype(code if isinstance(code, str) else code.decode())
        if (module, name) == ("_codecs", "encode"):  # bytes, as Python 3 writes them for Python 2
            return lambda text, _: text.encode("latin1")
        raise pickle.UnpicklingError(
            f"A batch of images must contain arrays only, got {module}.{name}."
        )


def damaged(path: Path, reason: str) -> ConfigError:
    """Returns the error for an existing file with unexpected content."""
    return ConfigError(
        f"{path} cannot be read: {reason}. Fetch it again from the page of the data set."
    )


class MissingFilesError(ConfigError):
    """Raised when files of a data set are missing."""


def missing(dataset: str, data_dir: Path, files: str) -> MissingFilesError:
    """Returns the error for missing files."""
    return MissingFilesError(
        f"dataset={dataset!r} needs {files}, which is missing in data_dir={str(data_dir)!r}. Pass "
        f"another --data-dir, or run python -m experiments fetch {dataset} --data-dir {data_dir}."
    )
