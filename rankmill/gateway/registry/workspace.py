"""Folders for models on their way: uploads until they are pushed, versions until they are sent."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "rankmill-upload-"
_NEW_SECONDS = 60
"""A folder that is younger may not have its lock yet."""


@contextmanager
def workspace() -> Iterator[Path]:
    """A folder that is removed at the end; those that killed processes have left are removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    with suppress(OSError):  # it is another user's, or in use, or gone meanwhile
        if folder.stat().st_mtime > time.time() - _NEW_SECONDS:
            return
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
