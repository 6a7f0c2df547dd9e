"""Names of rankmill's Redis keys; each key has an expiry.

RQ manages its own keys (queues, jobs, workers, registries), which start with ``rq:``.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

from rankmill.jobs.contract.priority import priority_of, tenant_in

PREFIX = "rankmill"

_CHUNK = r"(\d{1,18})(?:_(\d{1,18})_(\d{1,18}))?"
_CHUNK_ID = re.compile(_CHUNK, re.ASCII)
_JOB_ID = re.compile(f"(r?[0-9A-Fa-f]+)-({_CHUNK})", re.ASCII)


class PieceId(NamedTuple):
    """The name of a piece: successive rows of a chunk that are sent as a job of their own.

    Attributes
    ----------
    parent
        The chunk that the piece is a part of.
    start
        Place of the piece's first row, counted from 0 among the chunk's rows that have to be scored.
    rows
        Number of rows of the piece.
    """

    parent: int
    start: int
    rows: int

    def __str__(self) -> str:
        return f"{self.parent}_{self.start}_{self.rows}"


ChunkId: TypeAlias = int | PieceId
"""A whole chunk is named by its first row in the input, and a piece by its `PieceId`. `str` gives the name in
Redis, and `read_chunk_id` reads it.
"""


def parent_of(chunk: ChunkId) -> int:
    """Return the chunk that a piece (rows sent as a job of their own) is a part of.

    A whole chunk is returned as it is.
    """
    return chunk.parent if isinstance(chunk, PieceId) else chunk


def read_chunk_id(name: object) -> ChunkId | None:
    """Read a chunk's name in Redis, or return ``None`` if this is not the name of a chunk.

    >>> read_chunk_id("96"), read_chunk_id(b"96_16_8"), read_chunk_id("*")
    (96, PieceId(parent=96, start=16, rows=8), None)
    """
    match = _CHUNK_ID.fullmatch(name.decode(errors="replace") if isinstance(name, bytes) else str(name))
    if match is None:
        return None
    whole, *rows = match.groups()
    return PieceId(int(whole), *map(int, rows)) if rows[0] else int(whole)


def run(run_id: str) -> str:
    """Hash: the fields of a run (`Run.fields`), such as its spec, its queue and the time when it began."""
    return f"{PREFIX}:run:{run_id}:meta"


def pairs(run_id: str, chunk: ChunkId | Literal["*", ""]) -> str:
    """String: the Arrow payload of a chunk until its result is collected. ``*`` gives a pattern for all
    chunks.
    """
    return f"{PREFIX}:run:{run_id}:pairs:{chunk}"


def results(run_id: str) -> str:
    """Stream: an entry for each result, until the producer has read and deleted it."""
    return f"{PREFIX}:run:{run_id}:results"


def wrong(run_id: str) -> str:
    """String: why a worker's scores of this run are wrong, as that worker says. The key outlives the run."""
    return f"{PREFIX}:run:{run_id}:wrong"


def progress(run_id: str) -> str:
    """String: the progress of a run, as JSON."""
    return f"{PREFIX}:run:{run_id}:progress"


def errors(run_id: str) -> str:
    """List: a run's first rows that have no score, each as JSON."""
    return f"{PREFIX}:run:{run_id}:errors"


def cancelled(run_id: str) -> str:
    """String: tells a producer that someone else has cancelled its run."""
    return f"{PREFIX}:run:{run_id}:cancelled"


def detached(run_id: str) -> str:
    """String: the chunks of a detached run (any process may collect the results), as JSON."""
    return f"{PREFIX}:run:{run_id}:detached"


def failed_attempts(run_id: str) -> str:
    """Set: ``<chunk>:<number>`` for each failed attempt at a chunk, and ``<piece>:0`` for each piece (rows of
    a chunk) that was sent as a job of its own.
    """
    return f"{PREFIX}:run:{run_id}:submissions"


def settled(run_id: str) -> str:
    """Hash: what is the same for all chunks of a run, such as the precision (`Settled`)."""
    return f"{PREFIX}:run:{run_id}:settled"


def counted(run_id: str) -> str:
    """Set: ids of a run's results that are already counted in the tenant's usage (pairs, tokens, device
    time). This set exists only if the results stay in Redis.
    """
    return f"{PREFIX}:run:{run_id}:counted"


def usage(day: int | Literal[""]) -> str:
    """Hash: the pairs, tokens and device time that each tenant has used on one day, by model and device. Days
    are numbered from 1970 in UTC.
    """
    return f"{PREFIX}:usage:{day}"


def refusals(run_id: str) -> str:
    """Hash, by the worker's name: why a worker cannot score the run, and until when it refuses the run."""
    return f"{PREFIX}:run:{run_id}:refusals"


def of_run(run_id: str) -> list[str]:
    """The keys of a run, except `cancelled`, `wrong` and the keys of its chunks."""
    state = (run, results, progress, errors, detached, failed_attempts, counted)
    return [name(run_id) for name in (*state, settled, refusals)]


def runs() -> str:
    """Sorted set: ids of all runs with a producer, ordered by their expiry (seconds since 1970)."""
    return f"{PREFIX}:runs"


def probe() -> str:
    """String: written to test whether the server accepts writes; expires after a millisecond."""
    return f"{PREFIX}:probe"


def set_aside() -> str:
    """List: the latest jobs that could not be read, each with the reason, as JSON."""
    return f"{PREFIX}:set-aside"


def last_reports() -> str:
    """List: the last reports of workers that stopped because their scores were wrong, each as JSON."""
    return f"{PREFIX}:last-reports"


def worker(name: str) -> str:
    """String: the report of a live ScoringWorker, as JSON, under its RQ worker name."""
    return f"{PREFIX}:worker:{name}"


def of_queue(queue: str) -> str:
    """The prefix of the keys of a queue; Lua scripts add the rest of each name."""
    return f"{PREFIX}:queue:{queue}:"


def capacity(queue: str) -> str:
    """String: how many live workers of a queue take chunks, and how many pairs they claim ahead in all, as
    JSON.
    """
    return f"{of_queue(queue)}capacity"


def orders(name: str) -> str:
    """List: orders of operators (such as to drain) that the worker `name` has not read yet, each as JSON."""
    return f"{PREFIX}:orders:{name}"


def queues() -> str:
    """Sorted set: names of the queues in use, ordered by their last use (seconds since 1970)."""
    return f"{PREFIX}:queues"


def bell(queue: str) -> str:
    """List: wakes workers that are full of bulk work but can take requests. Each new job of a request adds an
    entry; the list keeps at most 64 entries.
    """
    return f"{of_queue(queue)}bell"


def waiting(queue: str, run_id: str) -> str:
    """List: ids of the waiting jobs of a bulk run in a queue, in order. All requests of a tenant share one
    list.
    """
    if priority_of(run_id) == "request":
        return waiting_requests(queue, tenant_in(run_id))
    return f"{of_queue(queue)}waiting:{run_id}"


def waiting_requests(queue: str, tenant: str) -> str:
    """List: ids of the waiting jobs of a tenant's requests in a queue, in the queue's order."""
    return f"{of_queue(queue)}waiting:requests:{tenant}"


def waits(queue: str) -> str:
    """String: the number of jobs in all waiting lists of a queue."""
    return f"{of_queue(queue)}waits"


def turns(queue: str, scope: str) -> str:
    """Sorted set: tenants or runs with waiting jobs, ordered by the number of pairs that workers took from
    each.

    The tenant or run with the lowest number is next. In the scopes ``request`` and ``bulk``, the set has
    tenants, and each number is divided by the tenant's weight. In a scope ``bulk:<tenant>``, the set has that
    tenant's runs.
    """
    return f"{of_queue(queue)}turns:{scope}"


def level(queue: str, scope: str) -> str:
    """String: the number with which a new tenant or run enters the sorted set `turns`.

    This is the highest number that a tenant or run of `turns` had when its turn came. So a tenant or run that
    had no jobs for a while gains no advantage.
    """
    return f"{of_queue(queue)}level:{scope}"


def waiters(queue: str) -> str:
    """Sorted set: names of the workers that wait at RQ's own list of jobs, ordered by the expiry of their
    entries.
    """
    return f"{of_queue(queue)}waiters"


def plain(queue: str) -> str:
    """String: exists while plain RQ workers listen on the queue, too. Then no chunk is put into RQ's own list
    of jobs, and an idle worker may notice a chunk only after a second.
    """
    return f"{of_queue(queue)}plain"


def idle(queue: str) -> str:
    """Sorted set: names of the queue's workers without work, ordered by the expiry of their entries."""
    return f"{of_queue(queue)}idle"


def reader_bell(reader: str) -> str:
    """Stream: announces one more run to a producer that already waits for the results of several runs.

    The producer reads this stream and the streams of results in one command. An entry in this stream ends the
    command, so that the next one can include the new run.
    """
    return f"{PREFIX}:reader:{reader}:bell"


def job_id(run_id: str, chunk: ChunkId | Literal[""]) -> str:
    """Return RQ's id of the job that scores a chunk. Without a chunk, return the prefix of the ids of all
    jobs of the run.
    """
    return f"{run_id}-{chunk}"


def parse_job_id(job: str) -> tuple[str, ChunkId] | None:
    """Read the run's id and the chunk from a job's id, or return ``None`` for a job without a chunk.

    >>> parse_job_id(job_id("0af", 7))
    ('0af', 7)
    """
    match = _JOB_ID.fullmatch(job)
    chunk = read_chunk_id(match[2]) if match else None
    return None if match is None or chunk is None else (match[1], chunk)
