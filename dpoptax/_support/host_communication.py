"""Communication between the hosts of a run: shared random bytes and equal values.

All hosts must call a function at the same point of the program, also while they trace a step.
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


class OtherRunError(ValueError):
    """Raised where two starts or two hosts do not belong to one run. The message says why."""


def check_same_on_hosts(values: Mapping[str, Any]) -> None:
    """Raises an error on all hosts unless all of them have the same values.

    Each host reads its part of a batch and compiles its own program. If the order of their records
    differed, a record could be in the parts of two hosts and move the sum by 2C. Hosts with other
    clips, seeds or keys would release other sums. With equal hashes, the run is that of one host,
    unless SHA-256 is broken.

    Raises:
      OtherRunError: a value differs. All hosts get the same message, which names it.
    """
    if other := differing({name: repr(value) for name, value in values.items()}):
        raise OtherRunError(
            "All hosts of a run must have the same values, but they differ in "
            f"{' and '.join(other)}. Otherwise hosts draw other batches, add other noise or sum "
            "other gradients, and the stated ε would be too small. Run the same program with the "
            "same files and packages on all hosts, list files in one order, such as with sorted(), "
            "and start the run by `plan.new_run()`, which shares its key."
        )


def differing(values: Mapping[str, str]) -> list[str]:
    """Returns the names of the values that are not equal on all hosts, the same list on each.

    Without values, hosts only wait for each other.
    """
    if jax.process_count() == 1:
        return []
    if not all(_equal([repr(list(values))])):  # hosts gather arrays of one shape only
        return ["the list of compared values"]
    if not values:
        return []
    return [name for name, same in zip(values, _equal(values.values()), strict=True) if not same]


def _equal(texts: Iterable[str]) -> list[bool]:
    """Returns for each text whether all hosts have the same, by its hash."""
    from jax.experimental import multihost_utils

    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    own = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
    with ThreadPoolExecutor(1) as thread:  # it does not share the trace of a step
        every = np.asarray(thread.submit(multihost_utils.process_allgather, own).result())
    found: list[bool] = (every.reshape(-1, *own.shape) == own).all((0, 2)).tolist()
    return found
