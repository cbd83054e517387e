"""Chains whose states are stored under `tests/noise/states`, one folder for each version.

A later version must read these files and continue. Before a release, store the states of the new
version, and leave the older folders as they are:

    uv run python -m tests.noise.stored_states VERSION
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
from flax import serialization

import dpoptax
from dpoptax import contrib, matrix

FOLDER = pathlib.Path(__file__).parent / "states"
PARAMS = {"w": jnp.asarray([[1.0, -2.0], [0.5, 0.25]]), "b": jnp.asarray([0.0, 3.0])}
CLIP = dpoptax.l2_clip(2.0)
ADAPTIVE_CLIP = dpoptax.contrib.adaptive_clip(0.1)
STEPS = 3


def gaussian(noise_multiplier=0.5, **options):
    return dpoptax.gaussian_noise(
        noise_multiplier=noise_multiplier, batch_size=10, key=jax.random.key(7), **options
    )


def correlated(strategy, **options):
    return dpoptax.correlated_noise(
        strategy, noise_multiplier=0.5, batch_size=10, key=jax.random.key(7), **options
    )


CHAINS = {
    "adam": lambda: optax.chain(gaussian(), optax.adam(0.1)),
    "schedule": lambda: optax.chain(gaussian({0: 2.0, 2: 0.5}), optax.sgd(0.1)),
    "fixed_point": lambda: optax.chain(gaussian(fixed_point=True), optax.sgd(0.1)),
    "chacha20": lambda: optax.chain(
        dpoptax.gaussian_noise(
            noise_multiplier=0.5, batch_size=10, key=dpoptax.random_key_from_os()
        ),
        optax.sgd(0.1),
    ),
    "banded": lambda: optax.chain(correlated(matrix.BandedToeplitz((1.0, 0.5))), optax.sgd(0.1)),
    "banded_fixed_point": lambda: optax.chain(
        correlated(matrix.BandedToeplitz((1.0, 0.5)), fixed_point_clip=CLIP), optax.sgd(0.1)
    ),
    "buffered": lambda: optax.chain(
        correlated(matrix.BufferedToeplitz((0.5,), (0.4,), steps=9)), optax.sgd(0.1)
    ),
    "adaptive_clip": lambda: optax.chain(
        dpoptax.contrib.adaptive_gaussian_noise(
            ADAPTIVE_CLIP, noise_multiplier=0.5, batch_size=10, key=jax.random.key(7)
        ),
        optax.sgd(0.1),
    ),
    "disk": lambda: optax.chain(gaussian(), dpoptax.disk(0.7, 0.5), optax.sgd(0.1)),
    "doppler": lambda: optax.chain(gaussian(), dpoptax.doppler(), optax.sgd(0.1)),
    "pmlf": lambda: optax.chain(gaussian(), dpoptax.pmlf(), optax.sgd(0.1)),
    "adaptive_kalman": lambda: optax.chain(
        gaussian(), dpoptax.adaptive_kalman(stddev=0.1), optax.sgd(0.1)
    ),
    "lp_adam": lambda: optax.chain(gaussian(), dpoptax.lp_adam(0.1, b=(0.1,), a=(-0.9,))),
    "geodp": lambda: optax.chain(
        contrib.geodp(0.1, noise_multiplier=0.5, batch_size=10, key=jax.random.key(7)),
        optax.sgd(0.1),
    ),
}


def summed(params, name, step):
    """Returns a clipped sum that depends on the parameters and the step."""
    if name == "adaptive_clip":
        grad_fn = dpoptax.clipped_grad(_loss, ADAPTIVE_CLIP)
    else:
        grad_fn = dpoptax.clipped_grad(_loss, CLIP)
    return grad_fn(params, jnp.linspace(-1.0, 1.0 + step, 10))


def _loss(params, x):
    return jnp.sum((params["w"] @ jnp.stack([x, x**2]) + params["b"]) ** 2)


def train(tx, name, params, state, steps):
    """Returns the parameters and the state after the given steps."""

    @jax.jit
    def advance(params, state, step):
        points = dpoptax.gradient_points(state, params)
        updates, state = tx.update(summed(points, name, step), state, params)
        return optax.apply_updates(params, updates), state

    for step in steps:
        params, state = advance(params, state, step)
    return params, state


def main(version):
    folder = FOLDER / version
    folder.mkdir()
    for name, make in CHAINS.items():
        tx = make()
        params, state = train(tx, name, PARAMS, tx.init(PARAMS), range(STEPS))
        later, _ = train(tx, name, params, state, range(STEPS, STEPS + 2))
        stored = serialization.to_bytes({"params": params, "state": state, "later": later})
        (folder / f"{name}.msgpack").write_bytes(stored)


if __name__ == "__main__":
    main(sys.argv[1])
