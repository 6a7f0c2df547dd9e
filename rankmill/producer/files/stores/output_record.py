"""The files that a confined process wrote as an output: it replaces and deletes nothing else there."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from rankmill.jobs.contract.errors import RunnerError
from rankmill.producer.files.stores.paths import AnyPath, workspace_of
from rankmill.producer.files.stores.writing import content, identity, sync

_SEAL = ""
"""In the record, in the place of a file's name."""


def record_of(output: AnyPath) -> Path:
    """The record of an output: a hidden file, which no order can name, beside the folder of its run."""
    folder = workspace_of(output)
    return folder.with_name(f".{folder.name}")


class OutputRecord:
    """The record of an output's files: of each by its name what it was when a runner had made it.

    Whoever has the output's lock may use it.
    """

    def __init__(self, output: AnyPath) -> None:
        self._record = record_of(output)
        self._folder = workspace_of(output)

    def check(self, files: Iterable[AnyPath]) -> None:
        """Raise `RunnerError` if one of `files` is there and is not as a runner has made it."""
        there = [path for path in files if _is_link(path) or path.exists()]
        known = self._read() if there else {}
        for path in there:
            if _is_link(path) or _state(path, path) not in known.get(path.name, ()):
                raise RunnerError(
                    f"{path}: no runner has made it as it is, and runners replace nothing else; remove it, "
                    "or name another output"
                )

    def note(self, files: Mapping[AnyPath, Path]) -> None:
        """Note what `files` become, before they are moved: ``{place: complete file}``.

        It is written in the folder of the run, if there is one: with that it is removed if this process dies.
        """
        known = self._read()
        for path, partial in files.items():
            known[path.name] = [*known.get(path.name, [])[-1:], _state(partial, path)]
        self._write(known)

    def seal(self, run_id: str, *what: str) -> None:
        """Note `what` the run has made, before it is moved: the server may lose its end."""
        self._write({**self._read(), _SEAL: [run_id, *what]})

    def sealed(self, run_id: str) -> list[str]:
        """What `seal` has noted of the run; nothing if another one was the last."""
        found = self._read().get(_SEAL, [])
        return found[1:] if found[:1] == [run_id] else []

    def _write(self, known: Mapping[str, list[str]]) -> None:
        folder = self._folder if self._folder.is_dir() else self._record.parent
        handle, name = tempfile.mkstemp(dir=folder, prefix=".rankmill-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(known, file)
            sync(Path(name))
            Path(name).replace(self._record)
            sync(self._record.parent)  # a part is synced in a folder of its own, and would outlast its record
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise

    def _read(self) -> dict[str, list[str]]:
        """The record; nothing is known if it is not this user's, or damaged."""
        try:
            descriptor = os.open(self._record, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    return {}
                read = json.load(file)
            return {str(name): [str(each) for each in states] for name, states in read.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}


def _is_link(path: AnyPath) -> bool:
    return isinstance(path, Path) and path.is_symlink()


def _state(path: AnyPath, place: AnyPath) -> str:
    """Inode, size, time and digest of a file; of an object size and digest."""
    own, digest = identity(path, place), content(path)
    return own if own == digest else f"{own} {digest}"
