"""The metrics of the gateway in this process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from rankmill.jobs.protocol.model_figures import ModelFigures

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

requests = Counter(
    "rankmill_gateway_requests",
    "Requests by path (gRPC: method), dialect, name of the key (empty without one) and HTTP status of the "
    "answer (gRPC: name of the status).",
    ["route", "dialect", "key", "status"],
    registry=REGISTRY,
)
seconds = Histogram(
    "rankmill_gateway_request_seconds",
    "Time from a request's headers to the end of its answer (s).",
    ["route", "dialect"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
stages = Histogram(
    "rankmill_gateway_stage_seconds",
    "Parts of that time (s) of scored requests: admission (key and body), queue (until a worker has the "
    "pairs, and the way of the scores back), work (the slowest chunk in its worker); of the work, tokenize "
    "and forward (the batches with its pairs).",
    ["stage"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
pairs = Counter(
    "rankmill_gateway_pairs",
    "Pairs that were scored, by dialect and name of the key.",
    ["dialect", "key"],
    registry=REGISTRY,
)
in_progress = Gauge(
    "rankmill_gateway_requests_in_progress", "Requests that are worked on now.", registry=REGISTRY
)
body_bytes = Gauge(
    "rankmill_gateway_body_bytes", "Bytes of the bodies of requests in progress.", registry=REGISTRY
)
backlog = Gauge(
    "rankmill_gateway_backlog_seconds",
    "Time (s) that the live workers need for the requests that wait in the queue, estimated.",
    registry=REGISTRY,
)
by_model = ModelFigures(
    "rankmill_gateway_model", "Time that the scores of a request took (s), by the version that scored."
)
REGISTRY.register(by_model)
