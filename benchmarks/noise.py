"""Times normal numbers by generator.

`python -m benchmarks noise` adds noise to an array with each generator in turn. It prints the
processor time per number in nanoseconds, summed over all cores. Each time is the minimum over
several rounds, because other programs may slow the machine down. Compilation is not included.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from dpoptax._random import box_muller
from dpoptax._random.discrete_gaussian import discrete_gaussian
from dpoptax.training.run.files import markdown_table


@dataclass
class Noise:
    """Times noise by generator."""

    sizes: tuple[int, ...] = (65_536, 3_200_000)
    """Array sizes."""
    rounds: int = 20
    """Rounds per generator; the fastest round counts."""
    numbers: int = 4_000_000
    """Numbers per round, spread over as many arrays as needed."""


def _philox_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    state = jnp.tile(jax.random.key_data(key), 2)
    bits = lax.rng_bit_generator(state, shape, algorithm=lax.RandomAlgorithm.RNG_PHILOX)[1]
    return (bits >> 8).astype(jnp.float32)


def _rbg(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    data = jnp.tile(jax.random.key_data(key), 2)
    return jax.random.normal(jax.random.wrap_key_data(data, impl="rbg"), shape)


def _integers(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return discrete_gaussian(key, shape, 2.0**18).astype(jnp.float32)


def _by_chacha20(draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda key, shape: draw(jnp.tile(jax.random.key_data(key), 4), shape)


GENERATORS: dict[str, Callable[[jax.Array, tuple[int, ...]], jax.Array]] = {
    "dpoptax": box_muller.normal,
    "dpoptax, fixed point": _integers,
    "dpoptax, by ChaCha20": _by_chacha20(box_muller.normal),
    "dpoptax, fixed point, by ChaCha20": _by_chacha20(_integers),
    "jax.random.normal": jax.random.normal,
    'jax.random.normal, impl="rbg"': _rbg,
    "uniform bits of Philox, by lax.rng_bit_generator": _philox_bits,
}


def main(chosen: Noise) -> str:
    """Returns a table of the processor time per number for each generator."""
    found = [measure(size, chosen) for size in chosen.sizes]
    rows = [(name, *(f"{times[name]:.2f}" for times in found)) for name in GENERATORS]
    return markdown_table(("ns a number", *(f"arrays of {n:,}" for n in chosen.sizes)), rows)


def measure(size: int, chosen: Noise) -> dict[str, float]:
    """Returns nanoseconds of processor time per number, by generator."""
    total, key = jnp.ones(size), jax.random.key(0)
    arrays = max(1, chosen.numbers // size)
    programs = {
        name: jax.jit(lambda key, total, draw=draw: total + 2.0 * draw(key, total.shape))
        for name, draw in GENERATORS.items()
    }
    best = dict.fromkeys(programs, float("inf"))
    for turn in range(chosen.rounds + 1):
        for name, program in programs.items():
            begun = time.process_time()
            for _ in range(arrays):
                jax.block_until_ready(program(key, total))
            spent = (time.process_time() - begun) / size / arrays * 1e9
            if turn:  # the first one compiles
                best[name] = min(best[name], spent)
    return best
