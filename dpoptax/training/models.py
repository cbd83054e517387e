"""Registers flax models, initializes them, and computes the loss of one example."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from dpoptax.training.config_files import named
from dpoptax.training.errors import ConfigError, line_in
from dpoptax.training.loss_arguments import takes_key

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


@dataclasses.dataclass(frozen=True)
class FunctionModel:
    """Model of any library with a custom loss and metrics, for a config's `model`.

    A config names a function of `num_classes` that returns the model: MODULE:FUNCTION, or a name
    registered with `register_model`. One of `logits` and `loss` is required.

    Attributes:
        initial: `initial(key, inputs)` returns the parameters, for inputs of one example.
        logits: `logits(params, inputs)` returns the logits of one example.
        loss: `loss(params, example)` returns the loss of one example, a dict of "inputs", "labels"
            and other columns. By default, it is the cross-entropy of the logits. If it requires a
            third argument, it gets a key that is new for each step and example, e.g. for dropout.
        metrics: `metrics(params, example)` returns numbers for one example by name. Their means are
            recorded. `dpoptax compare` and `sweep` choose by "accuracy", which must be in [0, 1].
            By default, cross-entropy and accuracy of the logits, or the loss without logits.
    """

    initial: Callable[[jax.Array, jax.Array], Params]
    logits: Callable[[Params, jax.Array], jax.Array] | None = None
    loss: Callable[..., jax.Array] | None = None
    metrics: Callable[[Params, Any], dict[str, jax.Array]] | None = None

    def __post_init__(self) -> None:
        if self.logits is None and self.loss is None:
            raise ConfigError(
                "A FunctionModel must have `logits` or `loss`, got neither. Pass one of them."
            )
        if self.logits is None and self.metrics is None and has_random_loss(self):
            raise ConfigError(
                "A FunctionModel whose loss takes a key must have `logits` or `metrics`, got "
                "neither. Pass one of them."
            )

    # The interface of a flax module.

    def init(self, key: jax.Array, inputs: jax.Array) -> dict[str, Params]:
        """Returns the initial variables."""
        return {"params": self.initial(key, inputs)}

    def apply(self, variables: dict[str, Params], inputs: jax.Array) -> jax.Array:
        """Returns the logits of one example."""
        assert self.logits is not None
        return self.logits(variables["params"], inputs)


MODELS: dict[str, Callable[[int], nn.Module]] = {}


def register_model(name: str, build: Callable[[int], nn.Module]) -> None:
    """Registers `build(num_classes)` as a config's `model`, from example to logits."""
    MODELS[name] = build


register_model("linear", lambda num_classes: MLP(num_classes, widths=()))
register_model("mlp", MLP)
register_model("cnn", CNN)


def build_model(name: str, num_classes: int | None) -> nn.Module:
    """Builds the registered model `name`, or the model that MODULE:FUNCTION returns.

    Raises:
        ConfigError: The name is unknown, or the import fails.
    """
    model: nn.Module = named("model", name, MODELS)(num_classes)
    return model


class Variables(NamedTuple):
    """Arrays of a model.

    Attributes:
        params: Parameters that are trained and released.
        frozen: The collection "frozen" of constants, such as the base weights of LoRA. It may be
            empty.
    """

    params: Params
    frozen: Params


@functools.partial(jax.jit, static_argnums=0)
def initial_variables(model: nn.Module, inputs: jax.Array, key: jax.Array) -> Variables:
    """Initializes the variables for one example with the shape of `inputs`.

    The compiler removes the forward pass of the initialization.

    Raises:
        ConfigError: The model does not take one such example, or it keeps other state.
    """
    try:
        made = model.init(key, jnp.zeros_like(_computed(inputs)))
    except Exception as error:
        raise _unfit(model, inputs, error) from error
    if others := made.keys() - {"params", "frozen"}:
        raise ConfigError(
            f"`model` must keep parameters only, got {type(model).__name__} with "
            f"{', '.join(sorted(others))}. Such state would depend on the data without noise. Use "
            "GroupNorm instead of BatchNorm."
        )
    return Variables(made["params"], made.get("frozen", {}))


def _unfit(model: nn.Module, inputs: jax.Array, error: Exception) -> ConfigError:
    """Returns the error for a model that fails on one example."""
    called: Any = type(model).__call__
    if isinstance(model, FunctionModel):
        called = model.logits or model.initial
    path = getattr(getattr(inspect.unwrap(called), "__code__", None), "co_filename", "")
    line = line_in(path, error)
    where = f" ({path}{line})" if line else ""
    return ConfigError(
        f"`model` must take one example without a batch axis, got {type(model).__name__}{where}, "
        f"which fails for inputs of shape {inputs.shape} with {type(error).__name__}: {error}"
    )


def apply(model: nn.Module, variables: Variables, inputs: jax.Array) -> jax.Array:
    """Computes the logits of one example.

    Raises:
        ConfigError: The model fails on the example.
    """
    frozen = {"frozen": variables.frozen} if variables.frozen else {}
    try:
        logits: Any = model.apply({"params": variables.params, **frozen}, _computed(inputs))
    except Exception as error:
        raise _unfit(model, inputs, error) from error
    return logits


def _computed(inputs: jax.Array) -> jax.Array:
    """Converts float16 inputs, which are for storage only, to float32."""
    return inputs.astype(jnp.float32) if inputs.dtype == jnp.float16 else inputs


def token_losses(model: nn.Module, variables: Variables, example: Any) -> tuple[Any, Any, Any]:
    """Computes the cross-entropy of each label of one example.

    Returns:
        The losses, the logits, and a mask of the labels that count. For an example with one class,
        the losses and the mask are scalars. For a row of tokens, all have a leading axis of tokens.

    Raises:
        ConfigError: The logits do not fit the labels.
    """
    logits, labels = apply(model, variables, example["inputs"]), example["labels"]
    if logits.ndim != labels.ndim + 1:
        raise ConfigError(
            "`model` must return logits for each label of one example, got an array of shape "
            f"{logits.shape} from {type(model).__name__} for inputs of shape "
            f"{example['inputs'].shape} and labels of shape {labels.shape}. Remove any batch axis "
            "from the model."
        )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return losses, logits, labels >= 0


def example_loss(model: nn.Module, frozen: Params = None) -> Callable[..., jax.Array]:
    """Returns `loss(params, example)`, the scalar cross-entropy of one example.

    For a row of tokens it is the mean over tokens with a label, or 0 without labels.
    """
    if isinstance(model, FunctionModel) and model.loss is not None:
        return model.loss

    def loss(params: Params, example: Any) -> jax.Array:
        losses, _, used = token_losses(model, Variables(params, frozen), example)
        if losses.ndim == 0:
            return losses
        return jnp.sum(jnp.where(used, losses, 0.0)) / jnp.maximum(jnp.sum(used), 1)

    return loss


def has_random_loss(model: Any) -> bool:
    """Returns whether the loss of a model takes a key."""
    return isinstance(model, FunctionModel) and model.loss is not None and takes_key(model.loss)


def has_own_metrics(model: nn.Module) -> bool:
    """Returns whether a model has other metrics than those of its logits."""
    own = isinstance(model, FunctionModel)
    return own and (model.metrics is not None or model.logits is None)


def example_metrics(
    model: nn.Module, variables: Variables, example: Any
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Computes the metrics of one example: by name, a sum and its number of terms.

    They are the cross-entropy ("loss") and the accuracy of the labels, or the model's own metrics.
    """
    one = jnp.ones([], jnp.int32)
    if has_own_metrics(model):
        own: Any = model
        measure = own.metrics or (lambda *args: {"loss": example_loss(model)(*args)})
        found = {name: jnp.asarray(x) for name, x in measure(variables.params, example).items()}
        if wrong := sorted(name for name, value in found.items() if value.shape):
            raise ConfigError(
                f"`metrics` must return scalars for one example, got arrays for {', '.join(wrong)}."
            )
        if "accuracy" in found:  # a sweep relies on sensitivity 1 of the sum
            found["accuracy"] = jnp.clip(jnp.nan_to_num(found["accuracy"]), 0.0, 1.0)
        return {name: (value, one) for name, value in found.items()}
    losses, logits, used = token_losses(model, variables, example)
    correct = used & (jnp.argmax(logits, axis=-1) == example["labels"])
    count = jnp.sum(used)
    return {
        "loss": (jnp.sum(jnp.where(used, losses, 0.0)), count),
        "accuracy": (jnp.sum(correct), count),
    }
