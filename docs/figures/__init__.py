"""The pictures of the documents, each drawn from what a ``record_*.py`` here has seen in a real run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs.figures import architecture, drawn, measured, terminal

FOLDER = Path(__file__).resolve().parent


def _recorded(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


PICTURES: dict[str, Callable[[], str]] = {
    "flow.svg": drawn.flow,
    "commands.svg": drawn.commands,
    "rooms.svg": architecture.rooms,
    "worker.svg": architecture.worker,
    "life.svg": architecture.life,
    "terminal.svg": lambda: terminal.animated(_recorded("terminal")),
    "killed.svg": lambda: measured.killed(_recorded("killed")),
    "resume.svg": lambda: measured.resume(_recorded("resume")),
    "requests.svg": lambda: measured.requests(_recorded("requests")),
    "batches.svg": lambda: measured.batches(_recorded("batches")),
    "machines.svg": measured.machines,
}
"""Each picture, and what draws it."""
