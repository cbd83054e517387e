"""Trains a linear model on images or their features with an update rule, in NumPy."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from experiments.data.published_data import PublishedSpec
from experiments.released.rules import Array, ClippedSums, Points, Rule, run

_CLASSES = 10


class Data(NamedTuple):
    """Rows of pixels or features with a 1 at the end, and labels.

    Attributes:
        inputs: (N, d + 1).
        labels: (N,).
        test_inputs: (M, d + 1).
        test_labels: (M,).
    """

    inputs: Array
    labels: Array
    test_inputs: Array
    test_labels: Array


def load(spec: PublishedSpec) -> Data:
    """Reads a data set of images, or its features."""
    dataset = spec.load()
    parts = []
    for split in (dataset.train, dataset.test):
        rows = np.reshape(split["inputs"], (len(split["inputs"]), -1))
        ones = np.ones((len(rows), 1))
        parts += [np.concatenate([rows, ones], axis=1, dtype=np.float32), split["labels"]]
    return Data(*parts)


def automatic_sums(inputs: Array, labels: Array, stabilizer: float) -> ClippedSums:
    """Returns sums over examples of g/(‖g‖ + stabilizer), g a combined gradient.

    Points are (runs, d). The loss is the cross-entropy of a linear model. A gradient is the outer
    product of the input and the residual, and its norm is the product of theirs.
    """
    lengths = np.sqrt(np.einsum("ni,ni->n", inputs, inputs))[:, None, None]

    def clipped_sums(combinations: Sequence[Points]) -> Sequence[Array]:
        places: dict[int, Array] = {id(x): x for points in combinations for w, x in points if w}
        residuals = _residuals(inputs, labels, np.stack(list(places.values())))
        at = {key: residuals[:, i] for i, key in enumerate(places)}
        combined = np.stack(
            [sum(w * at[id(x)] for w, x in points if w) for points in combinations], axis=1
        )
        squares = np.einsum("ncrk,ncrk->ncr", combined, combined)
        combined /= (lengths * np.sqrt(squares) + stabilizer)[..., None]
        _, count, runs, _ = combined.shape
        total = inputs.T @ combined.reshape(len(inputs), -1)
        return np.moveaxis(total.reshape(-1, count, runs, _CLASSES), 0, 2).reshape(count, runs, -1)

    return clipped_sums


def _residuals(inputs: Array, labels: Array, params: Array) -> Array:
    """Returns softmax(logits) − onehot(label), (examples, …, classes)."""
    found = _logits(inputs, params)
    found -= found.max(axis=-1, keepdims=True)
    np.exp(found, out=found)
    found /= found.sum(axis=-1, keepdims=True)
    found[np.arange(len(labels)), ..., labels] -= 1
    return found


def _logits(inputs: Array, params: Array) -> Array:
    kernels = np.moveaxis(params.reshape(-1, inputs.shape[1], _CLASSES), 0, 1)
    flat = inputs @ kernels.reshape(inputs.shape[1], -1)
    return flat.reshape(len(inputs), *params.shape[:-1], _CLASSES)


def accuracies(params: Array, inputs: Array, labels: Array) -> Array:
    """Returns the fraction of correct predictions of each run, (runs,)."""
    return np.mean(np.argmax(_logits(inputs, params), axis=-1) == labels[:, None], axis=0)


def poisson_sums(
    data: Data, batch_size: int, stabilizer: float, seed: int
) -> Iterator[ClippedSums]:
    """Yields the clipped sums of one Poisson sample after another."""
    rng = np.random.default_rng((seed, 1))
    while True:
        drawn = np.flatnonzero(rng.random(len(data.labels)) < batch_size / len(data.labels))
        yield automatic_sums(data.inputs[drawn], data.labels[drawn], stabilizer)


@dataclasses.dataclass(frozen=True)
class Training:
    """Everything of a run except its update rule, σ and seed. C is 1.

    Attributes:
        batch_size: B.
        steps: T.
        stabilizer: Constant of the automatic clipping.
        schedule: Step -> factor of the learning rate.
    """

    batch_size: int
    steps: int
    stabilizer: float
    schedule: Callable[[int], float] = lambda t: 1.0

    def accuracies(
        self,
        data: Data,
        rules: Sequence[tuple[Rule, float]],
        sigmas: Sequence[float],
        *,
        seed: int,
    ) -> Array:
        """Returns the test accuracies, (rules, sigmas).

        All runs share batches and unit noise.

        Args:
            data: The data.
            rules: Update rules with their learning rates.
            sigmas: Values of σ. Each rule is run with each.
            seed: Seed of the batches, the noise and the start.
        """
        rng = np.random.default_rng((seed, 0))
        size = data.inputs.shape[1] * _CLASSES
        limit = (data.inputs.shape[1] - 1) ** -0.5
        start = rng.uniform(-limit, limit, size).astype(np.float32)
        start = np.tile(start, (len(sigmas), 1))
        scales = np.asarray(sigmas, np.float32)[:, None]
        draws = (scales * rng.standard_normal(size, np.float32) for _ in range(self.steps))
        batches = poisson_sums(data, self.batch_size, self.stabilizer, seed)
        rates = [[rate * self.schedule(t) for t in range(self.steps)] for _, rate in rules]
        last: list[Array] = []
        for last in run(  # noqa: B007, the last iterates count
            [rule for rule, _ in rules],
            start,
            batches,
            draws,
            rates=rates,
            batch_size=self.batch_size,
        ):
            pass
        return np.stack([accuracies(x, data.test_inputs, data.test_labels) for x in last])
