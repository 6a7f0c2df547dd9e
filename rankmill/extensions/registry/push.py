"""Pushes versions of models into a registry, and pulls them into folders. A version becomes visible when it
is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from rankmill.extensions.lab.ask import ask
from rankmill.extensions.registry.documents import (
    MAX_FILES,
    MAX_NOTES,
    Manifest,
    ModelFile,
    Reference,
    check_name,
    content_of,
)
from rankmill.extensions.registry.folder import PIECE
from rankmill.extensions.registry.registry import Registry, fetch_files, files_folder
from rankmill.jobs.cache import lock
from rankmill.jobs.contract.errors import InputError, RegistryConflict, SpecError
from rankmill.jobs.model_files import PLAIN, WORDS, model_files, weight_files
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system

_DATA = frozenset(
    {".json", ".jsonl", ".txt", ".model", ".tiktoken", ".jinja", ".safetensors", ".onnx", ".onnx_data"}
)


@dataclass(frozen=True)
class LocalFile:
    """A file to push. ``bytes`` and ``changed`` are its size and modification time (ns) when it was found."""

    path: str
    source: Path
    bytes: int
    changed: int

    def check_unchanged(self) -> None:
        status = self.source.stat()
        if (status.st_size, status.st_mtime_ns) != (self.bytes, self.changed):
            raise InputError(
                f"{self.source} changed while it was pushed; push again when it no longer changes"
            )


def find_files(folder: Path) -> list[LocalFile]:
    """Find the files of a model in a folder and its subfolders, except hidden files.

    Raises
    ------
    InputError
        The folder does not hold a model, or has too many files. A file is neither weights in safetensors nor
        data. Or a file names another file that is not pushed.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a model: there is no config.json in it")
    _check_config(folder / "config.json")
    files = sorted(_walk(folder, folder), key=lambda file: file.path)
    _check_named(folder, files)
    if len(files) > MAX_FILES:
        raise InputError(f"{folder} has {len(files):,} files; a version has at most {MAX_FILES:,}")
    return files


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
        status = path.stat()
        yield LocalFile(path.relative_to(top).as_posix(), path, status.st_size, status.st_mtime_ns)


def is_left_out(name: str) -> bool:
    """Return whether a push leaves out files and folders with this name."""
    return name.startswith(".") or name == "__pycache__"


def check_kind(path: Path) -> None:
    """Raise `InputError` if the name of a file shows that it is neither weights in safetensors nor data."""
    if path.suffix in _DATA | WORDS or path.name in PLAIN:
        return
    kind = path.suffix or "files without an ending"
    why = "no code" if path.suffix == ".py" else f"weights as *.safetensors and data, not {kind}"
    raise InputError(f"{path} cannot be pushed: a registry holds {why}; remove it from the model's folder")


def _check_config(path: Path) -> None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}") from None
    if isinstance(config, dict) and config.get("auto_map"):
        raise InputError(f"{path} names code to load the model with (auto_map); a registry holds no code")


def _check_named(folder: Path, pushed: Sequence[LocalFile]) -> None:
    """Raise `InputError` if a model has no weights, or if one of its files names a file that is not
    pushed.
    """
    try:
        weights = weight_files(folder)
        lacking = model_files(folder).keys() - {file.path for file in pushed}
    except SpecError as error:
        raise InputError(str(error)) from None
    if not weights:
        raise InputError(f"{folder} has no *.safetensors: save the model with safe_serialization=True")
    if lacking:
        raise InputError(
            f"{folder} cannot be pushed: its files name {min(lacking)!r}, and a registry holds no hidden "
            "files: rename it, there and in the files that name it"
        )


def digests(files: list[LocalFile], on_bytes: Callable[[int], None]) -> tuple[ModelFile, ...]:
    """Read the files, and return each with its SHA-256. `on_bytes` is called with the size of each piece that
    was read.

    Raises
    ------
    InputError
        A file changes meanwhile, or its name cannot be in a registry.
    """
    listed = []
    for file in files:
        digest = hashlib.sha256()
        with file.source.open("rb") as opened:
            while piece := opened.read(PIECE):
                digest.update(piece)
                on_bytes(len(piece))
        file.check_unchanged()
        try:
            listed.append(ModelFile(path=file.path, bytes=file.bytes, sha256=digest.hexdigest()))
        except ValueError:
            raise InputError(f"{file.source}: the name of this file cannot be in a registry") from None
    return tuple(listed)


def try_model(folder: Path, settings: Settings, *, seconds: float | None = None) -> str:
    """Check that workers can score with the model in a folder, by scoring example pairs. Returns
    transformers' model type.

    Parameters
    ----------
    folder, settings
        The folder, and the settings, which say how pairs are scored.
    seconds
        Longest time for this; ``None`` for no limit.

    Raises
    ------
    InputError
        Workers cannot score with the model; the message says why.
    ProcessFailed
        The process was killed, or the time was over.
    ConfigError
        A package of a worker is missing.
    """
    spec = settings.spec().model_copy(
        update={"model": str(folder.resolve()), "revision": None, "precision": "fp32"}
    )
    try:
        request = {"spec": spec.model_dump()}
        answer = ask("trial", request, f"the trial of {folder}", settings, seconds=seconds)
    except InputError as error:
        raise InputError(f"{folder} cannot be pushed: {error}") from None
    return str(answer["family"])


@contextmanager
def progress(step: str, size: int | None = None, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show the progress of a step of a push or pull, if standard error is a terminal and `quiet` is false.

    Yields a function to call whenever bytes are done, with their number. `size` is the number of bytes in
    all; without it, the bar only shows that the step goes on.
    """
    columns = [TextColumn(step), BarColumn(), *([DownloadColumn(), TransferSpeedColumn()] if size else [])]
    shown = not quiet and sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(step, total=size)
        yield lambda done: bar.advance(task, done)


def push(
    registry: Registry,
    folder: Path,
    name: str,
    version: str | None,
    trial: Callable[[Path], str],
    *,
    by: str,
    quiet: bool = True,
    notes: str = "",
) -> tuple[Manifest, bool]:
    """Try a model, and push it into a registry. An interrupted push of the same files is continued.

    Returns the version that is in the registry now, and whether it was there before.

    Parameters
    ----------
    registry, folder, name
        The registry, the model's folder, and the model's name.
    version
        Name of the version. By default, it is the next of ``v1``, ``v2``, … But if the latest version has the
        same files, that version is returned. If a push of the same files was interrupted after the latest
        version, that push is continued.
    trial
        Loads the model in a folder, scores with it, and returns its family; raises an error if that fails.
    by, notes
        The person or API key that pushes the model, and notes on the version.
    quiet
        Whether to show no progress.

    Raises
    ------
    InputError
        The model cannot be scored or is not safe, or a name or the notes are not valid.
    RegistryConflict
        A version of this name has other files or was removed, or an alias has this name.
    RegistryAway
        The registry cannot be written.
    ProcessFailed
        The process in which `trial` loads the model was killed, or took too long.
    """
    check_name(name, "a model")
    if version is not None:
        _check_version(registry, Reference(name, version))
    if len(notes) > MAX_NOTES:
        raise InputError(f"the notes have {len(notes):,} characters; at most {MAX_NOTES:,} fit")
    local = find_files(folder)
    with progress("scoring the examples", quiet=quiet):
        family = trial(folder)
    size = sum(file.bytes for file in local)
    with progress("reading", size, quiet=quiet) as on_bytes:
        files = digests(local, on_bytes)
    content = content_of(files)
    version = version or _free_version(registry, name, content)
    present = registry.find_manifest(Reference(name, version))
    if present is None:
        with progress("pushing", size, quiet=quiet) as on_bytes:
            _upload(registry, (name, version, files_folder(content)), local, on_bytes)
        manifest = Manifest(
            name=name, version=version, content=content, files=files, family=family, by=by, at=system.now(),
            notes=notes,
        )  # fmt: skip
        if registry.publish(manifest):
            return manifest, False
        present = registry.manifest(Reference(name, version))  # another push was faster
    if present.content != content:
        raise RegistryConflict(
            f"{present} is in the registry with other files, pushed by {present.by}; a version never "
            "changes: push under another name"
        )
    return present, True


def _check_version(registry: Registry, reference: Reference) -> None:
    check_name(reference.tag, "a version")
    if registry.was_removed(reference):
        raise RegistryConflict(
            f"{reference} was removed from {registry.url}; a version never changes, so its name is not used "
            "again: push under another"
        )
    if registry.find_alias(reference) is not None:
        raise RegistryConflict(f"{reference} is an alias in {registry.url}; a version needs another name")


def _free_version(registry: Registry, name: str, content: str) -> str:
    taken = registry.taken(name)
    for version in reversed(taken):
        reference = Reference(name, version)
        if registry.was_removed(reference):
            continue
        manifest = registry.find_manifest(reference)
        if manifest is not None:
            if manifest.content == content:
                return version
            break
        if files_folder(content) in registry.folder.names(name, version):
            return version
    return next_version([*taken, *registry.aliases(name)])


def next_version(taken: Iterable[str]) -> str:
    """Return the name of a new version: ``v4`` if `taken` has ``v1`` and ``v3``."""
    numbers = [int(version[1:]) for version in taken if re.fullmatch(r"v[0-9]{1,9}", version)]
    return f"v{max(numbers, default=0) + 1}"


def _upload(registry: Registry, path: tuple[str, ...], local: Sequence[LocalFile], on_bytes: Any) -> None:
    sizes = registry.folder.sizes(*path)
    for file in local:
        if sizes.get(file.path) == file.bytes:  # an interrupted push has already copied the file
            on_bytes(file.bytes)
            continue
        registry.folder.upload(file.source, on_bytes, *path, *file.path.split("/"))
        file.check_unchanged()


def pull(registry: Registry, manifest: Manifest, target: Path, *, quiet: bool = True) -> None:
    """Fetch the files of a version into a folder, and verify them. An interrupted pull into the same folder
    is continued. The progress is shown unless `quiet` is set.

    Raises
    ------
    InputError
        The folder exists and is not empty, is the working directory or mounted, or another process is making
        it.
    RegistryError
        A file is missing in the registry or has another checksum than in the manifest.
    RegistryAway
        The registry cannot be reached.
    OSError
        A file cannot be written.
    """
    target = target.resolve()
    in_use = target == Path.cwd() or target.is_mount()  # the complete folder cannot be put there
    if in_use or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise InputError(f"{target} exists already; name a folder that does not exist")
    work = target.with_name(f".{target.name}.pulling-{manifest.content[:16]}")
    work.mkdir(parents=True, exist_ok=True)
    held = lock(work / "lock", wait=False)
    if held is None:
        raise InputError(f"another command is making {target}; let it finish")
    with closing(held):
        with progress("pulling", manifest.bytes, quiet=quiet) as on_bytes:
            fetch_files(registry, manifest, work / "model", work / "parts", on_bytes)
        if target.exists():
            target.rmdir()
        (work / "model").rename(target)
        shutil.rmtree(work, ignore_errors=True)
