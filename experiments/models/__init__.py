"""Builds the papers' models, and models that start from published weights."""

from collections.abc import Callable

import flax.linen as nn

from dpoptax.training.classifier import CNN, MLP
from experiments.models import networks

MODELS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda n: MLP(n, widths=()),
    "mlp": MLP,
    "cnn": CNN,
    "cnn_2": networks.TwoLayerCNN,
    "cnn_5": networks.FiveLayerCNN,
    "tanh_cnn": networks.TanhCNN,
    "tanh_cnn_mnist": lambda n: networks.TanhCNN(n, networks.TANH_CNN_MNIST, 32),
    "tanh_cnn_features": lambda n: networks.TanhCNN(n, networks.TANH_CNN_FEATURES, 0),
    "resnet_3": lambda n: networks.ResNet(n, channels=(16, 32, 64), blocks=1, relu_after_sum=False),
    "resnet_18": networks.ResNet,
    "resnet_50": networks.ResNet50,
    "wrn_16_4": networks.WideResNet,
    "transformer": lambda n: networks.VisionTransformer(n, patch=2, width=32, depth=2, heads=2),
    "vit_tiny": lambda n: networks.VisionTransformer(n, width=64, depth=4, heads=2),
    "vit_small": networks.VisionTransformer,
}
"""Functions from the number of classes to a model, by name."""
