"""Computes metrics of parameters on a split that is on the device or streamed."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.training import models
from dpoptax.training.config import TrainConfig
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import NO_LABEL


class Totals(NamedTuple):
    """Sums over all labels: one of an example, or one of each of its tokens."""

    loss: Any
    correct: Any
    labels: Any


@functools.lru_cache
def evaluate_split(
    model: nn.Module, chunk: int = 1024
) -> Callable[[models.Params, Any, models.Params], Totals]:
    """Compiles `evaluate(params, split, frozen)`, which takes `chunk` examples at a time."""

    def evaluate(params: models.Params, split: Any, frozen: models.Params) -> Totals:
        def one(example: Any) -> Totals:
            variables = models.Variables(params, frozen)
            loss, logits, used = models.token_losses(model, variables, example)
            correct = used & (jnp.argmax(logits, axis=-1) == example["labels"])
            return Totals(jnp.sum(jnp.where(used, loss, 0.0)), jnp.sum(correct), jnp.sum(used))

        return jax.tree.map(jnp.sum, jax.lax.map(one, split, batch_size=chunk))

    return jax.jit(evaluate)


class Evaluator:
    """Loss (nats per label), accuracy and, for labels of tokens, perplexity on a split.

    Args:
        config: The run; its microbatches are those of the evaluation too.
        model: Maps one example's inputs to logits.
        splits: By name, on the device or streamed.
        frozen: Constants of the model.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, splits: Mapping[str, Any], frozen: Any
    ) -> None:
        self._chunk = min(1024, config.microbatch_size or 1024)
        self._model, self._splits, self._frozen = model, splits, frozen

    def __call__(self, params: models.Params, name: str) -> dict[str, float]:
        """Returns the metrics of parameters on a split, prefixed with its name."""
        split = self._splits[name]
        parts: Iterable[Any] = [split]
        if not streaming.in_memory(split):
            parts = streaming.chunks(split, self._chunk, padding_label=NO_LABEL)
        evaluate = evaluate_split(self._model, self._chunk)
        sums = [evaluate(params, part, self._frozen) for part in parts]
        loss, correct, labels = (sum(map(float, column)) for column in zip(*sums, strict=True))
        metrics = {
            f"{name}_loss": loss / max(labels, 1),
            f"{name}_accuracy": correct / max(labels, 1),
        }
        if isinstance(split, Mapping) and np.ndim(split["labels"]) == 2:
            mean = metrics[f"{name}_loss"]
            metrics[f"{name}_perplexity"] = math.exp(mean) if mean < 700 else math.inf
        return metrics
