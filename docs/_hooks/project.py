"""Sets the site's addresses and version from the metadata of the project."""

import contextlib
import tomllib
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def on_config(config):
    """Sets the addresses of `[project.urls]` and adds the version to the site's name."""
    urls = tomllib.loads(PROJECT.read_text("utf-8"))["project"]["urls"]
    config.repo_url = urls["Repository"]
    config.repo_name = "dpoptax"
    config.site_url = urls["Documentation"] + "/"
    with contextlib.suppress(metadata.PackageNotFoundError):
        config.site_name += f" {metadata.version('dpoptax')}"
    return config
