"""Rankings and relevance judgements from files, as the data frames that ir-measures takes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.corpus.rankings import check_once, column_of, frame_of, read_ranking, read_table
from rankmill.producer.files.formats.table import TSV, format_of, is_readable, open_reader
from rankmill.producer.files.outputs import PASSAGE_IDS, QUERY_IDS


def read_scored(path: Path, score: str) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Read an output of score-file: its ranking, and the ranking of the run that was scored, if it has it.

    Both have columns ``query_id``, ``doc_id`` and ``score``. Rows without a score are left out of the first.

    Raises
    ------
    InputError
        The file cannot be read, lacks ids or scores, or a query has a passage twice.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    is_table = is_readable(path)
    if format_of(path) is TSV:
        is_table = score in open_reader(path).beginning().names
    if not is_table:
        return ranking_frame(path), None
    table = read_table(path)
    names = [column_of(path, table.column_names, usual) for usual in (QUERY_IDS, PASSAGE_IDS)]
    if score not in table.column_names:
        raise InputError(f"{path}: no column {score!r}; name it with --score-column")
    if "in_run" in table.column_names:  # judged passages that were added for mining
        table = table.filter(table["in_run"].cast(pa.bool_()))
    after = frame_of(table, [*names, score], path)
    check_once(after, path)
    before = None
    if "run_rank" in table.column_names and table["run_rank"].null_count == 0:
        before = frame_of(table, [*names, "run_rank"], path)
        before["score"] = -before["score"]
    elif "run_score" in table.column_names and table["run_score"].null_count == 0:
        before = frame_of(table, [*names, "run_score"], path)
    return after, before


def ranking_frame(path: Path) -> pd.DataFrame:
    """Read a run as its ranking: by score, else by rank, else as the passages come.

    Raises
    ------
    InputError
        The file is no run, or a query has a passage twice.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    batches = list(read_ranking(path))
    if not batches:
        raise InputError(f"{path}: the run is empty")
    found = pa.Table.from_batches(batches)
    frame: pd.DataFrame = found.to_pandas()
    if found["run_score"].null_count == 0:
        frame["score"] = frame["run_score"]
    elif found["run_rank"].null_count == 0:
        frame["score"] = -frame["run_rank"].astype(float)
    else:
        frame["score"] = -frame.index.to_series().astype(float)
    check_once(frame, path)
    return frame[["query_id", "doc_id", "score"]]
