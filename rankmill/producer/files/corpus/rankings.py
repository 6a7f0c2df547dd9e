"""Rankings (run files), relevance judgements, and other tables of ids and numbers, from files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import ReadOptions, text_of
from rankmill.producer.files.formats.delimited import TSV
from rankmill.producer.files.formats.lists import is_list
from rankmill.producer.files.formats.table import format_of, is_readable, open_reader
from rankmill.producer.files.formats.text import valid_texts
from rankmill.producer.files.formats.trec import LineFormat, read_lines
from rankmill.producer.files.outputs import PASSAGE_IDS, QUERY_IDS, known_column
from rankmill.producer.files.stores.paths import AnyPath

SCHEMA = pa.schema(
    [
        ("query_id", pa.string()),
        ("doc_id", pa.string()),
        ("run_rank", pa.int64()),
        ("run_score", pa.float64()),
    ]
)
"""Columns of every ranking; rank and score are null where the file does not have them."""

_ROWS = 65_536
_USUAL: Mapping[str, Sequence[Sequence[str]]] = {
    "query_id": [QUERY_IDS],
    "doc_id": [PASSAGE_IDS],
    "run_rank": [("rank", "position"), ("run_rank",)],
    "run_score": [("score", "sim", "similarity"), ("run_score",)],
}
"""The names that a column of a ranking may have in a file.

The names ``run_rank`` and ``run_score`` count only if the file has no other column of ranks or scores. An
output of score-file may have both: its own score, and the rank and score of the run that was scored.
"""

_RELEVANCE: Sequence[Sequence[str]] = [("relevance",), ("rel", "label", "score")]
"""Names that the column of grades may have in a file of judgements. The name ``relevance`` is preferred,
because a file that has it may also have a column of scores.
"""

_JUDGED: Mapping[str, Sequence[Sequence[str]]] = {
    "query_id": [QUERY_IDS],
    "doc_id": [PASSAGE_IDS],
    "relevance": _RELEVANCE,
}
"""The names that a column of judgements may have in a file."""

_RANKING = LineFormat(
    SCHEMA,
    {
        2: ("query_id", "doc_id"),
        4: ("query_id", "doc_id", "run_rank", "run_score"),
        6: ("query_id", "", "doc_id", "run_rank", "run_score", ""),
    },
    QUERY_IDS,
    "a run has two (query, passage), three (and the rank or the score), four (rank and score), or the six of "
    "TREC, between tabs or spaces",
)

_THREE = LineFormat(
    pa.schema({"query_id": pa.string(), "number": pa.string()}),
    {3: ("query_id", "", "number")},
    (),
    _RANKING.kinds,
)
"""A run with three fields on a line: query, passage, and either rank or score."""

_QRELS = LineFormat(
    pa.schema({"query_id": pa.string(), "doc_id": pa.string(), "relevance": pa.int64()}),
    {3: ("query_id", "doc_id", "relevance"), 4: ("query_id", "", "doc_id", "relevance")},
    QUERY_IDS,
    "judgements have four (query, 0, document, relevance) or three (query, document, relevance)",
)


def read_ranking(path: AnyPath) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a ranking in order, as batches of `SCHEMA`.

    In text, tabs or spaces separate the fields. Without a header, a line has the six fields of TREC, or two
    to four: query, passage, and perhaps the rank, the score, or both. If there is only one number, it is the
    rank if it is whole and rises within each query. A row of JSON or Parquet may hold lists of passages,
    ranks and scores.

    Raises
    ------
    InputError
        The file is damaged, or is not a ranking.
    """
    if is_readable(path) and format_of(path) is not TSV:
        yield from _records(path)
    else:
        yield from read_lines(path, _RANKING, lambda words: _fields(path, words))


def read_qrels(path: AnyPath) -> pd.DataFrame:
    """Read relevance judgements. They have TREC's form (``query 0 document relevance``), BEIR's, or named
    columns.

    Returns columns ``query_id``, ``doc_id`` and ``relevance``.

    Raises
    ------
    InputError
        The file does not exist, has another form, or judges a passage twice with different grades.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    frame = _judgements(path).drop_duplicates(ignore_index=True)
    check_once(frame, path)
    return frame


def check_once(frame: pd.DataFrame, path: AnyPath) -> None:
    """Raise `InputError` if a query has the same passage twice."""
    twice = frame[frame.duplicated(["query_id", "doc_id"])]
    if len(twice):
        query, passage = twice.iloc[0][["query_id", "doc_id"]]
        raise InputError(f"{path}: query {query!r} has passage {passage!r} twice; keep one")


def column_of(path: AnyPath, names: Sequence[str], *usual: Sequence[str]) -> str:
    """Find a column of a file by its usual names, such as ``label`` for ``relevance``.

    Parameters
    ----------
    path
        The file, for messages.
    names
        The names of the file's columns.
    usual
        Groups of usual names. A name in an earlier group is preferred to one in a later group.

    Raises
    ------
    InputError
        No column has a usual name, or several columns have names of the same group.
    """
    column = _column_with(path, names, usual)
    if column is None:
        every = " or ".join(chain.from_iterable(usual))
        raise InputError(f"{path}: no column {every}; it has {', '.join(map(repr, names))}")
    return column


def _column_with(path: AnyPath, names: Sequence[str], usual: Sequence[Sequence[str]]) -> str | None:
    subject, way_out = f"{path}: {usual[0][0]}", "leave one out of the file, or rename it"
    return next(
        (column for known_names in usual if (column := known_column(names, known_names, subject, way_out))),
        None,
    )


def _judgements(path: AnyPath) -> pd.DataFrame:
    if is_readable(path) and format_of(path) is not TSV:
        return _judged_table(path)
    lines = read_lines(path, _QRELS, lambda words: _judged_fields(path, words))
    read: pd.DataFrame = pa.Table.from_batches(lines, _QRELS.schema).to_pandas()
    if not len(read):
        raise InputError(f"{path}: holds no judgements")
    if read["relevance"].isna().any():  # Arrow reads NA or nan as null
        raise InputError(f"{path}: a row lacks relevance")
    return read


def _judged_table(path: AnyPath) -> pd.DataFrame:
    reader = open_reader(path)
    schema = reader.survey(find_nulls=False).schema
    if not schema.names:
        raise InputError(f"{path}: is empty")
    names = [column_of(path, schema.names, *usual) for usual in _JUDGED.values()]
    table = pa.Table.from_batches(reader.batches(schema, _ROWS), schema)
    try:
        columns = [*(valid_texts(table[name]) for name in names[:2]), table[names[2]].cast(pa.float64())]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        listed = ", ".join(map(repr, names))
        raise InputError(
            f"{path}: columns {listed} do not hold two ids and a number: {text_of(error)}"
        ) from None
    frame: pd.DataFrame = pa.table(columns, names=list(_JUDGED)).to_pandas()
    if frame.isna().any(axis=None):
        raise InputError(f"{path}: a row lacks {' or '.join(names)}")
    wrong = frame["relevance"][frame["relevance"] % 1 != 0]
    if len(wrong):
        row = wrong.index[0]
        raise InputError(
            f"{path}: row {row} (counted from 0): {names[2]} is {wrong[row]}, not a whole number"
        )
    return frame.astype({"relevance": int})


def _judged_fields(path: AnyPath, words: Sequence[str]) -> Sequence[str]:
    """If the `words` of the first line are a header with usual names, return the names of the fields on each
    line of judgements. If not, return no names, because the number of fields then decides.
    """
    columns = {_column_with(path, words, usual): name for name, usual in _JUDGED.items()}
    return () if None in columns else [columns.get(word, "") for word in words]


def _records(path: AnyPath) -> Iterator[pa.RecordBatch]:
    schema = open_reader(path).survey(find_nulls=False).schema
    if not schema.names:
        return
    names = _named(path, schema.names)
    fields = [schema.field(name) for name in schema.names if name in names.values()]
    lists = [field.name for field in fields if is_list(field.type)]
    unrolled = [field.with_type(field.type.value_type) if field.name in lists else field for field in fields]
    reader, row = open_reader(path, options=ReadOptions(lists=lists)), 0
    for batch in reader.batches(pa.schema(unrolled), _ROWS):
        columns = [
            _column(path, batch[names[field.name]] if field.name in names else None, field, len(batch), row)
            for field in SCHEMA
        ]
        row += len(batch)
        yield pa.record_batch(columns, schema=SCHEMA)


def _column(path: AnyPath, column: pa.Array | None, field: pa.Field, rows: int, first: int) -> pa.Array:
    if column is None:
        return pa.nulls(rows, field.type)
    try:
        converted = valid_texts(column) if pa.types.is_string(field.type) else column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError(f"{path}: {field.name} holds {column.type}, not {field.type}") from None
    if field.name in {"query_id", "doc_id"} and converted.null_count:
        row = first + pc.index(pc.is_null(converted), True).as_py()
        raise InputError(f"{path}: row {row} (counted from 0) has no {field.name}")
    return converted


def _named(path: AnyPath, names: Sequence[str]) -> Mapping[str, str]:
    """Find the columns of a ranking among a file's `names`, such as ``qid`` for ``query_id``."""
    ids = {name: column_of(path, names, *_USUAL[name]) for name in ("query_id", "doc_id")}
    groups = zip(*(_USUAL[name] for name in ("run_rank", "run_score")), strict=True)
    others: dict[str, str | None] = {}
    for rank, score in groups:
        if not any(others.values()):
            others = {
                "run_rank": _column_with(path, names, [rank]), "run_score": _column_with(path, names, [score])
            }  # fmt: skip
    return ids | {name: column for name, column in others.items() if column}


def _fields(path: AnyPath, words: Sequence[str]) -> Sequence[str]:
    """Name the fields on each line of a ranking, given the `words` of its first line.

    The result is empty if the number of fields on a line is enough to name them.
    """
    if words and words[0].lower() in QUERY_IDS:
        roles = {column: name for name, column in _named(path, words).items()}
        return [roles.get(word, "") for word in words]
    return ("query_id", "doc_id", _third_field(path)) if len(words) == 3 else ()


def _third_field(path: AnyPath) -> str:
    """Find out whether the third field on a run's lines is ``run_rank`` or ``run_score``.

    - If any number is negative or not whole, the field is the score.
    - If whole numbers rise from row to row in each query, the field is the rank.
    - If whole numbers never rise from row to row in a query, the field is the score.
    - If each query has only one row, and the file is read in one batch, the field is the rank.

    Raises
    ------
    InputError
        The field could be either: its whole numbers sometimes rise within a query and sometimes do not, or
        each query has only one row in a file of several batches.
    """
    rises, falls, parts = True, True, 0
    last: list[pa.RecordBatch] = []
    for batch in read_lines(path, _THREE):
        if not pc.all(pc.match_substring_regex(batch["number"], r"^[0-9]{1,18}$")).as_py():
            return "run_score"
        rows = pa.concat_batches([*last, batch])
        by_query = rows["query_id"].dictionary_encode().indices.to_numpy()
        steps = rows["number"].cast(pa.int64()).to_pandas().groupby(by_query).diff().dropna()
        rises, falls = rises and bool((steps > 0).all()), falls and bool((steps <= 0).all())
        last, parts = [batch.slice(len(batch) - 1)], parts + 1
    if rises == falls and (parts > 1 or not rises):
        raise InputError(
            f"{path}: its third fields could be ranks or scores, as they neither rise nor fall within each "
            "query: begin the file with a line that says it, query_id doc_id rank, or query_id doc_id score"
        )
    return "run_rank" if rises else "run_score"
