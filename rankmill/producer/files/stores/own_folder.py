"""Folders that belong only to this user, and that a process checks for changes while it works there."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from rankmill.jobs.cache import owner_in
from rankmill.jobs.contract.errors import InputError, OutputError
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.roots import held, opened_folder


def close(descriptor: int) -> None:
    """Close a file descriptor and ignore errors. Call this only if nothing was written through the
    descriptor, so that nothing can be lost.
    """
    with suppress(OSError):
        os.close(descriptor)


class OwnFolder:
    """Opens a folder of this user without following a link; the folder is made if it does not exist.

    Nobody but this user can write in the folder, so nobody else can change a file after its check. Call
    `close` at the end.

    Parameters
    ----------
    path
        The folder.
    output
        The output whose intermediate files the folder contains. The folder is made only if this process may
        write the output. If the output is in an object store, the folder's parent is made, too.

    Raises
    ------
    RunnerError
        This process may not write `output`.
    InputError
        The path is not a folder, or is another user's, or the folder holds something that no run puts there.
    OSError
        The folder cannot be made or opened.
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
                if not stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                    raise _strange(path, "not a folder") from None
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(name, flags, dir_fd=above)
            self._above = os.dup(above)
        self._watched: dict[Path, tuple[int, int]] = {}
        try:
            self._check_content()  # check even a new folder: somebody may have replaced it
            self.watch(path, os.fstat(self._descriptor))
            self.inside = held(self._descriptor, path)
            """The path at which to write files of the folder. In a process that works for other users, this
            path leads to the folder even if `path` leads elsewhere later.
            """
        except BaseException:
            self.close()
            raise

    def open(self, name: str) -> int:
        """Open a file of the folder to read and write, as a descriptor; the file is made if it does not
        exist.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self._descriptor)
        self.watch(self.path / name, os.fstat(descriptor))
        return descriptor

    def watch(self, path: Path, status: os.stat_result) -> None:
        """Remember the `status` of the file at `path`, so that `check` notices if the file is removed or
        replaced.
        """
        self._watched[path] = status.st_dev, status.st_ino

    def check(self) -> None:
        """Raise `OutputError` if the folder, or a file that is watched, is gone or was replaced."""
        for path, identity in self._watched.items():
            try:
                status = path.lstat()
            except OSError:
                status = None
            if status is None or (status.st_dev, status.st_ino) != identity:
                raise OutputError(
                    f"{path} was removed or replaced while the run worked with it: its scores are lost, and "
                    "the output is not complete; when nothing cleans up there any more, give the same "
                    "command again"
                )

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def remove(self) -> None:
        """Remove the folder and its files, even if a folder above it in `path` was replaced by now."""
        shutil.rmtree(".", ignore_errors=True, dir_fd=self._descriptor)
        os.rmdir(self.path.name, dir_fd=self._above)

    def close(self) -> None:
        for descriptor in (self._descriptor, self._above):
            close(descriptor)

    def _check_content(self) -> None:
        owner = os.fstat(self._descriptor).st_uid
        if owner != os.geteuid() and owner != owner_in(held(self._above, self.path.parent)):
            raise InputError(
                f"{self.path} belongs to another user ({owner}), who could change what is in it; remove it, "
                "or name another output with -o"
            )
        with suppress(OSError):  # the file system may not store modes
            os.fchmod(self._descriptor, 0o700)
        for name in os.listdir(self._descriptor):  # noqa: PTH208 -- lists the folder that is open
            try:
                status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            except FileNotFoundError:  # a run may just have ended and removed it
                continue
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise _strange(self.path / name, "not a regular file")
            if status.st_uid != owner:
                raise _strange(self.path / name, "another user's")


def _strange(path: Path, kind: str) -> InputError:
    return InputError(
        f"{path} is {kind}, so no run has put it there; remove it, or name another output with -o"
    )
