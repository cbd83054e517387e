"""Makes figures small enough for a repository."""

from pathlib import Path

from PIL import Image


def shrink(source: Path, target: Path) -> None:
    """Copies a figure with a palette of 96 colors."""
    with Image.open(source) as image:
        image.convert("RGB").quantize(96).save(target, optimize=True)
