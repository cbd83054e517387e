"""Computes metrics on the test split, on the device or streamed."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.training import models
from dpoptax.training.config import TrainConfig
from dpoptax.training.data import streaming


@functools.lru_cache
def evaluate_split(model: nn.Module, chunk: int = 1024) -> Callable[..., dict[str, Any]]:
    """Returns the compiled `evaluate(params, split, mask, frozen)`.

    It processes `chunk` examples at a time. It returns, by metric, a sum over the examples in
    `mask` and its number of terms.
    """

    def evaluate(
        params: models.Params, split: Any, mask: jax.Array, frozen: models.Params
    ) -> dict[str, Any]:
        def one(args: tuple[Any, jax.Array]) -> dict[str, Any]:
            example, counts = args
            variables = models.Variables(params, frozen)
            found = models.example_metrics(model, variables, example)
            return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), found)

        return jax.tree.map(jnp.sum, jax.lax.map(one, (split, mask), batch_size=chunk))

    return jax.jit(evaluate)


class Evaluator:
    """Computes mean metrics on a split, and the perplexity for labels of tokens.

    Args:
        config: The run; its microbatch size bounds the chunks of the evaluation.
        model: Maps one example's inputs to logits.
        split: The split, on the device or streamed.
        frozen: Constants of the model.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, split: streaming.Source, frozen: Any
    ) -> None:
        self._size = streaming.source_size(split)
        # Streamed chunks are padded, so none is larger than the split.
        self._chunk = max(1, min(1024, config.microbatch_size or 1024, self._size))
        self._model, self._split, self._frozen = model, split, frozen

    def __call__(self, params: models.Params) -> dict[str, float]:
        """Returns the metrics by name, such as "test_accuracy"."""
        split = self._split
        parts: Iterable[Any] = [(split, np.ones(self._size, bool))]
        if not streaming.in_memory(split):
            parts = streaming.chunks(split, self._chunk)
        evaluate = evaluate_split(self._model, self._chunk)
        sums = [evaluate(params, part, mask, self._frozen) for part, mask in parts]
        metrics = {}
        for metric in sorted(sums[0], key=lambda metric: (metric != "loss", metric)):
            columns = zip(*(part[metric] for part in sums), strict=True)
            total, terms = (sum(map(float, column)) for column in columns)
            metrics[f"test_{metric}"] = total / max(terms, 1)
        own = models.has_own_metrics(self._model)
        if not own and isinstance(split, Mapping) and np.ndim(split["labels"]) == 2:
            mean = metrics["test_loss"]
            metrics["test_perplexity"] = math.exp(mean) if mean < 700 else math.inf
        return metrics
