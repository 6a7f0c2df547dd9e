"""Finds a model's files in a folder, on the hub or by an extension, and checks the files of a folder. Limits
the disk space of copies and converted models in the cache.

Importing this module does not load torch. Reading 100 GB of weights for their digest takes minutes, so a
thread does that (`Reading`). The headers of safetensors are checked before the weights are read.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rankmill.jobs.cache import TEMPORARY_LOCK, Facts, KeptFolder, cache_folder
from rankmill.jobs.contract.errors import InputError, RankmillError, SpecError, WorkerError
from rankmill.jobs.contract.home import expanded, shipped
from rankmill.jobs.contract.spec import CONTENT, ScoreSpec
from rankmill.jobs.model_files import model_content, model_facts, weight_files
from rankmill.jobs.model_names import ModelCopy, ModelNames, has_tag, unknown_name
from rankmill.jobs.runtime.settings import WorkerSettings
from rankmill.jobs.system import system
from rankmill.workers.backends.auto import backends
from rankmill.workers.host.disk_cache import make_room
from rankmill.workers.host.model_file import check_files, check_headers, commit_of

DEMO_MODEL = shipped("examples", "demo-model")

_AT_ONCE_SECONDS = 0.2
"""The first call of `Reading.goes_on` waits up to this many seconds, so that small files are read at once."""


class ModelCopies:
    """Finds this host's copies of models that extensions know by name, such as registered models, and removes
    old copies.

    Parameters
    ----------
    settings
        The settings, including those of extensions; they name the cache folder and its limit.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self.folder = cache_folder(settings.cache_dir)
        self._limit = settings.cache_bytes
        self._names = ModelNames(settings)

    def pinned(self, spec: ScoreSpec) -> ScoreSpec:
        """Return a copy of `spec` that names the exact model, if an extension knows the model's name.

        An alias, for example, is replaced by the model for which it stands now. If no extension knows the
        name, `spec` is returned unchanged.

        Raises
        ------
        WorkerError
            This worker cannot find out what the name stands for.
        """
        try:
            return self._names.pinned(spec)
        except RankmillError as error:
            raise WorkerError(str(error)) from error

    def find(self, model: str, content: str | None) -> ModelCopy | None:
        """Return this host's copy of a model that an extension knows by name, and fetch missing files.

        Parameters
        ----------
        model
            The model's name.
        content
            The digest that the files must have, if it is known.

        Returns
        -------
        ModelCopy
            Where the files are, or ``None`` if no extension knows the name.

        Raises
        ------
        SpecError
            No worker could ever have these files.
        WorkerError
            This worker cannot get the files; another worker may.
        """
        owner = self._names.owner(model)
        try:
            return None if owner is None else owner.copy(model, content, self)
        except InputError as error:
            raise SpecError(str(error)) from None

    def make_room(self, needed: int = 0, keep: Path | None = None) -> int:
        """Remove copies and converted models from the cache folder, the longest unused first, to make room.

        Returns the number of bytes that still do not fit. If the settings set no limit, nothing is removed.

        Parameters
        ----------
        needed
            Bytes for which there must be room.
        keep
            A folder that is not removed, and does not count.
        """
        return 0 if self._limit is None else make_room(self._kept(), self._limit, needed=needed, keep=keep)

    def _kept(self) -> Iterator[KeptFolder]:
        for owner in self._names.owners:
            yield from owner.kept(self.folder)
        for backend in backends():  # each backend keeps its conversions in a folder of its name
            for folder in (self.folder / backend).glob("*"):
                # a hidden folder is temporary, and locked while a process fills it
                yield KeptFolder(folder, folder / TEMPORARY_LOCK if folder.name.startswith(".") else None)


@dataclass(frozen=True)
class ModelSource:
    """The place of a model's files, and their version.

    Attributes
    ----------
    files
        The folder on this host, or the hub id.
    revision
        Commit on the hub, or the digest of the content of a directory or an extension's model.
    held
        An object that keeps an extension's copy on this host as long as it exists.
    facts
        Sizes and times of the files in a folder, which show whether a file was changed (`Facts`).
    """

    files: str | Path
    revision: str | None
    held: object = None
    facts: Mapping[str, Facts] = field(default_factory=dict)

    def check_unchanged(self) -> None:
        if isinstance(self.files, Path) and model_facts(self.files) != self.facts:
            raise WorkerError(f"the files in {self.files} changed while they were read")


def find_source(spec: ScoreSpec, copies: ModelCopies | None, cache: Path) -> ModelSource:
    """Find the files of a model. An extension's model is fetched if its files are not on this host.

    Parameters
    ----------
    spec, copies
        The model, and this host's copies of models that extensions know by name.
    cache
        The cache folder, in which digests are remembered.

    Raises
    ------
    WorkerError
        The files are not on this host, their content is not what the spec asks for, or a folder's model does
        not fit into the memory of this host.
    SpecError
        The files are not a model, or the model is a directory and the spec's revision is a commit on the hub.
    ConnectionError
        As in `commit_of`.
    """
    copy = None if copies is None else copies.find(spec.model, spec.revision)
    if copy is None:
        files = locate(spec.model)
        if isinstance(files, str):
            return ModelSource(files, commit_of(files, spec.revision))
        facts = model_facts(files)
        return ModelSource(files, _content(files, spec, cache), facts=facts)
    folder = _checked(copy.folder, spec.model)
    return ModelSource(folder, copy.content, copy.held, model_facts(folder))


def directory_content(spec: ScoreSpec, cache: Path) -> str | None:
    """The digest of a model's directory, or ``None`` if the model is not a directory.

    Raises the same errors as `find_source`.
    """
    files = spec.model if has_tag(spec.model) else locate(spec.model)
    return _content(files, spec, cache) if isinstance(files, Path) else None


def _content(folder: Path, spec: ScoreSpec, cache: Path) -> str:
    """Return the digest of the content of a model's folder. Raises `WorkerError` if the spec's revision is
    another digest, and `SpecError` if it is a commit on the hub.
    """
    if spec.revision and not CONTENT.fullmatch(spec.revision):
        raise SpecError(
            f"model {spec.model} is a directory, and revision {spec.revision:.40} names a commit on the hub: "
            "leave it out"
        )
    content = model_content(folder, cache)
    if spec.revision not in {None, content}:
        raise WorkerError(
            f"model {spec.model} on worker host {socket.gethostname()} has content {content:.12}, and the "
            f"run has {spec.revision:.12}: put the same files on every worker host, or begin a new run"
        )
    return content


def locate(name: str) -> str | Path:
    """The directory of a model, or its hub id.

    Raises
    ------
    WorkerError
        `name` is a path, and this host has no such directory. Or no installed extension knows names of this
        form. Or the model does not fit into the memory of this host.
    SpecError
        The directory does not contain a model.
    """
    if name == "demo":
        return DEMO_MODEL
    if has_tag(name):
        raise WorkerError(unknown_name(name))
    path = expanded(name)
    if not path.is_dir():
        if not is_path(name):
            return name
        raise WorkerError(
            f"model {name}: no such directory on worker host {socket.gethostname()}; "
            "put the model at this path on every worker host, or name a model on the hub or in a registry"
        )
    return _checked(path, name)


def _checked(path: Path, name: str) -> Path:
    check_files(path, None)
    if not (path / "config.json").is_file():
        raise SpecError(
            f"{name} is not a model: there is no config.json in it on worker host {socket.gethostname()}; "
            "is its file system mounted there?"
        )
    weights = weight_files(path)
    if not weights:
        raise SpecError(f"{name} has no *.safetensors: save the model with safe_serialization=True")
    check_headers(weights, name)
    return path


def is_path(name: str) -> bool:
    """Whether a model's name can only be a path, because it has several slashes or begins with ``/``,
    ``.`` or ``~``.
    """
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


logger = logging.getLogger(__name__)


class Reading:
    """Reads models' files in threads before the models are loaded, so that the worker scores with other
    models meanwhile.

    Parameters
    ----------
    cache
        Folder in which digests are remembered, so that loading finds them.
    copies
        The copies of models that extensions know by name. A thread fetches a copy that this host lacks.
    """

    def __init__(self, cache: Path, copies: ModelCopies | None) -> None:
        self._cache = cache
        self._copies = copies
        self._threads: dict[tuple[str, str | None], threading.Thread] = {}

    def goes_on(self, spec: ScoreSpec) -> bool:
        """Return whether a thread is still reading the model's files. After ``False``, the model can be
        loaded.

        The first call starts this thread.
        """
        key = spec.model, spec.revision
        thread = self._threads.get(key)
        if thread is None:
            thread = system.Thread(target=self._read, args=(spec,), name="digest", daemon=True)
            self._threads[key] = thread
            thread.start()
            thread.join(_AT_ONCE_SECONDS)
            if thread.is_alive():
                logger.info("reading the files of %s; other models are served meanwhile", spec.model)
        if thread.is_alive():
            return True
        del self._threads[key]
        return False

    def _read(self, spec: ScoreSpec) -> None:
        try:
            if self._copies is None or self._copies.find(spec.model, spec.revision) is None:
                directory_content(spec, self._cache)
        except Exception as error:  # loading the model reports the error again
            logger.debug("%s cannot be read: %s", spec.model, error)
