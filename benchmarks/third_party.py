"""Times a private step of third-party models next to the plain step.

`python -m benchmarks models` measures the catalog of `tests/models`. Every step has its own
process, and the two processes of a model take turns. The output is a Markdown table. Memory is the
temporary memory of the compiled step, without parameters and batch.
"""

from dataclasses import dataclass, field
from typing import Annotated

import jax
import tyro

from benchmarks.models import Problem
from benchmarks.timing import Budget, Result, measure, pythons
from benchmarks.variants import Cell, Variant
from dpoptax.training.run.files import markdown_table
from tests.models import catalog

HEADER = (
    *("model", "parameters", "plain, ms", "private, ms", "ratio", "compile, s", "private, s"),
    *("memory, MiB", "private, MiB"),
)


@dataclass
class ThirdParty:
    """Times plain and private steps of third-party models."""

    models: tuple[str, ...] = tuple(catalog.MODELS)
    batch_size: int = 64
    budget: Annotated[Budget, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Budget(rounds=9)
    )


def main(chosen: ThirdParty) -> str:
    """Returns a table with a row for each model."""
    plain, private = Variant("non-private"), Variant("dpoptax auto")
    rows = []
    for name in chosen.models:
        cell = Cell(name, chosen.batch_size)
        results = measure(cell, [plain, private], pythons(None), chosen.budget, lambda text: None)
        rows.append(_row(name, *results))
        print(" | ".join(rows[-1]), flush=True)
    return markdown_table(HEADER, rows)


def problem(name: str) -> Problem:
    """Returns a model of the catalog. Keys of examples are part of the batch."""
    model = catalog.build(name)
    if not model.takes_key:
        return Problem(model.params, model.loss_fn, model.make_batch)

    def loss_fn(params, example):
        inner, key = example
        return model.loss_fn(params, inner, jax.random.wrap_key_data(key))

    def make_batch(size):
        keys = jax.random.split(jax.random.key(0), size)
        return model.make_batch(size), jax.random.key_data(keys)

    return Problem(model.params, loss_fn, make_batch)


def _row(name: str, plain: Result, private: Result) -> tuple[str, ...]:
    error = plain.error or private.error
    if error:
        return (name, f"failed: {error}", *[""] * (len(HEADER) - 2))
    parameters = plain.facts["parameters"]
    compiled = (f"{result.compile_seconds:.1f}" for result in (plain, private))
    memory = (f"{result.facts['temporary_mb']:.1f}" for result in (plain, private))
    times = (f"{result.median:.1f}" for result in (plain, private))
    return (name, f"{parameters:,}", *times, f"{private.ratio:.2f}", *compiled, *memory)
