"""Shows the version of the package in the header of each page."""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "dpoptax" / "__init__.py"


def on_config(config):
    """Appends the version to the name of the site."""
    found = re.search(r'__version__ = "(.+?)"', SOURCE.read_text("utf-8"))
    if found:
        config.site_name += f" {found[1]}"
    return config
