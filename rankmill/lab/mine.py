"""Hard negatives from a scored run, chosen as sentence-transformers' `mine_hard_negatives` chooses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.corpus.rankings import check_once
from rankmill.producer.files.formats.base import text_of
from rankmill.producer.files.stores.reading import open_random

Form = Literal["triplet", "n-tuple", "labeled-pair", "labeled-list"]

_NEEDED = ("query_id", "doc_id", "score", "relevance", "in_run", "query", "passage")


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


def read_ids(path: Path) -> pd.DataFrame:
    """Read ids, scores and labels of an output of ``score-file --run --qrels --with-texts``.

    Raises
    ------
    InputError
        The file is none.
    """
    try:
        schema = pq.read_schema(open_random(path))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a Parquet file: {text_of(error)}") from None
    missing = [name for name in _NEEDED if name not in schema.names]
    if missing:
        raise InputError(
            f"{path}: no column {missing[0]!r}; make it with score-file --run RUN --queries QUERIES "
            "--corpus CORPUS --qrels QRELS --with-texts"
        )
    found: pd.DataFrame = pq.read_table(open_random(path), columns=list(_NEEDED[:5])).to_pandas()
    check_once(found, path)
    return found


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


def texts_of(path: Path, rows: npt.NDArray[np.int64]) -> tuple[dict[int, str], dict[int, str]]:
    """Queries and passages of some rows of the scored file; the file is read as a stream."""
    wanted = np.unique(rows)
    queries: dict[int, str] = {}
    passages: dict[int, str] = {}
    start = 0
    with pq.ParquetFile(open_random(path)) as file:
        for batch in file.iter_batches(columns=["query", "passage"]):
            here = wanted[np.searchsorted(wanted, start) : np.searchsorted(wanted, start + len(batch))]
            part = batch.take(pa.array(here - start))
            queries |= dict(zip(here.tolist(), part["query"].to_pylist(), strict=True))
            passages |= dict(zip(here.tolist(), part["passage"].to_pylist(), strict=True))
            start += len(batch)
    return queries, passages


def with_rows(found: list[Mined], form: str, rules: Rules) -> list[Mined]:
    """Those from which `training_rows` makes rows: without negatives there are none, but of labeled pairs."""
    return [
        each
        for each in found
        if form == "labeled-pair" or _groups(each.negatives.tolist(), form, rules.num_negatives)
    ]


def training_rows(
    found: list[Mined], scored: pd.DataFrame, path: Path, form: str, rules: Rules, *, with_scores: bool
) -> pa.Table:
    """Lay out what was mined as sentence-transformers' trainers read it.

    triplet: ``anchor, positive, negative`` for each pair of them. n-tuple: ``anchor, positive, negative_1``
    and so on, only where there are ``num_negatives``. labeled-pair: ``anchor, passage, label``.
    labeled-list: ``anchor, passages, labels``. With scores: ``scores`` of the positive and the negatives, or
    ``score`` and ``scores`` instead of the labels.
    """
    used = [np.concatenate([each.positives, each.negatives]) for each in found]
    queries, passages = texts_of(path, np.concatenate(used) if used else np.zeros(0, np.int64))
    scores: list[float] = scored["score"].to_list()
    rows: list[dict[str, object]] = []
    for each in found:
        anchor = queries[int(each.positives[0])]
        positives: list[int] = each.positives.tolist()
        negatives: list[int] = each.negatives.tolist()
        if form == "labeled-pair":
            for row in [*positives, *negatives]:
                name, value = ("score", scores[row]) if with_scores else ("label", int(row in positives))
                rows.append({"anchor": anchor, "passage": passages[row], name: value})
            continue
        for positive in positives:
            for chosen in _groups(negatives, form, rules.num_negatives):
                listed = [positive, *chosen]
                new = _row(form, anchor, [passages[row] for row in listed])
                if with_scores:
                    new.pop("labels", None)
                    new["scores"] = [scores[row] for row in listed]
                rows.append(new)
    return pa.Table.from_pylist(rows)


def _groups(negatives: list[int], form: str, number: int) -> list[list[int]]:
    """The negatives that go into one row: each alone in triplets, else all, if there are enough."""
    if form == "triplet":
        return [[row] for row in negatives]
    needed = number if form == "n-tuple" else 1
    return [negatives] if len(negatives) >= needed else []


def _row(form: str, anchor: str, passages: list[str]) -> dict[str, object]:
    """A row of a positive, which comes first, and its negatives."""
    if form == "labeled-list":
        return {"anchor": anchor, "passages": passages, "labels": [1] + [0] * (len(passages) - 1)}
    numbered = {f"negative_{number}": text for number, text in enumerate(passages[1:], 1)}
    return {
        "anchor": anchor,
        "positive": passages[0],
        **({"negative": passages[1]} if form == "triplet" else numbered),
    }
