"""Rankings and relevance judgements from files, as the data frames that ir-measures takes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from jobs.errors import InputError
from producer.files.corpus.run_file import read_run
from producer.files.inputs import KINDS, InputFile
from producer.files.outputs import PASSAGE_IDS, QUERY_IDS
from producer.files.readers.choice import Options, choose
from producer.files.readers.delimited import DelimitedReader

_RELEVANCE = ("relevance", "score", "rel", "label")


def read_scored(path: Path, score: str) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Read an output of score-file: its ranking, and the ranking of the run that was scored, if it has it.

    Both have columns ``query_id``, ``doc_id`` and ``score``. Rows without a score are left out of the first.

    Raises
    ------
    InputError
        The file cannot be read, or lacks ids or scores.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    file = InputFile(path)
    is_text = file.kind not in KINDS
    if is_text or (file.kind == ".tsv" and score not in DelimitedReader("\t", has_quotes=False).header(path)):
        return read_ranking(path), None
    table = _table(file)
    names = [_named(path, table, usual) for usual in (QUERY_IDS, PASSAGE_IDS)]
    if score not in table.column_names:
        raise InputError(f"{path}: no column {score!r}; name it with --score-column")
    after = _frame(table, [*names, score], path)
    before = None
    if "run_rank" in table.column_names and table["run_rank"].null_count == 0:
        before = _frame(table, [*names, "run_rank"], path)
        before["score"] = -before["score"]
    elif "run_score" in table.column_names and table["run_score"].null_count == 0:
        before = _frame(table, [*names, "run_score"], path)
    return after, before


def read_ranking(path: Path) -> pd.DataFrame:
    """Read a run as its ranking: by score, else by rank, else as the passages come.

    Raises
    ------
    InputError
        The file is no run.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    batches = list(read_run(InputFile(path)))
    if not batches:
        raise InputError(f"{path}: the run is empty")
    found = pa.Table.from_batches(batches)
    frame = found.to_pandas()
    if found["run_score"].null_count == 0:
        frame["score"] = frame["run_score"]
    elif found["run_rank"].null_count == 0:
        frame["score"] = -frame["run_rank"].astype(float)
    else:
        frame["score"] = -frame.index.to_series().astype(float)
    return frame[["query_id", "doc_id", "score"]]


def read_qrels(path: Path) -> pd.DataFrame:
    """Read relevance judgements: TREC's ``query 0 document relevance``, BEIR's TSV, or named columns.

    Returns columns ``query_id``, ``doc_id`` and ``relevance``.

    Raises
    ------
    InputError
        The file has none of these forms.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    file = InputFile(path)
    if file.kind in KINDS and file.kind != ".tsv":
        table = _table(file)
        names = [_named(path, table, usual) for usual in (QUERY_IDS, PASSAGE_IDS, _RELEVANCE)]
        frame = _frame(table, names, path).rename(columns={"score": "relevance"})
        return frame.astype({"relevance": int})
    return _qrels_lines(path)


def _qrels_lines(path: Path) -> pd.DataFrame:
    try:
        with pa.input_stream(path, compression="detect") as stream:
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


def _table(file: InputFile) -> pa.Table:
    reader = choose(file, [], Options())
    schema = reader.survey(file.path, [], find_nulls=False).schema
    if not schema.names:
        raise InputError(f"{file.path}: is empty")
    return pa.Table.from_batches(reader.batches(file.path, schema, 65_536), schema)


def _named(path: Path, table: pa.Table, usual: tuple[str, ...]) -> str:
    found = next((name for name in usual if name in table.column_names), None)
    if found is None:
        raise InputError(
            f"{path}: no column {' or '.join(usual)}; it has {', '.join(map(repr, table.column_names))}"
        )
    return found


def _frame(table: pa.Table, names: list[str], path: Path) -> pd.DataFrame:
    try:
        columns = [
            table[names[0]].cast(pa.string()),
            table[names[1]].cast(pa.string()),
            table[names[2]].cast(pa.float64()),
        ]
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: column {names[2]!r} holds no numbers: {error}") from None
    return pa.table(columns, names=["query_id", "doc_id", "score"]).to_pandas().dropna()
