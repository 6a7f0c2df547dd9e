"""Finds files of a model, in its directory or on the hub, and checks files before they are loaded."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from rankmill.jobs.contract.errors import SpecError, WorkerError
from rankmill.jobs.model_files import check_named_files, weight_files
from rankmill.jobs.runtime.limits import total_memory
from rankmill.jobs.system import system

_HUB_SECONDS = 5.0

_MOST = 100 << 20
"""A safetensors file whose header has more bytes than this is refused, as the safetensors library does."""

_FLOATS = ("F", "BF")
"""Loading turns the numbers in a safetensors file into float32 if the name of their format, such as ``BF16``,
begins with one of these.
"""

logger = logging.getLogger(__name__)


def commit_of(source: str | Path, revision: str | None) -> str | None:
    """Return the commit that a revision on the hub, such as a branch, names now.

    If the model is a directory or cannot be found, the revision itself is returned. If the hub does not
    answer, this process uses only cached files of the hub until the next call.

    Raises
    ------
    ConnectionError
        The hub does not answer, and this host has no cached config of the model.
    """
    if isinstance(source, Path):
        return revision
    from huggingface_hub import constants, hf_hub_download

    told = os.environ.get("HF_HUB_OFFLINE", os.environ.get("TRANSFORMERS_OFFLINE", ""))
    away = told.upper() not in {"1", "ON", "TRUE", "YES"} and not _hub_answers()
    try:
        config = hf_hub_download(source, "config.json", revision=revision)
    except (OSError, ValueError):  # loading the model reports what is wrong
        if away:
            raise ConnectionError(f"{constants.ENDPOINT} does not answer") from None
        return revision
    return Path(config).parent.name


def _hub_answers() -> bool:
    """Return whether the Hugging Face hub answers within seconds. If not, set the hub's client offline."""
    from huggingface_hub import constants, get_session

    constants.HF_HUB_OFFLINE = False
    answers: list[object] = []

    def ask() -> None:
        with suppress(Exception):  # the client may raise any error
            answer = get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
            answers.extend([answer] if answer.status_code < 500 else [])  # a status of 5xx comes from a proxy

    # Ask in a thread, because the client's `timeout` is not a limit on the whole call. It does not apply to
    # the look-up of the hub's name in DNS, and it applies to each of the name's addresses separately.
    thread = system.Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    constants.HF_HUB_OFFLINE = not answers
    return bool(answers)


_NAMING = ("config.json", "tokenizer_config.json", "modules.json", "model.safetensors.index.json")
"""Files of a model that may name other files."""


def check_files(source: str | Path, revision: str | None) -> None:
    """Refuse a model with an adapter. A model on the hub is also refused if one of its JSON files names a
    file outside of the model, or weights that are not safetensors.

    With an adapter, or a file outside of the model, the scores would depend on what else is on this host.

    Raises
    ------
    SpecError
        The model is refused, or one of these JSON files is too large or has too many levels.
    OSError
        The model does not exist on the hub, or one of its files cannot be read.
    """
    if _found(source, revision, "adapter_config.json"):
        raise SpecError(
            f"{source} has a LoRA adapter (adapter_config.json), which is not loaded: merge it into its "
            "model with peft's merge_and_unload(), save that with its tokenizer, and name the new folder "
            "(docs/guides/models.md shows how)"
        )
    for name in _NAMING if isinstance(source, str) else ():
        if file := _found(source, revision, name):
            check_named_files(file)


def model_file(source: str | Path, revision: str | None, name: str) -> Path | None:
    """Return the path of a model's file on this host, and fetch the file if necessary.

    Returns ``None`` if the model does not have the file, or if the file would have to be fetched and this
    process uses only cached files of the hub.

    Parameters
    ----------
    source
        Directory or hub id.
    revision
        Branch, tag or commit on the hub.
    name
        Path of the file in the model.

    Raises
    ------
    OSError
        From transformers, if the model does not exist or cannot be read. Or the hub answers, but does not
        say whether the model has the file.
    """
    path = _found(source, revision, name)
    if path or isinstance(source, Path):
        return path
    from huggingface_hub import constants, get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if try_to_load_from_cache(source, name, revision=revision or "main") is None:
        if not constants.HF_HUB_OFFLINE:
            url = hf_hub_url(source, name, revision=revision)
            status = get_session().head(url, headers=build_hf_headers(), timeout=_HUB_SECONDS).status_code
            if status != 404:  # the file may exist, and without it the model could have other scores
                raise ConnectionError(f"the hub answers {status} for {name}")
            return None
        logger.warning(
            "the hub does not answer, and %s of %s was never fetched: going on without it", name, source
        )
    return None


def read_json(source: str | Path, revision: str | None, name: str, kind: type[Any]) -> Any:
    """Read a JSON file of the model. Returns ``None`` if the model does not have the file.

    The content of the file must be of type `kind`.
    """
    file = model_file(source, revision, name)
    if file is None:
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, kind):
        raise SpecError(f"model {source}: {name} is not a JSON {kind.__name__}")
    return content


def checkpoint(source: str | Path, revision: str | None) -> list[Path]:
    """Return the files that contain a model's weights."""
    if isinstance(source, Path):
        return weight_files(source)
    if file := model_file(source, revision, "model.safetensors"):
        return [file]
    index = read_json(source, revision, "model.safetensors.index.json", dict) or {}
    names = sorted(set(index.get("weight_map", {}).values()))
    return [file for name in names if (file := model_file(source, revision, name))]


def _found(source: str | Path, revision: str | None, name: str) -> Path | None:
    if isinstance(source, Path):
        return source / name if (source / name).is_file() else None
    from transformers.utils import cached_file

    path = cached_file(
        source,
        name,
        revision=revision or "main",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(path) if path else None


def check_headers(files: Iterable[Path], name: str) -> None:
    """Raise an error if a model's weights cannot be loaded on this host. Only the files' headers are read,
    which takes milliseconds.

    Raises
    ------
    SpecError
        A file is longer or shorter than its header says, or its header is missing or damaged.
    WorkerError
        The model does not fit into the memory of this host.
    OSError
        A file cannot be read.
    """
    needed = sum(_loaded_bytes(file, name) for file in files)
    memory = total_memory()
    if needed > memory:
        raise WorkerError(
            f"there is not enough memory to load model {name}: in float32 it needs "
            f"{needed / 2**30:,.1f} GiB, and worker host {socket.gethostname()} has {memory / 2**30:,.1f} GiB"
        )


def _loaded_bytes(file: Path, name: str) -> int:
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
