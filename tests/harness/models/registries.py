"""Registries of models for tests."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from rankmill.extensions.registry.documents import Manifest
from rankmill.extensions.registry.push import Steps, push
from rankmill.extensions.registry.store import RegistryStore
from rankmill.extensions.registry.trial import TriedModel


def put_version(url: str | Path, model: Path, name: str, version: str | None = None) -> Manifest:
    """Push a model without the trial, which takes seconds."""
    trial = TriedModel(family="bert", backend="torch", precision="fp32")
    return push(
        RegistryStore(str(url)), model, name, version, lambda folder: trial, Steps(), by="a test"
    ).manifest


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
