"""Reads YAML files within limits, so that a damaged or hostile file costs little time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rankmill.jobs.contract.errors import ConfigError

MAX_BYTES = 256 << 10

MAX_DEPTH = 32
"""A YAML file is refused if its lists and mappings are nested deeper than this: PyYAML recurses at each
level.
"""

_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C, which is twelve times as fast, if it is installed."""


def read_yaml(path: Path) -> Any:
    """Read a YAML file of plain values.

    Raises
    ------
    ConfigError
        The file cannot be read, is too large or too deeply nested, has an alias (a few aliases can expand to
        gigabytes), or is not YAML.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES >> 10} KiB; is it a config file?")
    try:
        text = raw.decode()
        _check_shape(text)
        return yaml.load(text, Loader=_LOADER)  # noqa: S506 -- it is a safe one
    except Exception as error:  # PyYAML raises errors of many types for damaged files
        raise ConfigError(f"{path}: not a YAML file: {shown(error)}") from None


def shown(value: object) -> str:
    """Make `value` one line of at most 300 characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _check_shape(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1 if event.start_mark else 1
        if depth > MAX_DEPTH:
            raise ValueError(f"line {line}: lists and mappings nested deeper than {MAX_DEPTH}")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"line {line}: an alias (*{event.anchor}); write the value out")
