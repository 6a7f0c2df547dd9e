"""Checks, before any work, that an output can be written at its place, on this host or in a store."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rankmill.jobs.contract.errors import InputError, StoreError
from rankmill.producer.files.stores.paths import NOT_WRITTEN, AnyPath, ObjectPath

_WITH_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"}

_HUB_KINDS = {"datasets", "spaces", "models", "kernels", "buckets"}


def check_writable(path: AnyPath) -> None:
    """Check that a file or a folder can be made at `path`; raises `InputError` if not."""
    if isinstance(path, ObjectPath):
        _check_container(path)
        return
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: no such directory to write the output to")
    # The parent must be writable even if `path` is an existing folder of parts, because the run's own folder
    # is made in the parent.
    for place in (path.parent, path):
        if place.is_dir() and not os.access(place, os.W_OK):
            raise InputError(f"{place} is not writable; name another place with -o")


def check_folder(folder: AnyPath) -> None:
    """Check that parts can be written to `folder`, which need not exist; raises `InputError` if not."""
    if isinstance(folder, Path) and folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; --rows-per-part needs a folder, name one with -o")
    check_writable(folder)


def check_replaceable(path: AnyPath) -> None:
    """Check that an output can replace what is at `path`; raises `InputError` if not.

    An object in a store can always be replaced. On this host, nothing but a regular file can be replaced.
    """
    if isinstance(path, ObjectPath):
        return
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is not a regular file, so no output replaces it; name a file with -o")


def is_in_repository(path: ObjectPath) -> bool:
    """Whether the object is a file of a repository on the Hugging Face Hub, where each write is a commit that
    stays.
    """
    return path.protocol == "hf" and path.parts[1] != "buckets"


def _check_container(path: ObjectPath) -> None:
    """Check that an object's bucket, or its repository on the Hugging Face Hub, exists. If this process has
    no right to ask whether it exists, the check passes.

    Raises
    ------
    InputError
        The bucket or repository does not exist, or the URL's scheme cannot hold an output.
    """
    if path.protocol.lower() in NOT_WRITTEN:
        raise InputError(
            f"{path}: an output cannot be written to {path.protocol}://; name another place with -o"
        )
    bucket = _container(path)
    try:
        is_there = bucket.exists()
    except StoreError:  # this process may have the right to write but not to look
        return
    if not is_there and path.protocol in _WITH_BUCKETS:
        raise InputError(f"{bucket}: no such bucket")
    if not is_there and path.protocol == "hf":
        raise InputError(f"{bucket}: no such repository on the hub; make it first (hf repos create)")


def _container(path: ObjectPath) -> ObjectPath:
    """Return the bucket or repository of an object: ``s3://bucket``, ``hf://user/model``,
    ``hf://datasets/user/name``.
    """
    if path.protocol != "hf":
        return ObjectPath(*path.parts[:2])
    return ObjectPath(*path.parts[: 4 if path.parts[1] in _HUB_KINDS else 3])
