"""Which backends this machine has."""

from __future__ import annotations

import pytest

from rankmill.workers.backends.auto import backends


def require(backend: str, precision: str = "fp32") -> None:
    """Skip the test if this machine lacks the backend, or its arithmetic."""
    kind = backends()[backend]
    for package in kind.packages:
        pytest.importorskip(package)
    if lacking := kind.lacks("cpu", precision):
        pytest.skip(f"{backend}: {lacking}")
