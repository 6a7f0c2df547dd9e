"""Paths that begin with ``~``, folders of this user, and files that come with rankmill."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from rankmill.jobs.contract.errors import ConfigError


def expanded(name: str) -> Path:
    """Expand ``~`` in a path; a path with an unknown user, such as ``~$draft.csv``, stays as it is."""
    with suppress(ValueError):  # no user can have such a name, as it has a null byte
        return Path(os.path.expanduser(name))  # noqa: PTH111 -- Path's own raises for such a path
    return Path(name)


def model_folder(model: str) -> Path | None:
    """Return the directory that a model's name stands for on this host, or ``None`` if it does not exist.

    The names ``demo`` and NAME@TAG never stand for a directory.
    """
    is_name = "/" not in model and (model == "demo" or "@" in model)
    # `Path.is_dir` raises for names that no file can have, and for a stale mount
    return None if is_name or not os.path.isdir(folder := expanded(model)) else folder  # noqa: PTH112


def model_of_run(model: str) -> str:
    """Return a model's name as a run stores it. A directory's name becomes an absolute path, because workers
    may run in other folders.
    """
    folder = model_folder(model)
    return model if folder is None else str(folder.resolve())


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
        The path begins with ``~``, and the user's home folder is unknown, as in some containers.
    """
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"user {os.geteuid()} has no home for {folder}: set {remedy} to a folder of this user, or HOME"
        ) from None


def shipped(*names: str) -> Path:
    """The path of a shipped file or folder, such as ``shipped("configs", "base.yaml")``."""
    return Path(str(files("rankmill").joinpath(*names)))
