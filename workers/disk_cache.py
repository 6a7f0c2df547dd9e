"""What is made from models, once, and kept: whole folders, named after all that they are made from."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cache_folder(setting: str) -> Path:
    """``auto`` is ``rankmill`` in the user's cache folder."""
    if setting != "auto":
        return Path(setting).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rankmill"


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, which `make` fills if it is not there yet.

    It appears there whole, as several workers may want the same one at a time, and any may die.

    Raises
    ------
    OSError
        It cannot be written.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as making:
        whole = Path(making) / "whole"
        whole.mkdir()
        make(whole)
        for file in whole.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        try:
            whole.rename(folder)
        except OSError:  # another process was faster, whose files are as good
            if not folder.is_dir():
                raise
    return folder


def keep_json(file: Path, values: dict[str, Any]) -> None:
    """Write a file of JSON, whole or not at all; raises `OSError`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parent, prefix=".", delete=False, encoding="utf-8"
    ) as written:
        json.dump(values, written, indent=1)
    Path(written.name).replace(file)


def kept_json(file: Path) -> dict[str, Any]:
    """What `keep_json` has written; nothing where that is not there or not JSON."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def digest(source: str | Path, revision: str | None, *made_with: str) -> str:
    """A name for what is made from a model: of its commit on the hub, or of what its files hold.

    Parameters
    ----------
    source, revision
        As in `workers.backends.base.ModelFiles`.
    made_with
        What else it depends on.
    """
    made_from = list(made_with)
    if isinstance(source, str):
        made_from += [source, str(revision)]
    else:
        for path in sorted([source / "config.json", *source.glob("*.safetensors")]):
            with path.open("rb") as file:
                made_from += [path.name, hashlib.file_digest(file, "blake2b").hexdigest()]
    return hashlib.blake2b("\n".join(made_from).encode(), digest_size=16).hexdigest()
