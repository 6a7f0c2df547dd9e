"""Reads scored files: ids and scores, and, if a TREC run was reranked, its earlier ranks and scores."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.corpus.rankings import column_of
from rankmill.producer.files.formats.base import text_of
from rankmill.producer.files.formats.delimited import TSV
from rankmill.producer.files.formats.parquet import PARQUET, metadata_of
from rankmill.producer.files.formats.table import format_of, is_readable, open_reader
from rankmill.producer.files.formats.text import valid_texts
from rankmill.producer.files.outputs import PASSAGE_IDS, QUERY_IDS
from rankmill.producer.files.stores.paths import AnyPath

_ROWS = 65_536
_TYPES = {
    "query_id": pa.string(),
    "doc_id": pa.string(),
    "score": pa.float64(),
    "relevance": pa.int64(),
    "in_run": pa.bool_(),
    "run_score": pa.float64(),
    "run_rank": pa.float64(),
}


def scored_column(path: AnyPath, role: str) -> str:
    """Return the name of the column with the queries, passages or scores in a scored file.

    Parameters
    ----------
    path
        The scored file.
    role
        ``query``, ``passage`` or ``score``. This is also the column's name, unless a Parquet file's metadata
        give another name.

    Raises
    ------
    InputError
        The column with the scores is not clear: a column with fractions follows ``score``, and no metadata
        name the column.
    """
    about = metadata_of(path) if path.is_file() and format_of(path) is PARQUET else {}
    if role == "score" and f"rankmill.{role}_column" not in about and path.is_file() and is_table(path, role):
        _check_is_last(path, role)
    return about.get(f"rankmill.{role}_column", role)


def _check_is_last(path: AnyPath, score: str) -> None:
    """Raise `InputError` if a column with fractions follows the column `score`. score-file writes its scores
    after the input's columns, so `score` may then be a column of the input.
    """
    schema = open_reader(path).shown_columns()
    after = pa.schema(list(schema)[schema.names.index(score) + 1 :] if score in schema.names else [])
    for batch in open_reader(path).batches(after, _ROWS) if after.names else ():
        for name in after.names:
            try:
                values = batch[name].cast(pa.float64())
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                continue  # the column does not hold numbers
            if pc.any(pc.not_equal(values, pc.floor(values))).as_py():
                raise InputError(
                    f"{path}: column {name!r}, which holds numbers too, follows column {score!r}: name the "
                    "one with the new scores with --score-column"
                )


def choose_score_column(path: AnyPath, named: str | None) -> str:
    """Return the name of the column with the scores in a scored file: `named`, or the one that
    `scored_column` finds. Raises `InputError` if the file is a run or a TSV file without a column `named`.
    """
    if named and path.is_file() and not is_table(path, named):
        raise InputError(f"{path}: no column {named!r}; for a run, leave out --score-column")
    return named or scored_column(path, "score")


def is_output(path: AnyPath) -> bool:
    """Return whether score-file has written a file, as Parquet's metadata or a column ``in_run`` shows."""
    if not path.is_file() or not is_readable(path):
        return False
    has_metadata = format_of(path) is PARQUET and "rankmill.score_column" in metadata_of(path)
    return has_metadata or "in_run" in open_reader(path).shown_columns().names


def is_table(path: AnyPath, score: str) -> bool:
    """Return whether a file is a table with named columns. A TSV file may be a table or a run; it is a table
    if it has a column `score`.
    """
    if format_of(path) is TSV:
        return score in open_reader(path).shown_columns().names
    return is_readable(path)


def read_rows(path: AnyPath, score: str, *, has_labels: bool = False) -> pd.DataFrame:
    """Read the columns ``query_id``, ``doc_id`` and ``score`` of a scored table, and some further columns.

    The further columns are:

    - ``in_run``: whether the row belongs to the run that was scored. True for all rows if the file does not
      say it; false where the file has null.
    - ``is_ranked``: whether the file has a column ``rank`` of new ranks.
    - ``run_score`` and ``run_rank``, if the file has them.
    - ``relevance``, if the file has it and `has_labels` is set.

    `score` is the name of the file's column of scores.

    Raises
    ------
    InputError
        The file cannot be read, lacks ids or scores, or has values of other types.
    """
    schema = open_reader(path).survey(find_nulls=False).schema
    names = {
        "query_id": column_of(path, schema.names, QUERY_IDS),
        "doc_id": column_of(path, schema.names, PASSAGE_IDS),
        "score": score,
        **{
            name: name for name in ("in_run", "run_score", "run_rank", *(["relevance"] if has_labels else []))
        },
    }
    if score not in schema.names:
        raise InputError(f"{path}: no column {score!r}; name it with --score-column")
    kept = {ours: name for ours, name in names.items() if name in schema.names}
    wanted = pa.schema([field for field in schema if field.name in kept.values()])
    table = pa.Table.from_batches(open_reader(path).batches(wanted, _ROWS), wanted)
    columns = {ours: _cast(path, name, table[name], _TYPES[ours]) for ours, name in kept.items()}
    for ours in ("query_id", "doc_id"):
        if columns[ours].null_count:
            row = pc.index(pc.is_null(columns[ours]), True).as_py()
            raise InputError(f"{path}: row {row} (counted from 0) has no {kept[ours]}")
    if "in_run" in columns:
        columns["in_run"] = pc.fill_null(columns["in_run"], False)
    frame: pd.DataFrame = pa.table(columns).to_pandas().assign(is_ranked="rank" in schema.names)
    return frame if "in_run" in frame else frame.assign(in_run=True)


def run_scores(frame: pd.DataFrame) -> pd.Series[float] | None:
    """Return the scores that the run had before it was reranked, as far as `frame` has them.

    Without scores, the negative ranks are returned, so that the first rank is the highest. Without scores and
    ranks, ``None`` is returned.
    """
    for name, sign in (("run_score", 1.0), ("run_rank", -1.0)):
        if name in frame and frame[name].notna().any():
            return frame[name] * sign
    return None


def lacks_passages(rows: pd.DataFrame) -> bool:
    """Return whether a scored table from `read_rows` lacks passages of its run, as an output of ``--top-k``
    does.

    A table lacks passages in two cases: it has a column of new ranks beside the run's scores or ranks, or the
    run's ranks have gaps.
    """
    if "is_ranked" in rows and rows["is_ranked"].any():
        return run_scores(rows) is not None
    if "run_rank" not in rows:
        return False
    ranks = rows[rows["in_run"]].groupby("query_id")["run_rank"]
    return bool((ranks.max() - ranks.min() >= ranks.size()).any())


def _cast(path: AnyPath, name: str, column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column, cast to the type `kind`. An empty text becomes null, unless `kind` is text."""
    if pa.types.is_string(column.type) and kind != pa.string():
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    try:
        return valid_texts(column) if kind == pa.string() else column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InputError(f"{path}: column {name!r} does not hold {kind}: {text_of(error)}") from None
