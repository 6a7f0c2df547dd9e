"""What a precision costs: the same pairs scored with it and in fp32, and the rankings compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from jobs.errors import InputError, RunFailed
from jobs.runtime.settings import Settings
from producer.files.readers import TextColumns
from rankmill.session import Scored, Session
from rankmill.tuning.agreement import Agreement, agreement
from rankmill.tuning.pairs import file_sample
from rankmill.tuning.quality import Qrels, ndcg

REFERENCE = "fp32"


@dataclass(frozen=True)
class Measured:
    """How a precision did.

    Attributes
    ----------
    precision
        The one asked for, or what ``auto`` meant.
    backend, device
        What ran it.
    agreement
        How it ranks the passages of a query, beside fp32.
    ndcg
        nDCG@10 by the labels, where there are any.
    lost
        Rows that have a score in fp32 and none in this precision.
    """

    precision: str
    backend: str
    device: str
    agreement: Agreement
    ndcg: float | None
    lost: int


def check_precisions(
    inputs: Sequence[str],
    columns: TextColumns,
    label_column: str | None,
    sample: int,
    precisions: Sequence[str],
    settings: Settings,
) -> list[Measured]:
    """Score a sample of the input in fp32 and in each precision: fp32 first, then those asked for.

    Parameters
    ----------
    inputs
        Files, directories or globs.
    columns
        Where the pairs are.
    label_column
        Where relevance is, as a number; without it there is no nDCG.
    sample
        Rows to score, at most; which ones: `rankmill.tuning.pairs.draw`.
    precisions
        What to compare with fp32.
    settings
        The model, and where it runs.

    Raises
    ------
    InputError
        The rows cannot be compared, or a precision cannot be run.
    """
    with Session(settings) as session:  # workers start while the files are looked at
        table = file_sample(inputs, sample, columns, label_column)
        scored = [
            _score(session, table, columns, precision)
            for precision in dict.fromkeys([REFERENCE, *precisions])
        ]
    queries = table[columns.query].to_pylist()
    labels = None if label_column is None else table[label_column].to_pylist()
    return [_measured(each, scored[0], queries, labels) for each in scored]


def _score(session: Session, table: pa.Table, columns: TextColumns, precision: str) -> Scored:
    try:
        scored = session.score(table, columns.names, precision=precision)
    except RunFailed as error:
        raise InputError(str(error)) from None
    if not scored.stats:
        raise InputError(f"no row has a score in {precision}")
    return scored


def _measured(
    scored: Scored, reference: Scored, queries: list[str], labels: list[float | None] | None
) -> Measured:
    has_reference = np.isfinite(reference.scores)
    both = np.flatnonzero(has_reference & np.isfinite(scored.scores))
    names = [queries[row] for row in both]
    found = agreement(names, scored.scores[both], reference.scores[both])
    if found is None:
        raise InputError("no query has two passages with different scores, so there are no ranks to compare")
    quality = None
    if labels is not None:
        rows = [f"{row:09}" for row in both]
        quality = ndcg(names, rows, scored.scores[both], _qrels(queries, labels))
    lost = int(has_reference.sum() - len(both))
    how = scored.stats[0]
    return Measured(how.precision, how.backend, how.device, found, quality, lost)


def _qrels(queries: list[str], labels: list[float | None]) -> Qrels:
    """Each row is a document of its query."""
    found: dict[str, dict[str, float]] = {}
    for row, (query, label) in enumerate(zip(queries, labels, strict=True)):
        if label is not None:
            found.setdefault(query, {})[f"{row:09}"] = label
    return found
