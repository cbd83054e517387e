"""Flax models by name, and the loss of one example."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax.training.data.dataset import Kind
from dpoptax.training.errors import ConfigError, line_in, unknown_name
from dpoptax.training.models import large_networks, networks, pretrained
from dpoptax.training.models.language import Gpt2, RobertaClassifier
from dpoptax.training.models.published import FORMATS
from dpoptax.training.models.transformer import Lora
from dpoptax.training.models.vision import VitClassifier

if TYPE_CHECKING:
    from dpoptax.training.config import TrainConfig

Params = Any


class MLP(nn.Module):
    """Fully connected layers with tanh between them; tanh keeps gradients bounded under noise."""

    num_classes: int
    widths: tuple[int, ...] = (64,)

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits (num_classes,) of one example of any shape."""
        hidden = inputs.reshape(-1)
        for width in self.widths:
            hidden = nn.tanh(nn.Dense(width)(hidden))
        return nn.Dense(self.num_classes)(hidden)


class CNN(nn.Module):
    """Two 3x3 convolutions with tanh and average pooling, then one linear layer."""

    num_classes: int
    channels: tuple[int, ...] = (16, 32)

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits (num_classes,) of one image (height, width, channels)."""
        hidden = inputs
        for channels in self.channels:
            hidden = nn.tanh(nn.Conv(channels, (3, 3))(hidden))
            hidden = nn.avg_pool(hidden, (2, 2), strides=(2, 2))
        return nn.Dense(self.num_classes)(hidden.reshape(-1))


MODELS: dict[str, Callable[[int], nn.Module]] = {}


def register_model(name: str, build: Callable[[int], nn.Module]) -> None:
    """Makes `build(num_classes)` available as a config's `model`; it maps one example to logits."""
    MODELS[name] = build


register_model("linear", lambda num_classes: MLP(num_classes, widths=()))
register_model("mlp", MLP)
register_model("cnn", CNN)
register_model("cnn_2", networks.TwoLayerCNN)
register_model("cnn_5", networks.FiveLayerCNN)
register_model("tanh_cnn", networks.TanhCNN)
register_model("tanh_cnn_mnist", lambda n: networks.TanhCNN(n, networks.TANH_CNN_MNIST, 32))
register_model("tanh_cnn_features", lambda n: networks.TanhCNN(n, networks.TANH_CNN_FEATURES, 0))
register_model(
    "resnet_3",
    lambda n: networks.ResNet(n, channels=(16, 32, 64), blocks=1, relu_after_sum=False),
)
register_model("resnet_18", networks.ResNet)
register_model("resnet_50", large_networks.ResNet50)
register_model("efficientnet_b0", large_networks.EfficientNetB0)
register_model("wrn_16_4", networks.WideResNet)
register_model(
    "vit_digits", lambda n: networks.VisionTransformer(n, patch=2, width=32, depth=2, heads=2)
)
register_model("vit_tiny", lambda n: networks.VisionTransformer(n, width=64, depth=4, heads=2))
register_model("vit_small", networks.VisionTransformer)
register_model("vit_small_16", lambda n: networks.VisionTransformer(n, patch=16))


PUBLISHED_MODELS: dict[str, tuple[type[nn.Module], Kind, dict[str, int]]] = {
    "roberta_base": (RobertaClassifier, "sentences", {}),
    "roberta_large": (
        RobertaClassifier,
        "sentences",
        {"width": 1024, "depth": 24, "heads": 16, "hidden": 4096},
    ),
    "gpt2": (Gpt2, "generation", {}),
    "vit_small_published": (VitClassifier, "images", {}),
}
"""Models that start from a checkpoint: module, what they are for, and the sizes as published."""

_PROJECTIONS: dict[type[nn.Module], tuple[str, ...]] = {
    RobertaClassifier: ("query", "key", "value"),
    Gpt2: ("query_key_value",),
    VitClassifier: ("query", "key", "value"),
}
_COMMON_PROJECTIONS = ("attention_output", "intermediate", "output")


def build_model(config: "TrainConfig", num_classes: int, kind: Kind = "images") -> nn.Module:
    """The model that a config means, for examples of `kind`.

    A published model has the sizes that the config.json of `config.pretrained` states, or, where
    none is given, those of its name.

    Raises:
        ConfigError: An unknown model, or one for another kind of examples; a checkpoint of another
            kind of model; a projection that it does not have.
    """
    if config.model in PUBLISHED_MODELS:
        return _published_model(config, num_classes, kind)
    if config.model not in MODELS:
        raise unknown_name("model", config.model, (*MODELS, *PUBLISHED_MODELS))
    if kind != "images":
        raise _misfit(config, kind)
    for name in ("pretrained", "lora_rank"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is for published models, and "
                f"model={config.model!r} is none; leave it out"
            )
    return MODELS[config.model](num_classes)


def _published_model(config: "TrainConfig", num_classes: int, kind: Kind) -> nn.Module:
    module, purpose, sizes = PUBLISHED_MODELS[config.model]
    if purpose != kind:
        raise _misfit(config, kind)
    fields: dict[str, Any] = dict(sizes)
    if config.pretrained is not None:
        fields = pretrained.fields_of(config.pretrained, module)
    if purpose != "generation":
        fields["num_classes"] = num_classes
    if config.lora_rank is not None:
        own = _PROJECTIONS[module]
        chosen = config.lora_projections or tuple(name for name in own if name != "key")
        for name in chosen:
            if name not in (*own, *_COMMON_PROJECTIONS):
                raise unknown_name("lora_projections", name, (*own, *_COMMON_PROJECTIONS))
        fields["lora"] = Lora(config.lora_rank, config.lora_alpha, chosen)
        fields |= {"frozen": True} if module is VitClassifier else {}
    model: Any = module(**fields)
    if purpose == "images":
        return model
    longest = model.positions - (model.padding + 1 if purpose == "sentences" else 0)
    if config.sequence_length > longest:
        raise ConfigError(
            f"sequence_length={config.sequence_length} exceeds the {longest} positions of "
            f"model={config.model!r}; give at most {longest}"
        )
    return model


def _misfit(config: "TrainConfig", kind: Kind) -> ConfigError:
    fitting = {name: purpose for name, (_, purpose, _) in PUBLISHED_MODELS.items()}
    fitting |= dict.fromkeys(MODELS, "images")
    names = ", ".join(sorted(name for name, purpose in fitting.items() if purpose == kind))
    return ConfigError(
        f"model={config.model!r} is for {fitting[config.model]}, and dataset={config.dataset!r} is "
        f"for {kind}; give one of {names}"
    )


class Variables(NamedTuple):
    """What a model computes with.

    Attributes:
        params: What is trained, and released.
        frozen: What is not: the published weights below LoRA's corrections; else empty.
    """

    params: Params
    frozen: Params


def init_variables(model: nn.Module, inputs: jax.Array, key: jax.Array) -> Variables:
    """Initial values for examples shaped like `inputs`, whose values are not used.

    Raises:
        ConfigError: A model that does not take one such example, or keeps more than parameters.
    """
    try:
        logits, made = model.init_with_output(key, jnp.zeros_like(_computed(inputs)))
    except Exception as error:
        raise _unfit(model, inputs, error) from error
    name = type(model).__name__
    if others := made.keys() - {"params", "frozen"}:
        raise ConfigError(
            f"model {name} keeps {', '.join(sorted(others))} beside its parameters, which the data "
            "would change without noise; for BatchNorm take GroupNorm"
        )
    if type(model) not in FORMATS and jnp.shape(logits)[1:] != ():
        raise ConfigError(
            f"model {name} makes an array of shape {jnp.shape(logits)} of one example, of shape "
            f"{inputs.shape}: want (num_classes,), and no axis of examples"
        )
    return Variables(made["params"], made.get("frozen", {}))


def _unfit(model: nn.Module, inputs: jax.Array, error: Exception) -> ConfigError:
    """The error for a model that does not take an example, with the line of its own file."""
    path = inspect.unwrap(type(model).__call__).__code__.co_filename
    line = line_in(path, error)
    where = f" ({path}{line})" if line else ""
    return ConfigError(
        f"model {type(model).__name__}{where} does not take one example alone, of shape "
        f"{inputs.shape}: {type(error).__name__}: {error}"
    )


@functools.lru_cache(maxsize=64)
def _compiled_init(model: nn.Module, shape: Any, dtype: Any, key_type: Any) -> Callable[..., Any]:
    """`init_variables` of a model as one program, for inputs and a key of these types.

    Compiled, the forward pass of initialisation is left out.
    """
    inputs, key = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((), key_type)
    init = functools.partial(init_variables, model)
    return jax.jit(init).lower(inputs, key).compile()


def start_variables(
    config: "TrainConfig", model: nn.Module, inputs: jax.Array, key: jax.Array
) -> Variables:
    """Where a run starts: initial values, or the published ones of `config.pretrained`.

    Raises:
        ConfigError: A checkpoint that cannot be read, or is not of this model.
    """
    if config.pretrained is None and type(model) in FORMATS:
        raise ConfigError(
            f"pretrained=None, and model={config.model!r} starts from published weights; give "
            "--pretrained, a directory with config.json and model.safetensors"
        )
    init = _compiled_init(model, inputs.shape, inputs.dtype, key.dtype)
    variables = init(np.zeros(inputs.shape, inputs.dtype), key)
    if config.pretrained is None:
        return variables
    loaded = pretrained.load_weights(config.pretrained, model, variables._asdict())
    return Variables(**loaded)


def apply(model: nn.Module, variables: Variables, inputs: jax.Array) -> jax.Array:
    """The logits of one example.

    Raises:
        ConfigError: A model that does not take it.
    """
    try:
        logits: Any = model.apply(_collections(variables), _computed(inputs))
    except Exception as error:
        raise _unfit(model, inputs, error) from error
    return logits


def _computed(inputs: jax.Array) -> jax.Array:
    """Inputs as a model computes with them: float16 is for storage."""
    return inputs.astype(jnp.float32) if inputs.dtype == jnp.float16 else inputs


def apply_from(
    model: nn.Module, variables: Variables, inputs: jax.Array, past: Any, position: Any
) -> tuple[jax.Array, Any]:
    """The logits of the tokens from number `position` on, and `past` with them; see `Gpt2`."""
    result: Any = model.apply(_collections(variables), inputs, past, position)
    return result


def _collections(variables: Variables) -> dict[str, Params]:
    frozen = {"frozen": variables.frozen} if variables.frozen else {}
    return {"params": variables.params, **frozen}


def empty_past(model: nn.Module, room: int) -> Any:
    """What `apply_from` takes before the first of `room` tokens."""
    zeros = jnp.zeros((room, model.width))
    return tuple((zeros, zeros) for _ in range(model.depth))


def example_loss(model: nn.Module, frozen: Params = None) -> Callable[[Params, Any], jax.Array]:
    """`loss(params, example)`: the cross-entropy of one example, a scalar.

    Of a row of tokens, it is the mean over those that have a label, and 0 where none has one.
    """

    def loss(params: Params, example: Any) -> jax.Array:
        logits = apply(model, Variables(params, frozen), example["inputs"])
        if example["labels"].ndim == 0:
            return optax.softmax_cross_entropy_with_integer_labels(logits, example["labels"])
        used = example["labels"] >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.maximum(example["labels"], 0)
        )
        return jnp.sum(jnp.where(used, losses, 0.0)) / jnp.maximum(jnp.sum(used), 1)

    return loss
