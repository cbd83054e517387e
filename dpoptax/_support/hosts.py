"""Communication between the hosts of a run: shared random bytes and equal values.

All hosts must call a function at the same point of the program, also while they trace a step.
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping

import jax
import numpy as np


def shared_bytes(number: int) -> bytes:
    """Draws a multiple of four random bytes, equal on all hosts."""
    drawn = secrets.token_bytes(number)
    if jax.process_count() == 1:
        return drawn
    from jax.experimental import multihost_utils

    words = multihost_utils.broadcast_one_to_all(np.frombuffer(drawn, np.uint32))
    return np.asarray(words).tobytes()


def differing(values: Mapping[str, str]) -> list[str]:
    """Returns the names of the values that are not equal on all hosts, the same list on each."""
    if jax.process_count() == 1:
        return []
    if not all(_equal([repr(list(values))])):  # hosts gather arrays of one shape only
        return ["the list of compared values"]
    return [name for name, same in zip(values, _equal(values.values()), strict=True) if not same]


def _equal(texts: Iterable[str]) -> list[bool]:
    """Returns for each text whether all hosts have the same, by its hash."""
    from jax.experimental import multihost_utils

    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    own = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
    with jax.ensure_compile_time_eval():  # also while a step is traced
        every = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, *own.shape)
    found: list[bool] = (every == own).all((0, 2)).tolist()
    return found
