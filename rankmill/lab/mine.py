"""Hard negatives from a scored run, chosen as sentence-transformers' `mine_hard_negatives` chooses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError
from rankmill.lab.evaluate import is_table
from rankmill.producer.files.corpus.rankings import SCHEMA, check_once, column_of, read_qrels, read_ranking
from rankmill.producer.files.formats.base import text_of
from rankmill.producer.files.formats.table import open_reader
from rankmill.producer.files.outputs import PASSAGE_IDS, QUERY_IDS

_ROWS = 65_536
_TYPES = {
    "query_id": pa.string(),
    "doc_id": pa.string(),
    "score": pa.float64(),
    "relevance": pa.int64(),
    "in_run": pa.bool_(),
}


@dataclass(frozen=True)
class Rules:
    """Which negatives to take; names and meanings are those of `mine_hard_negatives`.

    A passage is relevant from grade ``min_relevance`` on; one of a lower grade above 0 is neither relevant
    nor a candidate. A candidate is any other passage of the run: the first ``range_max`` of each query, in
    the run's order. It is left out if its score is over ``max_score`` or under ``min_score``, or over the
    lowest score of the query's relevant passages less a margin: ``absolute_margin``, or ``relative_margin``
    times that score's size. Of those that are left, the ``range_min`` with the highest scores are skipped.
    """

    min_relevance: int = 1
    range_min: int = 0
    range_max: int | None = None
    max_score: float | None = None
    min_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    num_negatives: int = 3
    sampling_strategy: str = "top"
    seed: int = 0


@dataclass(frozen=True)
class Mined:
    """Rows of the scored file, for one query: its relevant passages, and its negatives, hardest first."""

    positives: npt.NDArray[np.int64]
    negatives: npt.NDArray[np.int64]


def read_scored(path: Path, score: str = "score", qrels: Path | None = None) -> pd.DataFrame:
    """Read ids, scores and labels of whatever `evaluate` reads: a scored table, or a TREC run with scores.

    Returns columns ``query_id``, ``doc_id``, ``score``, ``relevance`` and ``in_run``, a row for each of the
    file. Judgements come from `qrels`, else from the table's column ``relevance``. Where there is no column
    ``in_run``, all rows are the run's.

    Raises
    ------
    InputError
        The file cannot be read, lacks ids, scores or judgements, or a query has a passage twice.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    found = _of_table(path, score, qrels is None) if is_table(path, score) else _of_run(path)
    check_once(found, path)
    if qrels is not None:
        pairs = ["query_id", "doc_id"]
        found = found.drop(columns="relevance", errors="ignore").merge(read_qrels(qrels), "left", pairs)
    elif "relevance" not in found:
        raise InputError(f"{path}: no column 'relevance'; name the judgements with --qrels")
    return found


def _of_table(path: Path, score: str, needs_labels: bool) -> pd.DataFrame:
    schema = open_reader(path).survey(find_nulls=False).schema
    names = {
        "query_id": column_of(path, schema.names, QUERY_IDS),
        "doc_id": column_of(path, schema.names, PASSAGE_IDS),
        "score": score,
        "relevance": "relevance",
        "in_run": "in_run",
    }
    if score not in schema.names:
        raise InputError(f"{path}: no column {score!r}; name it with --score-column")
    kept = {ours: name for ours, name in names.items() if name in schema.names}
    if not needs_labels:
        kept.pop("relevance", None)
    asked = pa.schema([field for field in schema if field.name in kept.values()])
    table = pa.Table.from_batches(open_reader(path).batches(asked, _ROWS), asked)
    columns = {ours: _cast(path, name, table[name], _TYPES[ours]) for ours, name in kept.items()}
    for ours in ("query_id", "doc_id"):
        if columns[ours].null_count:
            row = pc.index(pc.is_null(columns[ours]), True).as_py()
            raise InputError(f"{path}: row {row} (counted from 0) has no {kept[ours]}")
    frame: pd.DataFrame = pa.table(columns).to_pandas()
    return frame if "in_run" in frame else frame.assign(in_run=True)


def _cast(path: Path, name: str, column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """The column with another type; an empty field of text is no value."""
    if pa.types.is_string(column.type) and kind != pa.string():
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InputError(f"{path}: column {name!r} is no {kind}: {text_of(error)}") from None


def _of_run(path: Path) -> pd.DataFrame:
    table = pa.Table.from_batches(read_ranking(path), SCHEMA)
    if table["run_score"].null_count or not len(table):
        raise InputError(f"{path}: the run has no scores, by which negatives are chosen; mine a scored one")
    frame: pd.DataFrame = table.select(["query_id", "doc_id", "run_score"]).to_pandas()
    return frame.rename(columns={"run_score": "score"}).assign(in_run=True)


def mine(scored: pd.DataFrame, rules: Rules) -> Iterator[Mined]:
    """Yield what is found for each query that has a scored relevant passage, in order of appearance."""
    random = np.random.default_rng(rules.seed)
    scored = scored.reset_index(drop=True)
    for _, rows in scored.groupby("query_id", sort=False):
        has_score = rows["score"].notna()
        grades = rows["relevance"].fillna(0)
        positives = rows[(grades >= rules.min_relevance) & has_score]
        if positives.empty:
            continue
        candidates = rows[(grades <= 0) & rows["in_run"]].iloc[: rules.range_max]
        candidates = candidates[candidates["score"].notna()]
        negatives = _chosen(candidates, float(positives["score"].min()), rules, random)
        yield Mined(positives.index.to_numpy(), negatives)


def _chosen(
    candidates: pd.DataFrame, positive: float, rules: Rules, random: np.random.Generator
) -> npt.NDArray[np.int64]:
    scores = candidates["score"].to_numpy(np.float64)
    kept = np.ones(len(scores), bool)
    if rules.absolute_margin is not None:
        kept &= scores + rules.absolute_margin <= positive
    if rules.relative_margin is not None:
        kept &= scores <= positive - abs(positive) * rules.relative_margin
    if rules.max_score is not None:
        kept &= scores <= rules.max_score
    if rules.min_score is not None:
        kept &= scores >= rules.min_score
    rows = candidates.index.to_numpy()[kept]
    order = np.argsort(-scores[kept], kind="stable")[rules.range_min :]
    if rules.sampling_strategy == "random" and len(order) > rules.num_negatives:
        order = order[np.sort(random.choice(len(order), rules.num_negatives, replace=False))]
    return np.asarray(rows[order[: rules.num_negatives]], np.int64)
