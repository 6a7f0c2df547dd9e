"""Limits which files a process may read and write if it works for other users, as a runner does.

A process with these limits is called confined. It asks here before it reads or writes a file. After it has
opened the file, it asks again, because the file's name may lead elsewhere in the meantime.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urljoin

from rankmill.jobs.contract.errors import ConfigError, RankmillError, RunnerError
from rankmill.jobs.contract.file_request import DATASET
from rankmill.jobs.contract.home import expanded
from rankmill.producer.files.stores.paths import (
    NOT_WRITTEN,
    WORKSPACE,
    AnyPath,
    ObjectPath,
    as_path,
    guard,
    is_url,
    matches,
    object_path,
    resolved,
)

Use = Literal["read", "write"]

_NEVER = {"file", "local", "memory", "data"}
"""Schemes of URLs that the settings ``runner_read`` and ``runner_write`` refuse. A folder is named by its
path instead.
"""


class Roots:
    """Folders and prefixes of URLs that may be read, and those that may be written.

    Parameters
    ----------
    read, write
        Folders and URLs, as in the settings ``runner_read`` and ``runner_write``; ``irds:`` to read datasets.

    Raises
    ------
    ConfigError
        A folder or URL cannot be used in these settings.
    """

    def __init__(self, read: Sequence[str], write: Sequence[str]) -> None:
        self._datasets = DATASET in read
        self._roots: dict[Use, list[AnyPath]] = {
            "read": [_root(name, "read") for name in read if name != DATASET],
            "write": [_root(name, "write") for name in write],
        }

    def allow(self, path: AnyPath, use: Use) -> bool:
        """Whether a path may be read or written. The path, with its links resolved, must be in one of the
        allowed folders or URLs. It must not be hidden there, and must not be in a run's folder.
        """
        place = resolved(path)
        return any(_is_within(place, root) and not _is_hidden(place, root) for root in self._roots[use])

    def check(self, path: AnyPath, use: Use) -> None:
        """Raise `RunnerError` if `path` may not be used; `use` says whether to read or to write it."""
        if not self.allow(path, use):
            raise refusal(str(path), use)

    def check_name(self, name: str, use: Use) -> None:
        """Raise `RunnerError` if a request may not use `name`: a path, URL, glob of these, or dataset."""
        if name.startswith(DATASET):
            if not (self._datasets and use == "read"):
                raise refusal(name, use)
            return
        path = as_path(name)
        wild = next((at for at, part in enumerate(path.parts) if set("*?[") & set(part)), None)
        if wild is None:
            self.check(path, use)
        elif ".." in path.parts or not self.allow(type(path)(*path.parts[:wild]), use):
            raise refusal(name, use)
        elif isinstance(path, Path):
            for end in range(wild + 1, len(path.parts)):
                # Check each folder that the glob finds on its way: a link could lead out of the allowed
                # folders, and matches would show the names of files there.
                if not all(map(self._is_inside, matches(Path(*path.parts[:end]), folders=True))):
                    raise refusal(name, use)

    def _is_inside(self, folder: AnyPath) -> bool:
        return any(_is_within(resolved(folder), root) for root in self._roots["read"])

    def also_read(self, folder: Path) -> None:
        """Let files be read in a folder that this process has made itself."""
        self._roots["read"].append(folder)

    def allow_look(self, path: ObjectPath) -> bool:
        """Whether a store may be asked about an object. The object must be below one of the allowed URLs, or
        above one of them (such as a bucket). It may be hidden, such as a run's lock.
        """
        roots = [root for some in self._roots.values() for root in some]
        return any(_is_within(path, root) or _is_within(root, path) for root in roots)


_confined: list[Roots] = []


def confine(roots: Roots) -> None:
    """Limit this process to the files and objects in `roots` when it works for a request."""
    _confined[:] = [roots]
    guard(_options_for)


def confined() -> Roots | None:
    """Return the folders and URLs that limit this process, or ``None`` if it works for its own user."""
    return _confined[0] if _confined else None


def check_opened(descriptor: int, path: Path, use: Use) -> None:
    """Raise `RunnerError` if an open file may not be used: its path may have changed after it was checked."""
    roots = confined()
    if roots and not roots.allow(_path_of(descriptor), use):
        raise refusal(str(path), use)


@contextmanager
def opened_folder(folder: Path, target: Path | None = None, below: str = "") -> Iterator[int]:
    """Open a folder as a descriptor, so that new files are made in it even if the path leads elsewhere later.

    Raises
    ------
    RunnerError
        This process may not write `target` in the folder, or in its subfolder `below`.
    OSError
        The folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        roots = confined()
        if roots and target and not roots.allow(_path_of(descriptor) / below, "write"):
            raise refusal(str(target), "write")
        yield descriptor
    finally:
        os.close(descriptor)


def held(descriptor: int, path: Path) -> Path:
    """Return a path that leads to an open folder, even if `path` leads elsewhere later.

    Returns `path` itself if this process works for its own user, or if the system has no such path.
    """
    status = os.fstat(descriptor)
    stays = (f"/proc/self/fd/{descriptor}", f"/.vol/{status.st_dev}/{status.st_ino}")  # on Linux, on macOS
    for place in map(Path, stays if confined() else ()):
        with suppress(OSError):
            if os.path.samestat(status, place.stat()):
                return place
    return path


def _options_for(path: ObjectPath) -> Mapping[str, Any]:
    """Return the options with which fsspec opens an object's store. Raises `RunnerError` if this process may
    not use the object.
    """
    roots = confined()
    if roots and not roots.allow_look(path):
        raise refusal(str(path), "read")
    return _http_options() if path.protocol in {"http", "https"} else {}


@cache
def _http_options() -> dict[str, Any]:
    """Make options with which fsspec follows redirections of HTTP only to URLs that this process may use."""
    import aiohttp

    async def check(session: Any, context: Any, redirect: Any) -> None:
        place = urljoin(str(redirect.url), redirect.response.headers.get("Location", ""))
        _options_for(object_path(place))

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(check)
    return {"client_kwargs": {"trace_configs": [trace]}}


def refusal(name: str, use: Use) -> RunnerError:
    """Make the error to raise for a path or URL that this process may not read or write."""
    verb = {"read": "read", "write": "write to"}[use]
    return RunnerError(
        f"{name}: this runner may not {verb} it; its setting runner_{use} (rankmill runner --{use}) names "
        "the folders and URLs that it may use, without the hidden files in them"
    )


def _root(name: str, use: Use) -> AnyPath:
    setting = f"runner_{use}: {name}"
    scheme = name.partition("://")[0].lower() if is_url(name) else ""
    if scheme in _NEVER:
        raise ConfigError(f"{setting}: name a folder by its path, or an object store or server by its URL")
    if scheme in NOT_WRITTEN and use == "write":
        raise ConfigError(f"{setting}: nothing can be written to {scheme}://")
    try:
        return as_path(name) if scheme else expanded(name).absolute()
    except RankmillError as error:
        raise ConfigError(f"{setting}: {error}") from None


def _is_within(path: AnyPath, root: AnyPath) -> bool:
    """Whether a path without links is the folder or URL `root`, or below it. A URL is never in a folder of
    this host.
    """
    if isinstance(path, ObjectPath) and not _is_plain(path):
        return False
    start = resolved(root).parts
    return path.parts[: len(start)] == start


def _is_hidden(path: AnyPath, root: AnyPath) -> bool:
    """Whether a part of `path` below `root` begins with a dot, or is a run's folder."""
    return any(part[0] == "." or part.endswith(WORKSPACE) for part in path.parts[len(resolved(root).parts) :])


def _is_plain(path: ObjectPath) -> bool:
    """Whether every library understands the URL in the same way. Such a URL contains neither another URL
    (``::``) nor ``.`` or ``..`` as a name, plain or encoded.
    """
    parts = unquote(str(path)).replace("\\", "/").split("/")
    return "::" not in str(path) and not {".", ".."} & set(parts)


def _path_of(descriptor: int) -> Path:
    if hasattr(fcntl, "F_GETPATH"):  # macOS
        raw: bytes = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024))
        return Path(os.fsdecode(raw.rstrip(b"\0")))
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
