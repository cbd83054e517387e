"""Times training steps with a large table, of which all rows are trained, or few.

`python -m benchmarks tables` trains a small recommender. Its prediction for an example is a linear
function of the mean of the rows that the example looks up. The output is the time and memory of a
step for several table sizes:

- `dense` adds noise to all rows and writes all of them.
- `vocabulary` trains the rows that were chosen before the run.

Every cell runs in a separate process. Compilation is not included.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpoptax
from dpoptax import tables
from dpoptax.training.run.files import markdown_table

PyTree: TypeAlias = Any

WAYS = ("dense", "vocabulary")


@dataclass
class Tables:
    """Times steps of a recommender by the size of its table."""

    sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """Numbers of rows, V."""
    ways: tuple[str, ...] = WAYS
    width: int = 64
    """Entries per row, d."""
    batch_size: int = 256
    items: int = 16
    """Rows that an example looks up."""
    capacity: int = 1024
    """Number of trained rows of the vocabulary, k."""
    steps: int = 20
    """Timed steps; the median counts."""


def main(chosen: Tables) -> str:
    """Returns a table of time and memory per step for each way and size."""
    rows = []
    for size in chosen.sizes:
        for way in chosen.ways:
            settings = json.dumps({**vars(chosen), "sizes": [size], "ways": [way]})
            command = [sys.executable, "-m", "benchmarks.tables", settings]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                rows.append((f"{size:,}", way, done.stderr.strip().split("\n")[-1], "", "", ""))
            else:
                rows.append((f"{size:,}", way, *json.loads(done.stdout.splitlines()[-1])))
    header = ("rows", "way", "wall, ms", "processor, ms", "kept, MiB", "meanwhile, MiB")
    return markdown_table(header, rows)


def measure(chosen: Tables) -> tuple[str, ...]:
    """Returns times of a step, memory kept between steps, and temporary memory."""
    ways = {"dense": dense, "vocabulary": vocabulary}
    step, state = ways[chosen.ways[0]](chosen)
    batch = some_batch(chosen)
    compiled = jax.jit(step, donate_argnums=0).lower(state, *batch).compile()
    kept, meanwhile = sum(map(size_of, jax.tree.leaves(state))), compiled.memory_analysis()
    times = []
    for _ in range(chosen.steps + 2):
        begun = time.perf_counter(), time.process_time()
        state = jax.block_until_ready(compiled(state, *batch))
        times.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    medians = [1e3 * statistics.median(clock) for clock in zip(*times[2:], strict=True)]
    memory = [kept / 2**20, meanwhile.temp_size_in_bytes / 2**20]
    return tuple(f"{value:.1f}" for value in (*medians, *memory))


def size_of(leaf: jax.Array) -> int:
    """Returns the bytes of an array, and 0 for a key."""
    return 0 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.nbytes


def some_batch(chosen: Tables) -> tuple[jax.Array, jax.Array]:
    """Returns targets and looked-up items, of which a few are popular."""
    rng, shape = np.random.default_rng(0), (chosen.batch_size, chosen.items)
    lookups = (chosen.sizes[0] ** rng.random(shape)).astype(np.int32) - 1
    return jnp.asarray(lookups), jnp.asarray(rng.normal(size=chosen.batch_size), jnp.float32)


def some_params(chosen: Tables) -> dict[str, jax.Array]:
    """Returns a table and the weights of the prediction."""
    rng = np.random.default_rng(1)
    table = rng.standard_normal((chosen.sizes[0], chosen.width), np.float32)
    return {"table": jnp.asarray(table), "weights": jnp.ones(chosen.width)}


def loss_fn(params: dict[str, jax.Array], example: tuple[Any, jax.Array]) -> jax.Array:
    """Returns half the squared error of the weighted mean of the looked-up rows."""
    lookups, target = example
    mean = jnp.mean(tables.look_up(params["table"], lookups), axis=0)
    return 0.5 * (mean @ params["weights"] - target) ** 2


def dense(chosen: Tables) -> tuple[Callable[..., PyTree], PyTree]:
    """Returns a step that trains the whole table, and its initial state."""
    tx, grad_fn = optimizer(chosen), dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0))

    def step(state: PyTree, lookups: jax.Array, targets: jax.Array) -> PyTree:
        params, opt_state = state
        points = dpoptax.gradient_points(opt_state, params)
        updates, opt_state = tx.update(grad_fn(points, (lookups, targets)), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = some_params(chosen)
    return step, (params, tx.init(params))


def vocabulary(chosen: Tables) -> tuple[Callable[..., PyTree], PyTree]:
    """Returns a step that trains rows chosen beforehand, and its initial state."""
    tx, grad_fn = optimizer(chosen), dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0))
    rows = jnp.arange(chosen.capacity)

    def step(state: PyTree, lookups: jax.Array, targets: jax.Array) -> PyTree:
        table, params, opt_state = state
        points = dpoptax.gradient_points(opt_state, params)
        located = tables.locate(lookups, rows, table)
        updates, opt_state = tx.update(grad_fn(points, (located, targets)), opt_state, params)
        return table, optax.apply_updates(params, updates), opt_state

    whole = some_params(chosen)
    params = {**whole, "table": tables.take_rows(whole["table"], rows)}
    return step, (whole["table"], params, tx.init(params))


def optimizer(chosen: Tables) -> optax.GradientTransformation:
    """Returns noise and descent for parameters that are the same in all steps."""
    release = {"noise_multiplier": 1.0, "batch_size": chosen.batch_size, "key": jax.random.key(0)}
    return optax.chain(dpoptax.gaussian_noise(**release), optax.sgd(0.1))


if __name__ == "__main__":
    print(json.dumps(measure(Tables(**json.loads(sys.argv[1])))))
