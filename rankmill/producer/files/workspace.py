"""The folder beside the output that holds a run's work until the output is complete."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import TracebackType

from rankmill.jobs.contract.errors import (
    InputChanged,
    InputError,
    OutputBusy,
    OutputError,
    RankmillError,
    WrongScores,
)
from rankmill.producer.collect.journal import Journal
from rankmill.producer.files.manifest import differences
from rankmill.producer.files.outputs import errors_name, is_of_parts, part_number
from rankmill.producer.files.stores.lock import lock_in_store
from rankmill.producer.files.stores.output_record import OutputRecord
from rankmill.producer.files.stores.own_folder import OwnFolder, close
from rankmill.producer.files.stores.paths import WORKSPACE, AnyPath, workspace_of
from rankmill.producer.files.stores.places import check_replaceable
from rankmill.producer.files.stores.roots import confined
from rankmill.producer.files.stores.writing import delete, folder_of, identity, sync

logger = logging.getLogger(__name__)

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS}


class OutputFile:
    """The place of an output that is one file. The file is replaced as a whole, so an output never has rows
    of two runs.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path

    @property
    def lock(self) -> AnyPath:
        """The path of the object that locks an output in a store. The lock of a file is beside the file, and
        the lock of a folder of parts is in the folder.
        """
        return self.path.with_name(f"_{self.path.name}{WORKSPACE}")

    def taken(self, journal: Journal) -> AnyPath | None:
        """Return the output's path if it holds a file that the journal's run did not write, or ``None``."""
        if not self.path.exists():
            return None
        sealed = journal.sealed
        own = sealed and identity(self.path, self.path) in sealed
        return None if own else self.path

    def check(self, journal: Journal) -> None:
        """Raise `InputError` if the journal lists a part of the output that does not exist. An output that is
        a single file has no parts, so nothing is checked.
        """

    def clear(self, record: OutputRecord | None) -> None:
        """Delete the parts that an earlier run has made, so that the new run does not mix them with its own.

        A single file stays until the new one replaces it. If a `record` is given and lacks a file that the
        new run would replace or delete, raise `RunnerError`.
        """
        if record:
            record.check(self.there())

    def there(self) -> list[AnyPath]:
        """The existing files that a run replaces or deletes: the output and its list of row errors."""
        both = (self.path, self.path.with_name(errors_name(self.path.name)))
        return [path for path in both if path.exists()]


class PartsFolder(OutputFile):
    """The folder of an output in parts."""

    @property
    def lock(self) -> AnyPath:
        return self.path / f"_parts{WORKSPACE}"

    def taken(self, journal: Journal) -> AnyPath | None:
        """Return the path of a part that the journal's run cannot have made; ``None`` if no such part exists.

        The run may have made one part more than the journal lists, if the process died before it recorded
        that part.
        """
        own = journal.finished.parts + 1 if journal.rows else 0
        return next((path for path in sorted(self.there()) if (part_number(path.name) or 0) > own), None)

    def check(self, journal: Journal) -> None:
        """Raise `InputError` if a part that the journal lists does not exist."""
        present = {part_number(path.name) for path in self.there()}
        for number in range(1, journal.finished.parts + 1):
            if number not in present:
                raise InputError(
                    f"{self.path}: part {number} is gone, and its scores are kept nowhere else; "
                    "put it back, or start over with --restart"
                )

    def clear(self, record: OutputRecord | None) -> None:
        if files := self.there():
            with folder_of(files[0]) as folder:
                if record:
                    record.check(files, folder)
                delete(files, folder)

    def there(self) -> list[AnyPath]:
        """Return the existing parts of the output, and their lists of row errors."""
        entries = self.path.iterdir() if self.path.is_dir() else ()
        return [path for path in entries if is_of_parts(path.name)]


class Workspace:
    """The folder ``OUTPUT.rankmill/``, which holds the journal, and the output while it is being written.

    Use the object as a context manager, and call `begin` and `check_replaced` in the block. The end of the
    block deletes the folder, except in four cases:

    - `begin` has not returned, and the folder has scored rows of an earlier run.
    - An error other than `InputChanged` ends the block, and the folder has scored rows. A note on the error
      says that the rows are kept, unless the error is `WrongScores`.
    - The block ends with an error, or before `begin` has returned. The folder has no scored rows, but one of
      its journals names a run that may still be in Redis.
    - The folder, its lock or a journal was removed or replaced during the block.

    Parameters
    ----------
    output
        The place of the output.
    restart
        Whether to delete the results of an earlier run.
    force
        Whether an existing output may be replaced.
    models
        The number of models that score the output; each has a journal.
    made
        Returns whether another process has made the output since the caller looked. Called while this process
        holds the lock.

    Raises
    ------
    RunnerError
        On entering: this runner may not write here. From `begin` and `check_replaced`: it may not replace the
        existing output.
    InputError
        On entering: the output exists, or this user may not make the folder. Or the folder, or a file in it,
        is not from a run of this user; or the journal of an earlier run is damaged.
    OutputError
        On entering: the folder or the journal cannot be written, for instance on a full disk.
    OutputBusy
        On entering: another process, or another host, is making the output, or has just made it.
    StoreError
        On entering: the lock in the output's store cannot be read or written.
    """

    def __init__(
        self,
        output: OutputFile,
        *,
        restart: bool,
        force: bool,
        models: int = 1,
        made: Callable[[], bool] = lambda: False,
    ) -> None:
        self._models = models
        self._made = made
        self._output = output
        self._target = target = output.path
        self._restart = restart
        self._force = force
        self.folder = workspace_of(target)
        self.resumes = False
        """Whether the folder has an earlier run with the same manifest, which is then resumed."""
        self.record = OutputRecord(target) if confined() else None
        """The record of the files that runners have written as this output; ``None`` if this process works
        for its own user. A process that works for other users may replace only the recorded files.
        """
        self._begun = self._is_empty = False

    def __enter__(self) -> Workspace:
        with ExitStack() as stack:
            self._place = self._lock(stack)
            self._is_new = self._place.is_new
            try:
                self._remote = lock_in_store(self._output.lock, self._target, self.folder)
                if self._remote:
                    stack.enter_context(self._remote)
                if self._made():
                    raise self._just_made()
                self.journals = [stack.enter_context(self._open_journal(at)) for at in range(self._models)]
                self.journal = self.journals[0]
                # A journal without a manifest shows that a process died before its run began, or while it
                # removed the folder.
                self._is_new = self._is_new or not any(journal.manifest for journal in self.journals)
                self._check_output()
            except BaseException:
                if self._is_new:
                    self.remove()
                raise
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if self._is_lost():
                return  # the folder at this path is not this run's
            is_refused = not self._begun and not self._is_new
            rows = self.rows if error or is_refused else 0
            if is_refused and rows:
                return  # keep the scored rows of an earlier run
            if (error or is_refused) and not rows and any(journal.is_in_redis for journal in self.journals):
                return  # keep a journal that names a run, which may still be in Redis
            # If the input has changed, drop the scored rows: some may be from before the change, others from
            # after it.
            if not rows or isinstance(error, InputChanged):
                self.remove()  # the folder is removed while the lock is held
            elif error and not isinstance(error, WrongScores):
                error.add_note(f"{rows:,} scored rows are kept in {self.folder}: the same command continues")

    @property
    def inside(self) -> Path:
        return self._place.inside

    def check(self) -> None:
        """Check that this run may still make the output; called after each write, and before publishing.

        Raises
        ------
        OutputBusy
            Another host now makes the output.
        OutputError
            The folder, the lock or a journal was removed or replaced.
        """
        if self._remote:
            self._remote.check()
        self._place.check()

    def _is_lost(self) -> bool:
        try:
            self._place.check()
        except OutputError:
            return True
        return False

    def remove(self) -> None:
        """Remove the folder; a failure does not affect the output.

        The journals are deleted first, because the next process removes a folder without journals.
        """
        try:
            for at in range(self._models):
                self._place.delete(self._journal_path(at).name)
            self._place.remove()
        except OSError as error:
            logger.warning("%s is not needed any more, and cannot be removed: %s", self.folder, error)

    def _lock(self, stack: ExitStack) -> OwnFolder:
        try:
            place = stack.enter_context(closing(OwnFolder(self.folder, self._target)))
            lock = place.open("lock")
            stack.callback(close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputBusy(
                f"another score-file is making {self._target}; let it finish, or name another output with -o"
            ) from None
        except OSError as error:
            raise self._unwritable(error) from None
        if not os.fstat(lock).st_nlink:  # the process that held the lock has just removed the folder
            raise self._just_made()
        return place

    def _just_made(self) -> OutputBusy:
        return OutputBusy(f"another score-file has just made {self._target}")

    @property
    def rows(self) -> int:
        """The number of rows that have a result in a journal. If the journals of several models have
        different numbers, this is the largest.
        """
        return max(journal.rows for journal in self.journals)

    def _journal_path(self, at: int) -> Path:
        return self.folder / (f"journal-{at + 1}.db" if at else "journal.db")

    def _open_journal(self, at: int) -> closing[Journal]:
        path = self._journal_path(at)
        place = self.inside / path.name
        try:
            journal = Journal(path, self.check, place)
        except InputError:  # the journal is damaged, or has another format
            if not self._restart:
                raise
            for suffix in ("", "-wal", "-shm", "-journal"):
                self._place.delete(path.name + suffix)
            journal = Journal(path, self.check, place)
        try:
            for end in ("", "-wal"):  # SQLite follows links, and opens the file -wal later
                self._place.watch(Path(f"{path}{end}"), Path(f"{place}{end}").lstat())
        except OSError as error:
            raise self._unwritable(error) from None
        return closing(journal)

    def _unwritable(self, error: OSError) -> RankmillError:
        """Turn an error of the system into an `OutputError` if the disk is at fault, else into an
        `InputError`.
        """
        kind = OutputError if error.errno in _OF_THE_DISK else InputError
        return kind(f"cannot write {self._target}: {error.strerror or error}")

    def _check_output(self) -> None:
        for path in self._output.there():
            check_replaceable(path)
        taken = self._output.taken(self.journal)
        if taken and not (self._force or (self._restart and self.journal.finished.parts)):
            raise InputError(f"{taken} exists already; replace it with --force or name another with -o")

    def begin(self, manifest: Mapping[str, str]) -> None:
        """Resume the journal's run or begin a new one.

        Parameters
        ----------
        manifest
            The files, models and options from which the output is made. An earlier run is resumed only if its
            manifest is the same.

        Raises
        ------
        WrongScores
            Some results in the journal are wrong.
        InputError
            The journal has results with another manifest, or a part that the journal knows is gone.
        OutputError
            The disk does not confirm that the folder is stored.
        RunnerError
            This runner may not replace the existing output.
        """
        try:
            sync(self.folder)
            sync(self.folder.parent)
        except OSError as error:
            raise self._unwritable(error) from None
        changed = differences(self.journal.manifest, manifest)
        rows = self.rows
        if self._restart:  # before the journals forget which parts are to be deleted
            self._output.clear(self.record)
        self._is_empty = not rows
        wrong = next(filter(None, (journal.wrong for journal in self.journals)), None)
        if self._restart or ((changed or wrong) and not rows):
            # Restart the first journal last, because only its manifest is compared. If this process dies
            # before that, the first journal has the old manifest. So the next process does not take old
            # results in the other journals for results with the new manifest.
            for journal in reversed(self.journals):
                journal.restart(manifest)
        elif wrong:
            raise wrong
        elif changed:
            raise InputError(
                f"{self.folder} holds {rows:,} scored rows of another command ({changed}); "
                "give that command again to continue it, or --restart to start over"
            )
        else:
            self._output.check(self.journal)
            self.resumes = True
        self._begun = True

    def check_replaced(self) -> None:
        """Raise `RunnerError` if this runner may not replace the existing output."""
        if self.record and (self._is_empty or self._force):
            self.record.check(self._output.there())


def clear_workspace(output: OutputFile) -> None:
    """Delete the run's folder that a dead process has left beside a finished output.

    The folder stays if another process works in it.
    """
    if workspace_of(output.path).exists():
        with suppress(RankmillError), Workspace(output, restart=False, force=True) as work:
            work.remove()
