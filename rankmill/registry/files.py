"""The files of a model's folder: which are pushed, and which keep the folder from being pushed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rankmill.jobs.cache.models import PLAIN, WORDS
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.registry.documents import MAX_FILES, ModelFile
from rankmill.jobs.registry.folder import PIECE

_DATA = frozenset(
    {".json", ".jsonl", ".txt", ".model", ".tiktoken", ".jinja", ".safetensors", ".onnx", ".onnx_data"}
)


@dataclass(frozen=True)
class LocalFile:
    """A file to push, and its size and time of change when it was found."""

    path: str
    source: Path
    bytes: int
    changed: int

    def check_unchanged(self) -> None:
        """Raise `InputError` if the file has changed since it was found."""
        about = self.source.stat()
        if (about.st_size, about.st_mtime_ns) != (self.bytes, self.changed):
            raise InputError(f"{self.source} changed while it was pushed; push again when it no longer does")


def find_files(folder: Path) -> list[LocalFile]:
    """All files of a model, those in its folders included; hidden ones are left out.

    Raises
    ------
    InputError
        The folder holds no model, or something that is neither weights in safetensors nor data.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a model: there is no config.json in it")
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} has no *.safetensors: save the model with safe_serialization=True")
    _check_config(folder / "config.json")
    found = sorted(_walk(folder, folder), key=lambda file: file.path)
    if len(found) > MAX_FILES:
        raise InputError(f"{folder} has {len(found):,} files; a version has at most {MAX_FILES:,}")
    return found


def _walk(folder: Path, top: Path) -> Iterator[LocalFile]:
    for path in folder.iterdir():
        if is_left_out(path.name):
            continue
        if path.is_dir():
            if path.is_symlink():
                raise InputError(
                    f"{path} is a link to a folder, which is not pushed; copy the folder, or remove it"
                )
            yield from _walk(path, top)
            continue
        if not path.is_file():
            raise InputError(f"{path} is not a file; remove it from the model's folder")
        check_kind(path)
        about = path.stat()
        yield LocalFile(path.relative_to(top).as_posix(), path, about.st_size, about.st_mtime_ns)


def is_left_out(name: str) -> bool:
    """Whether a file or folder of this name is not pushed."""
    return name.startswith(".") or name == "__pycache__"


def check_kind(path: Path) -> None:
    """Raise `InputError` if a file of this name is neither weights in safetensors nor data."""
    if path.suffix in _DATA | WORDS or path.name in PLAIN:
        return
    kind = path.suffix or "files without an ending"
    why = "no code" if path.suffix == ".py" else f"weights as *.safetensors and data, not {kind}"
    raise InputError(f"{path} cannot be pushed: a registry holds {why}; remove it from the model's folder")


def _check_config(path: Path) -> None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}") from None
    if isinstance(config, dict) and config.get("auto_map"):
        raise InputError(f"{path} names code to load the model with (auto_map); a registry holds no code")


def digests(files: list[LocalFile], on_bytes: Callable[[int], None]) -> tuple[ModelFile, ...]:
    """The files with their SHA-256; `on_bytes` is told the size of each piece read.

    Raises
    ------
    InputError
        A file changes meanwhile, or its name cannot be in a registry.
    """
    found = []
    for file in files:
        digest = hashlib.sha256()
        with file.source.open("rb") as opened:
            while piece := opened.read(PIECE):
                digest.update(piece)
                on_bytes(len(piece))
        file.check_unchanged()
        try:
            found.append(ModelFile(path=file.path, bytes=file.bytes, sha256=digest.hexdigest()))
        except ValueError:
            raise InputError(f"{file.source}: the name of this file cannot be in a registry") from None
    return tuple(found)
