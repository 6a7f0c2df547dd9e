"""The content of a model's directory: the files that may decide its scores, and one digest of them all."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from rankmill.jobs.cache.digests import Facts, facts_of, file_digest

WORDS = frozenset({".md", ".yaml", ".yml", ".csv", ".tsv", ".html", ".svg", ".png", ".jpg", ".pdf"})
PLAIN = frozenset({"LICENSE", "LICENCE", "NOTICE", "README", "COPYING"})
"""Endings, and names, of files in a model's directory that are for people."""

_UNREAD = WORDS | PLAIN | {".py"}
_OTHER_WEIGHTS = frozenset({".bin", ".pt", ".pth", ".h5", ".msgpack", ".ot", ".gguf", ".ckpt"})
"""Beside the safetensors, where nothing reads them; below, a file of ONNX may have any name."""

_LEFT_OUT = re.compile(r"\..*|__pycache__|checkpoint-\d+")
"""Hidden files and folders, and those in which a training keeps its state."""


def model_folder(model: str) -> Path | None:
    """The directory that a model's name stands for on this host; ``None`` if there is none."""
    folder = Path(model).expanduser()
    try:
        return folder if model != "demo" and folder.is_dir() else None
    except (OSError, ValueError):  # no name of a file
        return None


def model_files(folder: Path) -> dict[str, Path]:
    """The files of a model's directory on which its scores may depend, by their path in it, in order.

    All but hidden files, words for people, code, and weights in formats that are not read.
    """
    return {path.relative_to(folder).as_posix(): path for path in sorted(_walk(folder, {_place(folder)}))}


def model_facts(folder: Path) -> dict[str, Facts]:
    """The facts of these files: when they are the same, so is the content. Raises `OSError`."""
    return {name: facts_of(path.stat()) for name, path in model_files(folder).items()}


def model_content(folder: Path, cache: Path | None = None) -> str:
    """The digest of the names and contents of these files; `cache` as of `file_digest`.

    Raises
    ------
    OSError
        A file cannot be read.
    """
    files = model_files(folder).items()
    return digest_of((name, path.stat().st_size, file_digest(path, cache)) for name, path in files)


def digest_of(files: Iterable[tuple[str, int, str]]) -> str:
    """The digest of the paths, sizes and SHA-256 of files."""
    return hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest()


def _walk(folder: Path, seen: set[tuple[int, int]], *, top: bool = True) -> Iterator[Path]:
    left_out = _UNREAD | _OTHER_WEIGHTS if top else _UNREAD
    for path in folder.iterdir():
        if _LEFT_OUT.fullmatch(path.name):
            continue
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:  # a dangling link, which no worker can read
            continue
        if stat.S_ISDIR(mode) and (place := _place(path)) not in seen:  # links to folders may go in a circle
            yield from _walk(path, seen | {place}, top=False)
        elif stat.S_ISREG(mode) and not {path.suffix, path.name} & left_out:
            yield path


def _place(folder: Path) -> tuple[int, int]:
    about = folder.stat()
    return about.st_dev, about.st_ino
