"""The output: a Parquet file that appears whole or not at all, and the list of row errors."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import InputError

ROW_GROUP_ROWS = 65_536
_ROW_GROUP_BYTES = 64 << 20


class ScoredFile:
    """Writes rows with their scores beside `path` and moves them there at the end.

    Use as a context manager: leaving it without `commit` removes what was written.

    Parameters
    ----------
    path
        The Parquet file to make.
    schema
        The input's schema.
    score_column
        Name of the float32 column to add, null where a row has an error.
    force
        Whether an existing file may be replaced.

    Raises
    ------
    InputError
        There is such a file already, the folder cannot be written to, or the input has such a
        column already.
    """

    def __init__(self, path: Path, schema: pa.Schema, score_column: str, *, force: bool) -> None:
        if score_column in schema.names:
            raise InputError(
                f"the input has a column {score_column!r} already; name the new one with --score-column"
            )
        check_target(path, force=force)
        self.path = path
        self.errors_path = path.with_name(path.name + ".errors.jsonl")
        self.rows = 0
        self.row_errors = 0
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._partial_errors = self._partial.with_name(self._partial.name + ".errors")
        self._schema = schema.append(pa.field(score_column, pa.float32()))
        self._pending: list[pa.Table] = []
        self._errors: TextIO | None = None
        try:
            self._writer = pq.ParquetWriter(self._partial, self._schema, compression="zstd")
        except (OSError, pa.ArrowException) as error:
            self._partial.unlink(missing_ok=True)
            raise InputError(f"cannot write {path}: {error}") from None

    def write(self, table: pa.Table, scores: pa.Array, errors: pa.Array) -> None:
        """Append rows; exactly one of a row's score and error is null."""
        scored = table.append_column(self._schema.field(-1), scores)
        if errors.null_count < len(errors):
            self._write_errors(errors)
        self.rows += len(table)
        self._pending.append(scored)
        rows = sum(map(len, self._pending))
        if rows >= ROW_GROUP_ROWS or sum(part.nbytes for part in self._pending) >= _ROW_GROUP_BYTES:
            self._flush()

    def commit(self, metadata: Mapping[str, str]) -> None:
        """Finish the file, with `metadata` in its footer, and put it in place."""
        self._flush()
        self._writer.add_key_value_metadata(dict(metadata))
        self._writer.close()
        _sync(self._partial)
        if self._errors is None:
            self.errors_path.unlink(missing_ok=True)  # of an earlier run into the same place
        else:
            self._errors.close()
            _sync(self._partial_errors)
            self._partial_errors.replace(self.errors_path)
        self._partial.replace(self.path)
        _sync(self.path.parent)

    def __enter__(self) -> ScoredFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        if self._errors is not None:
            self._errors.close()
        self._partial.unlink(missing_ok=True)
        self._partial_errors.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_table(pa.concat_tables(self._pending), row_group_size=ROW_GROUP_ROWS)
            self._pending = []

    def _write_errors(self, errors: pa.Array) -> None:
        if self._errors is None:
            self._errors = self._partial_errors.open("w", encoding="utf-8")
        for row, reason in enumerate(errors.to_pylist(), self.rows):
            if reason is not None:
                self._errors.write(json.dumps({"row": row, "error": reason}, ensure_ascii=False) + "\n")
                self.row_errors += 1


def check_target(path: Path, *, force: bool) -> None:
    """Whether a Parquet file may be put at `path`; raises `InputError` if not."""
    if path.suffix.lower() != ".parquet":
        raise InputError(f"the output is Parquet; let the name {path} end in .parquet")
    if path.is_dir():
        raise InputError(f"{path} is a directory; name a file with -o")
    if path.exists() and not force:
        raise InputError(f"{path} exists already; replace it with --force or name another with -o")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: no such directory to write the output to")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path.parent} is not writable; name another place with -o")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
