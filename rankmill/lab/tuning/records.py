"""Records of measurements on disk: a file with one JSON object per line, synced after each record."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rankmill.jobs.contract.errors import InputError


class Records:
    """Values by key in a file, which survive an interruption. An incomplete last line is ignored.

    Parameters
    ----------
    path
        The file; it is created when the first value is added.
    about
        Prefix of all keys: identifies what was measured. Records with another prefix are ignored.

    Raises
    ------
    InputError
        The file exists and has other content.
    """

    def __init__(self, path: Path, about: str = "") -> None:
        self._path = path
        self._about = about
        self._values: dict[str, Any] = {}
        self._good = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"\n"):
                break  # incomplete: the process died while it wrote the line
            try:
                record = json.loads(line)
                self._values[record["key"]] = record["value"]
            except (ValueError, TypeError, KeyError):
                raise InputError(f"{path}: not a file of rankmill's measurements; move it away") from None
            self._good += len(line)

    def get(self, key: str) -> Any | None:
        """The value of a key; ``None`` if there is no record."""
        return self._values.get(self._about + key)

    def add(self, key: str, value: Any) -> None:
        """Record a value (of JSON's types); it is on disk when this returns."""
        key = self._about + key
        line = json.dumps({"key": key, "value": value}).encode() + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("r+b" if self._path.exists() else "xb") as file:
            file.truncate(self._good)
            file.seek(self._good)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._good += len(line)
        self._values[key] = value
