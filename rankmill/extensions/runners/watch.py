"""Shows submitted runs in a cluster's status and metrics, by an entry point of ``rankmill.watch``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import redis
from pydantic import BaseModel, ConfigDict
from rq import Queue
from rq.registry import StartedJobRegistry

from rankmill.cluster.look import Look
from rankmill.cluster.watch import (
    ClusterFault,
    Gauge,
    ListedRuns,
    RunStatus,
    Seen,
    SeenRun,
    Watch,
    WatchedRun,
    waiting,
)
from rankmill.extensions.runners import redis_keys as keys
from rankmill.extensions.runners.record import FileRun
from rankmill.extensions.runners.store import PUT_OFF_SECONDS, WEBHOOK_SECONDS, open_store
from rankmill.extensions.runners.submitted import SubmittedFile, find_submitted
from rankmill.jobs.contract.errors import FormatError, WireError
from rankmill.jobs.contract.file_run import ENDED
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.contract.shown import counted
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system

_MOST_LISTED = 100
"""At most this many submitted runs are listed, the latest ones."""

_LATE_SECONDS = 15.0
_SENT_SECONDS = 10.0
"""Seconds for which a webhook that a runner has just taken does not count as late: it may still be in
transit.
"""

_ENDED_SECONDS = 3600.0


class FileQueueState(BaseModel):
    """A queue of submitted runs: how many runs wait and run, how many runners live, and how many webhooks are
    not delivered.

    ``late_webhooks`` counts three sorts of webhooks:

    - webhooks that wait over 5 s for another attempt after a failed one,
    - webhooks that have been due for over 15 s,
    - webhooks that a runner took over 10 s ago without a result.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    waiting: int
    running: int
    runners: int
    webhooks: int
    late_webhooks: int = 0


class SeenRunners(Seen):
    """The queues of submitted runs, and the latest submitted runs. Runs that ended more than an hour ago are
    left out.
    """

    file_queues: tuple[FileQueueState, ...] = ()
    submitted: tuple[SeenRun, ...] = ()

    def queues(self) -> Iterable[str]:
        return (queue.name for queue in self.file_queues)

    def runs(self) -> Iterable[SeenRun]:
        """Return the submitted runs; those that have ended come last."""
        return self.submitted

    def faults(self) -> Iterator[ClusterFault]:
        for queue in self.file_queues:
            # Without a live runner, running runs also wait: dead runners hold them.
            if not queue.runners and (left := queue.waiting + queue.running):
                waits = waiting(left, "submitted run")
                yield ClusterFault(
                    kind="no_runners",
                    text=f"No runner takes queue {queue.name}, where {waits}",
                    remedy="start one with rankmill runner",
                )
            if queue.late_webhooks:
                yield ClusterFault(
                    kind="webhooks",
                    text=f"{counted(queue.late_webhooks, 'webhook')} of queue {queue.name} could not be "
                    "delivered",
                    remedy="rankmill status RUN says why; it is tried again for webhook_seconds",
                )

    def lines(self) -> Iterator[str]:
        for queue in self.file_queues:
            counts = f"{queue.waiting:,} waiting, {queue.running:,} running; runners: {queue.runners:,}"
            yield f"Submitted runs in queue {queue.name}: {counts}."

    def gauges(self) -> list[Gauge]:
        queues = self.file_queues
        return [
            Gauge("rankmill_submitted_runs", "Submitted runs that are not finished.", ("queue", "state"),
                  {(queue.name, state): getattr(queue, state)
                   for queue in queues for state in ("waiting", "running")}),
            Gauge("rankmill_runners", "Live runners of a queue of submitted runs.", ("queue",),
                  {(queue.name,): queue.runners for queue in queues}),
            Gauge("rankmill_webhooks_due", "Webhooks of ended runs that are not delivered yet.", ("queue",),
                  {(queue.name,): queue.webhooks for queue in queues}),
        ]  # fmt: skip


class RunnersWatch(Watch):
    """Shows submitted runs and their queues in a cluster's status and metrics."""

    kinds: ClassVar = {"no_runners": "no_workers", "webhooks": "failed_jobs"}
    nothing: ClassVar = SeenRunners()

    def read(self, look: Look) -> SeenRunners:
        ((raws,),) = look.replies([""], lambda _: [("zrangebyscore", keys.file_queues(), (), "-inf", "+inf")])
        queues = sorted(look.texts(raws, keys.file_queues()))
        fresh = [run for run in _latest(look) if run.ended is None or look.now - run.ended < _ENDED_SECONDS]
        return SeenRunners(
            file_queues=tuple(_queues(look, queues)),
            submitted=tuple(sorted((_figures(run, look.now) for run in fresh), key=_has_ended)),
        )

    def find(self, client: redis.Redis, settings: Settings, run_id: str) -> WatchedRun | None:
        run = find_submitted(open_store(client, settings), run_id)
        return _Shown(run) if run else None

    def runs(self, client: redis.Redis, settings: Settings) -> ListedRuns:
        from rankmill.extensions.runners.show import submitted_table

        latest = [*_latest(Look(client))]
        waits = any(run.state == "waiting" for run in latest) and not open_store(client, settings).runners()
        return ListedRuns("submitted", latest, submitted_table(latest, system.now(), without_runner=waits))


def _queues(look: Look, queues: list[str]) -> Iterator[FileQueueState]:
    fresh_from, fresh_until = look.now - _LATE_SECONDS, look.now + PUT_OFF_SECONDS
    sent_until = look.now + WEBHOOK_SECONDS
    replies = look.replies(
        queues,
        lambda name: [
            ("llen", Queue.redis_queue_namespace_prefix + name, 0),
            ("zcard", StartedJobRegistry.key_template.format(name), 0),
            ("zcount", keys.runners(name), 0, look.now, "+inf"),
            ("zcard", keys.webhooks(name), 0),
            ("zcount", keys.webhooks(name), 0, fresh_from, fresh_until),
            ("zcount", keys.webhooks(name), 0, sent_until - _SENT_SECONDS, sent_until),
        ],
    )
    for name, (waits, running, runners, webhooks, fresh, sent) in zip(queues, replies, strict=True):
        yield FileQueueState(
            name=name, waiting=waits, running=running, runners=runners,
            webhooks=webhooks, late_webhooks=max(webhooks - fresh - sent, 0),
        )  # fmt: skip


def _has_ended(run: SeenRun) -> bool:
    return run.state in ENDED


def _latest(look: Look) -> Iterator[FileRun]:
    """Yield the latest submitted runs, the latest first. A run's time is when it was last submitted, taken,
    worked on or ended. Unreadable runs are left out.
    """
    # The values are redis-py's arguments desc, withscores, score_cast_func, byscore and bylex.
    latest_first = (True, False, float, True, False)
    ((raws,),) = look.replies(
        [""], lambda _: [("zrange", keys.file_runs(), (), "+inf", "-inf", *latest_first, 0, _MOST_LISTED)]
    )
    ids = look.texts(raws, keys.file_runs())
    replies = look.replies(ids, lambda run_id: [("get", keys.file_run(run_id), None)])
    for run_id, (raw,) in zip(ids, replies, strict=True):
        try:
            if raw:
                yield FileRun.read_json(raw, "a submitted run")
        except FormatError:
            continue  # a run of another release
        except WireError as error:
            look.note(keys.file_run(run_id), error)


def _figures(run: FileRun, now: float) -> SeenRun:
    return SeenRun(
        id=run.id,
        queue=run.order.queue or "",
        model=run.order.spec.model,
        created=run.created,
        rows=run.rows,
        rows_done=run.progress.rows,
        row_errors=run.progress.row_errors,
        rows_per_second=run.progress.rows_per_second(now),
        seconds_left=run.progress.seconds_left(run.rows, now),
        state=run.state,
        output=mask_passwords(run.order.request.output or ""),
        runner=run.runner,
        reason=mask_passwords(run.reason),
    )


class _Shown:
    """A submitted run, for the commands that show runs, wait for them and cancel them."""

    def __init__(self, run: SubmittedFile) -> None:
        self._run = run

    def status(self) -> RunStatus:
        return _status(self._run.status())

    def wait(self, timeout: float | None, show: Callable[[int, Progress], None]) -> RunStatus:
        def look(run: FileRun) -> None:
            if run.rows is not None:
                show(run.rows, run.progress)

        return _status(self._run.wait(timeout, on_look=look))

    def cancel(self) -> str:
        ended = self._run.cancel()
        outcome = f"{ended.state} already" if ended.state in {"done", "failed"} else "cancelled"
        return f"submitted run {ended.id} is {outcome}"


def _status(run: FileRun) -> RunStatus:
    from rankmill.extensions.runners.show import describe

    return RunStatus(describe(run), run, run.outcome.row_errors if run.outcome else 0)


WATCH = RunnersWatch()
