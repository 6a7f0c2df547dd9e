"""Tables of ids and numbers, and relevance judgements, from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.inputs import KINDS, InputFile
from rankmill.producer.files.outputs import PASSAGE_IDS, QUERY_IDS
from rankmill.producer.files.readers.choice import Options, choose
from rankmill.producer.files.stores.reading import open_stream

_RELEVANCE = ("relevance", "score", "rel", "label")


def read_qrels(path: Path) -> pd.DataFrame:
    """Read relevance judgements: TREC's ``query 0 document relevance``, BEIR's TSV, or named columns.

    Returns columns ``query_id``, ``doc_id`` and ``relevance``.

    Raises
    ------
    InputError
        The file has none of these forms, or judges a passage twice, and not alike.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    frame = _judgements(path).drop_duplicates(ignore_index=True)
    check_once(frame, path)
    return frame


def check_once(frame: pd.DataFrame, path: Path) -> None:
    """Raise `InputError` if a query has a passage twice (``query_id``, ``doc_id``)."""
    twice = frame[frame.duplicated(["query_id", "doc_id"])]
    if len(twice):
        query, passage = twice.iloc[0][["query_id", "doc_id"]]
        raise InputError(f"{path}: query {query!r} has passage {passage!r} twice; keep one")


def _judgements(path: Path) -> pd.DataFrame:
    file = InputFile(path)
    if file.kind in KINDS and file.kind != ".tsv":
        table = read_table(file)
        names = [column_of(path, table, usual) for usual in (QUERY_IDS, PASSAGE_IDS, _RELEVANCE)]
        frame = frame_of(table, names, path).rename(columns={"score": "relevance"})
        if len(frame) < len(table):
            raise InputError(f"{path}: a row lacks {' or '.join(names)}")
        wrong = frame["relevance"][frame["relevance"] % 1 != 0]
        if len(wrong):
            row = wrong.index[0]
            raise InputError(
                f"{path}: row {row} (counted from 0): {names[2]} is {wrong[row]}, no whole number"
            )
        return frame.astype({"relevance": int})
    return _qrels_lines(path)


def _qrels_lines(path: Path) -> pd.DataFrame:
    try:
        with open_stream(path) as stream:
            lines = stream.read().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or (number == 1 and words[0].lower() in QUERY_IDS):
            continue
        if len(words) not in {3, 4}:
            raise InputError(
                f"{path}, line {number}: {len(words)} fields; judgements have four (query, 0, document, "
                "relevance) or three (query, document, relevance)"
            )
        try:
            rows.append((words[0], words[-2], int(words[-1])))
        except ValueError:
            raise InputError(f"{path}, line {number}: relevance is {words[-1]!r}, no whole number") from None
    if not rows:
        raise InputError(f"{path}: holds no judgements")
    return pd.DataFrame(rows, columns=["query_id", "doc_id", "relevance"])


def read_table(file: InputFile) -> pa.Table:
    """Read a whole file of any kind; raises `InputError` if it cannot be read."""
    reader = choose(file, [], Options())
    schema = reader.survey(file.path, [], find_nulls=False).schema
    if not schema.names:
        raise InputError(f"{file.path}: is empty")
    return pa.Table.from_batches(reader.batches(file.path, schema, 65_536), schema)


def column_of(path: Path, table: pa.Table, usual: Sequence[str]) -> str:
    """The first of the `usual` names that the table has; raises `InputError` if it has none."""
    found = next((name for name in usual if name in table.column_names), None)
    if found is None:
        raise InputError(
            f"{path}: no column {' or '.join(usual)}; it has {', '.join(map(repr, table.column_names))}"
        )
    return found


def frame_of(table: pa.Table, names: list[str], path: Path) -> pd.DataFrame:
    """Columns `names` as ``query_id``, ``doc_id``, ``score``; rows with a null are left out."""
    try:
        columns = [
            table[names[0]].cast(pa.string()),
            table[names[1]].cast(pa.string()),
            table[names[2]].cast(pa.float64()),
        ]
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: column {names[2]!r} holds no numbers: {error}") from None
    found: pd.DataFrame = pa.table(columns, names=["query_id", "doc_id", "score"]).to_pandas()
    return found.dropna()
