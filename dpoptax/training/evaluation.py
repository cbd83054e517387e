"""Computes mean metrics over examples, on the device or streamed."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.runs import digest_of, rows_digest, traced, tree_digest
from dpoptax.training.data import streaming

_CHUNK = 1024
"""Number of examples that are evaluated at once."""


class Evaluation:
    """Computes the mean of each metric over examples, as `evaluate` of `fit`.

    Privacy: none for these examples. They are assumed to be public, such as a test split.

    Args:
        metrics: `metrics(params, example)` returns numbers for one example by name, or pairs of a
            sum and its number of terms. With `frozen`, it also gets the keyword `frozen`.
            "accuracy" is clipped to [0, 1].
        examples: The examples, arrays or records that are streamed.
        frozen: Arrays that are not trained.
        prefix: The beginning of each name in the results.

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
        prefix: str = "test_",
    ) -> None:
        self.size = streaming.source_size(examples)
        self._metrics, self._examples, self._prefix = metrics, examples, prefix
        self._frozen = {} if frozen is None else {"frozen": frozen}
        self._chunk = min(_CHUNK, self.size)  # streamed chunks are padded

    def __call__(self, params: Any) -> dict[str, float]:
        """Returns the means by name, the loss first."""
        parts: Iterable[Any] = streaming.chunks(self._examples, self._chunk)
        if streaming.in_memory(self._examples):
            parts = [(self._resident, np.ones(self.size, bool))]
        sums = [_sums(self._metrics, self._chunk, params, *part, self._frozen) for part in parts]
        means = {}
        for metric in sorted(sums[0], key=lambda metric: (metric != "loss", metric)):
            columns = zip(*(part[metric] for part in sums), strict=True)
            total, terms = (sum(map(float, column)) for column in columns)
            means[self._prefix + metric] = total / max(terms, 1)
        return means

    def on(self, examples: streaming.Source, *, prefix: str) -> "Evaluation":
        """Returns the evaluation of the same metrics on other examples."""
        frozen = self._frozen.get("frozen")
        return Evaluation(self._metrics, examples, frozen=frozen, prefix=prefix)

    @functools.cached_property
    def _resident(self) -> Any:
        # Several hosts share programs only with arrays that are on no device.
        alone = jax.process_count() == 1
        return jax.tree.map(jnp.asarray, self._examples) if alone else self._examples

    def kinds(self, params: Any) -> dict[str, bool]:
        """Returns the names in the results, and whether each has one term for each example."""
        found = jax.eval_shape(self._of_one, params, self._example(), self._frozen)
        return {self._prefix + name: not isinstance(value, tuple) for name, value in found.items()}

    def digest(self, params: Any) -> str:
        """Returns a hash of the metrics and the examples; `params` may be shapes."""
        program = traced(self._of_one, params, self._example(), self._frozen)
        arrays = rows_digest(self._examples, whole=False), tree_digest(self._frozen)
        return digest_of([program, *arrays])

    def _of_one(self, params: Any, example: Any, frozen: dict[str, Any]) -> dict[str, Any]:
        return self._metrics(params, example, **frozen)

    def _example(self) -> Any:
        """Returns the shapes of an example."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            streaming.read(self._examples, np.zeros(1, np.int64)),
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums(
    metrics: Callable[..., dict[str, Any]],
    chunk: int,
    params: Any,
    examples: Any,
    mask: jax.Array,
    frozen: dict[str, Any],
) -> dict[str, Any]:
    """Returns, by metric, a sum over the examples in `mask` and its number of terms."""

    def one(args: tuple[Any, jax.Array]) -> dict[str, Any]:
        example, counts = args
        found = {
            name: _pair(name, value) for name, value in metrics(params, example, **frozen).items()
        }
        return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), found)

    return jax.tree.map(jnp.sum, jax.lax.map(one, (examples, mask), batch_size=chunk))


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    """Returns a metric of one example as a sum and its number of terms."""
    if isinstance(value, tuple):
        return value
    value = jnp.asarray(value)
    if value.shape:
        raise ValueError(f"`metrics` must return numbers for one example, got an array for {name}.")
    if name == "accuracy":  # a sweep relies on sensitivity 1 of the sum
        value = jnp.clip(jnp.nan_to_num(value), 0.0, 1.0)
    return value, jnp.ones([], jnp.int32)
