"""A simulated disk: real files in a temporary folder, of which a crash leaves what a crash may leave.

Others may go first at each change of a file, list of files or journal, and the process may die there. When it
is killed, its files are as it has left them. When its host loses power, what was not synced may be lost, half
there or there; files that were moved may be where they were before.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import stat
from collections.abc import Callable, Container, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankmill.jobs.system import system
from rankmill.producer.files.formats.parquet import ParquetWriter
from rankmill.producer.files.formats.text import TextWriter
from tests.simulation.world import Armed, Process, World, strike, world


@dataclass(eq=False)
class Cell:
    """A file, wherever it is: its number, and what of it is on the disk for good."""

    number: int
    synced: bytes = b""


@dataclass
class _Kept:
    """A file as it was when its process was killed."""

    link: Path
    data: bytes
    times: tuple[int, int]


class Disk:
    """The files below a folder, and what happens to them.

    Parameters
    ----------
    mine
        The world.
    root
        A new folder.

    Attributes
    ----------
    full
        Until when nothing can be written.
    steps
        How often a process has changed or synced something.
    lost_at
        When its host has last lost power.
    has_failed
        Whether it was full when something was written, or a sync has failed, or its host lost power.
    """

    def __init__(self, mine: World, root: Path) -> None:
        self.world = mine
        self.root, self._links = root / "disk", root / "links"
        self.root.mkdir()
        self._links.mkdir()
        self.full = -1.0
        self.steps = 0
        self.armed: list[Armed] = []
        self.processes: list[Process] = []
        self.loses_power = False
        self.lost_at = -1.0
        self.has_failed = False
        self._chance = random.Random(mine.random.random())
        self._cells: dict[int, Cell] = {}
        self._listed: dict[Path, dict[str, Cell | None]] = {}
        self._journals: dict[tuple[bytes, ...], tuple[Container[int], int]] = {}
        self._frozen: tuple[dict[Path, _Kept], dict[Path, int]] | None = None
        self._opened: list[tuple[Process, _Database]] = []
        self._plain: dict[str, Callable[..., Any]] = {}
        self._prepare()

    # What the product's code calls

    def _prepare(self) -> None:
        for name in ("replace", "rename", "unlink", "mkdir", "rmdir"):
            self._plain[name] = getattr(os, name)
            self.world.patch(os, name, self._stepping(name, getattr(os, name)))
        self._plain["fsync"], self._plain["connect"] = os.fsync, sqlite3.connect
        self.world.patch(system, "fsync", self._fsync)
        self.world.patch(sqlite3, "connect", self._connect)
        for writer in (ParquetWriter, TextWriter):
            for name in ("write", "close"):
                self.world.patch(writer, name, self._writing(name, getattr(writer, name)))

    def step(self, what: str, place: object = "") -> None:
        """Something is about to happen, or has happened, to a file of the current process."""
        process = self._here()
        if process is None:
            return
        step = f"{what} {str(place).rpartition('/')[2]}"
        self.world.tell(f"disk: {step}")
        self.steps += 1
        strike(self.armed, step, process)
        self.world.give_way()

    def check_space(self, place: object) -> None:
        """Raise an error as a full disk does."""
        if self.world.now < self.full and self._here():
            self.world.tell("disk: it is full")
            self.has_failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))

    def _here(self) -> Process | None:
        """The current process, if it has files here and is alive."""
        task = self.world.current
        return task.process if task and task.process.disk is self and task.process.alive else None

    def _stepping(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self._here() is None:
                return plain(*args, **options)
            self.step(name, args[0])
            if name == "mkdir" and not _is_there(args[0], options.get("dir_fd")):  # else it needs no space
                self.check_space(args[0])
            found = plain(*args, **options)
            self.forget_gone()
            self.step(f"{name} is done", args[0])
            return found

        return call

    def _writing(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(writer: Any, *args: Any) -> Any:
            self.step(name, "output")
            self.check_space("output")
            return plain(writer, *args)

        return call

    def _fsync(self, descriptor: int) -> None:
        """What a file or a folder has now is there for good."""
        if self._here() is None:
            return
        found = os.fstat(descriptor)
        path = next((path for path in self._paths() if path.lstat().st_ino == found.st_ino), None)
        self.step("it is to be on disk", path)
        if path is not None:
            self.synced(path)
        self.step("sync is done", path)

    def synced(self, path: Path) -> None:
        """What is at a path is there for good: the content of a file, or the list of a folder's files."""
        if path.is_dir():
            self._listed[path] = {
                each.name: None if each.is_dir() else self._cell(each) for each in path.iterdir()
            }
        else:
            self._cell(path).synced = path.read_bytes()

    def settle(self) -> None:
        """All that is there now is there for good."""
        for path in self._paths():
            self.synced(path)

    def _connect(self, path: Any, *args: Any, **options: Any) -> Any:
        if self._here() is None:
            return self._plain["connect"](path, *args, **options)
        self.step("open", path)
        process = self._here()
        assert process
        database: _Database = self._plain["connect"](path, *args, factory=_Database, **options)
        self._opened.append((process, database))
        return database

    # What goes wrong

    def arm(self, steps: int, do: Callable[[Process], None], only: str = "") -> None:
        """Let something happen after so many further steps."""
        self.armed.append(Armed(steps, do, only))

    def lose_power(self) -> None:
        """The host of all processes of this disk stops at once."""
        self.loses_power, self.lost_at, self.has_failed = True, self.world.now, True
        for process in [each for each in self.processes if each.alive]:
            self.world.end(process, 137)
        if not self.world.killed:
            self.freeze()
            self.thaw()

    def freeze(self) -> None:
        """Keep the files as they are: a process has been killed, and is about to close them."""
        if self._frozen:
            return
        files: dict[Path, _Kept] = {}
        folders: dict[Path, int] = {}
        for path in self._paths():
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode):
                folders[path] = stat.S_IMODE(found.st_mode)
                continue
            link = self._links / str(len(files))
            os.link(path, link)
            files[path] = _Kept(link, path.read_bytes(), (found.st_atime_ns, found.st_mtime_ns))
        self._frozen = files, folders

    def thaw(self) -> None:
        """Let the files be as they were when they were frozen, or what the loss of power leaves of them."""
        if self._frozen is None:
            return
        for process, database in self._opened:  # else its locks stay, and others wait in real time
            if not process.alive:
                database.close()
        self._opened = [each for each in self._opened if each[0].alive]
        (files, folders), self._frozen = self._frozen, None
        numbers = {path: kept.link.lstat().st_ino for path, kept in files.items()}
        for path in reversed([*self._paths()]):
            if path not in folders and path not in files:
                self._plain["rmdir" if path.is_dir() else "unlink"](path)
            elif path in files and path.lstat().st_ino != numbers[path]:
                self._plain["unlink"](path)
        for path, mode in folders.items():
            if not path.exists():
                self._plain["mkdir"](path, mode)
        for path, kept in files.items():
            if not path.exists():
                os.link(kept.link, path)
            _rewrite(path, kept.data, kept.times)
            self._plain["unlink"](kept.link)
        self.forget_gone()
        if self.loses_power:
            self.loses_power = False
            self._lose()
            self.settle()

    def _lose(self) -> None:
        """What was not synced is lost, half there, or there."""
        moved_back = self._chance.random() < 0.5
        there = {path.lstat().st_ino: path for path in self._paths() if path.is_file()}
        data = {number: path.read_bytes() for number, path in there.items()}
        wanted: dict[Path, Cell] = {}
        folders: set[Path] = set()
        if moved_back:
            self._look_back(self.root, wanted, folders)
            for path, cell in [*wanted.items()]:  # a file that was moved between folders is at one place
                is_here = there.get(cell.number) == path
                if not is_here and any(wanted[each] is cell for each in wanted.keys() - {path}):
                    del wanted[path]
        else:
            folders = {path for path in self._paths() if path.is_dir()}
            wanted = {path: self._cell(path) for path in there.values()}
        aside = {}
        for number, path in there.items():
            aside[number] = self._links / str(number)
            self._plain["rename"](path, aside[number])
        for path in reversed([*self._paths()]):
            if path not in folders:
                self._plain["rmdir"](path)
        for path in sorted(folders):
            if not path.exists():
                self._plain["mkdir"](path, 0o700)
        for path, cell in wanted.items():
            is_there = self._cells.get(cell.number) is cell  # else another file has its number by now
            left = self._left(cell.synced, data.get(cell.number, cell.synced) if is_there else cell.synced)
            if is_there and cell.number in aside:
                os.link(aside[cell.number], path)
            _rewrite(path, left)
        for path in aside.values():
            self._plain["unlink"](path)

    def _look_back(self, folder: Path, wanted: dict[Path, Cell], folders: set[Path]) -> None:
        """The files of a folder as they were listed when it was last synced."""
        folders.add(folder)
        for name, cell in self._listed.get(folder, {}).items():
            if cell is None:
                self._look_back(folder / name, wanted, folders)
            else:
                wanted[folder / name] = cell

    def _left(self, synced: bytes, now: bytes) -> bytes:
        """What is left of a file."""
        if now == synced:
            return now
        ends = [synced, now]
        if now.startswith(synced):
            ends.append(now[: self._chance.randint(len(synced), len(now))])
        return self._chance.choice(ends)

    # What is there

    def has_in_journal(self, process: Process, chunk: int) -> bool:
        """Whether a journal that a process has open keeps a chunk if the power is lost now."""
        return any(chunk in self.journal(each.path)[0] for here, each in self._opened if here is process)

    def journal(self, path: Path) -> tuple[Container[int], int]:
        """The chunks, and how many rows, that a journal has if the power is lost now."""
        parts = (path, path.with_name(f"{path.name}-wal"))
        left = tuple(self._cell(each).synced if each.exists() else b"" for each in parts)
        if left not in self._journals:
            copy = self._links / path.name
            for part, data in zip((copy, copy.with_name(f"{path.name}-wal")), left, strict=True):
                part.write_bytes(data)
            with closing(self._plain["connect"](copy)) as database:
                try:
                    ((finished,),) = database.execute(_FINISHED)
                    rows = dict(database.execute("SELECT chunk, rows FROM chunks"))
                except sqlite3.OperationalError:  # it has no tables yet
                    finished, rows = 0, {}
            self._journals = {left: ({*range(finished), *rows}, finished + sum(rows.values()))}
        return self._journals[left]

    def _paths(self) -> Iterator[Path]:
        """All folders and files, from the top."""
        waiting = [self.root]
        while waiting:
            path = waiting.pop()
            yield path
            if path.is_dir():
                waiting += sorted(path.iterdir())

    def forget_gone(self) -> None:
        """Forget files that are gone: the next new ones may get their numbers."""
        if self._frozen:  # a killed process closes its files, and they will be as before
            return
        there = {path.lstat().st_ino for path in self._paths()}
        self._cells = {number: cell for number, cell in self._cells.items() if number in there}

    def _cell(self, path: Path) -> Cell:
        number = path.lstat().st_ino
        return self._cells.setdefault(number, Cell(number))


def _is_there(name: Any, folder: int | None) -> bool:
    try:
        os.stat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _rewrite(path: Path, data: bytes, times: tuple[int, int] | None = None) -> None:
    """Let a file have this content, and time of change, and be the same file."""
    if not path.exists() or path.read_bytes() != data:
        path.touch()
        with path.open("r+b") as file:
            file.write(data)
            file.truncate()
    if times and path.lstat().st_mtime_ns != times[1]:
        os.utime(path, ns=times)


_FINISHED = """
SELECT coalesce((SELECT json_extract(value, '$.rows') FROM state WHERE name = 'finished'), 0)
"""
"""Rows in parts of the output, which have left the journal."""


class _Database(sqlite3.Connection):
    """A journal. A commit is synced when it is done, if the journal asks for that.

    So is the file when it is closed: SQLite moves all commits there, syncs it, and then deletes its log.
    """

    def __init__(self, path: Any, *args: Any, **options: Any) -> None:
        super().__init__(path, *args, **options)
        here = world().current
        assert here
        assert here.process.disk
        self.path, self._disk, self._process = Path(path), here.process.disk, here.process

    def close(self) -> None:
        is_synced = self._process.alive and self._syncs()
        super().close()
        self._disk.forget_gone()
        if is_synced and self.path.exists():
            self._disk.synced(self.path)

    def _syncs(self) -> bool:
        """Whether the journal asks for syncs."""
        return bool(self.execute("PRAGMA synchronous").fetchone()[0] >= 2)

    def __exit__(self, *about: Any) -> Any:
        changes = self.in_transaction and about[0] is None
        try:
            if changes:
                self._disk.step("commit", self.path)
                self._disk.step("a commit is to be on disk", self.path)
                self._disk.check_space(self.path)
        except OSError as error:
            super().__exit__(type(error), error, None)
            what = "database or disk is full" if error.errno == errno.ENOSPC else "disk I/O error"
            raise sqlite3.OperationalError(what) from None
        found = super().__exit__(*about)
        if changes:
            self._disk.step("commit is under way", self.path)
        if self._syncs():
            for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
                if path.exists():
                    self._disk.synced(path)
        if changes and self._process.alive:  # one that is killed unwinds, and its files are then as they were
            self._disk.step("commit is done", self.path)
        return found
