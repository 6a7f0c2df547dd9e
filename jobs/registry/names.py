"""Names in a registry: ``NAME@VERSION`` and ``NAME@ALIAS``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from rankmill.jobs.contract.errors import InputError

ALIASES = "aliases"
"""Folder of a model's aliases; no version can be called so."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")


class Reference(NamedTuple):
    """A model, and the name of a version or of an alias."""

    name: str
    tag: str

    def __str__(self) -> str:
        return f"{self.name}@{self.tag}"


def check_name(text: str, what: str) -> str:
    """Return `text` if it can be a name; `what` says of what.

    Raises
    ------
    InputError
        It cannot: a name is a part of a path and of a URL.
    """
    if _NAME.fullmatch(text) and ".." not in text and text != ALIASES:
        return text
    raise InputError(
        f"{text[:80]!r} cannot be the name of {what}: a name has letters, digits, '.', '_' and '-', begins "
        f"with a letter or digit, and is at most 64 characters long"
    )


def parse_reference(model: str) -> Reference | None:
    """The version or alias that a model's name stands for; ``None`` if it names a folder or a hub's model.

    >>> parse_reference("reranker@production")
    Reference(name='reranker', tag='production')

    Raises
    ------
    InputError
        It has an ``@``, and the names around it cannot be in a registry.
    """
    if "@" not in model or model.startswith(("/", ".", "~")) or ("/" in model and Path(model).is_dir()):
        return None
    name, _, tag = model.partition("@")
    return Reference(check_name(name, "a model in a registry"), check_name(tag, "a version or alias"))
