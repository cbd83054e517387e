"""Computes mean metrics over examples, on the device or streamed."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.runs import digest_of, rows_digest, traced, tree_digest
from dpoptax.training.data import streaming

_CHUNK = 1024
"""Number of examples that are evaluated at once."""


@dataclasses.dataclass(frozen=True)
class Score:
    """Describes the metric by which runs are compared.

    Attributes:
        name: Its name among the metrics.
        worst: Its worst value for one example; may be infinite.
        best: Its best value.
    """

    name: str = "accuracy"
    worst: float = 0.0
    best: float = 1.0

    @property
    def size(self) -> float:
        """The sensitivity of the sum over examples, if each counts one clipped value."""
        return abs(self.best - self.worst)

    def clipped(self, value: Any) -> jax.Array:
        """Returns the value of one example in the range, and the worst for NaN."""
        value = jnp.asarray(value, jnp.result_type(value, jnp.float32))
        value = jnp.where(jnp.isnan(value), self.worst, value)
        return jnp.clip(value, *sorted((self.worst, self.best)))

    def of(self, record: Mapping[str, Any]) -> float:
        """Returns the score in a record, which has None for NaN and infinities."""
        found = record[f"test_{self.name}"]
        return self.worst if found is None else float(found)

    def rank(self, value: float) -> float:
        """Returns a number that is larger for better values."""
        return value if self.best > self.worst else -value

    @property
    def scale(self) -> int:
        """The factor of numbers for people: 100 for a metric in [0, 1], otherwise 1."""
        return 100 if (self.worst, self.best) == (0.0, 1.0) else 1

    def text(self, value: float) -> str:
        """Returns a number for people."""
        return f"{100 * value:.2f}" if self.scale == 100 else f"{value:.4f}"

    def label(self, split: str) -> str:
        """Returns the head of a column, such as "test accuracy (%)"."""
        return f"{split} {self.name.replace('_', ' ')}" + " (%)" * (self.scale == 100)


class Evaluation:
    """Computes the mean of each metric over examples, as `evaluate` of `fit`.

    Privacy: none for these examples. They are assumed to be public, such as a test split.

    Args:
        metrics: `metrics(params, example)` returns numbers for one example by name, or pairs of a
            sum and its number of terms. With `frozen`, it also gets the keyword `frozen`.
        examples: The examples, arrays or records that are streamed.
        frozen: Arrays that are not trained.
        combine: `combine(values)` returns further metrics by name, such as an AUC, from the values
            of all examples: an array (N,) for each metric that is a number.
        score: The metric by which `dpoptax compare` and `sweep` choose. A sweep needs a mean over
            examples with a finite range, because its price covers the held-out examples.
        score_range: The worst and the best value of `score` for one example, to which values are
            clipped: (3.0, 0.0) for a loss, which is better if it is smaller; (inf, 0.0) is also
            possible for `compare`. NaN counts as the worst.

    Raises:
        ValueError: `score_range` is empty, NaN, or has an infinite best value.

    >>> means = Evaluation(lambda x, y: {"error": jnp.abs(x - y)}, jnp.arange(3.0))
    >>> means(jnp.ones(()))
    {'test_error': 0.6666666666666666}
    """

    def __init__(
        self,
        metrics: Callable[..., dict[str, Any]],
        examples: streaming.Source,
        *,
        frozen: Any = None,
        combine: Callable[[dict[str, np.ndarray]], Mapping[str, Any]] | None = None,
        score: str = "accuracy",
        score_range: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        worst, best = map(float, score_range)
        if math.isnan(worst) or not math.isfinite(best) or worst == best:
            raise ValueError(
                "`score_range` must be the worst and the best value, such as (0, 1), got "
                f"{score_range}."
            )
        self.score, self._combine = Score(score, worst, best), combine
        self.size = streaming.source_size(examples)
        self.metrics, self._examples = metrics, examples
        self._frozen = {} if frozen is None else {"frozen": frozen}
        self._chunk = min(_CHUNK, self.size)  # streamed chunks are padded

    def __call__(self, params: Any) -> dict[str, float]:
        """Returns the means by name, such as "test_loss", the loss first."""
        means, values = self._means(params)
        if self._combine is None:
            return means
        further = {f"test_{name}": float(x) for name, x in self._combine(values).items()}
        if further.keys() & means.keys():  # a sweep takes the score for a mean
            raise ValueError(
                f"`combine` must return other names than `metrics`, got {sorted(further)}."
            )
        return means | further

    def _means(self, params: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Returns the means, and the values of all examples for metrics that are numbers."""
        parts: Iterable[Any] = streaming.chunks(self._examples, self._chunk)
        if streaming.in_memory(self._examples):
            parts = [(self._resident, np.ones(self.size, bool))]
        # Values of several hosts may be sharded, so only their sums are read.
        keep = self._combine is not None or jax.process_count() == 1
        how = self.metrics, self._chunk, self.score, keep
        found = [(_sums(*how, params, *part, self._frozen), part[1]) for part in parts]
        sums, means = [part for (part, _), _ in found], {}
        values = {
            name: np.concatenate([np.asarray(each[name])[mask] for (_, each), mask in found])
            for name in found[0][0][1]
        }
        for metric in sorted(sums[0], key=lambda metric: (metric != "loss", metric)):
            columns = zip(*(part[metric] for part in sums), strict=True)
            total, terms = (sum(map(float, column)) for column in columns)
            if metric in values:  # a sum in float32 can round by more than one example adds
                total = float(values[metric].sum(dtype=np.float64))
            means[f"test_{metric}"] = total / max(terms, 1)
        return means, values

    @functools.cached_property
    def _resident(self) -> Any:
        # Several hosts share programs only with arrays that are on no device.
        alone = jax.process_count() == 1
        return jax.tree.map(jnp.asarray, self._examples) if alone else self._examples

    def has_score(self, params: Any, *, mean: bool = False) -> bool:
        """Returns whether the score may be in the results, or whether it is a bounded mean."""
        found = jax.eval_shape(self._of_one, params, self._example(), self._frozen)
        known = self.score.name in found
        if mean:  # a pair is a sum with its own number of terms
            is_number = known and not isinstance(found[self.score.name], tuple)
            return is_number and math.isfinite(self.score.size)
        return known or self._combine is not None

    def digest(self, params: Any) -> str:
        """Returns a hash of the metrics and the examples; `params` may be shapes."""
        program = traced(self._of_one, params, self._example(), self._frozen)
        arrays = rows_digest(self._examples, whole=False), tree_digest(self._frozen)
        return digest_of([program, *arrays, repr(self.score)])

    def _of_one(self, params: Any, example: Any, frozen: dict[str, Any]) -> dict[str, Any]:
        return self.metrics(params, example, **frozen)

    def _example(self) -> Any:
        """Returns the shapes of an example."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            streaming.read(self._examples, np.zeros(1, np.int64)),
        )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _sums(
    metrics: Callable[..., dict[str, Any]],
    chunk: int,
    score: Score,
    keep: bool,
    params: Any,
    examples: Any,
    mask: jax.Array,
    frozen: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns, by metric, a sum over the examples in `mask` and its number of terms.

    With `keep`, also returns the value of each example, for metrics that are numbers.
    """
    numbers: set[str] = set()

    def one(args: tuple[Any, jax.Array]) -> dict[str, Any]:
        example, counts = args
        given = metrics(params, example, **frozen)
        numbers.update(name for name, value in given.items() if not isinstance(value, tuple))
        found = {name: _pair(name, value, score) for name, value in given.items()}
        return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), found)

    each = jax.lax.map(one, (examples, mask), batch_size=chunk)
    kept = {name: each[name][0] for name in sorted(numbers)} if keep else {}
    return jax.tree.map(jnp.sum, each), kept


def _pair(name: str, value: Any, score: Score) -> tuple[Any, Any]:
    """Returns a metric of one example as a sum and its number of terms."""
    if isinstance(value, tuple):
        return value
    value = jnp.asarray(value)
    if value.shape:
        raise ValueError(f"`metrics` must return numbers for one example, got an array for {name}.")
    if name == score.name:  # a sweep relies on the sensitivity of the sum
        value = score.clipped(value)
    return value, jnp.ones([], jnp.int32)
