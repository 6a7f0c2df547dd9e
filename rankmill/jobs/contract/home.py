"""Paths that begin with ``~``, and folders of this user."""

from __future__ import annotations

import os
from pathlib import Path

from rankmill.jobs.contract.errors import ConfigError


def expanded(name: str) -> Path:
    """The path that a name stands for; that of an unknown user, such as ``~$draft.csv``, stays as it is."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 -- Path's own raises for that one


def of_user(folder: str | Path, remedy: str) -> Path:
    """A folder that may be in this user's home; `remedy` names what else could say where it is.

    Raises
    ------
    ConfigError
        This user has no home, as one of a container with a uid of its own.
    """
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"user {os.geteuid()} has no home for {folder}: set {remedy} to a folder of this user, or HOME"
        ) from None
