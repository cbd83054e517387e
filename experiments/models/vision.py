"""Defines a published vision transformer for fine-tuning, with LoRA."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.models.transformer import SMALL, Frozen, Lora, Norm, Projection, run_layers


class _Patches(Frozen):
    """Cuts the image into squares and projects each."""

    size: int = 16
    features: int = 384

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        shape = (self.size, self.size, inputs.shape[-1], self.features)
        kernel = self.weight("kernel", SMALL, shape)
        bias = self.weight("bias", nn.initializers.zeros_init(), (self.features,))
        cut = jax.lax.conv_general_dilated(
            inputs[None],
            kernel,
            (self.size, self.size),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return cut.reshape(-1, self.features) + bias


class VitClassifier(Frozen):
    """ViT with a classification head on its class token (Dosovitskiy et al., 2020).

    The defaults are those of ViT-small on patches of 16x16. Images of another size are scaled.

    Attributes:
        num_classes: Number of logits.
        width: Features per token.
        depth: Number of layers.
        heads: Number of attention heads; it divides `width`.
        hidden: Features between the two projections of a layer.
        image: Height and width of the images that the positions are for.
        patch: Height and width of a patch; it divides those of the image.
        epsilon: ε of the layer normalizations.
        activation: Name of the activation.
        lora: Corrections to train instead of the weights. None: all weights are trained.
    """

    frozen: bool = False
    num_classes: int = 0
    width: int = 384
    depth: int = 12
    heads: int = 6
    hidden: int = 1536
    image: int = 224
    patch: int = 16
    epsilon: float = 1e-12
    activation: str = "gelu"
    lora: Lora | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns logits (num_classes,) of one image with colors in [-2, 2]."""
        # The published models were trained on colors in [-1, 1].
        shape = (self.image, self.image, inputs.shape[-1])
        scaled = jax.image.resize(inputs / 2, shape, "bilinear")
        patches = _Patches(self.frozen, self.patch, self.width, name="patch_embeddings")(scaled)
        token = self.weight("class_token", nn.initializers.zeros_init(), (1, 1, self.width))
        places = self.weight("positions", SMALL, (1, len(patches) + 1, self.width))
        hidden = jnp.concatenate([token[0], patches]) + places[0]
        seen = jnp.ones(len(hidden), bool)
        hidden = run_layers(self, hidden, seen, norm_first=True)
        normed = Norm(self.frozen, self.epsilon, name="final_norm")(hidden)
        return Projection(False, self.num_classes, name="head_output")(normed[0])
