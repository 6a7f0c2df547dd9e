"""Ids of files and batches."""

from __future__ import annotations

import uuid

_FILE = "file-"
_BATCH = "batch_"


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
