"""A trace follows a chunk from its producer to its worker and back, where traces are collected."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id
from rq.job import Job
from rq.serializers import JSONSerializer

from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import BIN, ENVIRON, Server, wait_for

PAIRS = [("big cat", f"the moon {number}") for number in range(30)]


@pytest.fixture
def producer_spans() -> Iterator[InMemorySpanExporter]:
    """What this process traces from now on; a process can be set up but once."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield exporter
    provider.shutdown()


def test_nothing_is_traced_unless_it_is_set_up(server: Server, tiny_model: Path) -> None:
    run = Client(server.url, model=str(tiny_model)).submit(PAIRS)
    job = Job.fetch(keys.job_id(run.id, 0), server.client, serializer=JSONSerializer)
    assert set(job.meta) == {"suspect"}


def test_a_worker_s_spans_are_below_those_of_its_producer(
    server: Server, tiny_model: Path, tmp_path: Path, producer_spans: InMemorySpanExporter
) -> None:
    environ = {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    command = [str(BIN / "opentelemetry-instrument"), "--traces_exporter", "console"]
    command += [str(BIN / "rq"), "worker", "rankmill", "--worker-class", "rankmill.ScoringWorker"]
    command += ["--serializer", "json", "--url", server.url]
    with (tmp_path / "spans.json").open("wb") as spans:
        worker = subprocess.Popen(command, stdout=spans, env={**ENVIRON, **environ})
    try:
        wait_for(lambda: queue_workers(server.client, "rankmill").scoring, worker)
        Client(server.url, model=str(tiny_model), chunk_size=10).score(PAIRS, timeout=60)
        worker.terminate()
        assert worker.wait(timeout=60) == 0  # and what it traced is written
    finally:
        worker.kill()
        worker.wait()
    finished = producer_spans.get_finished_spans()
    (run,) = (span for span in finished if span.name == "rankmill.run")
    chunks = [span for span in finished if span.name == "rankmill.chunk"]
    assert {span.parent and span.parent.span_id for span in chunks} == {run.context.span_id}
    found = [span for span in console_spans(tmp_path / "spans.json") if span["name"].startswith("rankmill.")]
    assert {span["context"]["trace_id"] for span in found} == {f"0x{format_trace_id(run.context.trace_id)}"}
    scored = {span["context"]["span_id"]: span for span in found if span["name"] == "rankmill.score"}
    assert {span["parent_id"] for span in scored.values()} == {
        f"0x{format_span_id(span.context.span_id)}" for span in chunks
    }
    for span_id in scored:
        steps = [span["name"] for span in found if span["parent_id"] == span_id]
        assert steps == [f"rankmill.{step}" for step in ("fetch", "tokenize", "forward", "write")]


def console_spans(path: Path) -> list[dict[str, Any]]:
    """What OpenTelemetry's console exporter has written."""
    return [json.loads(found) for found in re.findall(r"^{$.*?^}$", path.read_text(), re.M | re.S)]
