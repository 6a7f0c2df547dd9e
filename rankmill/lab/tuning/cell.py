"""Measure one cell of the grid: fresh workers, a warm-up, then the measurements."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import pyarrow as pa
from pydantic import BaseModel

from rankmill.jobs.contract.errors import EmbeddedError, RunFailed
from rankmill.jobs.contract.results import ChunkStats
from rankmill.jobs.runtime.settings import Settings
from rankmill.lab.tuning.bench import Bench, BenchFailed, split_requests
from rankmill.lab.tuning.experiment import Measure, Value
from rankmill.score.session import RunScores


class TokenCounts(BaseModel):
    """Real tokens, and computed tokens including padding."""

    real: int = 0
    padded: int = 0

    @property
    def waste(self) -> float:
        """Share of the computed tokens that was padding."""
        return 1 - self.real / self.padded if self.padded else 0.0


class Repeat(BaseModel):
    """One measurement: a bulk run of ``rows`` pairs, and requests with the latency of each."""

    rows: int = 0
    bulk_seconds: float = 0.0
    bulk_tokens: TokenCounts = TokenCounts()
    latencies: list[float] = []
    request_seconds: float = 0.0
    request_tokens: TokenCounts = TokenCounts()
    row_errors: int = 0


class CellResult(BaseModel):
    """Result of a cell in one round.

    ``status`` is ``impossible`` if the workers refuse the settings, ``failed`` if they died or took too long.
    """

    experiment: str
    cell: dict[str, Value]
    round: int
    status: Literal["measured", "impossible", "failed"]
    reason: str = ""
    settings: dict[str, Any] = {}
    measure: dict[str, Any] = {}
    device: str = ""
    backend: str = ""
    precision: str = ""
    startup_seconds: float = 0.0
    peak_bytes: int = 0
    stage_seconds: dict[str, float] = {}
    repeats: list[Repeat] = []
    seconds: float = 0.0
    ended: float = 0.0


def measure_cell(known: dict[str, Any], settings: Settings, measure: Measure, pairs: pa.Table) -> CellResult:
    """Measure a cell; ``known`` has the fields of its result that are known beforehand."""
    started = time.monotonic()
    record: dict[str, Any] = {**known, "settings": settings.model_dump(), "measure": measure.model_dump()}
    try:
        with Bench(settings, measure.timeout) as bench:
            record |= _measure(bench, measure, pairs) | {"status": "measured"}
    except (RunFailed, EmbeddedError) as error:
        record |= {"status": "impossible", "reason": str(error)}
    except BenchFailed as error:
        record |= {"status": "failed", "reason": str(error)}
    return CellResult(**record, seconds=time.monotonic() - started, ended=time.time())


def _measure(bench: Bench, measure: Measure, pairs: pa.Table) -> dict[str, Any]:
    startup = bench.warm_up(pairs.slice(0, measure.warm_up))
    requests = split_requests(pairs, measure.requests, measure.request_size)
    repeats = []
    stats: ChunkStats | None = None
    for _ in range(measure.repeats):
        scored = bench.bulk(pairs.slice(0, measure.rows)) if measure.rows else None
        began = time.perf_counter()
        answers = bench.requests(requests, measure.concurrency)
        seconds = time.perf_counter() - began
        repeats.append(_repeat(measure.rows, scored, answers, seconds if requests else 0.0))
        stats = next(_stats([*([scored] if scored else []), *answers]), stats)
    return {
        "startup_seconds": startup,
        "repeats": repeats,
        "stage_seconds": bench.stage_seconds(),
        "peak_bytes": bench.peak_bytes,
        **({"device": stats.device, "backend": stats.backend, "precision": stats.precision} if stats else {}),
    }


def _repeat(rows: int, bulk: RunScores | None, requests: list[RunScores], seconds: float) -> Repeat:
    every = [*([bulk] if bulk else []), *requests]
    return Repeat(
        rows=rows,
        bulk_seconds=bulk.seconds if bulk else 0.0,
        bulk_tokens=_tokens([bulk] if bulk else []),
        latencies=[answer.seconds for answer in requests],
        request_seconds=seconds,
        request_tokens=_tokens(requests),
        row_errors=sum(int((scored.scores != scored.scores).sum()) for scored in every),
    )


def _stats(scored: Iterable[RunScores]) -> Iterator[ChunkStats]:
    return (stats for part in scored for stats in part.stats)


def _tokens(scored: Iterable[RunScores]) -> TokenCounts:
    stats = list(_stats(scored))
    return TokenCounts(real=sum(one.tokens for one in stats), padded=sum(one.padded_tokens for one in stats))
