"""Times private training steps. `python -m benchmarks --help` lists the options.

The subcommands `compilation`, `first-seconds`, `noise`, `tables` and `models` run other benchmarks;
see `benchmarks/README.md`.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tqdm import tqdm

from benchmarks import compilation, first_seconds, noise, report, tables, third_party
from benchmarks.peers import torch_environment
from benchmarks.timing import ROOT, Budget, measure, pythons
from benchmarks.variants import (
    ALGORITHMS,
    JAX_LIBRARIES,
    TORCH_LIBRARIES,
    cells,
    sweep_cells,
    sweep_variants,
    variants,
)

Model = Literal[
    "mlp",
    "cnn",
    "transformer",
    "wide_mlp",
    "resnet_18",
    "wrn_16_4",
    "vit_tiny",
    "lstm",
    "gpt2_lora",
]
SWEEPS = ("batch", "parameters", "length", "points")


@dataclass
class Config:
    """Times private and non-private training steps and writes tables and figures."""

    models: tuple[Model, ...] = ("mlp", "cnn", "transformer", "wide_mlp")
    """Models to train. Those of `benchmarks.networks` run in JAX only."""
    batch_sizes: tuple[int, ...] = (64, 256, 1024)
    methods: tuple[Literal["dp-sgd", "doppler", "disk", "dp-pmlf"], ...] = ALGORITHMS
    libraries: tuple[str, ...] = JAX_LIBRARIES + TORCH_LIBRARIES
    """Libraries to compare. A PyTorch library gets its environment on first use."""
    sweeps: tuple[Literal["batch", "parameters", "length", "points"], ...] = SWEEPS
    """Quantities to vary: batch size, parameters, sequence length, gradient points."""
    budget: Annotated[Budget, tyro.conf.arg(name="")] = field(default_factory=Budget)
    output: Path = ROOT / "benchmarks" / "results"
    environment: Path = ROOT / "build" / "torch"
    """Folder of the environment for the PyTorch libraries."""
    fastdp: str = "fastDP"
    """Requirement that pip installs FastDP from: a name or the path of a checkout."""


def main(config: Config) -> str:
    """Runs the benchmark, saves after every cell, and returns the tables."""
    unknown = set(config.libraries) - {*JAX_LIBRARIES, *TORCH_LIBRARIES}
    if unknown:
        raise ValueError(
            f"`libraries` must be among {JAX_LIBRARIES + TORCH_LIBRARIES}, got {sorted(unknown)}."
        )
    interpreters, facts = pythons(None), report.machine_facts()
    if any(library in TORCH_LIBRARIES for library in config.libraries):
        python, problems = torch_environment(config.environment, config.fastdp)
        interpreters = pythons(python, "; ".join(problems))
        facts |= {"not installed": "; ".join(problems)} if problems else {}
    work = [
        (cell, variants(config.libraries, config.methods, cell.batch_size))
        for cell in cells(config.models, config.batch_sizes)
    ]
    for sweep in config.sweeps:
        work += [
            (cell, sweep_variants(sweep, config.libraries, cell.batch_size))
            for cell in sweep_cells(sweep)
        ]
    turns = [len(selected) * (1 + config.budget.rounds) for _, selected in work]
    results, markdown, done = [], "", 0
    with tqdm(total=sum(turns), unit="turn") as bar:

        def progress(text):
            bar.update()
            bar.set_description_str(text)

        for (cell, selected), size in zip(work, turns, strict=True):
            results += measure(cell, selected, interpreters, config.budget, progress)
            markdown = report.save(results, facts, config.output)
            done += size
            bar.update(done - bar.n)
    return markdown


if __name__ == "__main__":
    others = {
        "compilation": (compilation.main, compilation.Compilation),
        "first-seconds": (first_seconds.main, first_seconds.FirstSeconds),
        "models": (third_party.main, third_party.ThirdParty),
        "noise": (noise.main, noise.Noise),
        "tables": (tables.main, tables.Tables),
    }
    named = others.get(sys.argv[1]) if len(sys.argv) > 1 else None
    run, kind = named or (main, Config)
    print(run(tyro.cli(kind, args=sys.argv[2 if named else 1 :])))
