"""Small disks, which are full soon: a tmpfs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a disk of this size, such as ``128k``, at `folder`, which is made; skips without the right to."""
    folder.mkdir()
    if _mount(f"size={size},mode=0755", folder):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def resize(folder: Path, size: str) -> None:
    """Give the disk at `folder` another size."""
    assert _mount(f"remount,size={size}", folder) == 0


def fill(folder: Path) -> Path:
    """Write a file that leaves no room on the disk at `folder`; returns its path."""
    path = folder / "others"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return path


def _mount(options: str, folder: Path) -> int:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode
