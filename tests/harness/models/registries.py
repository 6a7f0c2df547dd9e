"""Registries of models for tests."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from rankmill.extensions.registry.documents import Manifest
from rankmill.extensions.registry.push import push
from rankmill.extensions.registry.registry import Registry


def put_version(url: str | Path, model: Path, name: str, version: str | None = None) -> Manifest:
    """Push a model without the trial, which takes seconds."""
    return push(Registry(str(url)), model, name, version, lambda folder: "bert", by="a test")[0]


def archive(model: Path, *more: tarfile.TarInfo, below: str = ".") -> bytes:
    """A model as ``tar`` sends it, in the folder `below`, with other entries behind it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.add(model, arcname=below)
        for each in more:
            tar.addfile(each, io.BytesIO(b"x" * each.size))
    return out.getvalue()


def entry(name: str, *, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> tarfile.TarInfo:
    """An entry of an archive."""
    found = tarfile.TarInfo(name)
    found.type, found.size, found.linkname = kind, size, link
    return found
