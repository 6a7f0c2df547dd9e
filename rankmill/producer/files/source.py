"""Checks the files of the input before scoring begins, and reads them as one stream of tables."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from types import MappingProxyType

import pyarrow as pa

from rankmill.jobs.contract.errors import InputChanged, InputError
from rankmill.jobs.contract.wire import is_text
from rankmill.jobs.system import system
from rankmill.producer.collect.pairs import OpenTables, as_json, cut_tables, holds_messages
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.formats.base import ROW, Reader, ReadOptions, Survey, TextColumns, text_of
from rankmill.producer.files.formats.delimited import CSV, TSV
from rankmill.producer.files.formats.jsonl import unified, with_keys, with_text
from rankmill.producer.files.formats.table import format_of, open_reader
from rankmill.producer.files.formats.text import texts_of
from rankmill.producer.files.inputs import InputFile
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import fingerprint

_BATCH_ROWS = 1024
"""About this many rows of an input are read at a time. More would be faster, but would take more memory if
texts are long.
"""

_SELECT_ROWS = 65_536

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""A column that is made from folders' names has integers if all of its values match this pattern. Otherwise,
it has text.
"""

_AS_USUAL = ReadOptions()

_AHEAD_BYTES = 16 << 20
_AHEAD_BATCHES = 64
"""At most this many batches, and at most `_AHEAD_BYTES` bytes, are read ahead. One batch is always read
ahead, even if it has more bytes.
"""


logger = logging.getLogger(__name__)

Shard = tuple[int, int]
"""The number of a shard (from 1), and the number of shards."""


def shard_range(rows: int, shard: Shard | None) -> tuple[int, int]:
    """Return the first row of a shard and the row after its last: shard 2 of 4 of 100 rows is 25 to 50."""
    number, shards = shard or (1, 1)
    return rows * (number - 1) // shards, rows * number // shards


def cut_range(batches: Iterator[pa.RecordBatch], start: int, stop: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `batches` with the numbers `start` to ``stop - 1``; later batches are not read."""
    row = 0
    while row < stop and (batch := next(batches, None)) is not None:
        first, last = max(start - row, 0), min(stop - row, len(batch))
        if first < last:
            yield batch.slice(first, last - first)
        row += len(batch)


class PairSource(ABC):
    """The base class of inputs. An input yields rows in order, and is checked before scoring begins.

    Attributes
    ----------
    columns
        Names of the columns with the texts or conversations.
    schema
        The columns of the input.
    carries
        Whether the column `ROW` can be read. It has each row as it stands in its file.
    taken
        For a ranking: which columns were read as ids and texts, such as ``{"corpus": "id '_id', text
        'text'"}``.
    """

    columns: TextColumns
    schema: pa.Schema
    carries = False
    taken: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, files: Sequence[InputFile], fingerprints: Sequence[str], rows: int, shard: Shard | None
    ) -> None:
        self._files, self._fingerprints = files, fingerprints
        self._start, self._stop = shard_range(rows, shard)

    @property
    def rows(self) -> int:
        return self._stop - self._start

    def tables(self, sizing: Sizing, start: int = 0, names: Sequence[str] | None = None) -> OpenTables:
        """Open an iterator over the shard's rows in order, from its row `start` on. It yields a table for
        each chunk.

        A table has the columns that workers get, and the columns `names`. If `names` is ``None``, a table has
        all columns of the input. When the first table is asked for, a thread begins to read ahead.

        Raises
        ------
        InputChanged
            A file has changed since the source was opened.
        InputError
            A file is damaged in a way that the first check cannot find.
        """
        batches = _ReadAhead(self._batches(start, self.schema.names if names is None else names))
        tables = (pa.Table.from_batches([batch]) for batch in batches)
        return OpenTables(cut_tables(tables, self.columns.sent, sizing, start), batches)

    @abstractmethod
    def select(self, names: Iterable[str]) -> Iterator[pa.RecordBatch]:
        """Yield the columns `names` of all rows of the shard, in order."""

    def check_unchanged(self) -> None:
        """Raise `InputChanged` if a file has changed since the source was opened."""
        for file, before in zip(self._files, self._fingerprints, strict=True):
            _check_file_unchanged(file.path, before)

    def explain(self, part: ScoredTable) -> ScoredTable:
        """Make the errors of rows say more, such as which id is missing. The base class changes nothing."""
        return part

    @abstractmethod
    def _batches(self, start: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the shard's rows from row `start` on. They have at least the columns `names` and the columns
        for workers.
        """


@dataclass(frozen=True)
class _OpenFile:
    file: InputFile
    fingerprint: str
    reader: Reader
    survey: Survey


class FileSource(PairSource):
    """Reads files in order, with one schema for all of them. `open_source` makes this object."""

    def __init__(
        self,
        opened: Sequence[_OpenFile],
        columns: TextColumns,
        schema: pa.Schema,
        limit: int | None,
        shard: Shard | None,
        as_text: Collection[str] = (),
    ) -> None:
        self.columns, self.schema, self._opened, self._as_text = columns, schema, opened, as_text
        self.carries = all(opened_file.survey.as_asked for opened_file in opened)
        rows = sum(opened_file.survey.rows for opened_file in opened)
        self._is_whole = limit is None and shard is None
        super().__init__(
            [opened_file.file for opened_file in opened],
            [opened_file.fingerprint for opened_file in opened],
            rows if limit is None else min(rows, limit),
            shard,
        )

    def select(self, names: Iterable[str]) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([self.schema.field(name) for name in names])
        return self._rows(_SELECT_ROWS, schema)

    def _batches(self, start: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        every = dict.fromkeys([*names, *self.columns.sent])
        own = [
            pa.field(name, pa.string()) if name.startswith(ROW) else self.schema.field(name) for name in every
        ]
        return self._rows(_BATCH_ROWS, pa.schema(own), start)

    def _rows(self, size: int, schema: pa.Schema, start: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield this shard's rows from its row `start` on. Files that end before this row are not read."""
        if self._is_whole and not start:  # read all files to the end, to notice if the last one has grown
            return self._all_rows(self._opened, size, schema)
        first = self._start + start
        ends = list(accumulate((opened_file.survey.rows for opened_file in self._opened), initial=0))
        skipped = max(bisect_right(ends, first) - 1, 0)
        rows = self._all_rows(self._opened[skipped:], size, schema)
        return cut_range(rows, first - ends[skipped], self._stop - ends[skipped])

    def _all_rows(
        self, opened: Sequence[_OpenFile], size: int, schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        for opened_file in opened:
            path, count = opened_file.file.path, 0
            try:
                for batch in opened_file.reader.batches(_to_ask_for(opened_file.survey, schema), size):
                    count += batch.num_rows
                    self._check_texts(path, batch, count)
                    yield self._conform(batch, schema, opened_file.file)
            except (InputError, pa.ArrowException) as error:
                _check_file_unchanged(path, opened_file.fingerprint)
                if isinstance(error, InputError):
                    raise
                raise InputError(f"{path}: {text_of(error)}") from None
            _check_file_unchanged(path, opened_file.fingerprint)
            if count != opened_file.survey.rows:
                raise _changed(path, f"{opened_file.survey.rows:,} rows", f"{count:,} rows")

    def _conform(self, batch: pa.RecordBatch, schema: pa.Schema, file: InputFile) -> pa.RecordBatch:
        """Convert a batch of `file` to `schema`. The batch may lack columns of `schema`, or have narrower
        types.
        """
        if not file.partition and not self._as_text and batch.schema.equals(schema):
            return batch
        constant = dict(file.partition)
        columns = []
        for field in schema:
            name = field.name
            if name == ROW:
                column = self._rows_of(batch[ROW], constant)
            elif name in constant:
                column = pa.repeat(pa.scalar(constant[name], pa.string()), len(batch))
            elif batch.schema.get_field_index(name) >= 0:
                column = batch[name]
            elif name.startswith(ROW):
                column = as_json(batch[name.removeprefix(ROW)])
            else:
                column = pa.nulls(len(batch), field.type)
            columns.append(column if column.type == field.type else _cast(column, field, file.path))
        return pa.record_batch(columns, schema=schema)

    def _rows_of(self, rows: pa.Array, constant: Mapping[str, str | None]) -> pa.Array:
        """Add the values `constant`, which come from the names of folders, to each JSON object in `rows`. In
        columns that are to be read as text, also turn the values into text.
        """
        if not constant and not self._as_text:
            return rows
        added = {
            name: pa.scalar(text).cast(self.schema.field(name).type).as_py()
            for name, text in constant.items()
        }
        texts = rows.to_pylist()
        if self._as_text:
            texts = [with_text(row, self._as_text) for row in texts]
        return pa.array([with_keys(row, added) for row in texts], pa.string())

    def _check_texts(self, path: AnyPath, batch: pa.RecordBatch, rows: int) -> None:
        for name in self.columns.names:
            try:
                if name in batch.schema.names:
                    batch[name].validate(full=True)
            except pa.ArrowInvalid:
                raise InputError(
                    f"{path}: column {name!r} is not valid UTF-8 in one of the rows "
                    f"{rows - len(batch)} to {rows - 1} (counted from 0)"
                ) from None


class _ReadAhead(Iterator[pa.RecordBatch]):
    """Reads batches ahead in a thread, which saves time because Arrow decodes without Python's lock.

    If reading a batch fails, the exception is raised when the caller asks for that batch. If nobody calls
    `close`, the thread ends by itself. Do not make this a generator: the garbage collector, which closes
    generators, would have to wait for the thread.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._thread = system.Executor(1, "rankmill-ahead")
        self._reading = system.Lock()
        self._pending: deque[Future[pa.RecordBatch | None]] = deque()
        self._begun = False

    def __next__(self) -> pa.RecordBatch:
        if not self._begun:
            self._begun = True
            self._read(1)
        try:
            batch = self._pending.popleft().result() if self._pending else None
        except BaseException:
            self.close()
            raise
        if batch is None:
            self.close()
            raise StopIteration
        most = min(_AHEAD_BYTES // max(batch.nbytes, 1), _AHEAD_BATCHES)
        self._read(max(most, 1))
        return batch

    def _read(self, most: int) -> None:
        while len(self._pending) < most:
            self._pending.append(self._thread.submit(self._read_next))

    def _read_next(self) -> pa.RecordBatch | None:
        with self._reading:
            return next(self._batches, None)

    def close(self) -> None:
        """Wait for the thread to end, and close the files."""
        self._pending.clear()
        self._thread.shutdown(cancel_futures=True)
        # If a signal has interrupted `submit`, the executor does not know its thread. `shutdown` has then not
        # waited for the thread, and the thread may still be reading.
        with self._reading:
            if close := getattr(self._batches, "close", None):
                close()


def open_source(
    files: Sequence[InputFile],
    columns: TextColumns,
    *,
    allow_nulls: bool,
    as_text: Collection[str] = (),
    fingerprints: Sequence[str] | None = None,
    options: ReadOptions = _AS_USUAL,
    limit: int | None = None,
    shard: Shard | None = None,
) -> FileSource:
    """Survey all input files, check that they can be scored, and make the source that reads them.

    Parameters
    ----------
    files
        From `rankmill.producer.files.inputs.find_files`.
    columns
        Names of the columns with the texts or conversations.
    allow_nulls
        Whether a null text becomes a row error. If not, a null text raises `InputError`. A null conversation
        always becomes a row error.
    as_text
        Columns to read as text, whatever their values are.
    fingerprints
        The expected `fingerprint` of each file; default: the current ones.
    options
        How to read the files.
    limit
        Read at most this many rows; default: all.
    shard
        The part of the rows within `limit` to read; default: all.

    Raises
    ------
    InputError
        A file cannot be scored; the message names the file, column and row, and how to fix it.
    """
    opened: list[_OpenFile] = []
    rows, missing = 0, "query or passage" if columns.inputs == "pairs" else "text"
    for file, before in zip(files, fingerprints or [fingerprint(file.path) for file in files], strict=True):
        reader = open_reader(file.path, columns.texts, replace(options, messages=columns.messages))
        surveyed = reader.survey(find_nulls=not allow_nulls)
        survey = _with_partition(file, surveyed)
        if surveyed.schema.names or surveyed.rows:
            _check_columns(file.path, survey.schema, columns, options)
        null = survey.first_null
        if null is not None and not allow_nulls and (limit is None or rows + null < limit):
            raise InputError(
                f"{file.path}: row {null} (counted from 0) has a null {missing}; "
                "remove it, or leave out --on-null fail to have it reported as a row error"
            )
        rows += survey.rows
        opened.append(_OpenFile(file, before, reader, survey))
    schema = _unify(opened, columns, as_text)
    source = FileSource(opened, columns, schema, limit, shard, as_text)
    # Read the columns whose type changes, so that a value that does not fit ends the command before any work.
    if widened := _widened(opened, schema):
        deque(source.select(widened), 0)
    return source


def _check_file_unchanged(path: AnyPath, before: str) -> None:
    try:
        now = fingerprint(path)
    except InputError as error:
        if not isinstance(error.__context__, FileNotFoundError):
            raise  # the disk cannot be read now; the file need not have changed
        now = "not there"
    if now != before:
        raise _changed(path, before, now)


def _changed(path: AnyPath, before: str, now: str) -> InputChanged:
    return InputChanged(
        f"{path} has changed while it was read (it was {before} and is {now}); no output was written. "
        "When nothing writes to it any more, give the same command again: it starts over"
    )


def _cast(column: pa.Array, field: pa.Field, path: AnyPath) -> pa.Array:
    try:
        return (texts_of(column) if isinstance(column.type, pa.UuidType) else column).cast(field.type)
    except pa.ArrowInvalid as error:
        raise InputError(
            f"{path}: column {field.name!r} does not fit {field.type}, which fits the other files: "
            f"{text_of(error)} ({_way_out(field.name, is_plain=_is_plain(column.type))})"
        ) from None


def _check_columns(path: AnyPath, schema: pa.Schema, columns: TextColumns, options: ReadOptions) -> None:
    twice = {name for name, number in Counter(schema.names).items() if number > 1}
    is_named = format_of(path) in {CSV, TSV} and not options.way_out
    headerless = "; --columns names those of a file without a header" if is_named else ""
    if twice:
        raise InputError(f"{path}: two columns are named {min(twice)!r}; rename one{headerless}")
    for option, name in zip(columns.options, columns.names, strict=True):
        if name not in schema.names:
            raise InputError(
                f"{path}: no column {name!r}; it has {', '.join(map(repr, schema.names)) or 'none'} "
                f"(choose with {option}{headerless})"
            )
        kind = schema.field(name).type
        if columns.inputs == "conversations":
            if not holds_messages(kind):
                raise InputError(
                    f"{path}: column {name!r} holds {kind}, not conversations: lists of {{role, content}} or "
                    f"their JSON (choose another with {option})"
                )
        elif not is_text(kind):
            way_out = f"write it as text first, or choose another with {option}"
            is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
            if is_list and not options.way_out:  # the command has the options of score-file
                way_out = f"--list-columns {name} makes a row of each item"
                way_out = "--messages-column is for conversations" if holds_messages(kind) else way_out
            raise InputError(f"{path}: column {name!r} holds {kind}, not text ({way_out})")


def _with_partition(file: InputFile, survey: Survey) -> Survey:
    """Add the columns from the names of the file's folders, as text.

    Raises
    ------
    InputError
        The file itself has such a column.
    """
    schema = survey.schema
    for name, text in file.partition:
        if schema.get_field_index(name) >= 0:
            raise InputError(
                f"{file.path}: column {name!r} is in the file and in its folder's name, {name}={text}; "
                "rename one"
            )
        schema = schema.append(pa.field(name, pa.string()))
    return replace(survey, schema=schema)


def _widened(opened: Sequence[_OpenFile], schema: pa.Schema) -> list[str]:
    """Return the names of columns whose type in `schema` is not text, and is not the type in a file."""
    own = chain.from_iterable(opened_file.survey.schema for opened_file in opened)
    kinds = {(field.name, field.type) for field in own if not is_text(field.type)}
    return sorted({name for name, kind in kinds if schema.field(name).type not in (kind, pa.string())})


def _unify(opened: Sequence[_OpenFile], columns: TextColumns, as_text: Collection[str]) -> pa.Schema:
    """Make one schema with the columns of all files. The type of each column fits its values in every file.

    Raises
    ------
    InputError
        A column of `as_text` is in none of the files or cannot be text, or columns of the files are
        incompatible.
    """
    having: dict[str, list[tuple[_OpenFile, pa.Field]]] = {}
    for opened_file in opened:
        for field in opened_file.survey.schema:
            having.setdefault(field.name, []).append((opened_file, field))
    if having and (unknown := set(as_text) - having.keys()):
        raise InputError(f"--text-columns: no column {min(unknown)!r} in the input")
    mixed = {name for opened_file in opened for name in opened_file.survey.mixed}
    fields = []
    for name, having_it in having.items():
        kind, is_mixed = _common_type(name, having_it, is_text_asked=name in {*as_text, *columns.texts})
        mixed |= {name} if is_mixed else set()
        first = having_it[0][1].with_type(kind)
        fields.append(first if len(having_it) == len(opened) == 1 else first.with_nullable(True))
    if mixed := mixed - set(as_text):
        names = ", ".join(map(repr, sorted(mixed)))
        logger.warning("no one type fits all values of column %s: the output has their text", names)
    metadata_of_files = (opened_file.survey.schema.metadata for opened_file in opened)
    first_metadata = next((metadata for metadata in metadata_of_files if metadata), None)
    if not fields:
        fields = [pa.field(name, pa.string()) for name in columns.names]
    return pa.schema(fields, metadata=first_metadata)


def _common_type(
    name: str, having_it: Sequence[tuple[_OpenFile, pa.Field]], *, is_text_asked: bool
) -> tuple[pa.DataType, bool]:
    """Return a type for a column that several files have. Also return whether this type is text only because
    no other type fits the column in all files.
    """
    partitions = [dict(opened_file.file.partition) for opened_file, _ in having_it]
    if all(name in partition for partition in partitions) and not is_text_asked:
        values = {text for partition in partitions if (text := partition[name]) is not None}
        return (pa.int64() if all(map(_INTEGER.fullmatch, values)) else pa.string()), False
    kinds = [field.type for _, field in having_it]
    if is_text_asked:
        kinds = [_text_of_column(opened_file, field) for opened_file, field in having_it]
    if (common := unified(kinds)) is not None:
        return common, False
    # If one of the files has no types of its own (such as CSV), try to read the column as text in all files.
    if not all(opened_file.survey.typed for opened_file, _ in having_it):
        with suppress(InputError):
            kinds = [_text_of_column(opened_file, field) for opened_file, field in having_it]
            if (common := unified(kinds)) is not None:
                return common, True
    place = next(at for at in range(1, len(kinds)) if unified(kinds[: at + 1]) is None)
    way_out = _way_out("NAME", is_plain=all(_can_be_text(*each) for each in having_it))
    raise InputError(
        f"{having_it[place][0].file.path}: its columns do not fit those of the files before it: {name!r} "
        f"holds {kinds[place]}, not {unified(kinds[:place])} ({way_out})"
    )


def _way_out(name: str, *, is_plain: bool) -> str:
    if is_plain:
        return f"--text-columns {name} reads the column as text"
    return "write the column with one type in all files"


def _is_plain(kind: pa.DataType) -> bool:
    is_number = pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
    return is_number or pa.types.is_null(kind) or isinstance(kind, pa.UuidType)


def _can_be_text(opened_file: _OpenFile, field: pa.Field) -> bool:
    return is_text(field.type) or opened_file.survey.as_asked or _is_plain(field.type)


def _text_of_column(opened_file: _OpenFile, field: pa.Field) -> pa.DataType:
    """Return the type with which a file's column is read as text. Raises `InputError` if the column cannot be
    text.
    """
    kind = field.type
    if is_text(kind):
        return kind
    if _can_be_text(opened_file, field):
        return pa.string()
    raise InputError(f"--text-columns: column {field.name!r} of {opened_file.file.path} holds {kind}")


def _to_ask_for(survey: Survey, schema: pa.Schema) -> pa.Schema:
    """Return the columns to ask a file's reader for, which are those of `schema` that the file has. If the
    reader cannot convert columns, they get the types that they have in the file.
    """
    own = dict(zip(survey.schema.names, survey.schema, strict=True))
    if survey.as_asked:
        return pa.schema([field for field in schema if field.name in own or field.name.startswith(ROW)])
    names = dict.fromkeys(field.name.removeprefix(ROW) for field in schema)
    return pa.schema([own[name] for name in names if name in own])
