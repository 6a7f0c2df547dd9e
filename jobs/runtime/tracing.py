"""Traces, for those who collect them: a run, its chunks, and what a worker does with each.

Only OpenTelemetry's API is used, which does nothing until an SDK is set up in the process, as its
own ``opentelemetry-instrument`` does. A chunk's span begins when the chunk is submitted and ends
when its result has been taken in; it travels in the job's metadata, so that the spans of the
worker are below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from opentelemetry import trace
from opentelemetry.propagate import extract, inject
from opentelemetry.trace import Span
from rq.job import Job

TRACE = "trace"
"""Key in a job's metadata."""

_tracer = trace.get_tracer("rankmill")


def begin(name: str, parent: Span | None = None, **attributes: str | int) -> Span:
    """A new span below `parent`, or the root of a trace; the caller ends it."""
    context = trace.set_span_in_context(parent) if parent else None
    return _tracer.start_span(f"rankmill.{name}", context, attributes=_prefixed(attributes))


def begin_for(job: Job, **attributes: str | int) -> Span:
    """A worker's span for a job, below that of the chunk that the job is for."""
    carried = job.meta.get(TRACE)
    return _tracer.start_span("rankmill.score", extract(carried or {}), attributes=_prefixed(attributes))


def within(span: Span) -> AbstractContextManager[Span]:
    """Make `span` the current one of this thread; it does not end with the block."""
    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


@contextmanager
def step(name: str) -> Iterator[None]:
    """A span around the block, if the thread is within one."""
    if not trace.get_current_span().is_recording():
        yield
        return
    with _tracer.start_as_current_span(f"rankmill.{name}"):
        yield


def carrier(span: Span) -> Mapping[str, str]:
    """What to put into a job's metadata; nothing when no traces are collected."""
    found: dict[str, str] = {}
    inject(found, trace.set_span_in_context(span))
    return found


def _prefixed(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"rankmill.{name}": value for name, value in attributes.items()}
