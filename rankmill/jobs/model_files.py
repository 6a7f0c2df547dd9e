"""The files of a model's directory on which the model's scores may depend, and the digest of these files.

Some JSON files of a model name other files: an index names the files of the weights, and ``modules.json``
names folders. Every file that a JSON file names is part of the model, wherever it lies in the directory.
Names of weights, configurations and folders must not lead out of the directory: a file outside may differ
between hosts, and the digest would not show this.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from rankmill.jobs.cache import Facts, facts_of, file_digest
from rankmill.jobs.contract.errors import SpecError

WORDS = frozenset({".md", ".yaml", ".yml", ".csv", ".tsv", ".html", ".svg", ".png", ".jpg", ".pdf"})
PLAIN = frozenset({"LICENSE", "LICENCE", "NOTICE", "README", "COPYING"})
"""Endings and names of files that are for people, not for the model."""

_UNREAD = WORDS | PLAIN | {".py"}
_OTHER_WEIGHTS = frozenset({".bin", ".pt", ".pth", ".h5", ".msgpack", ".ot", ".gguf", ".ckpt"})
"""Endings of weights in formats that rankmill does not read. Files with these endings are left out only in a
model's top folder. In a subfolder they may be weights of an ONNX model, whose files can have any name.
"""

_LEFT_OUT = re.compile(r"\..*|__pycache__|checkpoint-\d+")
"""Matches names of files and folders that are not part of a model: hidden ones, and folders in which a
training stores its state.
"""

_OF_WEIGHTS = ("weight_map", "transformers_weights")
_OF_CONFIGS = ("configuration_files", "fast_tokenizer_files")
"""Keys in JSON files under which transformers finds names of weights, or names of further JSON files."""

_MODULES = "modules.json"

_WITHOUT_NAMES = re.compile(r"(^|/)tokenizer\.json$|(?<!\.safetensors)\.index\.json$")
"""JSON files whose strings are not names of files: vocabularies of tokenizers, and indexes of weights in
formats that rankmill does not read.
"""

_LARGEST_JSON = 64 << 20
"""A JSON file that may name other files of a model is refused if it has more bytes than this. The index of a
model of 100 GB has two million bytes.
"""

_LONGEST = 100


def model_files(folder: Path) -> dict[str, Path]:
    """By relative path, in order: the files of a model's directory on which the model's scores may depend.

    Hidden files, checkpoints of a training, texts for people and code are left out. So are weights in the top
    folder in formats that rankmill does not read. A file that a JSON file of the model names is never left
    out.

    Raises
    ------
    SpecError
        A JSON file names a file outside of the directory, or weights that are not safetensors; or the JSON
        file is too large or has too many levels.
    OSError
        A file cannot be read.
    """
    seen = {_place(folder)}
    files = {path.relative_to(folder).as_posix(): path for path in _walk(folder, seen)}
    unread = list(files)
    while unread:
        name = unread.pop()
        for named in _names_in(folder, name).left_out:
            more = {path.relative_to(folder).as_posix(): path for path in _named(folder / named, seen)}
            unread += more.keys() - files.keys()
            files |= more
    return dict(sorted(files.items()))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, which lie in the top folder or are named by an index.

    Raises
    ------
    SpecError, OSError
        As in `model_files`.
    """
    files = model_files(folder)
    indexed = {weights for name in files for weights in _names_in(folder, name).weights}
    return [
        path
        for name, path in files.items()
        if path.suffix == ".safetensors" and ("/" not in name or name in indexed)
    ]


def model_facts(folder: Path) -> dict[str, Facts]:
    """Return `Facts`, such as size and times, about each file of a model. If a file changes, so do its facts.

    Raises as `model_files` does.
    """
    return {name: facts_of(path.stat()) for name, path in model_files(folder).items()}


def model_content(folder: Path, cache: Path | None = None) -> str:
    """Return a digest of the names and contents of a model's files.

    Parameters
    ----------
    folder
        The model's directory.
    cache
        Cache folder in which the digests of large files are stored.

    Raises
    ------
    SpecError, OSError
        As in `model_files`.
    """
    files = model_files(folder).items()
    return digest_of((name, path.stat().st_size, file_digest(path, cache)) for name, path in files)


def digest_of(files: Iterable[tuple[str, int, str]]) -> str:
    """The digest of the paths, sizes and SHA-256 of files."""
    return hashlib.sha256(json.dumps(sorted(files)).encode()).hexdigest()


def check_named_files(file: Path) -> None:
    """Check the names of files in a JSON file of a model.

    Raises
    ------
    SpecError
        A name leads out of the model's directory, or names weights that are not safetensors; or the JSON file
        is too large or has too many levels.
    OSError
        The file cannot be read.
    """
    _names_in(file.parent, file.name)


@dataclass(frozen=True)
class _Names:
    """The names of files that a JSON file of a model contains.

    Attributes
    ----------
    weights
        Names of files with weights.
    left_out
        Names of files that are part of the model only because this JSON file names them.
    """

    weights: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()


def _names_in(folder: Path, name: str) -> _Names:
    if not name.endswith(".json") or _WITHOUT_NAMES.search(name):
        return _Names()
    return _read_names(folder, name, facts_of((folder / name).stat()))


@lru_cache(maxsize=10_000)
def _read_names(folder: Path, name: str, facts: Facts) -> _Names:
    """Read the names of files from a JSON file of a model.

    The names are cached under the `facts` about the file, so a changed file is read again.
    """
    this, size = folder / name, facts[2]
    if size > _LARGEST_JSON:
        raise SpecError(f"{this} has {size:,} bytes, and at most {_LARGEST_JSON:,} are read")
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except RecursionError:
        raise SpecError(f"{this} cannot be read: it has too many levels") from None
    except ValueError:  # no error here: loading the model reports what is wrong with the file
        return _Names()
    entries = content if isinstance(content, dict) else {}
    modules = content if isinstance(content, list) and name == _MODULES else []
    weights = {named for key in _OF_WEIGHTS for named in _strings(entries.get(key))}
    others = {named for key in _OF_CONFIGS for named in _strings(entries.get(key))}
    paths = [module.get("path") for module in modules if isinstance(module, dict)]
    others.update(_strings(paths))
    for named in sorted(weights | others):
        shown, path = f"{this} names {named[:_LONGEST]!r}", PurePosixPath(named)
        if path.is_absolute() or ".." in path.parts:
            raise SpecError(
                f"{shown}, which is not in its directory: copy or link that into the directory, and name it "
                "by its path there"
            )
        if named in weights and not named.endswith((".safetensors", ".safetensors.index.json")):
            raise SpecError(f"{shown}: save the model with safe_serialization=True, as *.safetensors")
    left_out = filter(_is_left_out, _strings(content))
    return _Names(frozenset(map(_normal, weights)), frozenset(map(_normal, left_out)))


def _normal(name: str) -> str:
    return PurePosixPath(name).as_posix()


def _strings(content: Any) -> Iterator[str]:
    """All strings in a JSON value, except keys."""
    values = [content]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value


def _is_left_out(name: str) -> bool:
    """Return whether a file of this name is left out of a model's files unless a JSON file names it."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts:
        return False
    hidden = any(map(_LEFT_OUT.fullmatch, path.parts))
    return hidden or bool({path.suffix, path.name} & (_UNREAD | _OTHER_WEIGHTS))


def _named(path: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """The file at a path, or the files in the folder at a path; empty if neither exists."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    if stat.S_ISREG(mode):
        yield path
    elif stat.S_ISDIR(mode) and (place := _place(path)) not in seen:
        yield from _walk(path, seen | {place}, top=False)


def _walk(folder: Path, seen: set[tuple[int, int]], *, top: bool = True) -> Iterator[Path]:
    left_out = _UNREAD | _OTHER_WEIGHTS if top else _UNREAD
    for path in folder.iterdir():
        if _LEFT_OUT.fullmatch(path.name):
            continue
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:  # a dangling link, which no worker can read
            continue
        if stat.S_ISDIR(mode) and (place := _place(path)) not in seen:  # links to folders may form a circle
            yield from _walk(path, seen | {place}, top=False)
        elif stat.S_ISREG(mode) and not {path.suffix, path.name} & left_out:
            yield path


def _place(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
