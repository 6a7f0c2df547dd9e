"""Records the files that confined processes wrote as an output; such processes replace only these files."""

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
"""Key, in the record of an output's files, of the run's outcome that `OutputRecord.seal` notes. All other
keys are names of files.
"""


def record_of(output: AnyPath) -> Path:
    """The path of an output's record: a hidden file beside the run's folder, because no request can name a
    hidden file.
    """
    folder = workspace_of(output)
    return folder.with_name(f".{folder.name}")


class OutputRecord:
    """Records, by the name of each file of an output, the state in which a runner left the file.

    Only the process that has the output's lock may use the record.
    """

    def __init__(self, output: AnyPath) -> None:
        self._beside = output if isinstance(output, Path) else None
        self._record = record_of(output)
        self._folder = workspace_of(output)

    def check(self, files: Iterable[AnyPath], folder: AnyPath | None = None) -> None:
        """Raise `RunnerError` if one of `files` exists and is not in the state in which a runner left it;
        `folder` is their folder, as `folder_of` gives it.
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
        """Note the state that files will have at their final places (the keys of `files`). Call this before
        the files are moved.

        If the run's folder exists, the new record is written there first and then moved. A record that is
        left unfinished because the process died is then removed with the run's folder.
        """
        recorded = self._read()
        for path, partial in files.items():
            recorded[path.name] = [*recorded.get(path.name, [])[-1:], _state(partial, path)]
        self._write(recorded)

    def seal(self, run_id: str, *made: str) -> None:
        """Note the outcome of the run `run_id` (the texts `made`), because the Redis server may lose the end
        of the run. Call this before the output is moved into place. Raises `OutputError` if the record cannot
        be written.
        """
        with as_output_error(self._record):
            self._write({**self._read(), _SEAL: [run_id, *made]})

    def sealed(self, run_id: str) -> list[str]:
        """Return the texts that `seal` has noted for the run; empty if the last note is about another run."""
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
                # without this, a power failure could lose the record but leave a part in its folder
                system.fsync(above)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                raise

    @contextmanager
    def _opened(self, above: int) -> Iterator[int]:
        """Open the run's folder, which is in the open folder `above`, and yield its descriptor. If the run's
        folder does not exist, yield `above`.
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
