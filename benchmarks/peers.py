"""Installs the PyTorch libraries in a separate environment."""

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = ("torch==2.13.0", "opacus")


def torch_environment(folder: Path, fastdp: str) -> tuple[str | None, list[str]]:
    """Creates the environment once; returns its interpreter and the failed installs.

    The interpreter is `None` if torch cannot be installed. `fastdp` is a requirement for pip: a
    name or the path of a checkout.
    """
    python = folder / "bin" / "python"
    problems = []
    if not _runs([python, "-c", "import torch, opacus"]):
        print(f"installing {' and '.join(REQUIREMENTS)} in {folder}, once", file=sys.stderr)
        command = ["uv", "venv", "--quiet", "--clear", "--seed", "--python", sys.executable, folder]
        if not _runs(command) or not _runs([python, "-m", "pip", "install", *REQUIREMENTS]):
            return None, [f"{' and '.join(REQUIREMENTS)}: could not be installed"]
    if not _runs([python, "-c", "import fastDP"]) and not _runs(
        [python, "-m", "pip", "install", "--no-deps", fastdp]
    ):
        problems.append(f"FastDP: could not be installed as {Path(fastdp).name}")
    return str(python), problems


def _runs(command):
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
