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

MAX_PLAIN = 1024
"""A YAML file is refused if a value without quotes has more characters than this. PyYAML takes seconds for
some long values, and Python does not print an integer with thousands of digits.
"""

_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C if it is installed, because it is twelve times as fast as the other one."""


def read_yaml(path: Path) -> Any:
    """Read a YAML file of plain values.

    Raises
    ------
    ConfigError
        The file cannot be read, is too large or too deeply nested, or is not YAML. Or it has a value without
        quotes that is too long, or an alias (a few aliases can expand to gigabytes).
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
        _check_shape(path, text)
        return yaml.load(text, Loader=_LOADER)  # noqa: S506 -- it is a safe one
    except ConfigError:
        raise
    except Exception as error:  # PyYAML raises errors of many types for damaged files
        raise ConfigError(f"{path}: not a YAML file: {shown(error)}") from None


def shown(value: object) -> str:
    """Make `value` one line of at most 300 characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _check_shape(path: Path, text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        wrong = ""
        if depth > MAX_DEPTH:
            wrong = f"lists and mappings nested deeper than {MAX_DEPTH}"
        elif isinstance(event, yaml.AliasEvent):
            wrong = f"an alias (*{event.anchor}); write the value out"
        elif isinstance(event, yaml.ScalarEvent) and not event.style and len(event.value) > MAX_PLAIN:
            wrong = f"a value of {len(event.value):,} characters without quotes"
        if wrong:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise ConfigError(f"{path}, line {line}: {shown(wrong)}")
