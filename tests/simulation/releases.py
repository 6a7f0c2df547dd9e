"""Two releases at once: processes of the release before, and such as change their release in a run.

What a process of the release before (f4d4b9c) does not know is taken from it: the new names of job functions,
the latest formats, and fields that only the present release reads and writes.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import rankmill.jobs.protocol.runs as runs_module
import rankmill.producer.collect.journal as journal_module
import rankmill.workers.queue.chunks as chunks_module
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import ForeignJobError, FormatError, WireError
from rankmill.jobs.contract.job import OLD_JOB_FUNCTION, job_data
from rankmill.jobs.contract.priority import NOBODY
from rankmill.jobs.contract.results import ChunkStats
from rankmill.jobs.contract.schema import EXTENDED_FORMAT, FORMAT, WireModel
from rankmill.jobs.protocol.pairs_job import OLD_PAIRS_FUNCTION
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import read_job
from rankmill.jobs.protocol.submitted import store as submitted_module
from rankmill.jobs.protocol.submitted.store import FileRunStore
from rankmill.jobs.protocol.worker_report import DOING_FIELD, SCORING_FIELD
from rankmill.producer.collect.journal import Finished
from rankmill.workers.queue.job import ScoringJob
from rankmill.workers.worker import ScoringWorker
from tests.simulation.cluster import Cluster, Submitted
from tests.simulation.producers import KILLED
from tests.simulation.world import world

if TYPE_CHECKING:
    from tests.simulation.faults import Fault

_SHARE = 0.2
"""Share of the seeds in which there are two releases."""

_NEW_STATS = frozenset({"digest", "bound", "reference", "kind", "device_name", "device_seconds"})
"""Fields of a chunk's statistics of which the release before knows nothing."""

_NEW_META = frozenset({"reads", "row_tokens"})
"""What its producers do not write into a job's metadata."""


def drawn(seed: int, places: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[float, int], ...]] | None:
    """The places with the release before, and when and where the release changes; ``None``: there is one.

    It has dice of its own: what else a seed decides does not depend on it.
    """
    dice = random.Random(f"releases {seed}")
    if dice.random() >= _SHARE:
        return None
    old = tuple(place for place in places if dice.random() < 0.5)
    changes = tuple((dice.uniform(0.0, 25.0), dice.randrange(64)) for _ in range(dice.randint(0, 3)))
    return old, changes


def plain(run: Submitted) -> Submitted:
    """A run that both releases can submit and score."""
    return replace(run, deterministic=False, of_texts=False, tenant=NOBODY)


def change_release(cluster: Cluster, fault: Fault) -> None:
    """A worker, runner or producer of the release before is ended, and begins again with the present one.

    Nobody is rolled back: a worker would fail jobs that were sent to the present release, and others would
    have rows scored again whose results only that reads.
    """
    living = [each for each in world().processes if each.alive and each.place and not each.stopped]
    if not living:
        return
    process = living[fault.which % len(living)]
    if not process.old:
        return
    cluster.old -= {process.place}
    if process in cluster.workers:
        cluster.terminate(process)
    elif process in cluster.runners:
        cluster.world.signal(process, signal.SIGTERM)
    else:
        cluster.world.end(process, KILLED)


KINDS: dict[str, Callable[[Cluster, Fault], None]] = {"change_release": change_release}

_OLD_NAMES = f"a ScoringWorker runs nothing but {OLD_JOB_FUNCTION} and {OLD_PAIRS_FUNCTION}"


def _is_old() -> bool:
    """Whether the current process is of the release before."""
    here = world().current
    return here is not None and here.process.old


def prepare(cluster: Cluster) -> None:
    """Take from processes of the release before what they do not know."""
    for prepare_part in (_prepare_workers, _prepare_producers, _prepare_runners, _prepare_readers):
        prepare_part(cluster)


def _prepare_workers(cluster: Cluster) -> None:
    patch, serialize = cluster.world.patch, ScoringWorker.serialize
    chunk = ScoringJob.__dict__["chunk"]

    def serialized(worker: ScoringWorker) -> dict[str, Any]:
        found = serialize(worker)
        if _is_old():
            del found[DOING_FIELD]
            found[SCORING_FIELD] = 1
        return found

    def checked_chunk(job: ScoringJob) -> Any:
        if _is_old() and job.func_name not in {OLD_JOB_FUNCTION, OLD_PAIRS_FUNCTION}:
            world().history.unknown.add(job.id)
            raise ForeignJobError(f"job {job.id} asks for {job.func_name}; {_OLD_NAMES}")
        return chunk.func(job)

    of_chunk = cached_property(checked_chunk)
    of_chunk.__set_name__(ScoringJob, "chunk")
    patch(ScoringWorker, "serialize", serialized)
    patch(ScoringJob, "chunk", of_chunk)
    for name, unknown in (("read_format", FORMAT), ("asks_for_row_tokens", False)):
        patch(chunks_module, name, _unless_old(getattr(chunks_module, name), unknown))


def _prepare_producers(cluster: Cluster) -> None:
    patch = cluster.world.patch

    def made(*args: Any, **options: Any) -> Any:
        found = job_data(*args, **options)
        if not _is_old():
            return found
        known = {name: value for name, value in found.meta.items() if name not in _NEW_META}
        return found._replace(meta=known)

    patch(runs_module, "job_data", made)
    patch(RunStore, "_job_function", _unless_old(RunStore._job_function, OLD_JOB_FUNCTION))


def _prepare_runners(cluster: Cluster) -> None:
    patch, begin, read = cluster.world.patch, FileRunStore.__init__, FileRunStore._read

    def begun(store: FileRunStore, *args: Any) -> None:
        begin(store, *args)
        if _is_old():
            store._runners = (keys.runners(store.queue.name),) * 2

    def checked(store: FileRunStore, raw: bytes, run_id: str) -> Any:
        if _is_old() and not store.redis.exists(keys.file_run(run_id)):
            job = read_job(store.queue, raw)
            if job and job.func_name != submitted_module.OLD_JOB_FUNCTION:
                raise WireError(f"job {run_id}: a runner runs nothing but its own")
        return read(store, raw, run_id)

    patch(FileRunStore, "__init__", begun)
    patch(FileRunStore, "_read", checked)
    patch(FileRunStore, "_all_take_new_names", _unless_old(FileRunStore._all_take_new_names, False))


def _prepare_readers(cluster: Cluster) -> None:
    plain = WireModel.__dict__["_read"].__func__
    journalled = journal_module._result

    def read(cls: type[WireModel], found: dict[str, Any], what: str) -> Any:
        if _is_old():
            if str(found.get("format")) == str(EXTENDED_FORMAT):
                raise FormatError(f"{what} has format {EXTENDED_FORMAT}")
            stats = found if cls is ChunkStats else found.get("first") if cls is Finished else None
            if stats and (unknown := stats.keys() & _NEW_STATS):
                raise WireError(f"{what} is damaged: {', '.join(sorted(unknown))}")
        return plain(cls, found, what)

    def result(chunk: int, rows: Any, scores: Any, about: Any, latest: Any) -> Any:
        return journalled(chunk, rows, scores, about, None if _is_old() else latest)

    cluster.world.patch(WireModel, "_read", classmethod(read))
    cluster.world.patch(journal_module, "_result", result)


def _unless_old(call: Callable[..., Any], known: Any) -> Callable[..., Any]:
    """`call`, or in a process of the release before all that it knows of that."""

    def called(*args: Any) -> Any:
        return known if _is_old() else call(*args)

    return called
