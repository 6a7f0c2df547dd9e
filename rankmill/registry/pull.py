"""Pulling a version into a folder, which appears whole."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.registry.documents import Manifest
from rankmill.jobs.registry.fetch import fetch_files
from rankmill.jobs.registry.registry import Registry
from rankmill.registry.steps import Steps


def pull(registry: Registry, manifest: Manifest, target: Path, steps: Steps) -> None:
    """Fetch and verify the files of a version; an interrupted pull into the same folder continues.

    Raises
    ------
    InputError
        The folder exists and is not empty.
    RegistryError
        A file is not there or is not what the manifest says.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists already; name a folder that does not")
    work = target.absolute().with_name(f".{target.name}.pulling-{manifest.content[:16]}")
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another command is making {target}; let it finish") from None
        with steps.measured("pulling", manifest.bytes) as on_bytes:
            fetch_files(registry, manifest, work / "model", work / "parts", on_bytes)
        if target.exists():
            target.rmdir()
        (work / "model").rename(target)
        shutil.rmtree(work, ignore_errors=True)
