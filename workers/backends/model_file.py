"""Single files of a model, in its directory or on the hub."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def commit_of(source: str | Path, revision: str | None) -> str | None:
    """The commit that a revision on the hub names now, so that all files come from one commit.

    The revision itself if there is no such model, or if the model is a directory.
    """
    if isinstance(source, Path):
        return revision
    from huggingface_hub import hf_hub_download  # like the imports below, only for models on the hub

    try:
        config = hf_hub_download(source, "config.json", revision=revision)
    except (OSError, ValueError):  # loading the model reports what is wrong
        return revision
    return Path(config).parent.name


def model_file(source: str | Path, revision: str | None, name: str) -> Path | None:
    """Path of a model's file on this disk, fetched if necessary; ``None`` if the model has no such file.

    Parameters
    ----------
    source
        Directory or hub id.
    revision
        Branch, tag or commit on the hub.
    name
        Path of the file in the model.

    Raises
    ------
    OSError
        From transformers, when there is no such model or it cannot be read.
    """
    if isinstance(source, Path):
        return source / name if (source / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils import cached_file

    revision = revision or "main"
    found = cached_file(
        source,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found:
        return Path(found)
    if try_to_load_from_cache(source, name, revision=revision) is None:
        logger.warning(
            "the hub does not answer, and %s of %s was never fetched: going on without it", name, source
        )
    return None
