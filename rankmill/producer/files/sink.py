"""Writes the output and the list of row errors. The output appears at its place only when it is complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputChanged
from rankmill.jobs.system import system
from rankmill.producer.collect.journal import Finished, Journal
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.files.formats.parquet import ROW_GROUP_ROWS
from rankmill.producer.files.outputs import PART, PARTS, errors_name
from rankmill.producer.files.plan import OutputPlan
from rankmill.producer.files.stores.output_record import OutputRecord
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.writing import (
    as_output_error,
    delete,
    discard,
    folder_of,
    identity,
    put,
    sync,
)
from rankmill.producer.files.workspace import PartsFolder, Workspace

_ROW_GROUP_BYTES = 64 << 20


class ScoredFile:
    """Writes rows with their scores into a folder, and moves the complete file to `path` at the end.

    Use the object as a context manager; without `publish`, the end of the block deletes the written files.
    Call, in this order, `write` for all rows, `finish` and `publish`.

    Parameters
    ----------
    path
        The file to create.
    folder
        Folder for the incomplete file. It is on the same file system as `path`, unless `path` is an object in
        a store.
    plan
        The columns of the output, and the order of its rows.
    first_row
        The row number in the input at which the file begins, for the list of row errors.
    record
        The record of the files that runners have written at this place. Only these files are replaced; with
        ``None``, any file is.

    Raises
    ------
    InputError
        The file's format cannot hold a column.
    OutputError
        From any method: the file cannot be written, for example because the disk is full.
    StoreError, RunnerError
        From `publish`: the store does not accept the file, or this process may not replace a file there.
    """

    def __init__(
        self,
        path: AnyPath,
        folder: Path,
        plan: OutputPlan,
        first_row: int = 0,
        record: OutputRecord | None = None,
    ) -> None:
        self.path = path
        self.errors_path = path.with_name(errors_name(path.name))
        self.partial = folder / "output"
        self.rows = 0
        self.row_errors = 0
        self.partial_errors = folder / "errors.jsonl"
        self._plan = plan
        self._first_row = first_row
        self._record = record
        self._pending: list[pa.Table] = []
        self._pending_rows = self._pending_bytes = 0
        self._thread = system.Executor(1, "rankmill-write")
        self._writing: Future[None] | None = None
        self._errors: TextIO | None = None
        with as_output_error(path):
            self._held = plan.held_rows(folder)
            self._writer = plan.form.writer(self.partial, path, plan.schema, plan.score)

    @property
    def last(self) -> ScoredFile:
        """The file that `publish` moves into place."""
        return self

    def write(self, part: ScoredTable) -> None:
        scored = _with_scores(part.table.select(self._plan.needed), self._plan.scores, part.scores)
        if self._plan.tokens:
            tokens = pa.nulls(len(scored), pa.int32()) if part.tokens is None else part.tokens
            scored = scored.append_column(pa.field(self._plan.tokens, pa.int32()), tokens)
        if part.errors.null_count < len(part.errors):
            self._write_errors(part)
        self.rows += len(part.table)
        if self._held:
            with as_output_error(self.path):
                self._held.add(scored)
        else:
            self._append(scored)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Complete the file, with `metadata` if the format has a place for it, and sync it."""
        with as_output_error(self.path):
            for table in self._held.finish() if self._held else ():
                self._append(table)
            self._flush()
            self._wait()
            self._writer.close(metadata)
            sync(self.partial)
            if self._errors is not None:
                self._errors.close()
                sync(self.partial_errors)

    def publish(self, journal: Journal | None = None) -> None:
        """Move the file, and the list of row errors if there are any, to their final paths.

        Before the file is moved, its `identity` is recorded in the `journal`, so that a resumed run
        recognizes the file as its own.
        """
        if journal:
            journal.seal(identity(self.partial, self.path))
        with as_output_error(self.path), folder_of(self.path) as folder:
            if self._record:
                listed = {} if self._errors is None else {self.errors_path: self.partial_errors}
                self._record.check((self.path, self.errors_path), folder)
                self._record.note({self.path: self.partial, **listed})
            if self._errors is None:
                # an earlier run with the same output may have left a list
                delete([self.errors_path], folder)
            else:
                put(self.partial_errors, self.errors_path, folder)
            put(self.partial, self.path, folder)

    def __enter__(self) -> ScoredFile:
        return self

    def __exit__(self, *_: object) -> None:
        with self._thread, suppress(OSError, pa.ArrowException):
            self._wait()
        with suppress(OSError, pa.ArrowException):
            self._writer.abandon()
        if self._held:
            self._held.close()
        if self._errors is not None:
            with suppress(OSError):
                self._errors.close()
        discard(self.partial)
        discard(self.partial_errors)

    def _append(self, table: pa.Table) -> None:
        table = table.select(self._plan.schema.names)  # the column that tells queries apart may be left out
        self._pending.append(table)
        self._pending_rows += len(table)
        self._pending_bytes += table.nbytes
        if self._pending_rows >= ROW_GROUP_ROWS or self._pending_bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write the pending rows as a row group in the background, after the previous group is written."""
        with as_output_error(self.path):
            self._wait()
            if self._pending:
                group = pa.concat_tables(self._pending)
                self._writing = self._thread.submit(self._writer.write, group)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write_errors(self, part: ScoredTable) -> None:
        with as_output_error(self.path):
            if self._errors is None:
                self._errors = self.partial_errors.open("w", encoding="utf-8")
            for row, reason in enumerate(part.errors.to_pylist(), self._first_row + self.rows):
                if reason is not None:
                    record = {"row": row, "error": reason, "attempts": part.attempts, "worker": part.worker}
                    self._errors.write(json.dumps(record, ensure_ascii=False) + "\n")
                    self.row_errors += 1


class ScoredParts:
    """Writes rows with their scores as parts (files) of `rows_per_part` rows each. It is used like
    `ScoredFile`.

    When a part is in place, the journal records the part, and the scores of its rows are deleted from the
    journal. A resumed run begins after the last recorded part. If a part is in place but not recorded, the
    run makes it again, with the same name and scores.

    Parameters
    ----------
    folder
        The folder to create.
    work
        The run's folder. Each chunk in its journal lies within one part.
    plan
        The columns of the rows; rows in parts are not ranked.
    rows, rows_per_part
        The number of all rows, and the number of rows in a part. The last part may have fewer.
    metadata
        Returns the metadata of a part.
    tally
        Returns the caller's sums over the rows so far, which are recorded in the journal.
    """

    def __init__(
        self,
        folder: AnyPath,
        work: Workspace,
        plan: OutputPlan,
        rows: int,
        rows_per_part: int,
        metadata: Callable[[], Mapping[str, str]],
        tally: Callable[[], str],
    ) -> None:
        self.path = folder
        self.errors_path = folder / "_part-*.errors.jsonl"
        self._folder = PartsFolder(folder)
        self._work = work
        self._plan = plan
        self._rows_per_part = rows_per_part
        self._metadata = metadata
        self._tally = tally
        self._count = max(-(-rows // rows_per_part), 1)
        self._file: ScoredFile | None = None
        finished = work.journal.finished
        self._done, self.rows, self.row_errors = finished.parts, finished.rows, finished.row_errors
        self._replaces = not self._done and bool(self._folder.there())
        self._open()

    @property
    def last(self) -> ScoredFile | None:
        """The file of the part that is being written, which `publish` moves to its place. ``None`` if all
        parts are in their places.
        """
        return self._file

    def write(self, part: ScoredTable) -> None:
        """Append the rows of a chunk, all of which must belong to one part. When a part is full, it is moved
        to its place. But the last part waits for `publish`.
        """
        assert self._file is not None
        before = self._file.row_errors
        self._file.write(part)
        self.rows += len(part.table)
        self.row_errors += self._file.row_errors - before
        if self._file.rows == self._rows_per_part and self._done + 1 < self._count:
            self.finish(self._metadata())
            self.publish(self._work.journal)
            self._open()

    def finish(self, metadata: Mapping[str, str]) -> None:
        if self._file:
            numbers = {PART: str(self._done + 1), PARTS: str(self._count)}
            self._file.finish({**metadata, **numbers})

    def publish(self, journal: Journal) -> None:
        """Move the part to its place, and record this in the run's `journal`."""
        if self._file is None:
            return
        self._work.check()
        if self._replaces:  # parts of another output stay until the first new part is complete
            with as_output_error(self.path):
                self._folder.clear(self._work.record)
            self._replaces = False
        self._file.publish()
        self._file.__exit__(None, None, None)
        self._file = None
        self._done += 1
        first, tally = journal.first, self._tally()
        journal.finish(
            Finished(parts=self._done, rows=self.rows, row_errors=self.row_errors, first=first, tally=tally)
        )

    def __enter__(self) -> ScoredParts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.__exit__(kind, error, trace)
        # If the input has changed, delete this run's parts: some rows may be from before the change, others
        # from after it. If this run has made no part, the parts are those of an earlier output.
        if isinstance(error, InputChanged) and self._done:
            self._folder.clear(self._work.record)
        elif error and self._done:
            error.add_note(f"{self._done:,} of {self._count:,} parts are in {self.path}")

    def _open(self) -> None:
        if self._done < self._count:
            path = self.path / self._plan.form.part_name(self._done + 1, self._count)
            self._file = ScoredFile(path, self._work.inside, self._plan, self.rows, self._work.record)


def _with_scores(table: pa.Table, names: Sequence[str], scores: pa.Array) -> pa.Table:
    """Append scores to a table, in one column for each of the `names`."""
    kind = scores.type
    if pa.types.is_fixed_size_list(kind) and kind.list_size == len(names):
        columns = [pc.list_element(scores, at) for at in range(len(names))]
    elif len(names) > 1:  # no row of the table has scores
        columns = [pa.nulls(len(scores), pa.float32()) for _ in names]
    else:
        columns = [scores]
    for name, column in zip(names, columns, strict=True):
        table = table.append_column(pa.field(name, pa.float32()), column)
    return table
