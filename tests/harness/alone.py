"""The core without extensions: no seam finds one, and the registry cannot be imported."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pytest

from rankmill import plugins
from rankmill.workers.worker import ScoringWorker

_REGISTRY = "rankmill.extensions.registry"


def leave_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the extensions from this process."""

    def of_the_core(group: str) -> list[EntryPoint]:
        found = entry_points(group=group)
        return [point for point in found if not point.value.startswith("rankmill.extensions")]

    plugins._named.cache_clear()
    monkeypatch.setattr(plugins, "entry_points", of_the_core)
    for name in [_REGISTRY, *(name for name in sys.modules if name.startswith(_REGISTRY))]:
        monkeypatch.setitem(sys.modules, name, None)


class LonelyWorker(ScoringWorker):
    """A worker without extensions."""

    def run(self, options: Any) -> bool:
        """Take the extensions from this process, and work."""
        leave_alone(pytest.MonkeyPatch())
        return super().run(options)
