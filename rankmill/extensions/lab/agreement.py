"""Measures how alike two sets of scores rank the rows of each query, and computes the nDCG of scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

Scores = npt.NDArray[np.float32]
Verdict = Literal["kept", "lost", "undecided"]

TOP = 10
"""This many of a query's best rows are compared between two rankings. Their order does not count."""

_DRAWS = 1000
_INTERVAL = (2.5, 97.5)
"""Bounds of the 95% confidence interval of a rank correlation, as percentiles of the bootstrap draws."""

_MANY_QUERIES = 20
"""With fewer queries than this, the bootstrap also resamples the rows of each query. Otherwise it would
underestimate the variance.
"""


@dataclass(frozen=True)
class Agreement:
    """Two rankings of the same rows, compared query by query.

    Attributes
    ----------
    spearman
        Mean over the queries of Spearman's rank correlation.
    low, high
        The 95% confidence interval of `spearman`, by bootstrap.
    queries, rows
        Numbers of the compared queries and of their rows. A query is left out if all its rows have the same
        score in one of the rankings.
    top_overlap
        Share of a query's first `TOP` rows that the two rankings have in common, as the mean over the queries
        with more than `TOP` rows; ``None`` if there are no such queries.
    """

    spearman: float
    low: float
    high: float
    queries: int
    rows: int
    top_overlap: float | None

    def __str__(self) -> str:
        return f"{self.spearman:.5f} ({self.low:.5f} to {self.high:.5f})"

    def verdict(self, threshold: float) -> Verdict:
        """Compare the confidence interval of `spearman` with `threshold`.

        - ``kept``: the whole interval is at or above the threshold.
        - ``lost``: the whole interval is below the threshold.
        - ``undecided``: the threshold lies inside the interval.
        """
        if self.low >= threshold:
            return "kept"
        return "lost" if self.high < threshold else "undecided"

    def rows_wanted(self, threshold: float) -> int:
        """Estimate how many rows must be scored to decide whether `threshold` is reached.

        The estimate assumes that the confidence interval narrows with the square root of the number of rows.
        """
        margin = max(abs(self.spearman - threshold), 1e-5)
        return math.ceil(self.rows * ((self.high - self.low) / 2 / margin) ** 2 / 1000) * 1000


def agreement(queries: Sequence[str], scores: Scores, reference: Scores) -> Agreement | None:
    """Compare how `scores` and `reference`, both ``[n]``, rank the rows of each query.

    A row is left out if `scores` or `reference` lacks its score. A query is left out if `scores` or
    `reference` gives all its rows the same score. Returns ``None`` if no query remains.
    """
    both = np.flatnonzero(np.isfinite(scores) & np.isfinite(reference))
    if not len(both):
        return None
    queries, scores, reference = [queries[row] for row in both.tolist()], scores[both], reference[both]
    table = pd.DataFrame({"query": queries, "score": scores, "reference": reference})
    by_query = table.groupby("query", sort=False)
    all_ranks = by_query[["score", "reference"]].rank().to_numpy()
    numbers = by_query.ngroup().to_numpy()
    in_turn = np.argsort(numbers, kind="stable")
    ranks, overlaps = [], []
    for rows in np.split(in_turn, np.flatnonzero(np.diff(numbers[in_turn])) + 1):
        if (all_ranks[rows].std(axis=0) > 0).all():
            ranks.append(all_ranks[rows])
        if len(rows) > TOP:
            overlaps.append(_overlap(scores[rows], reference[rows]))
    if not ranks:
        return None
    values = np.array([_correlation(each[None])[0] for each in ranks])
    low, high = _interval(ranks, values)
    return Agreement(
        spearman=float(values.mean()),
        low=low,
        high=high,
        queries=len(ranks),
        rows=sum(map(len, ranks)),
        top_overlap=float(np.mean(overlaps)) if overlaps else None,
    )


def _overlap(scores: Scores, reference: Scores) -> float:
    """Return the share of the first `TOP` rows that the rankings by `scores` and by `reference` have in
    common. Rows with equal scores rank in input order.
    """
    first = [set(np.argsort(-each, kind="stable")[:TOP].tolist()) for each in (scores, reference)]
    return len(first[0] & first[1]) / TOP


def _interval(ranks: list[npt.NDArray[np.float64]], values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95% confidence interval of the mean rank correlation of queries, by bootstrap with a fixed
    seed.
    """
    random = np.random.default_rng(0)
    picked = random.integers(len(values), size=(_DRAWS, len(values)))
    if len(values) >= _MANY_QUERIES:
        means = values[picked].mean(axis=1)
    else:
        within = np.stack([_drawn(each, random) for each in ranks], axis=1)  # [draws, queries]
        means = np.take_along_axis(within, picked, axis=1).mean(axis=1)
    low, high = np.percentile(means, _INTERVAL)
    return float(min(low, values.mean())), float(max(high, values.mean()))


def _drawn(ranks: npt.NDArray[np.float64], random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return the rank correlation of a query for each bootstrap draw of its rows, ``[draws]``. A draw with
    only equal ranks gets the correlation of the whole query.
    """
    drawn = _correlation(ranks[random.integers(len(ranks), size=(_DRAWS, len(ranks)))])
    return np.where(np.isfinite(drawn), drawn, _correlation(ranks[None])[0])


def _correlation(pairs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Pearson's correlation of the two columns of ``[..., n, 2]``; NaN where a column is constant."""
    first, second = np.moveaxis(pairs - pairs.mean(axis=-2, keepdims=True), -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        # Add all products in the same way, so that the correlation of equal columns is exactly 1.
        both, of_first, of_second = (
            (one * other).sum(axis=-1) for one, other in ((first, second), (first, first), (second, second))
        )
        correlations: npt.NDArray[np.float64] = both / np.sqrt(of_first * of_second)
    return correlations


Qrels = Mapping[str, Mapping[str, float]]
"""Relevance grades of documents, by the query's id and then the document's id."""


def ndcg(
    queries: Sequence[str], documents: Sequence[str], scores: Scores, qrels: Qrels, k: int = 10
) -> float | None:
    """Return the mean over the queries of nDCG at `k`, computed like trec_eval's ``ndcg_cut``.

    Queries without grades in `qrels` are left out. Returns ``None`` if no query remains. The gain of a
    document is its grade. The ideal ranking contains all judged documents, even those without a score. Of
    documents with equal scores, the one with the larger id comes first.
    """
    run = pd.DataFrame({"query": queries, "document": documents, "score": scores})
    values = []
    for query, rows in run.groupby("query"):
        grades = qrels.get(str(query))
        if grades is None:
            continue
        ranked = rows.sort_values(["score", "document"], ascending=False)["document"]
        ideal = _dcg(sorted(grades.values(), reverse=True), k)
        values.append(_dcg([grades.get(name, 0) for name in ranked], k) / ideal if ideal else 0.0)
    return float(np.mean(values)) if values else None


def _dcg(grades: Sequence[float], k: int) -> float:
    return sum(max(grade, 0) / math.log2(place + 2) for place, grade in enumerate(grades[:k]))
