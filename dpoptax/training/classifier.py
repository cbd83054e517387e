"""Makes a task of a flax model and a data set with labels."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpoptax
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.errors import ConfigError
from dpoptax.training.evaluation import Evaluation
from dpoptax.training.run.seeds import params_key
from dpoptax.training.task import PlainPlan, Task

Params = Any


class MLP(nn.Module):
    """Fully connected layers with tanh, which bounds activations under noise."""

    num_classes: int
    widths: tuple[int, ...] = (64,)

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the logits (num_classes,) of one example of any shape."""
        hidden = inputs.reshape(-1)
        for width in self.widths:
            hidden = nn.tanh(nn.Dense(width)(hidden))
        return nn.Dense(self.num_classes)(hidden)


class CNN(nn.Module):
    """Two 3x3 convolutions with tanh and average pooling, then a linear layer."""

    num_classes: int
    channels: tuple[int, ...] = (16, 32)

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the logits (num_classes,) of one image (height, width, channels)."""
        hidden = inputs
        for channels in self.channels:
            hidden = nn.tanh(nn.Conv(channels, (3, 3))(hidden))
            hidden = nn.avg_pool(hidden, (2, 2), strides=(2, 2))
        return nn.Dense(self.num_classes)(hidden.reshape(-1))


def classification(
    model: nn.Module,
    data: Dataset,
    plan: dpoptax.PrivacyPlan | PlainPlan,
    *,
    seed: int | None = None,
    transform_loss: Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]] | None = None,
    variables: "Variables | None" = None,
    **options: Any,
) -> Task:
    """Returns the task of training a flax model on labels, by cross-entropy.

    Labels (N,) are classes of examples. Labels (N, L) are classes of tokens, of which those below
    0 do not count, and the loss of an example is a mean over its tokens. The metrics on the test
    split are loss and accuracy, and perplexity for tokens.

    Args:
      model: maps the inputs of one example to its logits, or those of its tokens. It must keep
        parameters only; a collection "frozen" is not trained.
      data: the data.
      plan: the plan, with N of `data`.
      seed: seed of the initial parameters, which are public; by default 0.
      transform_loss: maps the loss of one example to another one, such as
        `lambda loss: dpoptax.augmented(loss, augment, copies)`.
      variables: initial variables; by default those of `model.init`.
      **options: further attributes of the `Task`, such as `optimizer`.

    Raises:
      ConfigError: the model does not take one example, keeps other state, or has lists as
        attributes.
    """
    _check_hashable(model)
    first = streaming.read(data.train, np.zeros(1, np.int64))["inputs"][0]
    if variables is None:
        variables = initial_variables(model, jnp.asarray(first), params_key(seed))
    _check_logits(model, variables, data.train)
    frozen = variables.frozen or None
    loss = example_loss(model)
    if transform_loss is not None:
        loss = _transformed(loss, transform_loss)
    tokens = data.num_classes == 0
    evaluation = (_TokenEvaluation if tokens else Evaluation)(
        LabelMetrics(model, tokens), data.test, frozen=frozen
    )
    return Task(
        **{
            "loss_fn": loss,
            "params": variables.params,
            "data": data.train,
            "plan": plan,
            "frozen": frozen,
            "evaluate": evaluation,
            "dataset": data.name,
            **options,
        }
    )


class Variables(NamedTuple):
    """Arrays of a model.

    Attributes:
        params: Parameters that are trained and released.
        frozen: The collection "frozen" of constants, such as the base weights of LoRA. It may be
            empty.
    """

    params: Params
    frozen: Params


def _check_hashable(model: nn.Module) -> None:
    """Checks that runs of equal models can share compiled programs."""
    try:
        hash(model)
    except TypeError as error:
        raise ConfigError(
            f"`model` must be hashable, got {type(model).__name__} with an attribute that is not. "
            "Pass tuples instead of lists, such as `nn.Sequential((nn.Dense(8), nn.Dense(2)))`."
        ) from error


@functools.partial(jax.jit, static_argnums=0)
def initial_variables(model: nn.Module, inputs: jax.Array, key: jax.Array) -> Variables:
    """Initializes the variables for one example with the shape of `inputs`.

    The compiler removes the forward pass of the initialization.

    Raises:
        ConfigError: The model does not take one such example, or it keeps other state.
    """
    with _explains_model(model, inputs):
        made = model.init(key, jnp.zeros_like(_computed(inputs)))
    if others := made.keys() - {"params", "frozen"}:
        raise ConfigError(
            f"`model` must keep parameters only, got {type(model).__name__} with "
            f"{', '.join(sorted(others))}. Such state would depend on the data without noise. Use "
            "GroupNorm instead of BatchNorm."
        )
    return Variables(made["params"], made.get("frozen", {}))


@contextlib.contextmanager
def _explains_model(model: nn.Module, inputs: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigError(
            "`model` must take one example without a batch axis, got "
            f"{type(model).__name__}, which fails for inputs of shape {inputs.shape} with "
            f"{type(error).__name__}: {error}"
        ) from error


def apply(model: nn.Module, variables: Variables, inputs: jax.Array) -> jax.Array:
    """Computes the logits of one example."""
    frozen = {"frozen": variables.frozen} if variables.frozen else {}
    logits: Any = model.apply({"params": variables.params, **frozen}, _computed(inputs))
    return logits


def _computed(inputs: jax.Array) -> jax.Array:
    """Converts float16 inputs, which are for storage only, to float32."""
    return inputs.astype(jnp.float32) if inputs.dtype == jnp.float16 else inputs


def _check_logits(model: nn.Module, variables: Variables, source: streaming.Source) -> None:
    """Raises a ConfigError unless the logits of an example fit its labels."""
    example = jax.tree.map(lambda x: x[0], streaming.read(source, np.zeros(1, np.int64)))
    with _explains_model(model, example["inputs"]):
        logits = jax.eval_shape(functools.partial(apply, model), variables, example["inputs"])
    if logits.ndim != np.ndim(example["labels"]) + 1:
        raise ConfigError(
            "`model` must return logits for each label of one example, got an array of shape "
            f"{logits.shape} from {type(model).__name__} for inputs of shape "
            f"{example['inputs'].shape} and labels of shape {np.shape(example['labels'])}. Remove "
            "any batch axis from the model."
        )


def token_losses(model: nn.Module, variables: Variables, example: Any) -> tuple[Any, Any, Any]:
    """Computes the cross-entropy of each label of one example.

    Returns:
        The losses, the logits, and a mask of the labels that count. For an example with one class,
        the losses and the mask are scalars. For a row of tokens, all have a leading axis of tokens.
    """
    logits, labels = apply(model, variables, example["inputs"]), example["labels"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return losses, logits, labels >= 0


def example_loss(model: nn.Module) -> Callable[..., jax.Array]:
    """Returns `loss(params, example)`, the scalar cross-entropy of one example.

    For a row of tokens it is the mean over tokens with a label, or 0 without labels.
    """

    def loss(params: Params, example: Any, frozen: Params = None) -> jax.Array:
        losses, _, used = token_losses(model, Variables(params, frozen), example)
        if losses.ndim == 0:
            return losses
        return jnp.sum(jnp.where(used, losses, 0.0)) / jnp.maximum(jnp.sum(used), 1)

    return loss


def _transformed(
    loss: Callable[..., jax.Array],
    transform: Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]],
) -> Callable[..., jax.Array]:
    """Returns a transformed loss, which passes frozen arrays on."""

    @functools.wraps(transform(loss))  # `fit` reads in the signature whether it takes a key
    def transformed(*args: Any, frozen: Params = None) -> jax.Array:
        return transform(functools.partial(loss, frozen=frozen))(*args)

    return transformed


@dataclasses.dataclass(frozen=True)
class LabelMetrics:
    """Computes cross-entropy and accuracy of one example, or sums over its tokens and counts.

    Metrics of equal models are equal, so that runs share compiled evaluations.
    """

    model: nn.Module
    tokens: bool

    def __call__(self, params: Params, example: Any, frozen: Params = None) -> dict[str, Any]:
        """Returns numbers by name, or pairs of a sum and its number of terms."""
        losses, logits, used = token_losses(self.model, Variables(params, frozen), example)
        correct = used & (jnp.argmax(logits, axis=-1) == example["labels"])
        if not self.tokens:
            return {"loss": losses, "accuracy": correct.astype(jnp.float32)}
        count = jnp.sum(used)
        return {
            "loss": (jnp.sum(jnp.where(used, losses, 0.0)), count),
            "accuracy": (jnp.sum(correct), count),
        }


class _TokenEvaluation(Evaluation):
    """Adds the perplexity, the exponential of the mean loss."""

    def __call__(self, params: Any) -> dict[str, float]:
        found = super().__call__(params)
        mean = found["test_loss"]
        return {**found, "test_perplexity": math.exp(mean) if mean < 700 else math.inf}
