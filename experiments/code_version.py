"""Identifies the code that computed a number."""

import functools
import hashlib
from pathlib import Path

from dpoptax.training.run import records


@functools.cache
def source_sha256() -> str:
    """Returns the SHA-256 over the source files of dpoptax and of the experiments."""
    digest = hashlib.sha256(records.source_sha256().encode())
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
