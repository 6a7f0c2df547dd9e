"""The folder in which rankmill caches files on a host: its path, a check of who may write there, file locks,
and stored digests of files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any, NamedTuple

from rankmill.jobs.contract.home import of_user
from rankmill.jobs.system import system

TEMPORARY_LOCK = ".lock"
"""Name of a file in each temporary folder; the process that uses the folder keeps this file locked."""

_YOUNG_SECONDS = 60
"""A temporary folder of this age (s) or older is removed if no process has locked it. A younger folder stays,
because its process may not have locked it yet.
"""

_YOUNG_SHARED_SECONDS = 24 * 60 * 60
"""This age (s) replaces `_YOUNG_SECONDS` for a folder that hosts may share, because a host may not see the
locks of other hosts.
"""

_MODE = 0o775
"""Mode of a new folder of the cache: other users may not write to it, even if the umask would let them."""


def cache_folder(setting: str) -> Path:
    """Return the path of rankmill's cache folder, as the setting ``cache_dir`` says.

    The setting ``auto`` means the folder ``rankmill`` in ``$XDG_CACHE_HOME``, or else in ``~/.cache``.

    Raises
    ------
    ConfigError
        The path begins with ``~``, and that home folder is not known.
    """
    given = Path(setting if setting != "auto" else os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    folder = of_user(given, "cache_dir (RANKMILL_CACHE_DIR)")
    return folder if setting != "auto" else folder / "rankmill"


def make_folder(folder: Path) -> None:
    """Make a folder of the cache, and its missing parents, with the mode `_MODE`. Raises `OSError`."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir(mode=_MODE)


def strangers(folder: Path, top: Path | None = None, setting: str = "cache_dir") -> str | None:
    """Return one line that says which strangers can write to a folder that this process trusts.

    The result is ``None`` if no stranger can. Strangers are all users except root and this process's user,
    and all groups that this process is not in. The group of a pod (``fsGroup``) is not a stranger. Access
    control lists are not read.

    The folders above `folder` are checked, too, because whoever can write there can replace `folder`. A
    sticky bit, as on /tmp, prevents that.

    Parameters
    ----------
    folder
        The folder to check.
    top
        The cache folder, if `folder` lies in it; ``None`` if `folder` is the cache folder.
    setting
        Name of the setting that says where the folder is.
    """
    top = top or folder
    within = [folder, *(place for place in folder.parents if place.is_relative_to(top))]
    above = dict.fromkeys([*top.absolute().parents, *Path(os.path.realpath(top)).parents])
    looked_at = [(place, _strangers(place, above=True)) for place in above]
    for place, why in (*reversed(looked_at), *((place, _strangers(place)) for place in reversed(within))):
        if why:
            return (
                f"{place} {why}, and what lies there would be trusted: take that right away, or set "
                f"{setting} to a folder of this user"
            )
    return None


def _strangers(folder: Path, *, above: bool = False) -> str | None:
    """Return why strangers (other users) can write to a folder, such as ``belongs to user 7``.

    The result is ``None`` if they cannot. With `above`, the folder is above the cache, and a sticky bit is
    protection enough.
    """
    try:
        status = folder.stat()
    except OSError:
        return None
    groups = {os.getegid(), *os.getgroups()}
    is_sticky = above and status.st_mode & stat.S_ISVTX
    if status.st_mode & stat.S_IWOTH and not is_sticky:
        return "can be written by everybody"
    if status.st_mode & stat.S_IWGRP and not is_sticky and status.st_gid not in groups:
        return f"can be written by group {status.st_gid}, which this process is not in"
    owner = status.st_uid
    if owner in {0, os.geteuid()} or owner == owner_in(folder) or (above and owner in _unmapped()):
        return None
    return f"belongs to user {owner}"


def owner_in(folder: Path) -> int | None:
    """Return the user id that a new file in a folder gets, or ``None`` if this process can make no file
    there.

    Some file systems give all files the same owner.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None


def _unmapped() -> set[int]:
    """In a container that does not map the host's root, return a set with the user id that stands for root.

    The set is empty if this container maps root, or if the system does not tell.
    """
    try:
        mapped = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        unknown = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return set()
    return set() if any(line[1] == "0" for line in mapped) else {unknown}


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write a JSON file atomically; raises `OSError`."""
    make_folder(file.parent)
    written = tempfile.NamedTemporaryFile(  # noqa: SIM115 -- the file is removed if it cannot be closed, too
        "w", dir=file.parent, prefix=".", delete=False, encoding="utf-8"
    )
    try:
        with written:
            json.dump(values, written, indent=1)
        Path(written.name).replace(file)
    except BaseException:
        with suppress(OSError):
            Path(written.name).unlink()
        raise


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file that `write_json` wrote, or return ``{}`` if that fails or the content is not an
    object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


Facts = tuple[int, int, int, int, int]
"""A file's device, inode, size, mtime and ctime. A program can set the mtime to any value, but not the ctime.
"""

_SETTLED_SECONDS = 2.0
"""The digest of a file is stored in the cache only if the file's last change is longer ago than this (s). The
clocks of file systems are coarse, so two changes in quick succession may have the same time.
"""

_SMALL = 1 << 20
"""The digest of a file with fewer bytes than this is not stored in the cache: computing it again is as fast.
"""


def facts_of(status: os.stat_result) -> Facts:
    """Return the facts about a file that change when the file is replaced or its content changes."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def file_digest(path: Path, cache: Path | None = None) -> str:
    """Return the SHA-256 of a file, which takes seconds to minutes for a large model. Threads may call this.

    If a cache folder is given, the digest of a large file is stored there. The stored digest is used as long
    as the file's `Facts` stay the same. A cache folder to which other users can write is not used.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        same = list(facts_of(status))
        remembered = _remembered(path, cache) if status.st_size >= _SMALL else None
        kept = read_json(remembered) if remembered else {}
        if kept.get("same") == same and isinstance(sha256 := kept.get("sha256"), str):
            return sha256
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        settled = system.now() - max(status.st_mtime, status.st_ctime) > _SETTLED_SECONDS
        if remembered and settled and list(facts_of(os.fstat(file.fileno()))) == same:
            with suppress(OSError):
                write_json(remembered, {"same": same, "sha256": digest})
    return digest


def _remembered(path: Path, cache: Path | None) -> Path | None:
    """Return the file in which `cache` stores the digest of `path`, or ``None`` if `cache` cannot be used."""
    if cache is None or strangers(cache / "digests", cache):
        return None
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return cache / "digests" / f"{name}.json"


Locked = IO[bytes]
"""An open file that is locked. The lock ends when the file is closed or the process ends."""


def lock(path: Path, *, shared: bool = False, wait: bool = True) -> Locked | None:
    """Lock a file, which is made if it does not exist.

    If the file is locked already, wait until it is free. With ``wait=False``, return ``None`` instead.
    """
    make_folder(path.parent)
    # NFS grants a shared lock only if the file is open for reading, and an exclusive one only for writing.
    locked = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o664), "r+b", buffering=0)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(locked, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        locked.close()
        return None
    return locked


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder for temporary files, and remove it after the ``with`` block.

    Also remove older folders of the same `prefix`, which killed processes have left.

    Parameters
    ----------
    prefix
        The beginning of the folder's name.
    parent
        Where to make the folder; ``None`` means the system's folder for temporary files.
    """
    made = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    with made as name, ExitStack() as stack:
        folder = Path(name)
        with suppress(OSError):  # a file system without locks
            if held := lock(folder / TEMPORARY_LOCK):
                stack.enter_context(closing(held))
        for other in folder.parent.glob(f"{escape(prefix)}*"):
            with suppress(OSError):
                _remove_if_left(other, _YOUNG_SECONDS if parent is None else _YOUNG_SHARED_SECONDS)
        yield folder


def _remove_if_left(folder: Path, young: float) -> None:
    status = folder.lstat()
    is_young = system.now() - status.st_mtime < young  # its process may not have locked it yet
    if status.st_uid != os.geteuid() or is_young or not (folder / TEMPORARY_LOCK).exists():
        return
    if held := lock(folder / TEMPORARY_LOCK, wait=False):
        with closing(held):
            shutil.rmtree(folder)


class KeptFolder(NamedTuple):
    """A folder in the cache that may be removed, unless a process has locked the file `lock`."""

    folder: Path
    lock: Path | None = None
