"""Scores the same pairs in fp32 and in other precisions, and compares the rankings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rankmill.extensions.lab.agreement import TOP, Agreement, Qrels, agreement, ndcg
from rankmill.extensions.lab.pairs import FileSample
from rankmill.jobs.contract.errors import InputError, RunFailed
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.files.formats.base import TextColumns
from rankmill.score.session import RunScores, Session

REFERENCE = "fp32"


@dataclass(frozen=True)
class Measured:
    """How a model ranks in one precision, compared with reference scores, which are usually in fp32.

    Attributes
    ----------
    precision
        The precision that ran, such as the one that ``auto`` chose.
    backend, device
        Backend and device that computed in this precision.
    agreement
        How far the rankings within each query agree with those of the reference.
    ndcg
        nDCG@10 of the scores, computed from relevance labels; ``None`` without labels.
    lost
        Number of rows with a score in the reference but not in this precision.
    """

    precision: str
    backend: str
    device: str
    agreement: Agreement
    ndcg: float | None
    lost: int

    @property
    def values(self) -> dict[str, Any]:
        """Return all fields by name, with the fields of `agreement` in place of `agreement` itself."""
        fields = asdict(self)
        ranks = fields.pop("agreement")
        return {**fields, **ranks}

    @property
    def figures(self) -> dict[str, str]:
        """Return the measured values as texts for a table, by name; the text of a missing value is empty."""
        shared = self.agreement.top_overlap
        return {
            "Spearman": str(self.agreement),
            f"top {TOP} shared": "" if shared is None else f"{shared:.1%}",
            "nDCG@10": "" if self.ndcg is None else f"{self.ndcg:.4f}",
            "rows lost": f"{self.lost:,}",
        }


def check_precisions(sample: FileSample, precisions: Sequence[str], settings: Settings) -> list[Measured]:
    """Score a sample of the input in fp32 and in each other precision, and compare the rankings. Returns a
    result for each precision, fp32 first.

    Parameters
    ----------
    sample
        The rows to score; without a column of labels there is no nDCG.
    precisions
        Precisions to compare with fp32.
    settings
        The model, and the server or the embedded workers.

    Raises
    ------
    InputError
        The files cannot be read, the rows cannot be compared, or no worker can run a precision.
    """
    with Session(settings) as session:  # the workers start while the files are read
        table = sample.read()
        scored = [
            score_sample(session, table, sample.columns, f"in {precision}", precision=precision)
            for precision in dict.fromkeys([REFERENCE, *precisions])
        ]
    queries = table[sample.columns.query].to_pylist()
    labels = None if sample.label is None else table[sample.label].to_pylist()
    return [compare(each, scored[0], queries, labels) for each in scored]


def score_sample(
    session: Session, table: pa.Table, columns: TextColumns, what: str, **options: Any
) -> RunScores:
    """Score a table of pairs with the `options` of `Session.score`. If no row has a score, the error message
    ends with `what`, such as "in fp32".

    Raises
    ------
    InputError
        No worker can score with these options, or no row has a score.
    """
    try:
        scored = session.score(table, columns.names, **options)
    except RunFailed as error:
        raise InputError(str(error)) from None
    if not scored.stats:
        raise InputError(f"no row has a score {what}")
    return scored


def compare(
    scored: RunScores, reference: RunScores, queries: list[str], labels: list[float | None] | None
) -> Measured:
    """Compare how `scored` and `reference` rank the same rows.

    Parameters
    ----------
    scored, reference
        Scores of the rows, such as in bf16 and in fp32.
    queries, labels
        The query and the relevance label of each row, ``[n]``.

    Raises
    ------
    InputError
        No query has two rows with different scores, so there are no ranks to compare.
    """
    has_reference = np.isfinite(reference.scores)
    both = np.flatnonzero(has_reference & np.isfinite(scored.scores))
    agreed = agreement(queries, scored.scores, reference.scores)
    if agreed is None:
        raise InputError("no query has two passages with different scores, so there are no ranks to compare")
    quality = None
    if labels is not None:
        rows = [f"{row:09}" for row in both]
        quality = ndcg([queries[row] for row in both], rows, scored.scores[both], _qrels(queries, labels))
    lost = int(has_reference.sum() - len(both))
    ran_on = scored.stats[0]
    return Measured(ran_on.precision, ran_on.backend, ran_on.device, agreed, quality, lost)


def _qrels(queries: list[str], labels: list[float | None]) -> Qrels:
    """Make relevance judgements from the labels of rows; each row counts as a document of its query."""
    qrels: dict[str, dict[str, float]] = {}
    for row, (query, label) in enumerate(zip(queries, labels, strict=True)):
        if label is not None and not np.isnan(label):
            qrels.setdefault(query, {})[f"{row:09}"] = label
    return qrels
