"""Collects the wheels that a machine without a package index lacks."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

# Wheels that are missing next to Python, JAX, optax, flax, chex, orbax, NumPy, SciPy and torch:
# dp-accounting, jax-privacy, and what both need. The versions are those of this environment.
INSTALLED = (
    "dp-accounting", "dm-tree", "wrapt", "jax-privacy", "pydantic", "pydantic-core",
    "annotated-types", "typing-inspection", "typing-extensions",
)  # fmt: skip
FURTHER = ("opacus==1.6.0",)
LIMIT_MB = 60.0
PLATFORMS = (
    "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64",
    "manylinux2014_x86_64", "manylinux1_x86_64",
)  # fmt: skip


def requirements() -> list[str]:
    """Returns the requirements of the wheels, with their versions."""
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in INSTALLED]
    return [*pinned, *FURTHER]


def command(folder: Path) -> list[str]:
    """Returns pip's command line, which downloads the wheels for Python 3.12 on Linux."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    return [
        *("pip", "download", "--quiet", *options, "--implementation", "cp", *platforms),
        *("--dest", str(folder), *requirements()),
    ]


def collect(folder: Path) -> None:
    """Downloads the wheels and prints their size.

    Raises:
      RuntimeError: the wheels are larger than 60 MB.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    subprocess.run(command(folder), check=True)
    wheels = sorted(folder.glob("*.whl"))
    megabytes = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(*(wheel.name for wheel in wheels), f"{megabytes:.1f} MB", sep="\n", file=sys.stderr)
    if megabytes > LIMIT_MB:
        raise RuntimeError(f"The wheels must be below {LIMIT_MB:.0f} MB, got {megabytes:.1f} MB.")
