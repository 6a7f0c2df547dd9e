"""OpenTelemetry traces of a run, its chunks, and a worker's steps for each chunk.

The module uses only OpenTelemetry's API, which does nothing until the process sets up an SDK, for example
with ``opentelemetry-instrument``. A chunk's span begins when the chunk is submitted and ends when the
producer has its result. The worker's spans are children of the chunk's span. To make this possible, the job's
metadata carry the context of the chunk's span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from opentelemetry import trace
from opentelemetry.propagate import extract, inject
from opentelemetry.trace import Span
from rq.job import Job

from rankmill.jobs.contract.job import TRACE

_tracer = trace.get_tracer("rankmill")


def begin(name: str, parent: Span | None = None, **attributes: str | int) -> Span:
    """Begin a span, which the caller must end.

    The span is below `parent`; without `parent`, it is below the current span. Without either, it begins a
    new trace.
    """
    context = trace.set_span_in_context(parent) if parent else None
    return _tracer.start_span(f"rankmill.{name}", context, attributes=_prefixed(attributes))


def begin_for(job: Job, **attributes: str | int) -> Span:
    """Begin a worker's span for a job, below the span of the job's chunk."""
    carried = job.meta.get(TRACE)
    return _tracer.start_span("rankmill.score", extract(carried or {}), attributes=_prefixed(attributes))


def within(span: Span) -> AbstractContextManager[Span]:
    """Make `span` this thread's current span in the ``with`` block, without ending it afterwards."""
    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Make a span around the ``with`` block, if this thread has a current span."""
    if not trace.get_current_span().is_recording():
        yield
        return
    with _tracer.start_as_current_span(f"rankmill.{name}"):
        yield


def carrier(span: Span) -> Mapping[str, str]:
    """Return the span's context for a job's metadata. The context is empty if no traces are collected."""
    headers: dict[str, str] = {}
    inject(headers, trace.set_span_in_context(span))
    return headers


def _prefixed(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"rankmill.{name}": value for name, value in attributes.items()}
