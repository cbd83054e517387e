"""Defines larger networks from flax modules, as in published experiments."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.models import Problem, images, texts
from experiments.models.language import Gpt2
from experiments.models.networks import ResNet, VisionTransformer, WideResNet
from experiments.models.transformer import Lora


def resnet_18() -> Problem:
    """Returns ResNet-18 with group normalization for 32×32×3: 11 M."""
    return _classifier(ResNet(10))


def wrn_16_4() -> Problem:
    """Returns a wide residual network with standardized kernels for 32×32×3: 2.7 M."""
    return _classifier(WideResNet(10))


def vit_tiny() -> Problem:
    """Returns a vision transformer with a class token, 4 blocks of width 64: 0.2 M."""
    return _classifier(VisionTransformer(10, width=64, depth=4, heads=2))


def lstm(length: int = 64, width: int = 256) -> Problem:
    """Returns an LSTM over embedded tokens that predicts the next token: 0.8 M."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            hidden = nn.RNN(nn.OptimizedLSTMCell(width))(nn.Embed(512, width)(tokens))
            return nn.Dense(512)(hidden)

    return _language_model(Model(), length, 512)


def gpt2_lora(length: int = 64) -> Problem:
    """Returns frozen GPT-2 small with rank-4 LoRA on attention: 0.15 M of 124 M."""
    lora = Lora(rank=4, alpha=32.0, projections=("query_key_value",))
    return _language_model(Gpt2(lora=lora), length, 50_257)


NETWORKS = {
    "resnet_18": resnet_18,
    "wrn_16_4": wrn_16_4,
    "vit_tiny": vit_tiny,
    "lstm": lstm,
    "gpt2_lora": gpt2_lora,
}


def _classifier(model: nn.Module) -> Problem:
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((32, 32, 3)))

    def loss_fn(params, example):
        x, label = example
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), label)

    return Problem(params, loss_fn, lambda size: images(size, (32, 32, 3)))


def _language_model(model: nn.Module, length: int, vocabulary: int) -> Problem:
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros(length, jnp.int32))
    params = variables.pop("params")

    def loss_fn(params, example):
        tokens, targets = example
        logits = model.apply({"params": params, **variables}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return Problem(params, loss_fn, lambda size: texts(size, length, vocabulary))
