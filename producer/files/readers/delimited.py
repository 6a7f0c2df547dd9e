"""CSV and TSV files, plain or compressed with gzip or zstd.

The first line names the columns. The type of a column is found from the whole file, so one word in a
column of numbers makes it a text column and does not cause an error in the middle of a run. An empty
field without quotes is null. TSV has no quoting: a quote is an ordinary character. The quotes of CSV are
checked (`readers.quotes`), as Arrow lets a stray one merge rows.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pcsv

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.protocol.submitted.request import DELIMITERS
from rankmill.producer.files.readers import Survey, first_null
from rankmill.producer.files.readers.forms import ALL_FORMS, Forms, forms_of
from rankmill.producer.files.readers.quotes import MAX_FIELD_MIB, open_quoted
from rankmill.producer.files.stores.reading import open_stream

_BLOCK_BYTES = 16 << 20
"""Size of the blocks that are parsed, or that of the longest field; a row must fit into one."""

_WAY_OUT = "raise the bound: score-file --max-field-mib"

_HEADER_BYTES = 1 << 20
"""Longest header line."""

_MAX_COLUMNS = 10_000

_Types = dict[str, pa.DataType]


class DelimitedReader:
    """Reads text with one row to a line.

    Parameters
    ----------
    delimiter
        The character between two fields.
    has_quotes
        Whether a field may be in quotes, as in CSV; in TSV a quote is an ordinary character.
    max_field_mib
        Longest field, in MiB; default: `MAX_FIELD_MIB`.
    """

    def __init__(self, delimiter: str, *, has_quotes: bool, max_field_mib: int | None = None) -> None:
        self._delimiter = delimiter
        self._has_quotes = has_quotes
        self._max_field_mib = max_field_mib or MAX_FIELD_MIB

    def survey(self, path: Path, texts: Sequence[str], *, find_nulls: bool) -> Survey:
        """See `Reader.survey`; reads the file once, and once more for each column that is not UTF-8."""
        types: _Types = dict.fromkeys([*self.header(path), *texts], pa.string())
        while True:
            try:
                return self._scan(path, texts, types)
            except _Unfit as error:
                if error.column in texts:
                    raise InputError(
                        f"{path}: column {error.column!r}, row {error.row} (the header is row 1) is not "
                        "valid UTF-8; convert the file first, for example: iconv -f latin1 -t utf-8"
                    ) from None
                types[error.column] = pa.binary()

    def batches(self, path: Path, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """See `Reader.batches`; a batch is a block of the file."""
        if not schema.names:
            return
        try:
            yield from self._stream(path, {field.name: field.type for field in schema})
        except _Unfit as error:
            raise InputError(
                f"{path}: column {error.column!r}, row {error.row} (the header is row 1) does not hold "
                f"{error.type}; read it as text with --text-columns"
            ) from None

    def _scan(self, path: Path, texts: Sequence[str], types: _Types) -> Survey:
        rows, null, schema = 0, None, pa.schema([])
        forms: dict[str, Forms] = {
            name: ALL_FORMS for name, kind in types.items() if kind == pa.string() and name not in texts
        }
        for batch in self._stream(path, types):
            schema = batch.schema
            if null is None:
                found = first_null(batch, texts)
                null = None if found is None else rows + found
            for name, column in zip(schema.names, batch.columns, strict=True):
                if forms.get(name):
                    forms[name] = forms_of(column, forms[name])
            rows += batch.num_rows
        return Survey(schema, rows, null, forms)

    def _stream(self, path: Path, types: _Types) -> Iterator[pa.RecordBatch]:
        names = self.header(path)
        if not names:
            return
        longest = self._max_field_mib
        block_bytes = _BLOCK_BYTES if longest <= MAX_FIELD_MIB else longest << 20
        try:
            reader = pcsv.open_csv(
                open_quoted(path, self._delimiter, longest, _WAY_OUT)
                if self._has_quotes
                else open_stream(path),
                read_options=pcsv.ReadOptions(block_size=block_bytes, use_threads=False),
                parse_options=pcsv.ParseOptions(
                    delimiter=self._delimiter,
                    quote_char='"' if self._has_quotes else False,
                    newlines_in_values=self._has_quotes,
                ),
                convert_options=pcsv.ConvertOptions(
                    column_types=types,
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
            yield pa.RecordBatch.from_pylist([], schema=reader.schema)  # the schema, even without rows
            yield from reader
        except (pa.ArrowException, OSError) as error:
            if self._has_quotes and "Empty CSV file" in str(error):  # before the file's end is looked at
                with open_quoted(path, self._delimiter, longest, _WAY_OUT) as stream:
                    while stream.read(block_bytes):
                        pass
            raise _explain(path, error, names, block_bytes) from None

    def header(self, path: Path) -> list[str]:
        """Read the column names; none for an empty file. Arrow's errors give only a column's number."""
        try:
            with open_stream(path) as stream:
                raw = stream.read(_HEADER_BYTES)
            lines = io.StringIO(raw.decode("utf-8-sig", errors="surrogateescape"), newline="")
            quoting = csv.QUOTE_MINIMAL if self._has_quotes else csv.QUOTE_NONE
            names = next(csv.reader(lines, delimiter=self._delimiter, quoting=quoting), [])  # type: ignore[arg-type]
        except (OSError, csv.Error, pa.ArrowException) as error:
            raise InputError(f"{path}: cannot be read: {error}") from None
        if len(raw) == _HEADER_BYTES and not lines.read(1):
            raise InputError(f"{path}: its first line, the header, is longer than {_HEADER_BYTES >> 20} MiB")
        if any("\udc80" <= char <= "\udcff" for name in names for char in name):
            raise InputError(
                f"{path}: the header is not valid UTF-8; "
                "convert the file first, for example: iconv -f latin1 -t utf-8"
            )
        if len(names) > _MAX_COLUMNS:
            raise InputError(f"{path}: {len(names):,} columns; at most {_MAX_COLUMNS:,} can be read")
        return names


def notice_delimiter(path: Path, texts: Sequence[str]) -> str:
    """The delimiter with which the header of a CSV file has the columns `texts`, else the most columns.

    Raises
    ------
    InputError
        The file cannot be read.
    """
    headers = {each: DelimitedReader(each, has_quotes=True).header(path) for each in DELIMITERS.values()}
    fitting = [each for each, names in headers.items() if set(texts) <= set(names)]
    return fitting[0] if fitting else max(headers, key=lambda each: len(headers[each]))


class _Unfit(Exception):
    """A value does not fit the type of its column."""

    def __init__(self, column: str, row: int, kind: str) -> None:
        super().__init__(column)
        self.column = column
        self.row = row
        self.type = kind


def _explain(path: Path, error: Exception, names: list[str], block_bytes: int) -> Exception:
    """Turn Arrow's error into `InputError` or `_Unfit`; only its text contains the column and row."""
    text = " ".join(str(error).split())
    narrow = re.search(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\w+)", text)
    if narrow:
        return _Unfit(names[int(narrow[1])], int(narrow[2]), narrow[3])
    if "straddling object" in text:
        return InputError(f"{path}: a row is longer than {block_bytes >> 20} MiB; {_WAY_OUT}")
    return InputError(f"{path}: {text.removeprefix('CSV parse error: ')}")
