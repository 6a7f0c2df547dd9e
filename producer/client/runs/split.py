"""An alias that stands for several versions: which one scores a query, and their scores together."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.jobs.contract.errors import RankmillError
from rankmill.jobs.contract.priority import choose_priority
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.contract.schema import MAX_CHUNK_ROWS
from rankmill.producer.client.runs.scores import RunStats, Scores
from rankmill.producer.collect.pairs import cut_pairs

if TYPE_CHECKING:
    from rankmill.jobs.contract.priority import Priority
    from rankmill.jobs.registry.registry import Resolved
    from rankmill.producer.client.runs.scoring_run import ScoringRun, Submitter
    from rankmill.producer.collect.pairs import Pairs

SHADOWS = 8
"""Runs of a shadow at a time, for each client; what comes while there are so many has none."""

_SHADOW_SECONDS = 300.0

logger = logging.getLogger(__name__)


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
) -> dict[str, npt.NDArray[np.int64]]:
    """Row numbers by the version that scores them."""
    known: dict[str | None, str] = {}
    found: dict[str, list[int]] = {}
    for row, query in enumerate(queries):
        if query not in known:
            known[query] = version_of(name, versions, query)
        found.setdefault(known[query], []).append(row)
    return {version: np.array(rows, np.int64) for version, rows in found.items()}


class SplitScorer:
    """Scores with the versions of an alias, and in the shadow; safe to share between threads.

    Parameters
    ----------
    client
        Submits the runs.
    """

    def __init__(self, client: Submitter) -> None:
        self._client = client
        self._free = threading.BoundedSemaphore(SHADOWS)

    def start(
        self,
        choice: Resolved,
        pairs: Pairs,
        columns: tuple[str, str],
        *,
        priority: Priority | None = None,
        **options: Any,
    ) -> SplitRun:
        """Start a run for each version; `options` as of `Client.start`."""
        tables = list(cut_pairs(pairs, columns, lambda _: MAX_CHUNK_ROWS))
        if not tables:
            return SplitRun([], 0)
        table = pa.concat_tables(tables).select(list(columns))
        rows = rows_by_version(choice.name, choice.versions, table[columns[0]].to_pylist())
        priority = choose_priority(priority, len(table))
        options.pop("model", None)
        runs: list[tuple[npt.NDArray[np.int64], ScoringRun]] = []
        try:
            for version, numbers in rows.items():
                model = f"{choice.name}@{version}"
                part = self._client.run_of(
                    table.take(numbers), columns, priority=priority, model=model, **options
                )
                runs.append((numbers, part))
        except BaseException:
            SplitRun(runs, len(table)).cancel()
            raise
        if choice.shadow:
            self._begin_shadow(f"{choice.name}@{choice.shadow}", table, columns, options)
        return SplitRun(runs, len(table))

    def _begin_shadow(
        self, model: str, table: pa.Table, columns: tuple[str, str], options: Mapping[str, Any]
    ) -> None:
        if not self._free.acquire(blocking=False):
            logger.debug("%s has enough to do: a run is not scored in the shadow", model)
            return
        spec = {name: value for name, value in options.items() if name != "deadline"}

        def score() -> None:
            try:
                self._client.score(
                    table, columns=columns, timeout=_SHADOW_SECONDS, priority="bulk", model=model, **spec
                )
            except RankmillError as error:
                logger.warning("%s could not score in the shadow: %s", model, error)
            finally:
                self._free.release()

        self._client.store.later(score)


class SplitRun:
    """The runs of the versions, each with the rows that it scores; read as a `ScoringRun` is."""

    def __init__(self, runs: list[tuple[npt.NDArray[np.int64], ScoringRun]], rows: int) -> None:
        self._runs = runs
        self._rows = rows
        self.errors: dict[int, str] = {}
        """Reasons by row number (from 0) for the rows read so far that have no score."""
        self.stats = RunStats()
        """How the rows read so far were scored: known when all of them are."""

    @property
    def id(self) -> str:
        """The ids of the runs."""
        return ",".join(run.id for _, run in self._runs)

    @property
    def model(self) -> str:
        """The versions that score."""
        return ",".join(run.model for _, run in self._runs)

    @property
    def progress(self) -> Progress:
        """The rows done so far of all runs."""
        return Progress(rows=sum(run.progress.rows for _, run in self._runs))

    def scores(self, timeout: float | None = None) -> Scores:
        """The scores of all rows; the parameter and what it raises are as of `ScoringRun.scores`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        parts = [
            (numbers, run.scores(None if deadline is None else deadline - time.monotonic()))
            for numbers, run in self._runs
        ]
        labels = next((found.labels for _, found in parts if found.labels), ())
        whole = np.full((self._rows, len(labels)) if labels else self._rows, np.nan, np.float32)
        for numbers, found in parts:
            whole[numbers] = found.reshape(len(found), -1) if labels else found
            self.errors |= {int(numbers[row]): reason for row, reason in found.errors.items()}
        self.stats = RunStats.of([run.stats for _, run in self._runs])
        return Scores.of([whole], self.errors, labels)

    def __iter__(self) -> Iterator[float]:
        """Yield the scores in input order, when all are there; NaN for rows in `errors`."""
        yield from self.scores().tolist()

    def cancel(self) -> None:
        """Cancel all of them."""
        for _, run in self._runs:
            run.cancel()


AnyRun: TypeAlias = "ScoringRun | SplitRun"
"""What scores a caller's pairs: one run, or those of several versions."""
