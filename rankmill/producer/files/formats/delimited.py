"""CSV and TSV, plain or compressed with gzip or zstd.

The first line names the columns, unless the caller does. All columns are text in UTF-8. An empty field
without quotes is null. In TSV, a quote is an ordinary character, unless the beginning of the file shows the
quotes of CSV. Quotes are checked (`formats.quotes`), because Arrow lets a stray quote merge rows.
"""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import DELIMITERS
from rankmill.producer.files.formats.base import (
    BYTE_ORDER_MARK,
    MAX_LINE_BYTES,
    NOT_UTF8,
    TOO_LONG,
    Format,
    ReadOptions,
    Survey,
    count_rows,
    is_empty,
    text_of,
    undictionaried,
)
from rankmill.producer.files.formats.quotes import open_quoted
from rankmill.producer.files.formats.text import (
    TextWriter,
    as_text,
    joined,
    refuse,
    texts_of,
)
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import open_stream

_BLOCK_BYTES = MAX_LINE_BYTES
"""CSV and TSV are parsed in blocks of this many bytes. A row must fit into a block."""

_BEGINNING_BYTES = 1 << 20
"""At most this many bytes of the beginning of a file are read to find the delimiter and the header. The whole
header must be among these bytes.
"""

_MAX_COLUMNS = 10_000

_QUOTED = re.compile(r'"(?:[^"]|"")*"')

_BREAKS = r"[\t\r\n]"
"""Characters that TSV without quotes cannot hold."""

logger = logging.getLogger(__name__)


class _DelimitedReader:
    """Reads CSV and TSV; subclasses decide which delimiter is usual, and whether fields may be in quotes."""

    def __init__(self, path: AnyPath, texts: Sequence[str], options: ReadOptions) -> None:
        self._path, self._texts, self._options = path, texts, options
        beginning = self._read_beginning()
        named = options.delimiter and DELIMITERS.get(options.delimiter, options.delimiter)
        self._delimiter = named or self._usual_delimiter(beginning)
        self._has_quotes = self._shows_quotes(beginning)
        self._columns = self._header(beginning)

    def shown_columns(self) -> pa.Schema:
        """Return the columns that the header or the caller names, all as text."""
        return pa.schema([(name, pa.string()) for name in self._columns])

    def survey(self, *, find_nulls: bool) -> Survey:
        batches = self._stream(dict.fromkeys([*self._columns, *self._texts], pa.string()))
        schema = next(batches).schema  # the first batch has only the schema
        return Survey(schema, *count_rows(batches, self._texts), typed=False)

    def batches(self, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield a batch for each block of the file."""
        yield from self._stream({field.name: field.type for field in schema})

    def _stream(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        """Yield an empty batch that has the schema, and then the rows of the file. They have the columns that
        `types` names.

        If the file has none of these columns, its first column is read, so that its rows can be counted.
        """
        names = self._columns
        wanted = [name for name in names if name in types] or names[:1]
        try:
            reader = pcsv.open_csv(
                self._open(),
                read_options=pcsv.ReadOptions(
                    block_size=_BLOCK_BYTES, use_threads=False, column_names=self._options.names or None
                ),
                parse_options=pcsv.ParseOptions(
                    delimiter=self._delimiter,
                    quote_char='"' if self._has_quotes else False,
                    newlines_in_values=self._has_quotes,
                ),
                convert_options=pcsv.ConvertOptions(
                    column_types={name: types.get(name, pa.binary()) for name in wanted},
                    include_columns=wanted if len(wanted) < len(names) else [],
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
            # the first batch, which has the schema even if the file has no rows
            yield pa.RecordBatch.from_pylist([], schema=reader.schema)
            yield from reader
        except (pa.ArrowException, OSError) as error:
            if "Empty CSV file" not in str(error):
                raise self._explained(error, names) from None
            # Read the rest of the file: the check of quotes may find a quote that is never closed.
            with self._open() as stream:
                while stream.read(_BLOCK_BYTES):
                    pass
            # The file has only a header, without a line end.
            yield pa.RecordBatch.from_pylist(
                [], pa.schema([(name, types.get(name, pa.binary())) for name in wanted])
            )

    def _open(self) -> pa.NativeFile:
        if not self._has_quotes:
            return open_stream(self._path)
        return open_quoted(self._path, self._delimiter)

    def _usual_delimiter(self, beginning: str) -> str:
        raise NotImplementedError

    def _shows_quotes(self, beginning: str) -> bool:
        raise NotImplementedError

    def _header(self, beginning: str) -> list[str]:
        path, given = self._path, list(self._options.names)
        first = _first_row(beginning, self._delimiter, has_quotes=self._has_quotes)
        if given and first and self._is_header(first, given):
            raise InputError(f"{path}: its first line names the columns: leave out --columns")
        if given and first and len(first) != len(given):
            raise InputError(
                f"{path}: its first row has {len(first)} fields, and --columns names {len(given)}"
            )
        if given:
            return given
        if first is None:
            way_out = self._options.way_out or "--columns names the columns of a file without one"
            raise InputError(f"{path}: its first line is too long for a header; {way_out}")
        if any("\udc80" <= char <= "\udcff" for name in first for char in name):
            raise InputError(f"{path}: the header is {NOT_UTF8}")
        if len(first) > _MAX_COLUMNS:
            raise InputError(f"{path}: {len(first):,} columns; at most {_MAX_COLUMNS:,} can be read")
        return first

    def _is_header(self, first: Sequence[str], given: Sequence[str]) -> bool:
        """Whether the first row is a header, although the caller has `given` the columns' names.

        The row is a header if it has each of these names in its column, or at least the name of a text
        column. Case does not matter.
        """
        same = {
            name for name, field in zip(given, first, strict=False) if field.casefold() == name.casefold()
        }
        return len(same) == len(given) or not same.isdisjoint(self._texts)

    def _read_beginning(self) -> str:
        try:
            with open_stream(self._path) as stream:
                raw = stream.read(_BEGINNING_BYTES)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{self._path}: cannot be read: {error}") from None
        if not raw.removeprefix(BYTE_ORDER_MARK).strip(b"\r\n"):
            raise is_empty(self._path)
        return str(raw.decode("utf-8-sig", errors="surrogateescape"))

    def _explained(self, error: Exception, names: list[str]) -> InputError:
        """Turn an error of Arrow into an `InputError`."""
        text = text_of(error)
        narrow = re.search(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to", text)
        if narrow:
            counted = "counted from 1" if self._options.names else "the header is row 1"
            where = f"column {names[int(narrow[1])]!r}, row {narrow[2]} ({counted})"
            return InputError(f"{self._path}: {where} is {NOT_UTF8}")
        if "straddling object" in text:
            return InputError(f"{self._path}: a row is {TOO_LONG}")
        way_out = ""
        if "Expected " in text:
            another = self._options.way_out or "name another delimiter with --delimiter"
            way_out = f"; write a field with a delimiter in quotes, or {another}"
        return InputError(f"{self._path}: {text.removeprefix('CSV parse error: ')}{way_out}")


def _first_row(beginning: str, delimiter: str, *, has_quotes: bool) -> list[str] | None:
    """Return the fields of the first line that is not empty, or ``None`` if this line is too long."""
    lines = io.StringIO(beginning, newline="")
    quoting = csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE
    try:
        rows = csv.reader(lines, delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
        first = next(filter(None, rows), [])
    except csv.Error:  # a field has more than 2^17 characters
        return None
    is_whole = len(beginning.encode("utf-8", "surrogateescape")) < _BEGINNING_BYTES - len(BYTE_ORDER_MARK)
    return first if is_whole or lines.read(1) else None


class CsvReader(_DelimitedReader):
    """Reads CSV; the delimiter is detected unless it is given."""

    def _shows_quotes(self, beginning: str) -> bool:
        return True

    def _usual_delimiter(self, beginning: str) -> str:
        """Detect the delimiter by the first row, which must fit the columns that the caller names:

        - If the caller names all columns, the row must have as many fields.
        - If the caller names columns of texts or conversations, the row must have their names.
        - If the caller names no columns, the row must have several fields.

        If no delimiter fits, return the one that gives the most fields.
        """
        wanted = {*self._texts, *self._options.messages}
        rows = {
            delimiter: _first_row(beginning, delimiter, has_quotes=True) or []
            for delimiter in DELIMITERS.values()
        }
        if names := self._options.names:
            fitting = [delimiter for delimiter, row in rows.items() if len(row) == len(names)]
        else:
            fitting = [
                delimiter
                for delimiter, row in rows.items()
                if wanted <= set(row) and (wanted or len(row) > 1)
            ]
        return fitting[0] if fitting else max(rows, key=lambda delimiter: len(rows[delimiter]))


class TsvReader(_DelimitedReader):
    """Reads TSV, in which a quote is an ordinary character, unless the file's beginning shows CSV's quotes.

    The quotes are CSV's if a column has quotes around every value, and doubled quotes inside a value.
    """

    def _shows_quotes(self, beginning: str) -> bool:
        lines = beginning.replace("\r\n", "\n").split("\n")
        rows = [line.split(self._delimiter) for line in lines[:-1] or lines]
        values = zip(*(row for row in rows[1:] or rows if len(row) == len(rows[0])), strict=True)
        columns = [list(filter(None, column)) for column in values]
        return any(
            all(map(_QUOTED.fullmatch, column)) and any('""' in value[1:-1] for value in column)
            for column in columns
        )

    def _usual_delimiter(self, beginning: str) -> str:
        return "\t"


class CsvWriter(TextWriter):
    """Writes CSV. Text is in quotes where it needs them; null is an empty field without quotes."""

    def __init__(self, path: Path, schema: pa.Schema, compression: str | None) -> None:
        refuse(schema, "CSV", _is_refused)
        super().__init__(path, schema, compression)
        self._stream.write(
            (",".join(_quoted(pa.array(schema.names, pa.string())).to_pylist()) + "\n").encode()
        )

    def _lines(self, table: pa.Table) -> pa.Buffer:
        return joined([self._field(column) for column in table.columns], ",")

    @staticmethod
    def _field(column: pa.ChunkedArray) -> pa.ChunkedArray:
        kind = undictionaried(column.type)
        is_number_or_time = pa.types.is_primitive(kind) or pa.types.is_decimal(kind)
        return as_text(column) if is_number_or_time else pc.fill_null(_quoted(texts_of(column)), "")


def _quoted(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Put a text in quotes if it has a quote, a comma or a line end. Also put an empty text in quotes, to
    tell it from null.
    """
    inside = pc.replace_substring(texts, '"', '""')
    whole = pc.binary_join_element_wise('"', inside, '"', "")
    return pc.if_else(pc.match_substring_regex(texts, r'^$|[",\r\n]'), whole, texts)


def _is_refused(kind: pa.DataType) -> bool:
    kind = undictionaried(kind)
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return bool(pa.types.is_nested(kind) or pa.types.is_duration(kind) or pa.types.is_interval(kind))


class TsvWriter(TextWriter):
    """Writes TSV without quotes. Null becomes an empty field; tabs and line ends in a value become spaces."""

    def __init__(
        self, path: Path, schema: pa.Schema, compression: str | None, *, header: bool = True
    ) -> None:
        refuse(schema, "TSV", _is_refused)
        super().__init__(path, schema, compression)
        self._replaced = 0
        if header:
            names = pc.replace_substring_regex(pa.array(schema.names, pa.string()), _BREAKS, " ")
            self._stream.write(("\t".join(names.to_pylist()) + "\n").encode())

    def close(self, metadata: Mapping[str, str]) -> None:
        super().close(metadata)
        if self._replaced:
            logger.warning(
                "%s values had tabs or line ends, which TSV cannot hold: they are spaces now",
                f"{self._replaced:,}",
            )

    def _lines(self, table: pa.Table) -> pa.Buffer:
        return joined([self._field(column) for column in table.columns], "\t")

    def _field(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        text = as_text(column)
        broken = pc.sum(pc.match_substring_regex(text, _BREAKS)).as_py() or 0
        self._replaced += broken
        return pc.replace_substring_regex(text, _BREAKS, " ") if broken else text


CSV = Format((".csv",), CsvReader, CsvWriter)
TSV = Format((".tsv",), TsvReader, TsvWriter)
