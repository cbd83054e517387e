"""Defines cells (training problems) and variants (implementations of a step)."""

from dataclasses import asdict, dataclass, field, replace

JAX_LIBRARIES = ("non-private", "optax.contrib", "jax_privacy", "dpoptax vmap", "dpoptax auto")
TORCH_LIBRARIES = ("torch non-private", "Opacus ghost", "FastDP book-keeping")
ALGORITHMS = ("dp-sgd", "doppler", "disk", "dp-pmlf")

TUNED = "tuned"


@dataclass(frozen=True)
class Cell:
    """A model, its options, the batch size, and the name of the sweep, if any."""

    model: str
    batch_size: int
    options: dict[str, int] = field(default_factory=dict)
    sweep: str = ""
    points: int = 2

    def __str__(self):
        options = "".join(f", {name} {value}" for name, value in self.options.items())
        points = f", {self.points} points" if self.sweep == "points" else ""
        return f"{self.model}{options}, batch {self.batch_size}{points}"


@dataclass(frozen=True)
class Variant:
    """A library, its algorithm and micro-batch size, with or without noise."""

    library: str
    algorithm: str = "dp-sgd"
    noise: bool = True
    microbatch_size: int | str | None = None

    def __str__(self):
        if self.library.startswith("dpoptax"):
            return f"{self.library}, {self.algorithm}" + ("" if self.noise else ", no noise")
        return f"{self.library}, microbatched" if self.microbatch_size else self.library

    @property
    def is_baseline(self) -> bool:
        return "non-private" in self.library

    @property
    def uses_torch(self) -> bool:
        return self.library in TORCH_LIBRARIES


def variants(libraries: tuple[str, ...], algorithms: tuple[str, ...]) -> list[Variant]:
    """Returns all variants of the chosen libraries and algorithms, baselines first."""
    chosen = []
    for library in libraries:
        if library in ("non-private", "jax_privacy"):
            chosen += [Variant(library), Variant(library, microbatch_size=TUNED)]
        elif library.startswith("dpoptax"):
            for algorithm in algorithms:
                chosen.append(Variant(library, algorithm, microbatch_size=TUNED))
                if algorithm in ("dp-sgd", "disk"):
                    chosen.append(replace(chosen[-1], noise=False))
        else:
            chosen.append(Variant(library))
    return sorted(chosen, key=lambda variant: (variant.uses_torch, not variant.is_baseline))


def cells(models: tuple[str, ...], batch_sizes: tuple[int, ...]) -> list[Cell]:
    """Returns a cell for every model and batch size."""
    return [Cell(model, batch_size) for model in models for batch_size in batch_sizes]


def sweep_cells(sweep: str) -> list[Cell]:
    """Returns cells that vary one quantity and fix the others."""
    if sweep == "batch":
        return [Cell("transformer", size, sweep=sweep) for size in (16, 32, 64, 128, 256)]
    if sweep == "parameters":
        widths = (64, 256, 1024, 4096)
        return [Cell("mlp", 256, {"width": width}, sweep=sweep) for width in widths]
    if sweep == "length":
        lengths = (16, 32, 64, 128, 256)
        return [Cell("transformer", 16, {"length": length}, sweep=sweep) for length in lengths]
    return [Cell("transformer", 32, sweep=sweep, points=points) for points in (1, 2, 4, 8)]


def sweep_variants(sweep: str, libraries: tuple[str, ...]) -> list[Variant]:
    """Returns the non-private baselines and the chosen variants of dpoptax."""
    algorithm = "dp-pmlf" if sweep == "points" else "dp-sgd"
    chosen = [library for library in ("dpoptax vmap", "dpoptax auto") if library in libraries]
    baselines = [Variant("non-private"), Variant("non-private", microbatch_size=TUNED)]
    return baselines + [Variant(name, algorithm, microbatch_size=TUNED) for name in chosen]


def request(cell: Cell, variant: Variant, memory_limit_gb: float) -> dict:
    """Returns the request for a worker, as a dictionary for JSON."""
    return {**asdict(cell), **asdict(variant), "memory_limit_gb": memory_limit_gb}
