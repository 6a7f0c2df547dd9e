"""The cache folder: where it is, who can write to it, and its JSON files."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

_MODE = 0o775
"""Most that others may do with a folder of the cache, whatever the umask allows."""


def cache_folder(setting: str) -> Path:
    """The cache folder; ``auto`` means ``rankmill`` in the user's cache folder."""
    if setting != "auto":
        return Path(setting).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rankmill"


def make_folder(folder: Path) -> None:
    """Make a folder of the cache, and those above it; strangers cannot write to them. Raises `OSError`."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir(mode=_MODE)


def strangers(folder: Path, top: Path | None = None, setting: str = "cache_dir") -> str | None:
    """Why what lies in a folder may be a stranger's, in one line; ``None`` if it cannot be, or is not there.

    A stranger is any user but root and this process's, and a group that the process is not in: the group
    of a pod (``fsGroup``) may write.

    Parameters
    ----------
    folder, top
        The folder, and the one above it from which on all are looked at; ``None``: the folder alone.
    setting
        What says where the folder is.
    """
    above = [each for each in folder.parents if top and each.is_relative_to(top)]
    for each in (*reversed(above), folder):
        if why := _strangers(each):
            return (
                f"{each} {why}, and what lies there would be trusted: take that right away, or set {setting} "
                "to a folder of this user"
            )
    return None


def _strangers(folder: Path) -> str | None:
    try:
        about = folder.stat()
    except OSError:
        return None
    if about.st_mode & stat.S_IWOTH:
        return "can be written by everybody"
    if about.st_mode & stat.S_IWGRP and about.st_gid not in {os.getegid(), *os.getgroups()}:
        return f"can be written by group {about.st_gid}, which is none of this process"
    # Of a file system that shows another owner than the one who writes, what can be written is one's own.
    if about.st_uid not in {0, os.geteuid()} and not os.access(folder, os.W_OK):
        return f"belongs to user {about.st_uid}"
    return None


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write a JSON file atomically; raises `OSError`."""
    make_folder(file.parent)
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parent, prefix=".", delete=False, encoding="utf-8"
    ) as written:
        json.dump(values, written, indent=1)
    Path(written.name).replace(file)


def read_json(file: Path) -> dict[str, Any]:
    """Read a file of `write_json`; empty if the file does not exist or is not valid."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
