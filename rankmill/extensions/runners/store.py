"""Keeps submitted runs of files in Redis. At most one runner at a time holds a run.

A runner holds a run as long as RQ's registry of started jobs has the runner's entry ``<run>:<token>``. Each
claim makes a new token. The entry's score is the end of the runner's lease, by the server's clock, plus
`RQ_DELAY`. While a run is held, only its holder writes its record. Each change of a run's state is one Lua
script.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

import redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from rankmill.extensions.runners import redis_keys as keys
from rankmill.extensions.runners.record import FileRun, new_file_run
from rankmill.extensions.runners.settings import RunnerSettings
from rankmill.jobs.contract.errors import FormatError, RunExpired, WireError, WrongWorkerError
from rankmill.jobs.contract.file_request import FileOrder
from rankmill.jobs.protocol.leases import (
    BOUND,
    OURS,
    RQ_DELAY,
    UNRENEWED_SECONDS,
    Leases,
    hold,
    server_time,
)
from rankmill.jobs.protocol.script import Script
from rankmill.jobs.protocol.set_aside import DamagedJob, read_job, set_aside
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system

CLAIM = Script("extensions/runners/lua/claim.lua")
RENEW = Script("extensions/runners/lua/renew.lua")
END = Script("extensions/runners/lua/end.lua")
HAND_BACK = Script("extensions/runners/lua/hand_back.lua")
RECOVER = Script("extensions/runners/lua/recover.lua", BOUND)
TAKE_WEBHOOK = Script("extensions/runners/lua/take_webhook.lua")

JOB_FUNCTION = "rankmill.score_file"

LeaseState = Literal["held", "cancelled", "lost", "forgotten"]
"""State of a runner's lease of a run. ``cancelled``: the lease is held, but the run is to end. ``lost``: the
lease has ended, and another runner may have the run. ``forgotten``: the server has lost the run's data.
"""

_LOOK_AT = 128
"""A runner looks for a run only among this number of runs at the front of the queue."""

_LEFT_SECONDS = 30
"""If a runner cannot score a run, it leaves the run to others for this number of seconds, and then tries
again.
"""

WEBHOOK_SECONDS = 120
"""Seconds after which another runner takes a webhook, if the first runner has recorded no result."""

PUT_OFF_SECONDS = 5.0
"""A webhook is put off for this number of seconds while the receiver's host has not answered an earlier
webhook.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunLease:
    """A submitted run that a runner holds. ``entry`` is the runner's lease: an entry in RQ's registry of
    started jobs.
    """

    run: FileRun
    entry: str


class FileRunStore:
    """Stores and reads the submitted runs of one queue. Threads may share a `FileRunStore`.

    Parameters
    ----------
    client
        A client of the server, whose responses are bytes.
    queue
        The setting ``file_queue``.
    ttl
        Seconds for which a run is kept after its last change (``file_run_ttl``).
    """

    def __init__(self, client: redis.Redis, queue: str, ttl: int) -> None:
        self.redis: Any = client
        self.queue = Queue(queue, connection=client, serializer=JSONSerializer)
        self.ttl = ttl
        self._leases = self.queue.started_job_registry.key
        self._runners = keys.runners(queue)
        self._left: dict[str, float] = {}
        """For each run's id, the time (monotonic, s) until which `claim` leaves the run to other runners."""

    def submit(self, order: FileOrder, run_id: str | None = None) -> FileRun:
        """Put a new submitted run into the queue. Its id is `run_id`, or a new id."""
        run = new_file_run(order, run_id)
        job = Queue.prepare_data(
            JOB_FUNCTION,
            args=order.arguments(),
            job_id=run.id,
            timeout=-1,
            ttl=self.ttl,
            result_ttl=0,
            failure_ttl=self.ttl,
        )
        with self.redis.pipeline() as pipe:
            pipe.set(keys.file_run(run.id), run.written(), ex=self.ttl)
            self._list(pipe, run.id)
            self.queue.enqueue_many([job], pipeline=pipe)
            pipe.execute()
        return run

    def load(self, run_id: str) -> FileRun:
        """Read the record of a submitted run.

        Raises
        ------
        RunExpired
            The run has expired, or never existed.
        WireError, DamagedJob
            The record is damaged, or has another format.
        """
        run = self._read(run_id.encode(errors="replace"), run_id)
        if run is None:
            raise RunExpired(
                f"there is no submitted run {run_id}: it ended more than {self.ttl:,} s ago (file_run_ttl), "
                "the server has lost its data, or there never was one"
            )
        if not run.is_ended and self._is_gone(run_id):
            return run.end("failed", "a worker that is not a runner took its job; submit the file again")
        return run

    def find(self, prefix: str) -> list[str]:
        if not prefix.isalnum():
            return []
        entries = self.redis.zscan_iter(keys.file_runs(), match=f"{prefix}*", count=1000)
        return sorted({run_id.decode() for run_id, _ in entries})

    def cancel(self, run: FileRun) -> FileRun:
        """Cancel a submitted run, and return it.

        If the run waits, it is cancelled at once. But if a runner has begun it before, it stays in the queue:
        the next runner deletes what is left of it in Redis. If a runner holds the run, the run ends with that
        runner's next heartbeat.
        """
        ended = run.end("cancelled")
        if self._end(ended, ""):
            return ended
        found = self.load(run.id)
        if found.is_ended:  # otherwise the note would cancel the next run with this id
            self.redis.delete(keys.file_run_cancelled(run.id))
        return found

    def leave(self, run_id: str, seconds: float = _LEFT_SECONDS) -> None:
        """Make `claim` pass over a run for `seconds`, so that other runners can take it."""
        now = system.monotonic()
        # Do not drop entries before the run has expired: `claim` would warn of the run again.
        self._left = {left: until for left, until in self._left.items() if until > now - self.ttl}
        self._left[run_id] = now + seconds

    def claim(self, lease_seconds: int) -> RunLease | None:
        """Take the first waiting run that is not left to other runners.

        Returns ``None`` in three cases: this runner may take none of the waiting runs, the run has already
        ended, or its record cannot be read. If a run has ended and was enqueued once more under its id, it
        begins anew. A cancelled run is returned, because data of it may be left in Redis. A run whose record
        has another format stays in the queue. A run whose record is damaged, or whose record and job are
        gone, is set aside.
        """
        token = system.unique_id()
        numbers, now = [lease_seconds + RQ_DELAY, token, _LOOK_AT], system.monotonic()
        leave = [run_id for run_id, until in self._left.items() if until > now]
        raw = CLAIM.run(self.redis, [self.queue.key, self._leases], *numbers, *leave)
        if raw is None:
            return None
        run_id = cast("bytes", raw).decode(errors="replace")
        try:
            run = self._read(raw, run_id)
        except FormatError as error:
            if run_id not in self._left:
                logger.warning("left to other runners: %s", error)
            self.leave(run_id)
            self._leave_to_others(raw, token)
            return None
        except (WireError, DamagedJob) as error:
            run, reason = None, str(error)
        else:
            reason = "its record and its job are gone"
        if run is None or (run.is_ended and run.state != "cancelled"):
            self.redis.zrem(self._leases, raw + f":{token}".encode())
            if run is None:
                set_aside(self.queue, raw, reason)
            return None
        self._list(self.redis, run_id)
        return RunLease(run, f"{run_id}:{token}")

    def renew(self, claim: RunLease, lease_seconds: int) -> LeaseState:
        """Renew a runner's lease, and write the run's record. Returns the state of the lease.

        If the lease has ended, nothing is written. If the server has lost the run's data (``forgotten``), the
        lease and the record are written again.
        """
        run = claim.run
        places = [self._leases, keys.file_run(run.id), keys.file_run_cancelled(run.id), Job.key_for(run.id)]
        state = RENEW.run(self.redis, places, claim.entry, lease_seconds + RQ_DELAY, run.written(), self.ttl)
        held = cast("LeaseState", state.decode())
        if held == "lost":
            return held
        with self.redis.pipeline() as pipe:
            if held == "forgotten":  # the server has lost its data, so write the data of this run again
                pipe.set(keys.file_run(run.id), run.written(), ex=self.ttl)
                hold(pipe, self._leases, claim.entry, lease_seconds + RQ_DELAY, only_renew=False)
            self._list(pipe, run.id)
            pipe.execute()
        return held

    def end(self, claim: RunLease) -> bool:
        """Write the end of a run, if its runner's lease is still held; returns whether the lease was held."""
        return self._end(claim.run, claim.entry)

    def _end(self, run: FileRun, entry: str) -> bool:
        places = [
            self._leases, keys.file_run(run.id), Job.key_for(run.id), keys.file_run_cancelled(run.id),
            keys.file_run_refusals(run.id), keys.webhooks(self.queue.name), self.queue.key,
        ]  # fmt: skip
        left = not entry and run.started  # a waiting run that a runner has begun
        values = [entry, run.written(), self.ttl, run.id, int(run.notice is not None), int(bool(left))]
        ended = bool(END.run(self.redis, places, *values))
        self._list(self.redis, run.id)
        return ended

    def hand_back(self, claim: RunLease, *, first: bool = False) -> bool:
        """Put a run back into the queue, if its runner's lease is still held; returns whether the lease was
        held. If `first` is true, the run goes to the front of the queue, otherwise to its end.
        """
        run = claim.run
        places = [self._leases, keys.file_run(run.id), self.queue.key]
        values = [claim.entry, run.written(), self.ttl, run.id, "LPUSH" if first else "RPUSH"]
        return bool(HAND_BACK.run(self.redis, places, *values))

    def recover(self, lease_seconds: float, *, expired: bool) -> None:
        """Put runs with lapsed leases back into the queue, and shorten leases that end too late.

        Parameters
        ----------
        lease_seconds
            Length of a new lease. A lease is too long if it ends later than a new one would, and more than
            `UNRENEWED_SECONDS` from now: the server's clock was ahead when the lease was written.
        expired
            Whether to put runs with lapsed leases back.
        """
        longest = max(lease_seconds, UNRENEWED_SECONDS) + RQ_DELAY
        RECOVER.run(self.redis, [self._leases, self.queue.key], int(expired), longest, OURS, RQ_DELAY)

    def was_cancelled(self, run_id: str) -> bool:
        return bool(self.redis.exists(keys.file_run_cancelled(run_id)))

    def runners(self, name: str = "", lease_seconds: int = 0) -> list[str]:
        """Return the names of the queue's live runners. If `name` is given, the runner of this name counts as
        live for `lease_seconds` from now on.
        """
        live = Leases(self.redis, self._runners, lease_seconds)
        if name:
            self._list_queue(self.redis)
            live.take(name)
        return live.holders()

    def withdraw(self, name: str) -> None:
        self.redis.zrem(self._runners, name)

    def refuse(self, run_id: str, runner: str, reason: str) -> dict[str, str]:
        """Record that a runner cannot score a run. Returns the reasons of all live runners that cannot score
        it, by the runner's name.
        """
        key = keys.file_run_refusals(run_id)
        with self.redis.pipeline() as pipe:
            pipe.hset(key, runner, reason)
            pipe.expire(key, self.ttl)
            pipe.hgetall(key)
            *_, said = pipe.execute()
        live = self.runners()
        reasons = {name.decode(errors="replace"): why.decode(errors="replace") for name, why in said.items()}
        return {name: why for name, why in reasons.items() if name in live}

    def take_webhook(self) -> FileRun | None:
        """Take an ended run whose webhook is due; for `WEBHOOK_SECONDS`, no other process gets the run.
        Returns ``None`` if no webhook is due, if the record of the run cannot be read, or if the record is
        that of a new run with the same id.
        """
        key = keys.webhooks(self.queue.name)
        raw = TAKE_WEBHOOK.run(self.redis, [key], WEBHOOK_SECONDS)
        if raw is None:
            return None
        try:
            run = self._record(raw.decode(errors="replace"))
        except WireError:
            run = None
        if run is None or not run.is_ended:
            self.redis.zrem(key, raw)
            return None
        return run

    def note_webhook(self, run: FileRun, after: float | None) -> None:
        """Write the record of a run after an attempt to send its webhook.

        Parameters
        ----------
        run
            The run, with the result of the attempt.
        after
            Seconds until the next attempt; ``None`` means that there is none.
        """
        key, now = keys.webhooks(self.queue.name), server_time(self.redis)
        with self.redis.pipeline() as pipe:
            pipe.set(keys.file_run(run.id), run.written(), ex=self.ttl)
            if after is None:
                pipe.zrem(key, run.id)
            else:
                pipe.zadd(key, {run.id: now + after})
                pipe.expire(key, self.ttl)
            pipe.execute()

    def put_off_webhook(self, run: FileRun) -> None:
        """Make the webhook of a run due in `PUT_OFF_SECONDS`. This is not counted as an attempt."""
        key = keys.webhooks(self.queue.name)
        self.redis.zadd(key, {run.id: server_time(self.redis) + PUT_OFF_SECONDS}, xx=True)

    def has(self, run_id: str) -> bool:
        return bool(self.redis.exists(keys.file_run(run_id))) or bool(
            self.redis.hget(Job.key_for(run_id), "origin") == self.queue.name.encode()
        )

    def _read(self, raw: bytes, run_id: str) -> FileRun | None:
        """Read the record of a run. If only the run's RQ job exists, make a new record from it. Returns
        ``None`` if neither a record nor a job exists.

        When a run ends, its job is deleted. So if a run has ended but has a job, the job was enqueued again
        under the same id, and makes a new run.
        """
        run = self._record(run_id)
        if run and not run.is_ended:
            return run
        job = read_job(self.queue, raw)
        if job is None:
            return run or self._record(run_id)  # a runner may have written the record in between
        if job.func_name != JOB_FUNCTION or len(job.args) != 1 or job.kwargs:
            raise WireError(f"job {run_id}: a runner runs nothing but {JOB_FUNCTION}, with one argument")
        order = FileOrder.read_json(json.dumps(job.args[0]), f"job {run_id}")
        return new_file_run(order, run_id).changed(created=job.created_at.timestamp())

    def _record(self, run_id: str) -> FileRun | None:
        written = self.redis.get(keys.file_run(run_id))
        return None if written is None else FileRun.read_json(written, f"submitted run {run_id}")

    def _leave_to_others(self, raw: bytes, token: str) -> None:
        with self.redis.pipeline() as pipe:
            pipe.rpush(self.queue.key, raw)
            pipe.zrem(self._leases, raw + f":{token}".encode())
            pipe.execute()

    def _is_gone(self, run_id: str) -> bool:
        """Return whether RQ says that the run's job has failed. The job fails if a worker that is not a
        runner takes it.
        """
        return bool(self.redis.hget(Job.key_for(run_id), "status") == b"failed")

    def _list(self, pipe: Any, run_id: str) -> None:
        now = system.now()
        self._list_queue(pipe)
        pipe.zremrangebyscore(keys.file_runs(), 0, now - self.ttl)
        pipe.zadd(keys.file_runs(), {run_id: now})
        pipe.expire(keys.file_runs(), self.ttl)

    def _list_queue(self, pipe: Any) -> None:
        pipe.zadd(keys.file_queues(), {self.queue.name: system.now()})
        pipe.expire(keys.file_queues(), self.ttl)


def open_store(client: redis.Redis, settings: Settings) -> FileRunStore:
    """Return the `FileRunStore` of the queue that the settings name."""
    own = settings.of(RunnerSettings)
    return FileRunStore(client, own.file_queue, own.file_run_ttl)


def names_of(refusals: dict[str, str]) -> str:
    """Join the reasons of runners that cannot score a run into a line such as ``host-1: no model; host-2: no
    file``.
    """
    return "; ".join(f"{name}: {why}" for name, why in sorted(refusals.items()))


def score_file(order: object) -> NoReturn:
    """Fail, because a worker that is not a runner has taken a submitted run.

    RQ calls this function by the name in the job. A runner never does: it scores the files itself.

    Raises
    ------
    WrongWorkerError
        Always.
    """
    raise WrongWorkerError("a plain RQ worker cannot score files; start a runner with: rankmill runner")
