"""Damaged jobs, which are set aside with the reason, so that no worker takes them again.

Anyone who can write to Redis can put anything into a queue. All code that takes jobs from a queue reads them
with `read_job`, so a damaged job never ends a process or affects other jobs.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import redis
from rq import Queue
from rq.exceptions import DeserializationError, NoSuchJobError
from rq.job import Job, JobStatus
from rq.results import Result

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import Fault, RankmillError, WireError
from rankmill.jobs.contract.job import JOB_FUNCTION, TRACE, chunk_of
from rankmill.jobs.contract.schema import Seconds, WireModel
from rankmill.jobs.protocol.latest import LatestEntries
from rankmill.jobs.protocol.rq import restored
from rankmill.jobs.runtime.patience import cannot_serve
from rankmill.jobs.system import system

_JOB_TTL = 86400

MAX_DATA = 1 << 20
"""A job counts as damaged if its data have more bytes than this after decompression; the job of a chunk has
about a hundred.
"""

_MAX_CHARS = 300

_NUMBERS = (b"timeout", b"result_ttl", b"failure_ttl", b"ttl", b"retries_left", b"number_of_retries")

logger = logging.getLogger(__name__)


class DamagedJob(RankmillError):
    """A job cannot be read, or its content is not valid."""

    fault = Fault.JOB


class SetAside(WireModel):
    """A job that was set aside; ``at`` is in seconds since 1970."""

    job: str
    queue: str
    reason: str
    at: Seconds


SET_ASIDE = LatestEntries(keys.set_aside(), SetAside)


def read_job(queue: Queue, raw_id: bytes) -> Job | None:
    """Read a job and validate all of its fields, or return ``None`` if the job is gone.

    Raises
    ------
    DamagedJob
        A field is damaged or not valid.
    """
    connection: Any = queue.connection
    try:
        job_id = raw_id.decode()
        key = Job.key_for(job_id)
        fields = connection.hgetall(key)
        if b"data" not in fields:
            return None  # Redis has lost the job; some fields may be left
        unpacked(fields[b"data"])
        _check_numbers(fields)
        fields.pop(b"webhooks", None)  # nothing calls webhooks, and RQ logs a traceback for damaged ones
        job, has_meta = restored(queue, job_id, fields)
        if not has_meta:
            raise DamagedJob("its metadata is not a mapping")
        _check(job, queue)
    except redis.ResponseError as error:
        if cannot_serve(error) or not str(error).startswith("WRONGTYPE"):
            raise
        raise DamagedJob("its key does not hold a hash") from None
    except (redis.RedisError, DamagedJob):
        raise
    except NoSuchJobError:
        return None
    except WireError as error:
        raise DamagedJob(str(error)) from None
    except RankmillError:
        raise
    except DeserializationError:
        raise DamagedJob("its data is not JSON: enqueue it with serializer=JSONSerializer") from None
    except Exception as error:  # RQ can raise any type for damaged data
        raise DamagedJob(f"RQ cannot read it ({type(error).__name__}: {error})") from None
    return job


def unpacked(data: bytes) -> bytes:
    """Decompress the data in a job's hash as RQ does; raises `DamagedJob` if they are too large."""
    unpack = zlib.decompressobj()
    try:
        plain = unpack.decompress(data, MAX_DATA + 1)
    except zlib.error:
        plain = data  # RQ also accepts data that are not compressed
    if unpack.unconsumed_tail or len(plain) > MAX_DATA:
        raise DamagedJob(f"its data is over {MAX_DATA:,} bytes")
    return plain


def _check_numbers(fields: Mapping[bytes, bytes]) -> None:
    for name in _NUMBERS:
        if fields.get(name) and not re.fullmatch(rb"-1|\d{1,9}", fields[name]):
            raise DamagedJob(f"its {name.decode()} is {fields[name]!r:.40}, not a number")


def _check(job: Job, queue: Queue) -> None:
    """Check the content of a job. Raises `DamagedJob` or `WireError` if RQ or a worker would fail later."""
    if job.origin != queue.name:
        raise DamagedJob(f"it belongs to queue {job.origin!r}")
    if not isinstance(job.func_name, str):
        raise DamagedJob("it names no function")
    if not isinstance(job.args, list | tuple) or not isinstance(job.kwargs, dict):
        raise DamagedJob("its arguments are not a list and a mapping")
    if not isinstance(job.meta, dict):
        raise DamagedJob("its metadata is not a mapping")
    carried = job.meta.get(TRACE) or {}
    if not isinstance(carried, dict) or not all(isinstance(value, str) for value in carried.values()):
        raise DamagedJob("its trace is not a mapping of strings")
    intervals = getattr(job, "retry_intervals", None) or []
    if not isinstance(intervals, list) or not all(isinstance(seconds, int) for seconds in intervals):
        raise DamagedJob("its pauses between attempts are not numbers")
    if job.func_name == JOB_FUNCTION:
        run_id, chunk = chunk_of(job)
        if job.id != keys.job_id(run_id, chunk):
            raise DamagedJob("its id does not match its arguments")
        if job.failure_ttl is None or job.failure_ttl <= 0:
            raise DamagedJob("it never expires")


def set_aside(queue: Queue, raw_id: bytes, reason: str) -> None:
    """Set a damaged job aside: mark it as failed, and list it with the reason for operators.

    Also remove the job from the list of jobs in transit, and from the list of paused jobs.
    """
    connection: Any = queue.connection
    job_id = raw_id.decode(errors="backslashreplace")[:_MAX_CHARS]
    reason = reason.encode(errors="replace").decode()[:_MAX_CHARS]
    logger.warning("job %s of queue %r is set aside: %s", job_id, queue.name, reason)
    noted = SetAside(job=job_id, queue=queue.name, reason=reason, at=system.now())
    key = Job.redis_job_namespace_prefix.encode() + raw_id
    with connection.pipeline() as pipe:
        pipe.lrem(queue.intermediate_queue_key, 0, raw_id)
        pipe.zrem(queue.scheduled_job_registry.key, raw_id)
        SET_ASIDE.add(pipe, noted)
        pipe.hset(key, "status", JobStatus.FAILED.value)  # a producer submits a chunk again if its job failed
        pipe.expire(key, _JOB_TTL)
        with suppress(UnicodeDecodeError):  # the caller that enqueued the job reads the reason in RQ's result
            failure = f"set aside: {reason}"
            result: Any = Result(raw_id.decode(), Result.Type.FAILED, connection, exc_string=failure)
            result.save(_JOB_TTL, pipe)
        pipe.execute(raise_on_error=False)  # any of these keys may be damaged too
