"""Finds a model's files in a folder, on the hub or by an extension, and checks the files of a folder.

Importing this module loads no torch. Reading 100 GB of weights for their digest takes minutes, so a thread
does that (`Reading`). The headers of safetensors are checked before the weights are read.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rankmill.jobs.cache import Facts
from rankmill.jobs.contract.errors import SpecError, WorkerError
from rankmill.jobs.contract.home import expanded
from rankmill.jobs.contract.shipped import shipped
from rankmill.jobs.contract.spec import CONTENT, ScoreSpec
from rankmill.jobs.model_files import model_content, model_facts, weight_files
from rankmill.jobs.model_names import has_tag, unknown_name
from rankmill.jobs.runtime.limits import total_memory
from rankmill.jobs.system import system
from rankmill.workers.host.model_file import check_files, commit_of
from rankmill.workers.models.copies import ModelCopies

_MOST = 100 << 20
"""Most bytes of a header; the safetensors library refuses longer ones."""

_FLOATS = ("F", "BF")
"""Beginnings of the names of number formats that are loaded as float32."""

DEMO_MODEL = shipped("examples", "demo-model")

_AT_ONCE_SECONDS = 0.2
"""`Reading.goes_on` waits this many seconds for a thread that it has started."""


def check_headers(folder: Path, name: str) -> None:
    """Refuse weights that cannot be loaded here, by their headers, which takes milliseconds.

    Raises
    ------
    SpecError
        A file is longer or shorter than its header says, or its header is missing or damaged.
    WorkerError
        The model does not fit into the memory of this host.
    OSError
        A file cannot be read.
    """
    needed = sum(_loaded_bytes(file, name) for file in weight_files(folder))
    memory = total_memory()
    if needed > memory:
        raise WorkerError(
            f"there is not enough memory to load model {name}: in float32 it needs "
            f"{needed / 2**30:,.1f} GiB, and worker host {socket.gethostname()} has {memory / 2**30:,.1f} GiB"
        )


def _loaded_bytes(file: Path, name: str) -> int:
    """Bytes that the file's tensors take in memory."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= min(_MOST, size - 8):
            raise SpecError(f"{file.name} of model {name} is damaged or cut off: it has no header")
        header = opened.read(length)
    try:
        tensors: dict[str, Any] = json.loads(header)
        tensors.pop("__metadata__", None)
        end = 8 + length + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
        loaded = sum(map(_in_memory, tensors.values()))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise SpecError(f"{file.name} of model {name} is damaged: its header cannot be read") from None
    if end != size:
        raise SpecError(f"{file.name} of model {name} has {size:,} bytes, and its header describes {end:,}")
    return loaded


def _in_memory(tensor: dict[str, Any]) -> int:
    first, last = tensor["data_offsets"]
    return 4 * prod(tensor["shape"]) if tensor["dtype"].startswith(_FLOATS) else int(last - first)


@dataclass(frozen=True)
class ModelSource:
    """A model's files, and where they are.

    Attributes
    ----------
    files
        The folder on this host, or the hub id.
    revision
        Commit on the hub; for a directory or an extension's model, the digest of its content.
    held
        An object that keeps an extension's copy on this host as long as it exists.
    facts
        What the file system says about the files in a folder.
    """

    files: str | Path
    revision: str | None
    held: object = None
    facts: Mapping[str, Facts] = field(default_factory=dict)

    def check_unchanged(self) -> None:
        """Raise `WorkerError` if files in a folder have changed since they were found."""
        if isinstance(self.files, Path) and model_facts(self.files) != self.facts:
            raise WorkerError(f"the files in {self.files} changed while they were read")


def find_source(
    spec: ScoreSpec, copies: ModelCopies | None, cache: Path, *, ask_hub: bool = True
) -> ModelSource:
    """Find the files of a model; an extension's are fetched if they are not on this host.

    Parameters
    ----------
    spec, copies
        The model, and this host's copies of models that extensions know by name.
    cache
        The cache folder, in which digests are remembered.
    ask_hub
        Whether to ask the hub for a commit; otherwise a model on the hub has the spec's revision.

    Raises
    ------
    WorkerError
        The files are not on this host, or their content is not what the spec asks for.
    SpecError
        The files are not a model, or the revision of a directory is a commit on the hub.
    """
    copy = None if copies is None else copies.find(spec.model, spec.revision)
    if copy is None:
        files = locate(spec.model)
        if isinstance(files, str):
            return ModelSource(files, commit_of(files, spec.revision) if ask_hub else spec.revision)
        facts = model_facts(files)
        return ModelSource(files, _content(files, spec, cache), facts=facts)
    folder = _checked(copy.folder, spec.model)
    return ModelSource(folder, copy.content, copy.held, model_facts(folder))


def directory_content(spec: ScoreSpec, cache: Path) -> str | None:
    """The digest of a model's directory; ``None`` if the model is not a directory. Raises as `find_source`
    does.
    """
    files = spec.model if has_tag(spec.model) else locate(spec.model)
    return _content(files, spec, cache) if isinstance(files, Path) else None


def _content(folder: Path, spec: ScoreSpec, cache: Path) -> str:
    """The digest of a directory's content, which must equal the spec's revision if it has one."""
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
        `name` is a path, and the directory does not exist on this host; or no installed extension knows names
        of this form.
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
    if not weight_files(path):
        raise SpecError(f"{name} has no *.safetensors: save the model with safe_serialization=True")
    check_headers(path, name)
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
        The copies of models that extensions know by name; a thread fetches these too.
    """

    def __init__(self, cache: Path, copies: ModelCopies | None) -> None:
        self._cache = cache
        self._copies = copies
        self._threads: dict[tuple[str, str | None], threading.Thread] = {}

    def goes_on(self, spec: ScoreSpec) -> bool:
        """Whether the model's files are still being read; the first call starts a thread for that. After
        ``False``, the model can be loaded.
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
            find_source(spec, self._copies, self._cache, ask_hub=False)
        except Exception as error:  # loading the model reports it again
            logger.debug("%s cannot be read: %s", spec.model, error)
