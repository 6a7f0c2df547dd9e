"""The pages of docs/reference/, from the code and the tests, and the runbook as Prometheus serves it.

python -m tests.harness.reference    # writes them
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.harness.reference import commands, metrics, python, redis_keys, runbook, settings, shown

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "reference"

PAGES: dict[str, Callable[[str], str]] = {
    "commands.md": lambda _: commands.page(),
    "settings.md": lambda _: settings.page(),
    "python.md": lambda _: python.page(),
    "redis.md": lambda _: redis_keys.page(),
    "metrics.md": metrics.written,
    "shown.md": lambda _: shown.page(),
    "../../configs/prometheus/consoles/runbook.html": lambda _: runbook.page(),
}
"""Each page, and what makes it of the page that is there: its tables, or all of it."""


def written(name: str) -> str:
    """A page as it should be."""
    path = FOLDER / name
    return PAGES[name](path.read_text() if path.exists() else "")
