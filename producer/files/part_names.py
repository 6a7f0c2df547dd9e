"""The names of parts: each says which part it is, and how many there are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.stores.paths import ObjectPath, check_container

PART, PARTS = "rankmill.part", "rankmill.parts"
"""Metadata of a part: its number, and how many parts there are."""

_NAME = re.compile(r"part-([0-9]{5,})-of-([0-9]{5,})\.[a-z]+")
_LIST = re.compile(rf"_{_NAME.pattern}\.errors\.jsonl")


@dataclass(frozen=True)
class Part:
    """A part that a file's name speaks of: its number (from 1), and how many parts there are."""

    number: int
    count: int


def part_of(name: str) -> Part | None:
    """The part of which a file's name speaks; ``None`` if it is no part's name."""
    found = _NAME.fullmatch(name)
    return found and Part(int(found[1]), int(found[2]))


def part_name(part: Part, ending: str) -> str:
    """The name of a part's file."""
    return f"part-{part.number:05}-of-{part.count:05}{ending}"


def errors_name(name: str) -> str:
    """The name of a file's list of row errors; readers of a whole folder skip names that begin with _."""
    return f"{'_' if part_of(name) else ''}{name}.errors.jsonl"


def is_of_parts(name: str) -> bool:
    """Whether a file is a part, or the list of a part's row errors."""
    return part_of(name) is not None or _LIST.fullmatch(name) is not None


def check_folder(folder: Path) -> None:
    """Check that parts can be written to `folder`, which need not be there yet.

    Raises
    ------
    InputError
        They cannot.
    """
    if isinstance(folder, ObjectPath):
        check_container(folder)
        return
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; --rows-per-part needs a folder, name one with -o")
    if not folder.parent.is_dir():
        raise InputError(f"{folder.parent}: no such directory to write the output to")
    for each in (folder.parent, folder):  # beside the folder is the run's own
        if each.is_dir() and not os.access(each, os.W_OK):
            raise InputError(f"{each} is not writable; name another place with -o")


def whole(paths: Iterable[Path]) -> list[Path]:
    """Replace each folder by its parts, in order.

    Raises
    ------
    InputError
        A folder has no parts, lacks one, or has parts of two outputs.
    """
    found: list[Path] = []
    for path in paths:
        found += _parts_in(path) if path.is_dir() else [path]
    return found


def _parts_in(folder: Path) -> list[Path]:
    parts = {path: part for path in folder.iterdir() if (part := part_of(path.name))}
    counts = {(part.count, path.suffix) for path, part in parts.items()}
    if not parts:
        raise InputError(f"{folder}: no part of an output in this directory")
    if len(counts) > 1:
        raise InputError(f"{folder} has parts of several outputs; name the files")
    there = {part.number for part in parts.values()}
    missing = [str(number) for number in range(1, max(counts)[0] + 1) if number not in there]
    if missing:
        raise InputError(
            f"{folder}: part {', '.join(missing[:5])} of {max(counts)[0]} is not there; "
            "let score-file finish, the same command continues"
        )
    return sorted(parts, key=lambda path: parts[path].number)
