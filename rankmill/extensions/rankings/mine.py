"""Chooses hard negatives from a scored run as sentence-transformers' `mine_hard_negatives` does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from rankmill.extensions.rankings.scored import is_table, read_rows, run_scores, scored_column
from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.corpus.rankings import SCHEMA, check_once, read_qrels, read_ranking
from rankmill.producer.files.ranking import best_first
from rankmill.producer.files.stores.paths import AnyPath


@dataclass(frozen=True)
class Rules:
    """Rules for choosing the negatives of each query, with the names and meanings of `mine_hard_negatives`.

    A passage is relevant from grade ``min_relevance`` on. The candidates for negatives of a query are the
    first ``range_max`` of its passages without a grade above 0, in the run's order. A passage is not a
    candidate if it has the text of a passage with a grade above 0, or of an earlier candidate.

    A candidate is left out if it has no score, or a score over ``max_score`` or under ``min_score``. It is
    also left out if its score is less than a margin below the lowest score of the query's relevant passages.
    The margin is ``absolute_margin``, or ``relative_margin`` times the absolute value of this lowest score.
    If both are given, the larger margin decides. Of the remaining candidates, the ``range_min`` with the
    highest scores are skipped.
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
    """A query's relevant passages, and its negatives, hardest first, as numbers of rows in the scored file.

    Some passages were not candidates for negatives because of their text. ``copies`` is the number of
    passages with the text of a passage with a grade above 0. ``repeats`` is the number of passages with the
    text of an earlier candidate.
    """

    positives: npt.NDArray[np.int64]
    negatives: npt.NDArray[np.int64]
    copies: int
    repeats: int


@dataclass(frozen=True)
class TextKeys:
    """Numbers that stand for the texts of each row's query and passage; equal texts have equal numbers."""

    queries: npt.NDArray[np.uint64]
    passages: npt.NDArray[np.uint64]


_RELEVANT, _RELATED, _OTHER = 2, 1, 0
"""Kinds of passages: those with a grade from ``min_relevance`` on, those with a lower grade above 0, and
those without a grade above 0.
"""

_ODD = np.uint64(0x9E3779B97F4A7C15)
"""A query's key is multiplied by this odd number before it is combined with a passage's key. Otherwise a pair
would have the same key as the pair with the two texts exchanged.
"""


def read_scored(path: AnyPath, score: str | None = None, qrels: AnyPath | None = None) -> pd.DataFrame:
    """Read the ids, scores and labels of a scored table, or of a TREC run with scores, as `evaluate` does.

    Returns the columns ``query_id``, ``doc_id``, ``score``, ``relevance``, ``in_run`` and ``place`` (in the
    run's order), with a row for each row of the file. `score` is the column of scores; by default
    `scored_column` finds it. Judgements come from `qrels`, or else from the table's ``relevance``. Without a
    column ``in_run``, all rows belong to the run.

    The file may lack passages that have a grade above 0 in `qrels` for one of its queries. The result then
    has a row without a score for each such passage, after the rows of the file.

    Raises
    ------
    InputError
        The file cannot be read or lacks ids, scores or judgements, or a query has a passage twice.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    score = score or scored_column(path, "score")
    rows = read_rows(path, score, has_labels=qrels is None) if is_table(path, score) else _of_run(path)
    check_once(rows, path)
    rows["place"] = _places(rows)
    if qrels is not None:
        judged, pairs = read_qrels(qrels), ["query_id", "doc_id"]
        lacking = judged[(judged["relevance"] > 0) & judged["query_id"].isin(rows["query_id"])]
        lacking = lacking.merge(rows[pairs], "left", pairs, indicator=True).query("_merge == 'left_only'")
        rows = rows.drop(columns="relevance", errors="ignore").merge(judged, "left", pairs)
        lacking = lacking.drop(columns="_merge").assign(score=np.nan, in_run=False, place=len(rows))
        rows = pd.concat([rows, lacking], ignore_index=True) if len(lacking) else rows
    elif "relevance" not in rows:
        raise InputError(f"{path}: no column 'relevance'; name the judgements with --qrels")
    return rows


def _of_run(path: AnyPath) -> pd.DataFrame:
    table = pa.Table.from_batches(read_ranking(path), SCHEMA)
    if table["run_score"].null_count or not len(table):
        raise InputError(f"{path}: the run has no scores, by which negatives are chosen; mine a scored one")
    frame: pd.DataFrame = table.select(["query_id", "doc_id", "run_score"]).to_pandas()
    return frame.assign(score=frame["run_score"], in_run=True)


def _places(rows: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return the place of each row in the run that was scored. The run is ordered by its scores. A run
    without scores is ordered by its ranks, and a run without scores and ranks is ordered as the rows are.
    """
    numbers = pd.factorize(rows["query_id"])[0]
    scores = run_scores(rows)
    if scores is None:
        return np.arange(len(rows))
    order = best_first(numbers, scores.to_numpy(np.float64), pa.array(rows["doc_id"], pa.string()))
    places = np.empty(len(rows), np.int64)
    places[order] = np.arange(len(rows))
    return places


def mine(scored: pd.DataFrame, rules: Rules, texts: TextKeys | None = None) -> Iterator[Mined]:
    """Yield the relevant passages and the chosen negatives of each query that has a relevant passage with a
    score.

    `texts` are the keys of the texts of `scored`'s rows, by which texts are compared; ``None`` if the texts
    are not known.
    """
    random = np.random.default_rng(rules.seed)
    scored = scored.reset_index(drop=True)
    grades = scored["relevance"].fillna(0)
    scored["kind"] = np.select([grades >= rules.min_relevance, grades > 0], [_RELEVANT, _RELATED], _OTHER)
    if "place" in scored:
        scored = scored.sort_values("place", kind="stable")
    scored["is_copy"], scored["is_repeat"] = _same_texts(scored, texts)
    for _, rows in scored.groupby("query_id", sort=False):
        positives = rows[(rows["kind"] == _RELEVANT) & rows["score"].notna()]
        if positives.empty:
            continue
        others = rows[(rows["kind"] == _OTHER) & rows["in_run"]]
        repeats = others["is_repeat"] & ~others["is_copy"]
        candidates = others[~others["is_copy"] & ~repeats].iloc[: rules.range_max]
        candidates = candidates[candidates["score"].notna()]
        negatives = _chosen(candidates, float(positives["score"].min()), rules, random)
        distinct = np.sort(positives.index.to_numpy()[~positives["is_repeat"]])
        yield Mined(distinct, negatives, int(others["is_copy"].sum()), int(repeats.sum()))


def _same_texts(
    scored: pd.DataFrame, texts: TextKeys | None
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Find the rows that are copies of a row with a grade above 0, and the rows that repeat an earlier row.

    A row is a copy if its query and its passage have the same texts as those of a row with a grade above 0. A
    row repeats an earlier row if both rows have scores, the same query, passages of the same kind (relevant,
    of a lower grade, or without a grade above 0), and the same text of the passage.
    """
    if texts is None:
        return np.zeros(len(scored), bool), np.zeros(len(scored), bool)
    rows, kinds = scored.index.to_numpy(), scored["kind"].to_numpy()
    pairs = pd.Series(texts.queries[rows] * _ODD ^ texts.passages[rows])
    is_copy = pairs.isin(pairs[kinds != _OTHER]).to_numpy()
    has_score = scored["score"].notna().to_numpy()
    compared = pd.DataFrame({"query": scored["query_id"], "text": texts.passages[rows], "kind": kinds})
    is_repeat = np.zeros(len(scored), bool)
    is_repeat[has_score] = compared[has_score].duplicated().to_numpy()
    return is_copy, is_repeat


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
