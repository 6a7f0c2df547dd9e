"""Locks outputs in object stores, where two hosts would not notice that they make the same output."""

from __future__ import annotations

import json
import logging
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankmill.jobs.contract.errors import OutputBusy, RankmillError
from rankmill.jobs.system import Periodic, system
from rankmill.producer.files.stores.paths import AnyPath, ObjectPath
from rankmill.producer.files.stores.places import is_in_repository

BEAT_SECONDS = 5.0
"""The holder of a lock writes it again every so many seconds, to show that it is alive."""

LEASE_SECONDS = 20.0
"""A lock that has not changed for this many seconds counts as free, because its holder has died or lost the
store.
"""

logger = logging.getLogger(__name__)


def lock_in_store(lock: AnyPath, output: AnyPath, folder: Path) -> ObjectLock | None:
    """Make the lock of an output in an object store, or return ``None`` in two cases:

    - The output is on this host, where the lock in the run's folder protects it.
    - The output is in a repository of the Hugging Face Hub, where each write of a lock would be a commit that
      stays.
    """
    if isinstance(lock, ObjectPath) and not is_in_repository(lock):
        return ObjectLock(lock, output, folder)
    return None


class ObjectLock:
    """A lock in an object store. The lock's holder writes it again and again.

    Use the object as a context manager. Clocks are not compared: a process that finds a lock watches whether
    it changes.

    Parameters
    ----------
    lock
        The object that is the lock.
    output
        The output that is locked, for messages.
    folder
        The run's folder on this host. If a command was killed, another command with the same folder gets the
        lock immediately.

    Raises
    ------
    OutputBusy
        On entering: another host holds the lock.
    StoreError
        On entering: the lock cannot be read or written.
    """

    def __init__(self, lock: ObjectPath, output: AnyPath, folder: Path) -> None:
        self._lock, self._output = lock, output
        self._owner = _owner(folder)
        self._beats = 0
        self._periodic = Periodic("output-lock", self._renew, BEAT_SECONDS, at_once=False)
        self._other: str | None = None

    def __enter__(self) -> ObjectLock:
        if not self._create():
            seen = self._read()
            if seen and seen["owner"] != self._owner:
                self._watch(seen)
            self._write()
            seen = self._read()  # another host may have written the lock at the same time
            if not seen or seen["owner"] != self._owner:
                raise self._busy(seen)
        self._periodic.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._periodic.stop(seconds=None)  # otherwise the thread could write the lock again
        try:
            seen = self._read()
            if seen and seen["owner"] == self._owner:
                self._lock.unlink(missing_ok=True)
        except RankmillError as error:
            logger.warning("%s", error)

    def check(self) -> None:
        """Raise `OutputBusy` if another host has taken the lock. It may do so if this host did not renew the
        lock in time.
        """
        if self._other is not None:
            raise OutputBusy(
                f"{self._output}: host {self._other} is making it now, because this host did not answer for "
                "long; nothing was written"
            )

    def _watch(self, first: dict[str, str]) -> None:
        """Wait until another host's lock is gone, or has not changed for `LEASE_SECONDS`. Raise `OutputBusy`
        if it changes.
        """
        logger.warning("host %s has begun %s; looking whether it still works", first["host"], self._output)
        until = system.monotonic() + LEASE_SECONDS
        while system.monotonic() < until:
            system.sleep(min(BEAT_SECONDS / 5, LEASE_SECONDS))
            now = self._read()
            if now is None:
                return
            if now != first:
                raise self._busy(now)

    def _busy(self, seen: dict[str, str] | None) -> OutputBusy:
        host = seen["host"] if seen else "another"
        return OutputBusy(f"score-file on host {host} is making {self._output}; let it finish")

    def _renew(self) -> None:
        if self._other is not None:
            return
        try:
            seen = self._read()
            if seen and seen["owner"] != self._owner:
                self._other = seen["host"]
            else:
                self._write()
        except RankmillError as error:
            logger.warning("%s", error)

    def _content(self) -> bytes:
        self._beats += 1
        holder = {"owner": self._owner, "host": socket.gethostname(), "beat": str(self._beats)}
        return json.dumps(holder).encode()

    def _create(self) -> bool:
        """Write the lock if it does not exist, and return whether it was written.

        Some stores cannot write an object on this condition. Nothing is then written.
        """

        def create(store: Any, name: str) -> bool:
            try:
                store.pipe_file(name, self._content(), mode="create")
            except (FileExistsError, NotImplementedError, TypeError, ValueError):
                return False
            return True

        return self._lock.ask(create, doing="cannot write ")

    def _write(self) -> None:
        self._lock.ask(lambda store, name: store.pipe_file(name, self._content()), doing="cannot write ")

    def _read(self) -> dict[str, str] | None:
        """Read from the lock who holds it. Returns ``None`` if the lock does not exist or is damaged."""

        def read(store: Any, name: str) -> dict[str, str] | None:
            try:
                raw = store.cat_file(name)
            except FileNotFoundError:
                return None
            try:
                holder = json.loads(raw)
                return {key: str(holder[key]) for key in ("owner", "host", "beat")}
            except (ValueError, KeyError, TypeError):
                return None

        return self._lock.ask(read, doing="cannot read ")


def _owner(folder: Path) -> str:
    """Read the id of a run's folder on this host. A folder without an id gets one."""
    file = folder / "owner"
    with suppress(FileNotFoundError):
        return file.read_text()
    owner = system.unique_id()
    file.write_text(owner)
    return owner
