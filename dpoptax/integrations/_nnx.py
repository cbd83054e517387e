"""Splits a Flax nnx model into the loss of one example and its trained parameters."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def check_variables(model: nnx.Module) -> None:
    """Raises an error if the model has statistics of batches.

    A merged copy of the model would drop their updates without a message.
    """
    for path, each in nnx.iter_graph(model):
        if isinstance(each, nnx.BatchStat):
            raise ValueError(
                f"`model` must not have `nnx.BatchStat`, got one at {'.'.join(map(str, path))}: "
                "statistics of a batch mix its examples. Use `nnx.LayerNorm` or `nnx.GroupNorm`."
            )


def has_streams(model: nnx.Module) -> bool:
    """Returns whether the model has streams of random numbers, as for dropout."""
    return bool(_streams(model))


def example_loss(
    model: nnx.Module,
    trained: nnx.filterlib.Filter,
    loss_fn: Callable[..., Any],
    inputs_of: Callable[[Any], dict[str, Any]],
) -> tuple[Callable[..., jax.Array], Any]:
    """Returns the loss of one example, and the parameters that it is differentiated in.

    Args:
      model: the model.
      trained: selects the trained variables, such as their type.
      loss_fn: `loss_fn(model, **inputs)`, the loss of a batch, or a tuple that starts with it.
      inputs_of: returns the inputs of a batch. It gets a batch of one.
    """
    graph, *states = nnx.split(model, trained, ...)
    params, rest = map(nnx.as_pure, states)
    names = sorted({stream.tag for stream in _streams(model)})

    def example_loss_fn(params: Any, example: Any, *key: jax.Array) -> jax.Array:
        # On a mesh, JAX refuses to index an array that the loss closes over.
        own = nnx.merge(graph, params, jax.lax.stop_gradient(rest))
        for record_key in key:
            keys: Any = {n: jax.random.fold_in(record_key, i) for i, n in enumerate(names)}
            nnx.reseed(own, policy="match_shape", **keys)
        found = loss_fn(own, **inputs_of(jax.tree.map(lambda x: x[None], example)))
        return found[0] if isinstance(found, tuple) else found

    return example_loss_fn, params


def _streams(model: nnx.Module) -> list[nnx.RngStream]:
    return [each for _, each in nnx.iter_graph(model) if isinstance(each, nnx.RngStream)]
