"""What a run leaves behind: strict JSON, the hash of the parameters, versions."""

import hashlib
import importlib.metadata
import json
import math
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: numbers that JSON cannot write (NaN and the infinities) become null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Path):
        return str(value)
    number = float(value)
    return number if math.isfinite(number) else None


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` in one piece: a killed process leaves no half-written file."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def params_sha256(params: Any) -> str:
    """SHA-256 over the bytes of all leaves, in the order of `jax.tree.leaves`, row-major."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return digest.hexdigest()


def save_params(path: Path, params: Any) -> None:
    """The parameters in flax's msgpack format; `flax.serialization.msgpack_restore` reads them."""
    path.write_bytes(serialization.to_bytes(jax.device_get(params)))


def versions() -> dict[str, str]:
    """Versions that the numbers of a run depend on."""
    packages = ("dpoptax", "jax", "jaxlib", "optax", "flax", "numpy", "dp-accounting")
    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }
