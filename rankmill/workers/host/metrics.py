"""Metrics of this worker process, for Prometheus and for the worker's report.

One process is one worker, so metrics are variables of this module, and all code of the worker updates them
directly. ``docs/reference/metrics.md`` lists the metrics.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from rankmill.jobs.contract.errors import RowFault
from rankmill.jobs.contract.priority import Priority
from rankmill.jobs.contract.results import ChunkScores
from rankmill.jobs.contract.run import Run
from rankmill.jobs.contract.wire import outputs
from rankmill.jobs.protocol.model_figures import ModelFigures
from rankmill.jobs.protocol.worker_report import LATENCY_BUCKETS, STAGES, GpuReport
from rankmill.jobs.runtime.tracing import step
from rankmill.jobs.system import system
from rankmill.workers.host.gpu import Gpu

_PACE_SECONDS = 30
"""The worker's pace is measured over about this many seconds. It is the number of padded tokens in forwards,
divided by the seconds that these forwards took.
"""

_LEAST_FORWARD_SECONDS = 1
"""A worker reports no pace if its forwards took fewer seconds than this, because a first batch is slow."""

REGISTRY = CollectorRegistry()
"""Registry of all metrics below. The library's default registry is not used, because other libraries may add
metrics to it.
"""

_counter = partial(Counter, registry=REGISTRY)
_gauge = partial(Gauge, registry=REGISTRY)
_histogram = partial(Histogram, registry=REGISTRY)
_info = partial(Info, registry=REGISTRY)

ROW_ERRORS = get_args(RowFault)
OUTCOMES = ("scored", "failed", "dropped", "handed_back")

pairs = _counter("rankmill_pairs_total", "Pairs that went through the model.")
tokens = _counter("rankmill_tokens_total", "Tokens of those pairs.")
padded_tokens = _counter("rankmill_padded_tokens_total", "Tokens computed for those pairs, padding included.")
batches = _counter("rankmill_batches_total", "Batches that went through the model.")
batch_pairs = _histogram(
    "rankmill_batch_pairs",
    "Pairs in a batch; each window of a long text is one.",
    buckets=[2**power for power in range(13)],
)
batch_fill = _histogram(
    "rankmill_batch_fill_ratio",
    "Padded tokens of a batch over the token budget; more than 1 where a single pair is longer.",
    buckets=[tenths / 10 for tenths in range(1, 11)],
)
row_errors = _counter(
    "rankmill_row_errors_total",
    "Pairs that got an error instead of a score: a text was null, or tokenizer or model failed, "
    "the pair was too long for `long: refuse`, or the model's output was not a number.",
    ["kind"],
)
cut_batches = _counter(
    "rankmill_cut_batches_total", "Batches scored in pieces, as they were not expected to fit into memory."
)
stage_seconds = _histogram(
    "rankmill_stage_seconds",
    "Time of each stage: wait (of the model for work; 5 s at a time), fetch, tokenize and write "
    "(a chunk), forward (a batch; those under way at once share the time).",
    ["stage"],
    buckets=[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30],
)
chunks = _counter(
    "rankmill_chunks_total",
    "Claimed chunks by outcome: scored, failed, dropped (the scores are no longer wanted), "
    "handed_back (to the queue, by a worker that was told to stop or cannot score them).",
    ["outcome"],
)
retries = _counter("rankmill_retries_total", "Chunks claimed after an attempt that had failed.")
set_aside = _counter(
    "rankmill_set_aside_jobs_total", "Jobs of a queue that could not be read; rankmill status says why."
)
latency = _histogram(
    "rankmill_job_latency_seconds",
    "Time from a chunk's submission to its result, earlier attempts included, by the clocks of both hosts.",
    buckets=LATENCY_BUCKETS,
)
request_latency = Histogram("request_latency", "That of requests.", buckets=LATENCY_BUCKETS, registry=None)
claimed_jobs = _gauge("rankmill_claimed_jobs", "Chunks claimed and not answered.")
claimed_pairs = _gauge(
    "rankmill_claimed_pairs",
    "Pairs claimed that wait for the model or are in it; each window of a long text is one.",
)
refusals = _gauge(
    "rankmill_refusals",
    "Models or runs whose chunks the worker leaves to others now, because it cannot score them.",
)
drained = _gauge("rankmill_drained", "1 if the worker is drained and takes no new chunks, else 0.")
model_loads = _counter("rankmill_model_loads_total", "Attempts to load a model: loaded, failed.", ["outcome"])
model_load_seconds = _histogram(
    "rankmill_model_load_seconds",
    "Time to load a model, its download included.",
    buckets=[0.5, 1, 2.5, 5, 10, 30, 60, 300, 900],
)
model_hits = _counter("rankmill_model_hits_total", "Chunks whose model was loaded already.")
model_unloads = _counter("rankmill_model_unloads_total", "Models unloaded as idle or by order.")
model_bytes = _gauge("rankmill_model_bytes", "Memory of the weights that are loaded.")
model_evictions = _counter("rankmill_model_evictions_total", "Models unloaded to make room for another.")
models = _gauge(
    "rankmill_model_info", "1 for each loaded model.", ["model", "revision", "backend", "device", "precision"]
)
heartbeat_age = _gauge("rankmill_heartbeat_age_seconds", "Time since the last heartbeat that went through.")
worker = _info("rankmill_worker", "Name and device of the worker, as in the queue.")
build = _info("rankmill_build", "Versions of rankmill and of what it runs on.")

for _metric, _labels in (
    (stage_seconds, STAGES), (chunks, OUTCOMES), (row_errors, ROW_ERRORS), (model_loads, ("loaded", "failed"))
):  # fmt: skip
    for _label in _labels:
        _metric.labels(_label)
build.info(
    {
        "version": importlib.metadata.version("rankmill"),
        "python": platform.python_version(),
        "torch": next((each.version for each in importlib.metadata.distributions(name="torch")), "none"),
    }
)
ProcessCollector(registry=REGISTRY)


gpu = Gpu()
by_model = ModelFigures("rankmill_model", "Time from a chunk's submission to its result, by model.")
for _collector in (gpu, by_model):
    REGISTRY.register(_collector)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Time the ``with`` block as one of `STAGES`, and trace it as a step of the current chunk."""
    with stage_seconds.labels(name).time(), step(name):
        yield


def count_batch(scored: int, rows: int, real: int, padded: int, budget: int) -> None:
    """Add a scored batch to the metrics.

    Parameters
    ----------
    scored
        Pairs whose first window is in the batch.
    rows
        Rows of the batch.
    real, padded
        Tokens of the batch, without and with padding.
    budget
        The batch's token budget.
    """
    pairs.inc(scored)
    tokens.inc(real)
    padded_tokens.inc(padded)
    batches.inc()
    batch_pairs.observe(rows)
    batch_fill.observe(padded / budget)


def count_chunk(outcome: str) -> None:
    """Count a claimed chunk under one of `OUTCOMES`, such as ``failed``."""
    chunks.labels(outcome).inc()


def count_scored(
    run: Run, priority: Priority, result: ChunkScores, submitted: datetime | None, faults: Iterable[RowFault]
) -> None:
    """Add a scored chunk to the metrics.

    Parameters
    ----------
    run, priority
        The chunk's run, and its priority.
    result
        The chunk's scores.
    submitted
        When the chunk was submitted, if that is known.
    faults
        The fault of each row without a score.
    """
    count_chunk("scored")
    for fault in faults:
        row_errors.labels(fault).inc()
    seconds = None if submitted is None else max(system.now() - submitted.timestamp(), 0.0)
    if seconds is not None:
        latency.observe(seconds)
        if priority == "request":
            request_latency.observe(seconds)
    if run.inputs == "tokens":
        return  # these scores are only numbers of tokens
    model = (run.spec.model, result.stats.revision or "")
    scores, labels = result.scores.drop_null(), outputs(result.scores)
    numbers = (scores.flatten() if labels else scores).to_numpy(zero_copy_only=False)
    by_model.count(model, priority, numbers, seconds, labels or 1)


class _CpuUse:
    """Measures how many CPU cores this process keeps busy, from one call of `cores` to the next."""

    def __init__(self) -> None:
        self._at, self._seconds = system.monotonic(), time.process_time()
        self._cores: float | None = None

    def cores(self) -> float | None:
        """Return the mean number of busy CPU cores since the last measurement, or ``None`` before the first.

        A measurement is at least half a second long; until then, the last result is returned again.
        """
        at, seconds = system.monotonic(), time.process_time()
        if at - self._at >= 0.5:
            # the CPU time of a forked process starts at 0
            self._cores = max(seconds - self._seconds, 0.0) / (at - self._at)
            self._at, self._seconds = at, seconds
        return self._cores


class _Pace:
    """Measures the worker's pace over about the last half minute (see `_PACE_SECONDS`)."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque()

    def now(self, padded: float, forward: float) -> float | None:
        """Return the worker's recent pace, or ``None`` if too little was scored.

        Parameters
        ----------
        padded
            Padded tokens of this process so far.
        forward
            Seconds of this process in forwards so far.
        """
        at = system.monotonic()
        self._seen.append((at, padded, forward))
        while len(self._seen) > 2 and at - self._seen[1][0] > _PACE_SECONDS:
            self._seen.popleft()
        _, first, began = self._seen[0]
        seconds = forward - began
        return (padded - first) / seconds if seconds >= _LEAST_FORWARD_SECONDS else None


_cpu = _CpuUse()
_pace = _Pace()


def figures() -> dict[str, Any]:
    """Return the figures of a worker's report, from the metrics that Prometheus reads."""
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in (*REGISTRY.collect(), *request_latency.collect())
        for sample in metric.samples
    }

    def whole(*key: str) -> int:
        return int(values.get(key, 0))

    seconds = {name: values["rankmill_stage_seconds_sum", name] for name in STAGES}
    within = [0, *(whole("rankmill_job_latency_seconds_bucket", key) for key in _BOUNDS)]
    requests = [0, *(whole("request_latency_bucket", key) for key in _BOUNDS)]
    return {
        "beat": system.now(),
        "drained": bool(whole("rankmill_drained")),
        "pace": _pace.now(whole("rankmill_padded_tokens_total"), seconds["forward"]),
        "models": tuple(sorted({key[1] for key in values if key[0] == "rankmill_model_info"})),
        "resident_bytes": whole("process_resident_memory_bytes"),
        "cpu": _cpu.cores(),
        "gpu": None
        if ("rankmill_gpu_memory_size_bytes",) not in values
        else GpuReport(
            use=values.get(("rankmill_gpu_utilization_ratio",)),
            memory_used=whole("rankmill_gpu_memory_used_bytes"),
            memory_size=whole("rankmill_gpu_memory_size_bytes"),
            celsius=values.get(("rankmill_gpu_temperature_celsius",)),
        ),
        "model_hits": whole("rankmill_model_hits_total"),
        "model_loads": whole("rankmill_model_loads_total", "loaded"),
        "claimed_jobs": whole("rankmill_claimed_jobs"),
        "claimed_pairs": whole("rankmill_claimed_pairs"),
        "chunks": whole("rankmill_chunks_total", "scored"),
        "retried_chunks": whole("rankmill_retries_total"),
        "pairs": whole("rankmill_pairs_total"),
        "row_errors": sum(whole("rankmill_row_errors_total", kind) for kind in ROW_ERRORS),
        "batches": whole("rankmill_batches_total"),
        "tokens": whole("rankmill_tokens_total"),
        "padded_tokens": whole("rankmill_padded_tokens_total"),
        "stage_seconds": tuple(seconds.values()),
        "latency_counts": tuple(upper - lower for lower, upper in pairwise(within)),
        "request_latency_counts": tuple(upper - lower for lower, upper in pairwise(requests)),
    }


_BOUNDS = [*(str(float(bound)) for bound in LATENCY_BUCKETS), "+Inf"]
