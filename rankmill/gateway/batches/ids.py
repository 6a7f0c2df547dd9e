"""Ids of files and batches."""

from __future__ import annotations

import re
import uuid

_FILE = "file-"
_BATCH = "batch_"

_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")


def can_be_id(text: str) -> bool:
    """Whether a file or batch may be called so; a colon would lead to other keys."""
    return bool(_ID.fullmatch(text))


def new_file_id() -> str:
    """A new id of a file that is uploaded."""
    return _FILE + uuid.uuid4().hex


def new_batch_id(run: str) -> str:
    """The id of the batch that is scored by a run."""
    return _BATCH + run


def output_id(batch: str) -> str:
    """The id of a batch's output."""
    return f"{_FILE}{batch.removeprefix(_BATCH)}-output"


def errors_id(batch: str) -> str:
    """The id of the list of a batch's errors."""
    return f"{_FILE}{batch.removeprefix(_BATCH)}-errors"
