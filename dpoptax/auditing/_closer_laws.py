"""Tests batches under a law, and looks for another law that fits them."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from dpoptax.auditing._batch_laws import Integers, Law, allocation, epochs, independent
from dpoptax.auditing._batch_tests import Partition, tests_under
from dpoptax.auditing._exact_scores import Finding, rejected
from dpoptax.sampling import Sampler

PLACES, LENGTHS, REMAINDERS = "eighths of the rows", "eighths by length", "remainders modulo"


def row_groups(size: int, lengths: ArrayLike | None) -> list[Partition]:
    """Returns groups of rows by their place in the data, by lengths and by remainders."""
    row = np.arange(size)
    eighths = tuple("12345678")
    found = [Partition(PLACES, row * 8 // size, eighths)]
    if lengths is not None:
        values = np.asarray(lengths)
        if values.shape != (size,):
            raise ValueError(f"`lengths` must have shape ({size},), got {values.shape}.")
        rank = np.empty(size, np.int64)
        rank[np.argsort(values, kind="stable")] = row
        found.append(Partition(LENGTHS, rank * 8 // size, eighths))
    # In this order the first halving separates even rows, and the second remainders modulo 4.
    reversed_bits = np.array([0, 4, 2, 6, 1, 5, 3, 7])
    for modulus in (8, 3, 5, 7):
        order = np.argsort(reversed_bits) if modulus == 8 else np.arange(modulus)
        labels = tuple(str(each) for each in np.argsort(order))
        found.append(Partition(f"{REMAINDERS} {modulus}", order[row % modulus], labels))
    return found


def findings_under(
    distinct: Sequence[Integers], law: Law, claimed: Sampler, partitions: Sequence[Partition]
) -> tuple[list[str], list[Finding]]:
    """Returns the impossible batches under a law, and the tests of the others."""
    # By the claim and not by the sizes of batches, of which a score may only know the earlier ones.
    window = max(1, round(claimed.dataset_size / claimed.batch_size) - 1)
    return tests_under(law, distinct, window, partitions, _randomization(distinct))


def _randomization(distinct: Sequence[Integers]) -> np.random.Generator:
    """Returns the generator that randomizes scores, a function of the batches.

    A fixed stream would make the scores of small counts about the same for all batches, so that
    false alarms are rare only on average over streams. Streams of different batches are independent
    if SHA-256 behaves like a random function.
    """
    digest = hashlib.sha256()
    for rows in distinct:
        digest.update(len(rows).to_bytes(8, "big") + rows.tobytes())
    return np.random.default_rng(int.from_bytes(digest.digest(), "big"))


def closer_law(
    distinct: Sequence[Integers], claimed: Sampler, partitions: Sequence[Partition]
) -> str | None:
    """Names a law that the tests do not refute, if a known one fits."""
    filled = [each.tobytes() for each in distinct if len(each)]
    if 4 * (len(filled) - len(set(filled))) > len(distinct):
        return "the same batches again"
    for name, law in _candidates(distinct, claimed):
        impossible, tests = findings_under(distinct, law, claimed, partitions)
        if not impossible and not rejected(tests):
            return name
    return None


def _candidates(distinct: Sequence[Integers], claimed: Sampler) -> Iterator[tuple[str, Law]]:
    """Yields names and laws, from special to general, each new and before its first step."""
    sizes = np.array([len(each) for each in distinct])
    number, first, mean = claimed.dataset_size, int(sizes[0]), float(sizes.mean())
    if first:
        yield "shuffled epochs", epochs(number, first, -(-number // first))
        if number % first and len(distinct) > number // first:
            yield "shuffled epochs with drop_last", epochs(number, first, number // first)
    if np.all(sizes == first):
        yield f"batches of {first} without replacement", epochs(number, first, 1)
    if mean:
        period = max(1, round(number / mean))
        yield f"each record once in {period} steps, at random", allocation(number, period)
        law = independent((number,), (mean / number,))
        yield f"Poisson samples of {mean:.4g} on average", law
    rate, most = claimed.sampling_probability, int(sizes.max())
    yield f"Poisson samples cut to {most}", independent((number,), (rate,), most)
