"""A queue whose jobs a test answers itself, as workers would, on a server in the same process."""

from __future__ import annotations

from collections.abc import Callable

import fakeredis
import pyarrow as pa
import pyarrow.compute as pc
from rq.job import Job

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.keys import ChunkId
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.contract.results import ChunkFailure, ChunkResult, ChunkScores, ChunkStats
from rankmill.jobs.contract.wire import decode_rows
from rankmill.jobs.protocol.runs import RunStore
from rankmill.producer.collect.cleanup import RunCleaner
from rankmill.producer.collect.driver import RunDriver
from rankmill.producer.collect.journal import Journal
from rankmill.producer.collect.live import live_run
from rankmill.producer.collect.scored import EarlierScores
from rankmill.producer.collect.sizing import Sizing, WindowSize
from tests.harness.runs import stored_run
from tests.harness.waiting import take_out, waiting_jobs

STATS = ChunkStats(
    worker="w", device="cpu", device_name="cpu", backend="torch", precision="fp32", revision="commit",
    attempt=1, tokens=10, padded_tokens=12, batches=1, seconds=0.5,
)  # fmt: skip


class QueueByHand:
    """The jobs of a run; a test says when which chunk has its result."""

    def __init__(
        self,
        tables: list[pa.Table],
        window: WindowSize,
        journal: Journal | None = None,
        *,
        reuse: EarlierScores | None = None,
        sizing: Sizing | None = None,
        priority: Priority | None = None,
    ) -> None:
        self.store = RunStore(fakeredis.FakeRedis())
        self.run = stored_run(self.store, ttl=100, max_retries=1, priority=priority)
        if journal:
            journal.begin(self.run.id)
        columns = ("query", "passage")
        sizing = sizing or Sizing(len(tables[0]), journals=[journal] if journal else [])
        kept = live_run(self.store, self.run, RunCleaner(self.store), columns, journal)
        self.driver = RunDriver(kept, iter(tables), sizing, window, reuse)
        self.most_waiting = 0
        self.asked: list[str] = []
        """The queries of all pairs that were answered."""
        self.tokens: list[int | None] = []
        """Those of the rows of `scores`, of chunks in which any are known."""

    def waiting(self) -> list[ChunkId]:
        """The chunks that no worker has scored, in the order of the queue."""
        names = waiting_jobs(self.store.redis, "q")
        chunks = [parsed[1] for name in names if (parsed := keys.parse_job_id(name))]
        self.most_waiting = max(self.most_waiting, len(chunks))
        return chunks

    def score(self, chunk: ChunkId) -> None:
        """Answer a chunk: the score of a row is its number in the input, and it has 100 tokens more."""
        scores = pa.array([float(query) for query in self.queries(chunk)], pa.float32())
        tokens = pc.add(scores, 100).cast(pa.int32())
        self._answer(ChunkScores(chunk, scores, pa.nulls(len(scores), pa.string()), STATS, tokens))

    def score_all(self) -> None:
        """Answer all chunks that wait."""
        for chunk in self.waiting():
            self.score(chunk)

    def fail(self, chunk: ChunkId) -> None:
        """Say that a chunk cannot be scored."""
        self._answer(ChunkFailure(chunk=chunk, message="bad", fatal=False, attempts=1))

    def queries(self, chunk: ChunkId) -> list[str]:
        """The queries of a chunk that waits."""
        return [query or "0" for query in decode_rows(self.store.payload(self.run, chunk) or b"", "pairs")[0]]

    def _answer(self, result: ChunkResult) -> None:
        self.asked += self.queries(result.chunk)
        job = keys.job_id(self.run.id, result.chunk)
        self.store.write_result(self.run, result)
        take_out(self.store.redis, job, "q")
        self.store.redis.unlink(Job.key_for(job))

    def scores(self, work: Callable[[], None]) -> list[float]:
        """All scores in order; `work` is called while the producer waits."""
        self.driver.on_wait = work
        self.driver.fill()
        found = []
        for part in self.driver.tables():
            found += part.scores.to_pylist()
            if part.tokens is not None:
                self.tokens += part.tokens.to_pylist()
        return found


def pairs(rows: int, start: int = 0, passage: str = "p") -> pa.Table:
    return pa.table({"query": [str(start + row) for row in range(rows)], "passage": [passage] * rows})
