"""Programs that tests need and pip does not bring."""

from __future__ import annotations

import os
import shutil
import socket

import pytest

_REQUIRED = bool(os.environ.get("RANKMILL_REQUIRE_TOOLS"))  # read here: tests run without such variables


def tool(name: str, package: str) -> str:
    """Path of the program; skips the test without it, or fails it where tools are required."""
    found = shutil.which(name)
    if found is None:
        message = f"{name} is not installed; Debian has it in the package {package}"
        if _REQUIRED:
            pytest.fail(message)
        pytest.skip(message)
    return found


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
