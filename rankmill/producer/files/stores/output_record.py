"""Records the files that runners wrote as an output, because they may replace only these files."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rankmill.jobs.contract.errors import RunnerError
from rankmill.jobs.system import system
from rankmill.producer.files.stores.paths import AnyPath, workspace_of
from rankmill.producer.files.stores.roots import opened_folder
from rankmill.producer.files.stores.writing import as_output_error, content, identity

_SEAL = ""
"""Key in the record for the outcome of a run (`OutputRecord.seal`). All other keys are names of files."""


def record_of(output: AnyPath) -> Path:
    """Return the path of an output's record. It is a hidden file, which no request can read or write."""
    folder = workspace_of(output)
    return folder.with_name(f".{folder.name}")


class OutputRecord:
    """Records the state in which a runner has left each file of an output.

    Only the process that has the output's lock may use the record.
    """

    def __init__(self, output: AnyPath) -> None:
        self._beside = output if isinstance(output, Path) else None
        self._record = record_of(output)
        self._folder = workspace_of(output)

    def check(self, files: Iterable[AnyPath], folder: AnyPath | None = None) -> None:
        """Raise `RunnerError` if an existing file is not in the state in which a runner has left it.

        Parameters
        ----------
        files
            The files to check.
        folder
            Their folder, from `folder_of`; by default, the folder that the files' paths name.
        """
        places = {path: folder / path.name if folder else path for path in files}
        existing = [(path, at) for path, at in places.items() if _is_link(at) or at.exists()]
        recorded = self._read() if existing else {}
        for path, at in existing:
            if _is_link(at) or _state(at, at) not in recorded.get(path.name, ()):
                raise RunnerError(
                    f"{path}: no runner has left it in this state, and runners replace only their own files; "
                    "remove it, or name another output"
                )

    def note(self, files: Mapping[AnyPath, Path]) -> None:
        """Record the state of finished files, before they are moved to their places.

        Parameters
        ----------
        files
            The finished file for each place.
        """
        recorded = self._read()
        for path, partial in files.items():
            recorded[path.name] = [*recorded.get(path.name, [])[-1:], _state(partial, path)]
        self._write(recorded)

    def seal(self, run_id: str, *made: str) -> None:
        """Record the outcome of a run on disk, before the output is moved into place.

        Redis has the outcome too, but may lose it.

        Parameters
        ----------
        run_id
            The run.
        *made
            Texts that describe the outcome.

        Raises
        ------
        OutputError
            The record cannot be written.
        """
        with as_output_error(self._record):
            self._write({**self._read(), _SEAL: [run_id, *made]})

    def sealed(self, run_id: str) -> list[str]:
        """Return the texts that `seal` has recorded for this run, or an empty list."""
        sealed = self._read().get(_SEAL, [])
        return sealed[1:] if sealed[:1] == [run_id] else []

    def _write(self, record: Mapping[str, list[str]]) -> None:
        name = f".rankmill-{secrets.token_hex(8)}"
        with opened_folder(self._record.parent, self._beside) as above, self._opened(above) as folder:
            try:
                descriptor = os.open(
                    name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder
                )
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(record, file)
                    file.flush()
                    system.fsync(descriptor)
                os.replace(name, self._record.name, src_dir_fd=folder, dst_dir_fd=above)
                # without this, a power failure could lose the record of a part, but not the part
                system.fsync(above)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                raise

    @contextmanager
    def _opened(self, above: int) -> Iterator[int]:
        """Yield a descriptor of the folder in which to write a new record, which is then moved to `above`.

        The folder is that of the run. If the process dies while it writes, the unfinished record is removed
        with the run's folder later. If the run has no folder, the folder is `above` itself.
        """
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            folder = os.open(self._folder.name, flags, dir_fd=above)
        except FileNotFoundError:
            yield above
            return
        try:
            yield folder
        finally:
            os.close(folder)

    def _read(self) -> dict[str, list[str]]:
        """Read the record of the output's files from disk. Returns an empty record if the file does not
        exist, belongs to another user, or is damaged.
        """
        try:
            descriptor = os.open(self._record, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                    return {}
                read = json.load(file)
            return {str(name): [str(state) for state in states] for name, states in read.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}


def _is_link(path: AnyPath) -> bool:
    return isinstance(path, Path) and path.is_symlink()


def _state(path: AnyPath, place: AnyPath) -> str:
    """Return the inode, size, time and digest of a file, or the size and digest of an object."""
    own, digest = identity(path, place), content(path)
    return own if own == digest else f"{own} {digest}"
