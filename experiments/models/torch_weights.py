"""Reads tensors from files of `torch.save` without torch, in the format before version 1.6."""

import collections
import pickle
import struct
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from dpoptax.training.errors import ConfigError

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_DTYPES = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
}


class _Storage(NamedTuple):
    key: str
    size: int
    dtype: np.dtype


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_weights(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by name.

    Tensors keep the strides that the file states, so they need not be contiguous. Only dictionaries
    of tensors are read. The file cannot run code: its pickles can name nothing else.

    Raises:
        ConfigError: The file has another format, is incomplete, or holds something else.
    """
    try:
        with path.open("rb") as file:
            if [_load(file) for _ in range(2)] != [_MAGIC, _PROTOCOL]:
                raise pickle.UnpicklingError("its first numbers differ from those of the format")
            _load(file)  # sizes of types
            tensors, keys = _load(file), _load(file)
            storages = {}
            dtypes = {tensor.storage.key: tensor.storage for tensor in tensors.values()}
            for key in keys:
                (size,) = struct.unpack("<q", file.read(8))
                storage = dtypes[key]
                stored = file.read(size * storage.dtype.itemsize)
                storages[key] = np.frombuffer(stored, storage.dtype, size)
        return {
            name: _view(tensor, storages[tensor.storage.key]) for name, tensor in tensors.items()
        }
    except (pickle.UnpicklingError, struct.error, ValueError, EOFError, KeyError) as error:
        raise ConfigError(
            f"{path} cannot be read: it is not a complete dictionary of tensors, saved by torch "
            f"before 1.6 ({type(error).__name__}: {error}). Fetch it again."
        ) from error
    except (AttributeError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path} must hold a dictionary of tensors, got something else ({error})."
        ) from error


def _view(tensor: _Tensor, storage: np.ndarray) -> np.ndarray:
    """Returns a tensor's elements; none outside its storage."""
    steps = zip(tensor.shape, tensor.strides, strict=True)
    last = tensor.offset + sum((length - 1) * step for length, step in steps)
    if min((0, tensor.offset, *tensor.strides)) < 0 or last >= len(storage):
        raise ValueError(f"a tensor of shape {tensor.shape} reaches outside its storage")
    return np.lib.stride_tricks.as_strided(
        storage[tensor.offset :],
        tensor.shape,
        [step * storage.itemsize for step in tensor.strides],
        writeable=False,
    )


class _Unpickler(pickle.Unpickler):
    """Rejects all global names except those of a dictionary of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *_: _Tensor(
                storage, offset, shape, strides
            )
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, size, view = pid
        if kind != "storage" or view is not None:
            raise pickle.UnpicklingError(f"a tensor is stored in {kind!r} with view {view!r}")
        return _Storage(key, size, dtype)


def _load(file: IO[bytes]) -> Any:
    return _Unpickler(file).load()
