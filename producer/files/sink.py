"""The output: a file that appears only when it is complete, and the list of row errors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

import pyarrow as pa

from rankmill.jobs.contract.errors import OutputError
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.files.layout import Layout, Step
from rankmill.producer.files.part_names import errors_name
from rankmill.producer.files.stores.made import Made
from rankmill.producer.files.stores.paths import ObjectPath
from rankmill.producer.files.stores.upload import Upload
from rankmill.producer.files.stores.writing import discard, identity, put, sync
from rankmill.producer.files.writers.parquet import ROW_GROUP_ROWS

_ROW_GROUP_BYTES = 64 << 20


class ScoredFile:
    """Writes rows with their scores into a folder, and moves the complete file to `path` at the end.

    Use it as a context manager; leaving it without `publish` deletes the written files. Call, in this
    order, `write` for all rows, `finish` and `publish`.

    Parameters
    ----------
    path
        The file to create.
    folder
        Folder for the incomplete file, on the same file system as `path`.
    layout
        The columns and the order of the rows.
    first_row
        Number of the first row in the input, for the list of row errors.
    made
        What runners have made at this place; ``None``: whatever is there is replaced.

    Raises
    ------
    InputError
        The file's format cannot hold a column.
    OutputError
        From any method: the file cannot be written, for example because the disk is full.
    """

    def __init__(
        self, path: Path, folder: Path, layout: Layout, first_row: int = 0, made: Made | None = None
    ) -> None:
        self.path = path
        self.errors_path = path.with_name(errors_name(path.name))
        self.partial = folder / "output"
        self.rows = 0
        self.row_errors = 0
        self.partial_errors = folder / "errors.jsonl"
        self._layout = layout
        self._first_row = first_row
        self._made = made
        self._pending: list[pa.Table] = []
        self._pending_rows = self._pending_bytes = 0
        self._thread = ThreadPoolExecutor(1, "rankmill-write")
        self._writing: Future[None] | None = None
        self._errors: TextIO | None = None
        self._steps = layout.steps(folder)
        self._upload = Upload(self.partial, path) if isinstance(path, ObjectPath) else None
        with _as_output_error(path):
            self._writer = layout.form.writer(self.partial, path, layout.schema, layout.score)

    @property
    def last(self) -> ScoredFile:
        """The file that `publish` moves into place."""
        return self

    def write(self, part: ScoredTable) -> None:
        """Append rows."""
        scored = part.table.select(self._layout.kept)
        for name, scores in zip(self._layout.scores, self._layout.columns(part.scores), strict=True):
            scored = scored.append_column(pa.field(name, pa.float32()), scores)
        with _as_output_error(self.path):
            if part.errors.null_count < len(part.errors):
                self._write_errors(part)
            self.rows += len(part.table)
            self._pass((scored,), self._steps)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Complete the file, with `metadata` where its format has a place for it, and sync it."""
        with _as_output_error(self.path):
            for at, step in enumerate(self._steps, 1):
                self._pass(step.finish(), self._steps[at:])
            self._flush()
            self._wait()
            self._writer.close(metadata)
            sync(self.partial)
            if self._errors is not None:
                self._errors.close()
                sync(self.partial_errors)

    def publish(self, journal: Journal | None = None) -> None:
        """Move the file, and the list of row errors if there are any, to their final paths.

        The `journal` notes before that what the output is.
        """
        if journal:
            journal.seal(identity(self.partial, in_store=isinstance(self.path, ObjectPath)))
        with _as_output_error(self.path):
            if self._made:
                listed = {} if self._errors is None else {self.errors_path: self.partial_errors}
                self._made.check((self.path, self.errors_path))
                self._made.note({self.path: self.partial, **listed})
            if self._errors is None:
                self.errors_path.unlink(missing_ok=True)  # from an earlier run with the same output
            else:
                put(self.partial_errors, self.errors_path)
            put(self.partial, self.path, self._upload)

    def __enter__(self) -> ScoredFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._thread, suppress(OSError, pa.ArrowException):
            self._wait()
        if self._upload:
            self._upload.abandon()
        with suppress(OSError, pa.ArrowException):
            self._writer.abandon()
        for step in self._steps:
            step.close()
        if self._errors is not None:
            with suppress(OSError):
                self._errors.close()
        discard(self.partial)
        discard(self.partial_errors)

    def _pass(self, tables: Iterable[pa.Table], steps: Sequence[Step]) -> None:
        """Pass rows through the steps, and append what comes out."""
        for table in tables:
            if steps:
                self._pass(steps[0].add(table), steps[1:])
            else:
                self._append(table)

    def _append(self, table: pa.Table) -> None:
        self._pending.append(table)
        self._pending_rows += len(table)
        self._pending_bytes += table.nbytes
        if self._pending_rows >= ROW_GROUP_ROWS or self._pending_bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write the pending rows as a row group in the background, after the previous group is written."""
        self._wait()
        if self._upload:
            self._upload.follow()
        if self._pending:
            group = pa.concat_tables(self._pending)
            self._writing = self._thread.submit(self._writer.write, group)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write_errors(self, part: ScoredTable) -> None:
        if self._errors is None:
            self._errors = self.partial_errors.open("w", encoding="utf-8")
        for row, reason in enumerate(part.errors.to_pylist(), self._first_row + self.rows):
            if reason is not None:
                record = {"row": row, "error": reason, "attempts": part.attempts, "worker": part.worker}
                self._errors.write(json.dumps(record, ensure_ascii=False) + "\n")
                self.row_errors += 1


@contextmanager
def _as_output_error(path: Path) -> Iterator[None]:
    """Raise errors of the system and of Arrow as an `OutputError` that names `path`."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        number = getattr(error, "errno", None)
        raise OutputError(f"cannot write {path}: {os.strerror(number) if number else error}") from None
