"""Paths that begin with ``~``, and folders of this user."""

from __future__ import annotations

import os
from pathlib import Path

from rankmill.jobs.contract.errors import ConfigError


def expanded(name: str) -> Path:
    """Expand ``~`` in a path; a path with an unknown user, such as ``~$draft.csv``, stays as it is."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 -- Path's own raises for such a path


def of_user(folder: str | Path, remedy: str) -> Path:
    """Expand ``~`` in the path of a folder.

    Parameters
    ----------
    folder
        The path of the folder.
    remedy
        Name of a setting that can give another folder, for the error message.

    Raises
    ------
    ConfigError
        The path begins with ``~``, and that home folder is not known, as in some containers.
    """
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"user {os.geteuid()} has no home for {folder}: set {remedy} to a folder of this user, or HOME"
        ) from None
