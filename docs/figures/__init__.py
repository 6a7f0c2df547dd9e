"""The pictures of the documents, each drawn from what a ``record_*.py`` here has seen in a real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs.figures import drawn, terminal

FOLDER = Path(__file__).resolve().parent


def _recorded(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


PICTURES: dict[str, Callable[[], str]] = {
    "flow.svg": drawn.flow,
    "commands.svg": drawn.commands,
    "terminal.svg": lambda: terminal.animated(_recorded("terminal")),
}
"""Each picture, and what draws it."""
