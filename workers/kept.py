"""Where what is made from models is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(setting: str) -> Path:
    """``auto`` is ``rankmill`` in the user's cache folder."""
    if setting != "auto":
        return Path(setting).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rankmill"
