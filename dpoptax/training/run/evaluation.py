"""Metrics of parameters on a split that is on the device, or streamed."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.training import models
from dpoptax.training.config import TrainConfig
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import NO_LABEL

Evaluate = Callable[..., "Totals"]
"""Compiled: `evaluate(params, split, frozen)`."""


class Totals(NamedTuple):
    """Sums over all labels: one of an example, or one of each of its tokens."""

    loss: Any
    correct: Any
    labels: Any


def evaluated_steps(config: TrainConfig, last: int) -> tuple[int, ...]:
    """After how many of `last` steps a run evaluates: before any, every so many, after the last."""
    return (*range(0, last, config.eval_every), last)


@functools.lru_cache
def evaluate_split(
    model: nn.Module, chunk: int = 1024
) -> Callable[[models.Params, Any, models.Params], Totals]:
    """`evaluate(params, split, frozen)`: sums over the split's labels, `chunk` at a time."""

    def evaluate(params: models.Params, split: Any, frozen: models.Params) -> Totals:
        def one(example: Any) -> Totals:
            variables = models.Variables(params, frozen)
            loss, logits, used = models.token_losses(model, variables, example)
            correct = used & (jnp.argmax(logits, axis=-1) == example["labels"])
            return Totals(jnp.sum(jnp.where(used, loss, 0.0)), jnp.sum(correct), jnp.sum(used))

        return jax.tree.map(jnp.sum, jax.lax.map(one, split, batch_size=chunk))

    return jax.jit(evaluate)


@functools.lru_cache(maxsize=64)
def _compiled(model: nn.Module, chunk: int, leaves: Any, structure: Any) -> Evaluate:
    arguments = jax.tree.unflatten(structure, leaves)
    return jax.jit(evaluate_split(model, chunk)).lower(*arguments).compile()


class Evaluation:
    """Loss (nats per label), accuracy and, for labels of tokens, perplexity on a split.

    Args:
        config: The run; its microbatches are those of the evaluation too.
        model: Maps one example's inputs to logits.
        splits: By name, on the device or streamed.
        frozen: What the model computes with and does not train.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, splits: Mapping[str, Any], frozen: Any
    ) -> None:
        self._chunk = min(1024, config.microbatch_size or 1024)
        self._model, self._splits, self._frozen = model, splits, frozen
        self._executables: dict[str, Evaluate] = {}

    def compile(self, params: models.Params, name: str) -> None:
        """Compiles for parameters like `params`, by their shapes alone, on one device."""
        split = self._splits[name]
        if not streaming.in_memory(split):
            split = next(self._chunks(split))
        self._executable(params, split, name)

    def _chunks(self, split: Any) -> Any:
        return streaming.chunks(split, self._chunk, padding_label=NO_LABEL)

    def _executable(self, params: models.Params, part: Any, name: str) -> Evaluate:
        """The program for a split; its parameters and its parts are of the same shapes each time.

        It says so where they are not.
        """
        if name not in self._executables:
            arguments = jax.eval_shape(lambda *args: args, params, part, self._frozen)
            leaves, structure = jax.tree.flatten(arguments)
            self._executables[name] = _compiled(self._model, self._chunk, tuple(leaves), structure)
        return self._executables[name]

    def _totals(self, params: models.Params, part: Any, name: str) -> Totals:
        if all(
            len(leaf.devices()) == 1
            for leaf in jax.tree.leaves(params)
            if isinstance(leaf, jax.Array)
        ):
            return self._executable(params, part, name)(params, part, self._frozen)
        return evaluate_split(self._model, self._chunk)(params, part, self._frozen)

    def __call__(self, params: models.Params, name: str) -> dict[str, float]:
        """The metrics of parameters on a split, each with the split's name before it."""
        split = self._splits[name]
        parts = [split] if streaming.in_memory(split) else self._chunks(split)
        sums = [self._totals(params, part, name) for part in parts]
        loss, correct, labels = (sum(map(float, column)) for column in zip(*sums, strict=True))
        metrics = {
            f"{name}_loss": loss / max(labels, 1),
            f"{name}_accuracy": correct / max(labels, 1),
        }
        if isinstance(split, Mapping) and np.ndim(split["labels"]) == 2:
            mean = metrics[f"{name}_loss"]
            metrics[f"{name}_perplexity"] = math.exp(mean) if mean < 700 else math.inf
        return metrics
