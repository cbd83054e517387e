"""A model of Keras with the backend of JAX."""

import keras

from tests.models.catalog import Model, cross_entropy, images


def cnn() -> Model:
    """Returns the CNN of Keras's MNIST example; layers without state."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.SeparableConv2D(32, 3, activation="relu"),
            layers.GroupNormalization(4),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    frozen = [variable.value for variable in model.non_trainable_variables]

    def loss_fn(params, example):
        image, label = example
        logits, _ = model.stateless_call(params, frozen, image[None], training=True)
        return cross_entropy(logits[0], label)

    return Model(loss_fn, [v.value for v in model.trainable_variables], images)
