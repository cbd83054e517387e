"""Models of Haiku."""

import functools

import haiku as hk
import jax

from tests.models.catalog import Model, cross_entropy, images, texts


def mlp() -> Model:
    """Returns `hk.nets.MLP`, 784-256-10."""
    return _classifier(lambda x: hk.nets.MLP([256, 10])(x.reshape(1, -1))[0])


def lstm() -> Model:
    """Returns a language model of `hk.LSTM`, unrolled by `hk.dynamic_unroll`."""

    def forward(tokens):
        core = hk.LSTM(64)
        outputs, _ = hk.dynamic_unroll(core, hk.Embed(256, 64)(tokens), core.initial_state(None))
        return hk.Linear(256)(outputs)

    network = hk.without_apply_rng(hk.transform(forward))

    def loss_fn(params, text):
        return cross_entropy(network.apply(params, text[:-1]), text[1:])

    return Model(loss_fn, jax.jit(network.init)(jax.random.key(0), texts(1)[0, :-1]), texts)


def resnet() -> Model:
    """Returns `hk.nets.ResNet18` with narrow layers and the running averages of evaluation.

    The averages are frozen: they belong to a model that was trained on public data.
    """

    def forward(images, is_training):
        network = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            channels_per_group=(16, 32, 64, 128),
            use_projection=(True, True, True, True),
            bottleneck=False,
            num_classes=10,
            resnet_v2=True,
        )
        return network(images, is_training)

    network = hk.without_apply_rng(hk.transform_with_state(forward))
    public, _ = images(8, (32, 32, 3))
    params, averages = jax.jit(functools.partial(network.init, is_training=True))(
        jax.random.key(0), public
    )
    _, averages = jax.jit(functools.partial(network.apply, is_training=True))(
        params, averages, public
    )

    def loss_fn(params, example):
        image, label = example
        logits, _ = network.apply(params, averages, image[None], is_training=False)
        return cross_entropy(logits[0], label)

    return Model(loss_fn, params, lambda size: images(size, (32, 32, 3)))


def _classifier(forward):
    network = hk.without_apply_rng(hk.transform(forward))

    def loss_fn(params, example):
        image, label = example
        return cross_entropy(network.apply(params, image), label)

    return Model(loss_fn, jax.jit(network.init)(jax.random.key(0), images(1)[0][0]), images)
