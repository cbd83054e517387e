"""What a step costs with a large table, of whole rows and of selected ones.

`python -m benchmarks tables` trains a small recommender, the mean of the rows of an example's items
against a target, and prints time and memory of a step for tables of several sizes: `dense` noises
and writes all rows, `vocabulary` those that were chosen before the run, `selected` those that noisy
counts choose in each step. Every cell is a process of its own. What is compiled is compiled before.
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
from dpoptax.training.run.records import markdown_table

PyTree: TypeAlias = Any

WAYS = ("dense", "vocabulary", "selected")


@dataclass
class Tables:
    """Times steps of a recommender by the size of its table."""

    sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """V, numbers of rows."""
    ways: tuple[str, ...] = WAYS
    width: int = 64
    """d, entries of a row."""
    batch_size: int = 256
    items: int = 16
    """How many rows an example looks up."""
    capacity: int = 1024
    """k, how many rows are trained at most."""
    threshold: float = 64.0
    """τ, in examples of a batch."""
    steps: int = 20
    """A time is the median over so many."""


def main(chosen: Tables) -> str:
    """Time and memory of a step of each way and size, as a table."""
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
    """Times of a step, the memory that is kept from step to step, and that needed meanwhile."""
    ways = {"dense": dense, "vocabulary": vocabulary, "selected": selected}
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
    """Bytes of an array; none of a key."""
    return 0 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.nbytes


def some_batch(chosen: Tables) -> tuple[jax.Array, jax.Array]:
    """Items that few of are popular, and targets."""
    rng, shape = np.random.default_rng(0), (chosen.batch_size, chosen.items)
    lookups = (chosen.sizes[0] ** rng.random(shape)).astype(np.int32) - 1
    return jnp.asarray(lookups), jnp.asarray(rng.normal(size=chosen.batch_size), jnp.float32)


def some_params(chosen: Tables) -> dict[str, jax.Array]:
    """A table, and weights."""
    rng = np.random.default_rng(1)
    table = rng.standard_normal((chosen.sizes[0], chosen.width), np.float32)
    return {"table": jnp.asarray(table), "weights": jnp.ones(chosen.width)}


def loss_fn(params: dict[str, jax.Array], example: tuple[Any, jax.Array]) -> jax.Array:
    """Half the squared error of the mean of the looked-up rows, times weights."""
    lookups, target = example
    mean = jnp.mean(tables.look_up(params["table"], lookups), axis=0)
    return 0.5 * (mean @ params["weights"] - target) ** 2


def dense(chosen: Tables) -> tuple[Callable[..., PyTree], PyTree]:
    """A step of the whole table, and what it starts from."""
    tx = optax.chain(gaussian_noise(chosen), optax.sgd(0.1))
    grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0))

    def step(state: PyTree, lookups: jax.Array, targets: jax.Array) -> PyTree:
        params, opt_state = state
        points = dpoptax.gradient_points(opt_state, params)
        updates, opt_state = tx.update(grad_fn(points, (lookups, targets)), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = some_params(chosen)
    return step, (params, tx.init(params))


def vocabulary(chosen: Tables) -> tuple[Callable[..., PyTree], PyTree]:
    """A step of rows that were chosen before; the table is kept for the others."""
    tx = optax.chain(gaussian_noise(chosen), optax.sgd(0.1))
    grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0))
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


def selected(chosen: Tables) -> tuple[Callable[..., PyTree], PyTree]:
    """A step of rows that are selected in it."""
    selection = tables.RowSelection(
        table_size=chosen.sizes[0],
        capacity=chosen.capacity,
        threshold=chosen.threshold,
        rows_per_example=chosen.items,
    )
    clip = tables.row_selecting_clip(dpoptax.l2_clip(1.0), selection)
    noise = tables.row_selecting_noise(
        clip, noise_multiplier=1.0, batch_size=chosen.batch_size, key=jax.random.key(0)
    )
    tx = optax.chain(noise, optax.sgd(0.1))
    grad_fn = tables.selected_grad(loss_fn, clip, where=table_of)

    def step(state: PyTree, lookups: jax.Array, targets: jax.Array) -> PyTree:
        params, opt_state = state
        found = grad_fn(opt_state, params, (lookups, targets))
        updates, opt_state = tx.update(found.sum, opt_state, found.params)
        rows = found.rows.rows
        return tables.apply_updates(params, updates, rows, where=table_of), opt_state

    params = some_params(chosen)
    return step, (params, tx.init(params))


def table_of(params: dict[str, Any]) -> Any:
    """The table among the parameters."""
    return params["table"]


def gaussian_noise(chosen: Tables) -> optax.GradientTransformation:
    """The noise of parameters that are the same in all steps."""
    key = jax.random.key(0)
    return dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=chosen.batch_size, key=key)


if __name__ == "__main__":
    print(json.dumps(measure(Tables(**json.loads(sys.argv[1])))))
