"""Defines cells (training problems) and variants (implementations of a step)."""

from dataclasses import asdict, dataclass, field, replace

JAX_LIBRARIES = ("non-private", "optax.contrib", "jax_privacy", "dpoptax vmap", "dpoptax auto")
TORCH_LIBRARIES = ("torch non-private", "Opacus ghost", "FastDP book-keeping")
ALGORITHMS = ("dp-sgd", "doppler", "disk", "dp-pmlf")


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
    """A library, its algorithm and micro-batch size, with or without noise.

    Without a size, dpoptax takes its default, and the others the whole batch.
    """

    library: str
    algorithm: str = "dp-sgd"
    noise: bool = True
    microbatch_size: int | None = None

    def __str__(self):
        sizes = f", {self.microbatch_size} at once" if self.microbatch_size else ""
        return self.step + sizes

    @property
    def step(self) -> str:
        """Returns the name without the size."""
        if self.library.startswith("dpoptax"):
            return f"{self.library}, {self.algorithm}" + ("" if self.noise else ", no noise")
        return self.library

    @property
    def is_baseline(self) -> bool:
        return "non-private" in self.library

    @property
    def uses_torch(self) -> bool:
        return self.library in TORCH_LIBRARIES


def variants(
    libraries: tuple[str, ...], algorithms: tuple[str, ...], batch_size: int
) -> list[Variant]:
    """Returns all variants of the chosen libraries and algorithms, baselines first.

    Plain steps, jax_privacy, DP-SGD and DiSK take the same sizes: the batch, its half, … a 64th.
    """
    sizes = [batch_size // 2**i for i in range(7) if batch_size % 2**i == 0]
    chosen = []
    for library in libraries:
        if library in ("non-private", "jax_privacy"):
            chosen += [Variant(library, microbatch_size=size) for size in sizes]
        elif library.startswith("dpoptax"):
            for algorithm in algorithms:
                chosen.append(Variant(library, algorithm))
                if algorithm in ("dp-sgd", "disk"):
                    chosen.append(replace(chosen[-1], noise=False))
                    chosen += [Variant(library, algorithm, microbatch_size=size) for size in sizes]
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


def sweep_variants(sweep: str, libraries: tuple[str, ...], batch_size: int) -> list[Variant]:
    """Returns the non-private baselines and the chosen variants of dpoptax, at their defaults."""
    algorithm = "dp-pmlf" if sweep == "points" else "dp-sgd"
    chosen = [library for library in ("dpoptax vmap", "dpoptax auto") if library in libraries]
    return variants(("non-private",), (), batch_size) + [Variant(n, algorithm) for n in chosen]


def request(cell: Cell, variant: Variant, memory_limit_gb: float) -> dict:
    """Returns the request for a worker, as a dictionary for JSON."""
    return {**asdict(cell), **asdict(variant), "memory_limit_gb": memory_limit_gb}
