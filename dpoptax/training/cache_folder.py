"""Folders of this user alone for what can be made again: compiled programs, features of images."""

import os
import stat
import sys
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder `name` where the platform keeps such things: XDG_CACHE_HOME or its stand-in."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given and Path(given).is_absolute():
        base = Path(given)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ".cache"
    return base / "dpoptax" / name


def prepare(folder: Path) -> None:
    """Makes the folder for its owner alone.

    Raises:
        OSError: It cannot be made or written to, is another user's, or others may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if sys.platform != "win32":
        _check_others_keep_out(folder)
    with open(folder / ".writable", "wb"):
        pass


def keep_newest(folder: Path, pattern: str, largest: int) -> None:
    """Removes of the files that match `pattern` the oldest, until all have `largest` bytes."""
    files = sorted((f.stat().st_mtime, f.stat().st_size, f) for f in folder.glob(pattern))
    excess = sum(size for _, size, _ in files) - largest
    for _, size, file in files:
        if excess <= 0:
            break
        file.unlink(missing_ok=True)
        excess -= size


def _check_others_keep_out(folder: Path) -> None:
    found, around = folder.stat(), folder.parent.stat()
    others = stat.S_IWGRP | stat.S_IWOTH
    if found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if found.st_mode & others or (around.st_mode & others and not around.st_mode & stat.S_ISVTX):
        raise PermissionError(f"others may write to {folder}, and what is there would be used")
    folder.chmod(0o700)
