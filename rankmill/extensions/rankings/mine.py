"""Chooses hard negatives from a scored run as sentence-transformers' `mine_hard_negatives` does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from pydantic import Field

from rankmill.cli import options
from rankmill.extensions.rankings.scored import choose_score_column, is_table, read_rows, run_scores
from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.corpus.rankings import SCHEMA, check_once, read_qrels, read_ranking
from rankmill.producer.files.ranking import best_first
from rankmill.producer.files.stores.paths import AnyPath

_Score = Annotated[float, Field(title="X")]


class Rules(options.CommandOptions):
    """Options of ``rankmill mine`` that choose the negatives of a query, named as in sentence-transformers'
    `mine_hard_negatives`.

    First the candidates are found: passages of the run without a grade above 0. If several passages have the
    same text, only the first of them is a candidate. If one of them has a grade above 0, none of them is a
    candidate. Candidates without a score are not chosen. If both margins are given, the larger one decides.
    """

    min_relevance: options.Number = 1
    """Lowest grade of a relevant passage. Passages with a lower grade above 0 are not used."""
    num_negatives: options.Number = 3
    """Number of negatives for each query."""
    range_min: Annotated[int, Field(ge=0, title="N")] = 0
    """Skip the N hardest negatives."""
    range_max: options.Number | None = None
    """Choose from each query's first N passages; those with a grade above 0 do not count.  [default: all]"""
    max_score: _Score | None = None
    """Highest score of a negative."""
    min_score: _Score | None = None
    """Lowest score of a negative."""
    absolute_margin: _Score | None = None
    """Choose only negatives that score at least X less than every relevant passage of their query."""
    relative_margin: _Score | None = None
    """Like --absolute-margin, with a margin of X times the query's lowest relevant score. 0.05 is 5%."""
    sampling_strategy: Literal["top", "random"] = "top"
    """Take the hardest negatives, or random ones."""
    seed: Annotated[int, Field(title="N")] = 0
    """Seed of random sampling."""


@dataclass(frozen=True)
class Mined:
    """The passages that were chosen for one query.

    Attributes
    ----------
    positives
        Row numbers of the relevant passages in the scored file.
    negatives
        Row numbers of the negatives in the scored file, hardest first.
    copies
        Number of passages left out because a passage with a grade above 0 has the same text.
    repeats
        Number of passages left out because an earlier candidate has the same text.
    """

    positives: npt.NDArray[np.int64]
    negatives: npt.NDArray[np.int64]
    copies: int
    repeats: int


@dataclass(frozen=True)
class TextKeys:
    """Hashes of each row's query and passage, uint64 ``[n]``. Equal texts have equal hashes."""

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
    """Read the ids, scores and judgements of a scored table, or of a TREC run with scores.

    Returns the columns ``query_id``, ``doc_id``, ``score``, ``relevance``, ``in_run`` and ``place`` (in the
    run's order), with a row for each row of the file. Without a column ``in_run``, all rows belong to the
    run.

    If the file lacks passages with a grade above 0 in `qrels`, further rows have these passages, without a
    score.

    Parameters
    ----------
    path
        The scored table, or the run.
    score
        Name of the column with the scores; by default, `choose_score_column` finds it.
    qrels
        Judgements; by default, the table's column ``relevance`` has them.

    Raises
    ------
    InputError
        The file cannot be read or lacks ids, scores or judgements, or a query has a passage twice.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    score = choose_score_column(path, score)
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
    """Return each row's place in the run, in the order that the run had before it was scored.

    The column ``run_score``, or else ``run_rank``, has the order of that run. If there is neither, the run
    had the order of the rows.
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
    """Choose negatives for each query that has a relevant passage with a score.

    Parameters
    ----------
    scored
        Rows from `read_scored`.
    rules
        Rules for the choice.
    texts
        Hashes of the rows' texts, to leave out passages with the same text; ``None`` if the texts are not
        known.
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
    """Find passages with the same text. Returns two masks, which are true for these rows:

    - ``is_copy``: rows with the query's text and the passage's text of a row with a grade above 0.
    - ``is_repeat``: rows with the passage's text and the kind (`_RELEVANT`, `_RELATED` or `_OTHER`) of an
      earlier row of the same query. Only rows with scores are compared.
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
