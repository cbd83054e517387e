"""Renders the notebooks as pages with their text, code and stored outputs."""

import base64
import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
_BADGE = re.compile(r"\[!\[Open in Colab\]\(.*?\)\]\((.*?)\)")


def on_files(files, config):
    """Adds a page, and its figures, for each notebook."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, figures = rendered(json.loads(path.read_text("utf-8")), path.stem)
        files.append(File.generated(config, f"examples/{path.stem}.md", content=text))
        for name, data in figures.items():
            files.append(File.generated(config, f"examples/{name}", content=data))
    return files


def on_page_markdown(markdown, page, config, files):
    """Points links to notebooks at their pages instead of at the repository's files."""
    del config, files
    folder = posixpath.dirname(page.file.src_uri)

    def link(match):
        return f"({posixpath.relpath(f'examples/{match[1]}.md', folder or '.')})"

    return re.sub(r"\((?:\.\./)+notebooks/(\w+)\.ipynb\)", link, markdown)


def rendered(notebook, stem):
    """Returns the Markdown of a notebook, and the bytes of its figures by name."""
    parts, figures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_BADGE.sub(r"[Open in Colab](\1)", source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = output.get("text") or data.get("text/plain", [])
            if "image/png" in data:
                name = f"{stem}-{len(figures)}.png"
                figures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![Output of the code above]({name})")
            elif text and output.get("name") != "stderr":
                parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    parts.append(f"*This page is the notebook `notebooks/{stem}.ipynb` of the repository.*")
    return "\n\n".join(parts) + "\n", figures
