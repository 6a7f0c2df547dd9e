"""Represents the paths of files and objects, asks object stores about objects, and repeats requests that
fail.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, TypeVar

from rankmill.jobs.contract.errors import InputError, RankmillError, StoreError
from rankmill.jobs.contract.home import expanded, of_user
from rankmill.jobs.runtime.installation import install_line
from rankmill.jobs.system import Backoff, system

WORKSPACE = ".rankmill"
"""Suffix of a run's folder: the output ``a.csv`` is made in the folder ``a.csv.rankmill``."""

INDEX = f".index{WORKSPACE}"
"""Suffix of the folder with a corpus' index: that of ``corpus.tsv`` is ``corpus.tsv.index.rankmill``."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_SECRET = re.compile(r"[^/]*//[^/]*:[^/]*@|https?://[^?]*\?", re.IGNORECASE)

NOT_WRITTEN = {"memory", "data", "http", "https"}
"""Schemes of URLs at which an output cannot be kept."""


LOOK_SECONDS = 15.0
"""Seconds for which a failing store is asked again about an object or a lock; then `StoreError` is raised."""

WORK_SECONDS = 600.0
"""Seconds for which a failing store is asked again to read, write or delete an object; then `StoreError` is
raised.
"""

_BACKOFF = Backoff(first=0.2, longest=10.0)

_LASTING = (ImportError, NotImplementedError, TypeError, ValueError)
_LASTING_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound"}
"""Names of errors that do not pass with time; a request that raises one is not repeated. Errors are known by
name, not by class, because the stores' libraries need not be installed.
"""

T = TypeVar("T")
Pattern = TypeVar("Pattern", bound=PurePath)

logger = logging.getLogger(__name__)

Guard = Callable[["ObjectPath"], Mapping[str, Any]]
"""Returns options of fsspec for an object, or raises an error if this process may not use the object."""

_guards: list[Guard] = []


def guard(check: Guard) -> None:
    """Let `check` be called before each later use of an object. It refuses the object by raising an error."""
    _guards[:] = [check]


class ObjectPath(PurePosixPath):
    """The path of an object in a store, such as ``s3://bucket/key``.

    Methods such as `exists` ask the store. They have the names of `pathlib.Path`'s methods, so that code can
    take an `AnyPath`, which is either kind of path.
    """

    @property
    def store(self) -> tuple[Any, str]:
        """The fsspec file system, and the object's name in it. Raises the errors of `patiently`, and
        `RunnerError` if this process may not use the object.
        """
        import fsspec

        options = _guards[0](self) if _guards else {}
        opened: tuple[Any, str] = patiently(
            self, lambda: fsspec.core.url_to_fs(str(self), **options), LOOK_SECONDS
        )  # fsspec keeps file systems: a second call returns the same one
        return opened

    @property
    def protocol(self) -> str:
        return self.parts[0].removesuffix(":")

    def ask(self, question: Callable[[Any, str], T], seconds: float = LOOK_SECONDS, doing: str = "") -> T:
        """Ask the store about the object. A store that fails is asked again.

        Parameters
        ----------
        question
            Called with the store and the object's name in it; returns the answer.
        seconds
            How long a failing store is asked again.
        doing
            Beginning of an error's message, such as ``"cannot write "``.

        Raises
        ------
        InputError
            The object does not exist, or its URL or the store's library is wrong.
        StoreError, RunnerError
            The store refuses or does not serve, or this process may not use the object.
        """
        system, name = self.store
        return patiently(f"{doing}{self}", lambda: question(system, name), seconds)

    def about(self) -> Mapping[str, Any]:
        """Return what the store says about the object (fsspec's ``info``); raises `InputError` if it does not
        exist.
        """
        return self.ask(_about, WORK_SECONDS)

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def exists(self) -> bool:
        """Whether the store has an object of this name, or objects in a folder of this name."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Whether the store has an object of this name."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether the store has objects in a folder of this name."""
        return self._kind() not in (None, "file")

    def iterdir(self) -> Generator[ObjectPath, None, None]:
        yield from self.names(lambda system, name: system.ls(name, detail=False))

    def names(
        self, question: Callable[[Any, str], Iterable[str]], above: ObjectPath | None = None
    ) -> list[ObjectPath]:
        """Return the paths of the objects that `question` finds in the store.

        Parameters
        ----------
        question
            Called with the store and this path's name in it; returns names of objects.
        above
            The folder that contains all of these objects; default: this path. The returned paths begin with
            this folder's path, even if the store spells the folder's name in another way.
        """
        above = above or self

        def look(system: Any, name: str) -> list[str]:
            system.invalidate_cache()  # fsspec keeps lists of folders, to which objects may have been added
            return [system.unstrip_protocol(key) for key in question(system, name)]

        names = self.ask(look)
        return [above.joinpath(*object_path(key).parts[len(above.parts) :]) for key in names]

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object. An object that does not exist is ignored, even without `missing_ok`."""
        with suppress(InputError):
            self.about()  # raises for a missing object, so that this needs no right to delete
            self.ask(lambda system, name: system.rm_file(name), WORK_SECONDS, "cannot delete ")
            self.ask(lambda system, name: system.invalidate_cache(name))

    def _kind(self) -> str | None:
        def look(system: Any, name: str) -> str | None:
            with suppress(FileNotFoundError):
                return str(_about(system, name)["type"])  # fsspec's ``exists`` is false after any failure
            return None

        return self.ask(look)


AnyPath = Path | ObjectPath


def _about(system: Any, name: str) -> Mapping[str, Any]:
    system.invalidate_cache(name)
    info: Mapping[str, Any] = system.info(name)
    return info


def is_url(name: str) -> bool:
    """Whether a name is a URL, not a path."""
    return _URL.match(name) is not None


def object_path(url: str) -> ObjectPath:
    """Make the path of an object from its URL.

    Raises
    ------
    InputError
        The URL holds a secret, or has parts that a path cannot have.
    """
    if _SECRET.match(url):
        where = url.partition("://")[0]
        raise InputError(
            f"{where}://...: a URL with a password or a signature would get into logs and journals; give it "
            "to the store's library in its own file or variables of the environment"
        )
    path = ObjectPath(url)
    if str(path) != url.rstrip("/") or ".." in path.parts:
        raise InputError(f"{url}: names with empty parts, . or .. are not supported")
    return path


def as_path(name: str) -> AnyPath:
    """Make the path of a file, or of an object if `name` is a URL."""
    if not is_url(name):
        return expanded(name)
    return Path(name.partition("://")[2]) if name.lower().startswith("file://") else object_path(name)


def resolved(path: AnyPath) -> AnyPath:
    """Return a path with its links resolved. The path of an object has no links.

    Raises
    ------
    InputError
        Links lead in a circle, or the path is not valid UTF-8, so that a journal or JSON cannot hold it.
    """
    if isinstance(path, ObjectPath):
        return path
    try:
        whole = path.resolve()
        str(whole).encode()
        return whole
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise InputError(f"{shown}: its path is not valid UTF-8; rename the file or the folder") from None
    except (RuntimeError, OSError):
        raise InputError(f"{path}: its links lead in a circle") from None


def fixed_part(pattern: Pattern) -> Pattern:
    """Return the folder above the first wildcard of a glob: ``data`` for ``data/*/part-*.csv``."""
    parts = list(pattern.parent.parts)
    wild = [number for number, part in enumerate(parts) if glob.has_magic(part)]
    return type(pattern)(*parts[: wild[0]]) if wild else pattern.parent


def matches(pattern: AnyPath, *, folders: bool = False) -> list[AnyPath]:
    """Return the files that fit a glob, sorted by path. On this host, `folders` asks for folders instead of
    files.
    """
    if isinstance(pattern, Path):
        paths = map(Path, sorted(glob.glob(str(pattern), recursive=True)))  # noqa: PTH207
        return [path for path in paths if path.is_dir() == folders]

    return list(pattern.names(_glob, fixed_part(pattern)))


def _glob(system: Any, pattern: str) -> list[str]:
    """Return the names of the objects that fit a glob; raises an error if a folder cannot be listed.

    fsspec's ``glob`` would leave out a folder that cannot be listed. For ``**``, it lists no single folders,
    but all objects at once, and so leaves out nothing.
    """
    if "**" in pattern or not glob.has_magic(pattern):
        objects = system.glob(pattern, detail=True).items()
        return sorted(name for name, info in objects if info["type"] == "file")
    parts = pattern.split("/")
    start = next(at for at, part in enumerate(parts) if glob.has_magic(part))
    found = ["/".join(parts[:start])]
    for at, part in enumerate(parts[start:], start):
        kind = "file" if at + 1 == len(parts) else "directory"
        entries = [entry for folder in found for entry in _entries(system, folder)]
        names = {entry["name"].rstrip("/") for entry in entries if entry["type"] == kind}
        found = sorted(name for name in names.difference(found) if fnmatchcase(name.rpartition("/")[2], part))
    return found


def _entries(system: Any, folder: str) -> list[dict[str, Any]]:
    """Return the entries of a folder, or none if the folder does not exist."""
    try:
        entries: list[dict[str, Any]] = system.ls(folder, detail=True)
    except FileNotFoundError:  # another process may have removed it after it was listed
        return []
    return entries


def below(folder: AnyPath) -> list[AnyPath]:
    """Return the files in a folder and its subfolders, at any depth, sorted by path."""
    if isinstance(folder, Path):
        return sorted(path for path in folder.rglob("*") if path.is_file())
    return list(folder.names(lambda system, name: sorted(system.find(name))))


def workspace_of(output: AnyPath) -> Path:
    """The folder of the run that makes `output`. It is beside an output on this host, and in the user's state
    folder for an output in a store.
    """
    if isinstance(output, Path):
        return output.with_name(output.name + WORKSPACE)
    home = of_user(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "XDG_STATE_HOME")
    digest = hashlib.sha256(str(output).encode()).hexdigest()[:16]
    return home / "rankmill" / "outputs" / f"{output.name}-{digest}{WORKSPACE}"


def patiently(subject: object, action: Callable[[], T], seconds: float) -> T:
    """Call `action` and return the result. While the store fails, `action` is called again after pauses that
    become longer. `subject` names the object in messages.

    Raises
    ------
    InputError
        The object does not exist, or its URL or the store's library is wrong.
    StoreError
        The store refuses, or still fails `seconds` after its first failure.
    """
    deadline = math.inf
    for failures in count(1):
        try:
            return action()
        except RankmillError:
            raise
        except FileNotFoundError:
            raise InputError(f"{subject}: no such object") from None
        except PermissionError as error:
            raise StoreError(f"{subject}: no permission ({_reason(error)})") from None
        except Exception as error:
            if isinstance(error, ImportError):
                raise InputError(f"{subject}: {_reason(error)} ({install_line('s3')} for s3://)") from None
            # raised by the client of the hub
            if getattr(getattr(error, "response", None), "status_code", None) in {401, 403}:
                raise StoreError(f"{subject}: no permission ({_reason(error)})") from None
            if isinstance(error, _LASTING) or type(error).__name__ in _LASTING_NAMES:
                raise InputError(f"{subject}: {_reason(error)}") from None
            # The time is counted from the first failure, not from the call, because an upload may take longer
            # than `seconds` and still succeed.
            deadline = min(deadline, system.monotonic() + seconds)
            if system.monotonic() > deadline:
                raise StoreError(f"{subject}: the store does not serve: {_reason(error)}") from None
            logger.warning("%s: the store does not serve, trying again: %s", subject, _reason(error))
            system.sleep(_BACKOFF.pause(failures))
    raise AssertionError


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
