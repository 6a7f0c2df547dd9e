"""The manifest of an output: the files, the model and the options on which its rows depend.

A run is resumed only if its manifest is unchanged. With another manifest, the output would mix rows that were
made in two ways. A file of the input is identified by path, size, time of last change, and a digest of the
first and last 64 KiB. So a large file takes no longer than a small one. An object in a store is identified by
path, size and version. If the store has no versions, the time of the last change stands in place of the
version. A file of the model is identified by all of its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rankmill.jobs.cache import file_digest
from rankmill.jobs.contract.errors import InputError, SpecError
from rankmill.jobs.contract.home import model_folder
from rankmill.jobs.model_files import model_content, model_files
from rankmill.producer.files.inputs import InputFile
from rankmill.producer.files.stores.paths import resolved

_PROMPTS = {"instruction", "prompt_template"}
_LONGEST = 60

_SHOWN = 3
"""A message names at most this many differences between two manifests. There may be thousands of differences,
for instance if a folder of input files was moved.
"""


def named(files: Sequence[InputFile], fingerprints: Sequence[str]) -> dict[str, str]:
    """Return the fingerprint of each input file, by a name for messages: ``input 1 (/data/a.csv)``."""
    return {
        f"input {number} ({resolved(file.path)})": mark
        for number, (file, mark) in enumerate(zip(files, fingerprints, strict=True), 1)
    }


def manifest(
    inputs: Mapping[str, str], models: Sequence[str], options: Mapping[str, object], cache: Path
) -> dict[str, str]:
    """Describe the files, models and options on which the rows of an output depend. Returns texts by name.

    Parameters
    ----------
    inputs
        The inputs in order, each with a text that changes when the input does.
    models
        The models; for a local directory, its files are included.
    options
        Options by the names of their fields.
    cache
        The cache folder, where digests of files are remembered.

    Raises
    ------
    InputError
        A file of the model cannot be read, or names a file outside of the model's directory.
    """
    texts = {name: str(value) for name, value in options.items()}
    texts |= {name: _in_a_line(texts[name]) for name in _PROMPTS & texts.keys()}
    facts = {f"--{name.replace('_', '-')}": text for name, text in texts.items()}
    for model in models:
        facts |= _model_files(model, cache)
    return {**facts, **inputs}


def content_here(model: str, cache: Path) -> str | None:
    """Return a digest of a model's directory, or ``None`` if the model is not a directory on this host.

    Raises
    ------
    InputError
        A file of the model cannot be read, or names a file outside of the model's directory.
    """
    with _reading(model):
        folder = model_folder(model)
        return None if folder is None else model_content(folder, cache)


def _model_files(model: str, cache: Path) -> dict[str, str]:
    """List the files of a model's directory, each with its size and digest; empty if the model is not a
    directory.
    """
    with _reading(model):
        folder = model_folder(model)
        return {
            f"model file {resolved(path)}": f"{path.stat().st_size:,} bytes "
            f"(digest {file_digest(path, cache)[:32]})"
            for path in (model_files(folder).values() if folder else ())
        }


@contextmanager
def _reading(model: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"model {model} cannot be read: {error}") from None
    except SpecError as error:
        raise InputError(str(error)) from None


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Describe in words how the manifest `now` differs from the manifest `before`. Returns an empty text if
    the manifests do not differ.
    """
    changed = [
        f"{name} was {before[name]} and is {now[name]}"
        for name in before
        if before[name] != now.get(name, before[name])
    ]
    changed += [f"{name} is gone" for name in before if name not in now]
    changed += [f"{name} is new" for name in now if name not in before]
    more = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return ", ".join(changed[:_SHOWN]) + more


def _in_a_line(text: str) -> str:
    """Shorten the text of a prompt to its quoted beginning and a digest, if it is long or has line breaks."""
    if len(text) <= _LONGEST and text.isprintable():
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
    return f"{text[:_LONGEST]!r} ({len(text):,} characters, digest {digest})"
