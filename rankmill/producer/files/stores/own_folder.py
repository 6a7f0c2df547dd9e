"""A folder that is this user's alone, and that a process finds again at its path while it works in it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rankmill.jobs.contract.errors import InputError, OutputError
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.roots import opened_folder

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISDIR, "a directory"),
)


def kind_of(mode: int) -> str:
    """The kind of file, in words, from its mode."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a file")


class OwnFolder:
    """A folder that was opened without following a link; it is made if it is not there.

    It belongs to this process's user and no other user may write in it from now on, so what is in it is what
    was looked at here. Close it at the end.

    Parameters
    ----------
    path
        The folder.
    output
        What is made in the folder, and put beside it: a process that may not write it there makes no folder.
        That of an object is in the user's own folder, which is made, too.

    Raises
    ------
    RunnerError
        This process may not write `output`.
    InputError
        Something else is there, or it is not this user's, or holds what no run puts there.
    OSError
        It cannot be made or opened.
    """

    def __init__(self, path: Path, output: AnyPath) -> None:
        self.path, name = path, path.name
        beside = output if isinstance(output, Path) else None
        if not beside:
            path.parent.mkdir(parents=True, exist_ok=True)
        with opened_folder(path.parent, beside) as above:
            try:
                os.mkdir(name, 0o700, dir_fd=above)
                self.is_new = True
            except FileExistsError:
                self.is_new = False
                mode = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
                if not stat.S_ISDIR(mode):
                    raise _strange(path, kind_of(mode)) from None
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(name, flags, dir_fd=above)
        self._watched: dict[Path, tuple[int, int]] = {}
        try:
            if not self.is_new:
                self._check_content()
            self.watch(path, os.fstat(self._descriptor))
        except BaseException:
            self.close()
            raise

    def open(self, name: str) -> int:
        """Open a file of the folder to read and write, as a descriptor; it is made if it is not there."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self._descriptor)
        self.watch(self.path / name, os.fstat(descriptor))
        return descriptor

    def watch(self, path: Path, found: os.stat_result | None = None) -> None:
        """From now on, `check` looks whether the same file is at this path: that of `found`, or of now."""
        found = found or path.lstat()
        self._watched[path] = found.st_dev, found.st_ino

    def check(self) -> None:
        """Raise `OutputError` if the folder, or a file that is watched, is gone or was replaced."""
        for path, known in self._watched.items():
            try:
                found = path.lstat()
            except OSError:
                found = None
            if found is None or (found.st_dev, found.st_ino) != known:
                raise OutputError(
                    f"{path} was removed or replaced while the run worked with it: its scores are lost, and "
                    "the output is not complete; when nothing cleans up there any more, give the same "
                    "command again"
                )

    def close(self) -> None:
        """Close the folder."""
        os.close(self._descriptor)

    def _check_content(self) -> None:
        owner = os.fstat(self._descriptor).st_uid
        if owner != os.geteuid() and owner != self._owner_here():
            raise InputError(
                f"{self.path} belongs to another user ({owner}), who could change what is in it; remove it, "
                "or name another output with -o"
            )
        with suppress(OSError):  # of a file system without modes
            os.fchmod(self._descriptor, 0o700)
        for name in os.listdir(self._descriptor):  # noqa: PTH208 -- of the folder that is open
            try:
                found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            except FileNotFoundError:  # of a run that ends just now
                continue
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise _strange(self.path / name, kind_of(found.st_mode))
            if found.st_uid != owner:
                raise _strange(self.path / name, "another user's")

    def _owner_here(self) -> int:
        """Whom a file belongs to that this process makes: some file systems give all to one user."""
        with tempfile.TemporaryFile(dir=self.path.parent) as file:
            return os.fstat(file.fileno()).st_uid


def _strange(path: Path, kind: str) -> InputError:
    return InputError(
        f"{path} is {kind}, which no run has put there; remove it, or name another output with -o"
    )
