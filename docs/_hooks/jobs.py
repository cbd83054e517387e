"""Shows the README's table of jobs on the first page of the site."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def on_page_markdown(markdown, page, config, files):
    """Inserts the table, with links relative to the site."""
    del page, config, files
    return markdown.replace("<!-- jobs -->", _jobs(README.read_text("utf-8")))


def _jobs(readme):
    (table,) = re.findall(r"^\| I want to .*?(?=\n\n)", readme, re.DOTALL | re.MULTILINE)
    table = re.sub(r"\]\(notebooks/(\w+)\.ipynb\)", r"](examples/\1.md)", table)
    return table.replace("](docs/", "](")
