"""A real browser."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.harness.tools import tool


def shown(url: str, directory: Path, seconds: int = 8) -> str:
    """A page as a browser has it after some seconds, by its own clock."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory}", "--dump-dom"]
    done = subprocess.run(
        [tool("chromium", "chromium"), *options, f"--virtual-time-budget={seconds}000", url],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout
