"""Files that come with rankmill: settings, prompts, the demo model and its pairs."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def shipped(*names: str) -> Path:
    """The path of a shipped file or folder, such as ``shipped("configs", "base.yaml")``."""
    return Path(str(files("rankmill").joinpath(*names)))
