"""What an output is made from: the files, the model and the options that its rows depend on.

A run is taken up again only while all of this is as it was, for otherwise the output would mix
two things. Files are told apart by path, size, time of last change and a digest of their first
and last 64 KiB (which takes in a Parquet file's footer), so that a terabyte costs nothing.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from jobs.errors import InputError
from producer.files.inputs import InputFile

_DIGESTED_BYTES = 64 << 10

_SHOWN = 3
"""Differences to name, at most; a folder of a thousand files may have moved."""


def manifest(
    files: Sequence[InputFile], fingerprints: Sequence[str], model: str, options: Mapping[str, object]
) -> dict[str, str]:
    """Everything the output depends on, each with a value for a person to read.

    Parameters
    ----------
    files, fingerprints
        The input's files, in order, and what `fingerprint` says of each.
    model
        The model; the files of a local directory count.
    options
        Options by their names on the command line, without the dashes.

    Raises
    ------
    InputError
        A file of the model cannot be read.
    """
    found = {"rankmill": version("rankmill")}
    found |= {f"--{name.replace('_', '-')}": str(value) for name, value in options.items()}
    weights = sorted(path for path in Path(model).glob("*") if path.is_file()) if Path(model).is_dir() else []
    found |= {f"model file {path.resolve()}": fingerprint(path) for path in weights}
    found |= {
        f"input {number} ({file.path.resolve()})": found
        for number, (file, found) in enumerate(zip(files, fingerprints, strict=True), 1)
    }
    return found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What has changed, in words; empty if nothing has."""
    changed = [
        f"{name} was {before[name]} and is {now[name]}"
        for name in before
        if before[name] != now.get(name, before[name])
    ]
    changed += [f"{name} is gone" for name in before if name not in now]
    changed += [f"{name} is new" for name in now if name not in before]
    more = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return ", ".join(changed[:_SHOWN]) + more


def fingerprint(path: Path) -> str:
    """What tells a file from another, and from what it was; raises `InputError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            digest = hashlib.sha256(file.read(_DIGESTED_BYTES))
            file.seek(max(about.st_size - _DIGESTED_BYTES, 0))
            digest.update(file.read(_DIGESTED_BYTES))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    changed = dt.datetime.fromtimestamp(about.st_mtime_ns // 10**9).isoformat(sep=" ")
    nanoseconds = about.st_mtime_ns % 10**9
    return f"{about.st_size:,} bytes of {changed}.{nanoseconds:09} (digest {digest.hexdigest()[:12]})"
