"""Tests the memory of each method, in copies of the parameters (docs/guides/choosing.md)."""

import jax
import jax.numpy as jnp
import optax
import pytest

import dpoptax
from dpoptax.filters import preset

pytestmark = pytest.mark.optimized

KEY = jax.random.key(0)
NOISE = {"noise_multiplier": 1.0, "batch_size": 8, "key": KEY}
PARAMS = {
    "w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32),
    "b": jax.ShapeDtypeStruct((1000,), jnp.float32),
}
COPIES = [
    ("gaussian_noise", dpoptax.gaussian_noise(**NOISE), 0),
    (
        "correlated_noise",
        dpoptax.correlated_noise(dpoptax.matrix.BandedToeplitz((1.0, 0.5, 0.25)), **NOISE),
        2,
    ),
    (
        "correlated_noise, banded inverse",
        dpoptax.correlated_noise(dpoptax.matrix.banded_inverse_square_root(100, 16), **NOISE),
        0,
    ),
    ("geodp", dpoptax.contrib.geodp(0.1, **NOISE), 0),
    ("doppler, first order", dpoptax.doppler(*preset("doppler-first-order-1")), 1),
    ("doppler, second order", dpoptax.doppler([0.25, 0.5, 0.25]), 2),
    ("disk", dpoptax.disk(0.7, 0.5), 2),
    ("disk, one gradient", dpoptax.disk(0.7, None), 2),
    ("pmlf, 2 iterates", dpoptax.pmlf(2, 0.1, *preset("pmlf-mnist")), 2),
    ("pmlf, 4 iterates", dpoptax.pmlf(4, 0.1, *preset("pmlf-mnist")), 4),
    ("lp_adam", dpoptax.lp_adam(0.1, *preset("doppler-first-order-1")), 2),
    ("adam_bc", dpoptax.contrib.adam_bc(0.1, stddev=0.1), 2),
    ("adaptive_kalman", dpoptax.adaptive_kalman(0.1), 1),
]


@pytest.mark.parametrize(
    ("transform", "copies"), [c[1:] for c in COPIES], ids=[c[0] for c in COPIES]
)
def test_state_has_expected_copies_of_parameters(transform, copies):
    state = jax.eval_shape(transform.init, PARAMS)
    sizes = [x.size for x in jax.tree.leaves(state)]
    assert round(sum(sizes) / (1000 * 1000 + 1000), 3) == copies


# jax_privacy stacks the buffers of correlated noise along a new first axis.
SHAPED = [c for c in COPIES if c[0] != "correlated_noise"]


@pytest.mark.parametrize("transform", [c[1] for c in SHAPED], ids=[c[0] for c in SHAPED])
def test_optax_maps_parameter_shardings_over_state(transform):
    state = jax.eval_shape(transform.init, PARAMS)
    specs = {"w": "of w", "b": "of b"}
    mapped = optax.tree.map_params(
        transform, lambda _, spec: spec, state, specs, transform_non_params=lambda _: "replicated"
    )
    by_shape = {PARAMS["w"].shape: "of w", PARAMS["b"].shape: "of b"}
    for got, leaf in zip(jax.tree.leaves(mapped), jax.tree.leaves(state), strict=True):
        assert got == by_shape.get(leaf.shape, "replicated")


# First the inputs of layers take most of the memory, then the logits.
@pytest.mark.parametrize(
    ("layers", "length", "classes", "most"), [(24, 512, 64, 1.2), (3, 1024, 4096, 0.8)]
)
def test_second_pass_needs_no_memory_of_the_first(layers, length, classes, most):
    def loss(params, x):
        x, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, params["w1"])
        logits = x @ params["w2"]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[:, 0])

    params = {
        "w1": jax.ShapeDtypeStruct((layers, 64, 64), jnp.float32),
        "w2": jax.ShapeDtypeStruct((64, classes), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((1, length, 64), jnp.float32)

    def temporary(function):
        return jax.jit(function).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    plain = temporary(jax.grad(lambda p, x: jnp.sum(jax.vmap(loss, (None, 0))(p, x))))
    twice = temporary(dpoptax.clipped_grad(loss, 1.0, method="recompute"))
    assert twice < most * plain
