"""Ranking quality by labels: nDCG as trec_eval computes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

Scores = npt.NDArray[np.float32]
Qrels = Mapping[str, Mapping[str, float]]
"""Grades by query id and document id."""


def read_qrels(path: Path) -> Qrels:
    """Judgments in TREC's format: ``query-id 0 document-id grade`` on each line."""
    found: dict[str, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        query, _, document, grade = line.split()
        found.setdefault(query, {})[document] = int(grade)
    return found


def ndcg(
    queries: Sequence[str], documents: Sequence[str], scores: Scores, qrels: Qrels, k: int = 10
) -> float:
    """trec_eval's ``ndcg_cut_k``, the mean over the queries that have judgments.

    The gain is the grade. The ideal ranking contains all judged documents, even those without a score here.
    Among equal scores the document with the larger id comes first.
    """
    run = pd.DataFrame({"query": queries, "document": documents, "score": scores})
    values = []
    for query, found in run.groupby("query"):
        grades = qrels.get(str(query))
        if grades is None:
            continue
        ranked = found.sort_values(["score", "document"], ascending=False)["document"]
        ideal = _dcg(sorted(grades.values(), reverse=True), k)
        values.append(_dcg([grades.get(name, 0) for name in ranked], k) / ideal if ideal else 0.0)
    return float(np.mean(values))


def _dcg(grades: Sequence[float], k: int) -> float:
    return sum(max(grade, 0) / math.log2(place + 2) for place, grade in enumerate(grades[:k]))
