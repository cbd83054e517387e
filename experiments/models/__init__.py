"""Builds the papers' models, and models that start from published weights."""

from dpoptax.training import register_model
from experiments.models import large_networks, networks
from experiments.models.vision_transformer import VisionTransformer

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
register_model("transformer", lambda n: VisionTransformer(n, patch=2, width=32, depth=2, heads=2))
register_model("vit_tiny", lambda n: VisionTransformer(n, width=64, depth=4, heads=2))
register_model("vit_small", VisionTransformer)
register_model("vit_small_16", lambda n: VisionTransformer(n, patch=16))
