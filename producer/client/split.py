"""An alias that stands for several versions: which one scores a query, and their scores together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.jobs.contract.run import Progress
from rankmill.producer.client.runs import JoinedRuns, ScoringRun
from rankmill.producer.collect.scored import ScoredTable

RowNumbers = npt.NDArray[np.int64]


def version_of(name: str, versions: Mapping[str, float], query: str | None) -> str:
    """The version of model `name` that scores a query: always the same, as long as the shares are.

    The first version keeps its queries as its share grows, and so does the last.
    """
    text = f"{name}\0{query or ''}".encode(errors="replace")
    at = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64
    for version, share in versions.items():
        at -= share
        if at < 0:
            return version
    return list(versions)[-1]  # the shares add up to a little less than 1


def rows_by_version(
    name: str, versions: Mapping[str, float], queries: Iterable[str | None]
) -> dict[str, RowNumbers]:
    """Row numbers by the version that scores them."""
    known: dict[str | None, str] = {}
    found: dict[str, list[int]] = {}
    for row, query in enumerate(queries):
        if query not in known:
            known[query] = version_of(name, versions, query)
        found.setdefault(known[query], []).append(row)
    return {version: np.array(rows, np.int64) for version, rows in found.items()}


def split_run(table: pa.Table, rows: Sequence[RowNumbers], runs: Sequence[ScoringRun]) -> ScoringRun:
    """Runs that score some rows of `table` each, read as one; its scores are there when all of them are."""
    read: list[list[ScoredTable]] = [[] for _ in runs]

    def tables() -> Iterator[ScoredTable]:
        for run, found in zip(runs, read, strict=True):
            for part in run.tables():
                found.append(part)  # to be there if the wait ends, and is taken up again
        parts = [part for found in read for part in found]
        read[:] = [[] for _ in runs]
        if not parts:
            return
        kinds = [part.scores.type for part in parts]
        kind = next((kind for kind in kinds if pa.types.is_fixed_size_list(kind)), pa.float32())
        scores = [
            part.scores if part.scores.type == kind else pa.nulls(len(part.scores), kind) for part in parts
        ]
        order = pa.array(np.argsort(np.concatenate(rows)))
        yield ScoredTable(
            table=table,
            scores=pa.concat_arrays(scores).take(order),
            errors=pa.concat_arrays([part.errors for part in parts]).take(order),
            stats=None,
            attempts=max(part.attempts for part in parts),
            worker="",
            parts=tuple(parts),
        )

    return JoinedRuns(runs, tables, lambda each: Progress(rows=sum(one.rows for one in each)))
