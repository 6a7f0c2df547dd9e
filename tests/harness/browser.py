"""A real browser."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.harness.tools import tool


def shown(url: str, directory: Path) -> str:
    """A page as a browser has it after some seconds."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory}", "--dump-dom"]
    done = subprocess.run(
        [tool("chromium", "chromium"), *options, "--virtual-time-budget=8000", url],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout
