"""Creates private folders for caches and secret files."""

import os
import stat
import sys
import tempfile
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Returns the cache folder `name` in XDG_CACHE_HOME or its counterpart."""
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
    """Creates a folder that only its owner can access.

    Raises:
        OSError: The folder cannot be created or written to, it belongs to another user, or others
            can write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if sys.platform != "win32":
        _check_others_keep_out(folder)
    with open(folder / ".writable", "wb"):
        pass


def make_private(folder: Path) -> None:
    """Creates a folder for secret files, or restricts an existing one to its owner.

    Raises:
        OSError: The folder cannot be created, or it belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if sys.platform == "win32":
        return
    # Compare with the owner of a new file, not of the process: network disks may map all to nobody.
    with tempfile.TemporaryFile(dir=folder) as file:
        _check_owner(folder, os.fstat(file.fileno()).st_uid)
    if folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        folder.chmod(0o700)


def keep_newest(folder: Path, pattern: str, largest: int) -> None:
    """Removes the oldest files of a pattern until at most `largest` bytes remain."""
    files = sorted((f.stat().st_mtime, f.stat().st_size, f) for f in folder.glob(pattern))
    excess = sum(size for _, size, _ in files) - largest
    for _, size, file in files:
        if excess <= 0:
            break
        file.unlink(missing_ok=True)
        excess -= size


def _check_others_keep_out(folder: Path) -> None:
    """Raises unless only this user can write to the folder or replace it."""
    found, *around = (place.stat() for place in (folder, *folder.resolve().parents))
    _check_owner(folder, os.getuid())
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or any(map(_open_to_others, around)):
        raise PermissionError(
            f"The folder {folder} must not be writable by other users, who could replace its "
            "files. Remove their write permission from it and its parents."
        )
    if any(x.st_uid not in (found.st_uid, 0, around[-1].st_uid) for x in around):
        raise PermissionError(
            f"The folder {folder} must not be inside a folder of another user, who could replace "
            "it. Use another folder."
        )
    folder.chmod(0o700)


def _check_owner(folder: Path, user: int) -> None:
    if folder.stat().st_uid != user:
        raise PermissionError(
            f"The folder {folder} must belong to the current user. Use another folder."
        )


def _open_to_others(found: os.stat_result) -> bool:
    """Returns whether other users can rename files in a folder."""
    # A group whose number is that of the user has no other members.
    group = stat.S_IWGRP if found.st_gid != os.getuid() else 0
    return bool(found.st_mode & (group | stat.S_IWOTH)) and not found.st_mode & stat.S_ISVTX
