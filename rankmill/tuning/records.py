"""What was measured, on disk as soon as it is: a JSON object a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jobs.errors import InputError


class Records:
    """Values by key that outlive an interruption. A line that was not finished counts for nothing.

    Parameters
    ----------
    path
        The file; made when something is added.
    about
        What the values are about; those about something else do not count.

    Raises
    ------
    InputError
        The file is there and holds something else.
    """

    def __init__(self, path: Path, about: str = "") -> None:
        self._path = path
        self._about = about
        self._values: dict[str, Any] = {}
        self._good = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"\n"):
                break  # torn
            try:
                record = json.loads(line)
                self._values[record["key"]] = record["value"]
            except (ValueError, TypeError, KeyError):
                raise InputError(f"{path}: these are no measurements of rankmill; move it away") from None
            self._good += len(line)

    def get(self, key: str) -> Any | None:
        """The value, if it is there."""
        return self._values.get(self._about + key)

    def add(self, key: str, value: Any) -> None:
        """Keep a value (of JSON's types); it is on disk when this returns."""
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
