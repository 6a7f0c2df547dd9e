"""What a worker says of itself: its report, its metrics, its health."""

from __future__ import annotations

import logging
import math
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram

from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import ConfigError, RunFailed
from rankmill.jobs.model_files import model_content
from rankmill.jobs.protocol.model_figures import SCORE_BUCKETS, ModelFigures
from rankmill.jobs.protocol.worker_report import (
    STAGES,
    GpuReport,
    WorkerReport,
    queue_workers,
    worker_reports,
)
from rankmill.jobs.runtime.connection import client_for
from rankmill.jobs.runtime.http import answer, serve
from rankmill.workers.host import metrics
from rankmill.workers.host.gpu import Gpu
from rankmill.workers.queue.heartbeat import WorkerHeartbeat
from rankmill.workers.rq.worker import RQWorker
from tests.conftest import QUICK_LEASE, Server, StartWorker, score_file, wait_for
from tests.harness.models.tiny import make_bert
from tests.harness.tools import tool
from tests.harness.waiting import waiting_jobs
from tests.workers.engine.test_engine import engine, misbehaving

PAIRS: list[tuple[str, str | None]] = [("big cat", f"moon river {number}") for number in range(99)]
PAIRS.append(("big cat", None))


def the_report(server: Server) -> WorkerReport:
    (report,) = worker_reports(server.client, queue_workers(server.client, "rankmill").scoring).values()
    return report


def test_a_worker_reports_what_it_has_done(server: Server, workers: StartWorker, tiny_model: Path) -> None:
    workers(environ=QUICK_LEASE)  # reports come with heartbeats
    Client(server.url, model=str(tiny_model), chunk_size=10).score(PAIRS, timeout=60)
    wait_for(lambda: the_report(server).chunks == 10)
    report = the_report(server)
    assert (report.pairs, report.row_errors, report.retried_chunks) == (99, 1, 0)
    assert (report.claimed_jobs, report.claimed_pairs) == (0, 0)
    assert report.models == (str(tiny_model),)
    assert 0 < report.batches <= 99
    assert 99 < report.tokens <= report.padded_tokens
    assert sum(report.latency_counts) == 10
    assert all(seconds > 0 for seconds in report.stage_seconds)
    assert len(report.stage_seconds) == len(STAGES)
    assert report.started <= report.beat
    assert report.resident_bytes > 50_000_000


def get(url: str) -> tuple[int, str]:
    """Status and text of a page."""
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def page(server: Server, name: str) -> tuple[int, str]:
    url = the_report(server).metrics_url
    assert url
    return get(url.replace("/metrics", f"/{name}"))


def check_metrics(text: str) -> None:
    """What Prometheus's own linter says of the metrics."""
    done = subprocess.run(
        [tool("promtool", "prometheus"), "check", "metrics"],
        input=text, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_worker_serves_its_metrics(server: Server, workers: StartWorker, tiny_model: Path) -> None:
    workers(name="one")
    Client(server.url, model=str(tiny_model), chunk_size=10).score(PAIRS, timeout=60)
    wait_for(lambda: 'rankmill_chunks_total{outcome="scored"} 10.0' in page(server, "metrics")[1])
    _, text = page(server, "metrics")
    revision = f'revision="{model_content(tiny_model)}"'
    model, rest = f'model="{tiny_model}"', f'priority="request",{revision}'
    for line in (
        "rankmill_pairs_total 99.0",
        'rankmill_row_errors_total{kind="null"} 1.0',
        "rankmill_job_latency_seconds_count 10.0",
        'rankmill_stage_seconds_count{stage="fetch"} 10.0',
        'rankmill_model_loads_total{outcome="loaded"} 1.0',
        'rankmill_worker_info{device="cpu",worker="one"} 1.0',
        "rankmill_claimed_jobs 0.0",
        f"rankmill_model_pairs_total{{{model},{rest}}} 99.0",
        f"rankmill_model_latency_seconds_count{{{model},{rest}}} 10.0",
        f'rankmill_model_score_bucket{{le="1.0",{model},{revision}}} 99.0',
    ):
        assert f"\n{line}\n" in text, line
    check_metrics(text)


@given(
    st.lists(st.floats(-20, 20, width=32) | st.just(math.nan) | st.sampled_from(SCORE_BUCKETS), max_size=40),
    st.integers(1, 5),
)
def test_scores_are_counted_by_model_as_prometheus_own_histogram_does(scores: list[float], cut: int) -> None:
    figures, reference = (
        ModelFigures("rankmill_model", "Latency."),
        Histogram("reference", "", buckets=SCORE_BUCKETS, registry=None),
    )
    for start in range(0, len(scores), cut):
        figures.count(
            ("reranker@v1", "abc"), "request", np.array(scores[start : start + cut], np.float32), seconds=None
        )
    known = [float(np.float32(score)) for score in scores if not math.isnan(score)]
    for score in known:
        reference.observe(score)
    found = {sample.labels["le"]: sample.value for family in figures.collect() for sample in family.samples
             if sample.name == "rankmill_model_score_bucket"}  # fmt: skip
    expected = {sample.labels["le"]: sample.value for family in reference.collect()
                for sample in family.samples if sample.name == "reference_bucket"}  # fmt: skip
    assert found == (expected if scores else {})


def test_figures_of_models_are_bounded() -> None:
    figures = ModelFigures("rankmill_model", "Latency.")
    for number in range(150):
        figures.count((f"reranker@v{number}", ""), "bulk", np.ones(3, np.float32), seconds=1.0)
        figures.count(("reranker@v0", ""), "bulk", np.ones(3, np.float32), seconds=-1.0)
    pairs, latency, _ = figures.collect()
    counts = {sample.labels["model"]: sample.value for sample in pairs.samples if sample.name[-5:] == "total"}
    assert len(counts) == 100
    assert counts["reranker@v0"] == 453
    assert "reranker@v1" not in counts
    (seconds,) = [each.value for each in latency.samples if each.labels["model"] == "reranker@v149"
                  and each.name.endswith("_sum")]  # fmt: skip
    assert seconds == 1.0


def test_what_goes_wrong_is_counted(
    server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    client = Client(server.url, model=str(tiny_model), chunk_size=len(PAIRS))
    again, forgotten = client.submit(PAIRS), client.submit(PAIRS)
    wait_for(lambda: len(waiting_jobs(server.client)) == 2)
    first = f"rq:job:{keys.job_id(again.id, 0)}"
    server.client.hincrby(first, "retries_left", -1)  # as RQ does before it runs a job again
    server.client.delete(keys.pairs(forgotten.id, 0))
    workers(environ={"RANKMILL_MODEL_CACHE_SIZE": "1"})
    again.scores(timeout=60)
    with pytest.raises(RunFailed):
        Client(server.url, model=str(tmp_path / "nowhere"), chunk_size=len(PAIRS)).score(PAIRS, timeout=60)
    assert "\nrankmill_model_info{" not in page(server, "metrics")[1]
    other = Client(server.url, model=str(make_bert(tmp_path / "second")), chunk_size=len(PAIRS))
    other.score(PAIRS, timeout=60)
    wait_for(lambda: 'rankmill_chunks_total{outcome="scored"} 2.0' in page(server, "metrics")[1])
    text = page(server, "metrics")[1]
    for line in (
        "rankmill_retries_total 1.0",
        'rankmill_chunks_total{outcome="dropped"} 1.0',
        'rankmill_chunks_total{outcome="failed"} 1.0',
        'rankmill_model_loads_total{outcome="failed"} 1.0',
        'rankmill_model_loads_total{outcome="loaded"} 2.0',
        "rankmill_model_evictions_total 1.0",
    ):
        assert f"\n{line}\n" in text, line
    assert text.count("\nrankmill_model_info{") == 1


@pytest.mark.parametrize(
    ("kind", "how"), [("model", {"most_tokens": 0}), ("not_a_number", {"value": float("nan")})]
)
def test_rows_without_a_score_are_counted_by_kind(kind: str, how: dict[str, float], tiny_model: Path) -> None:
    def counted() -> float:
        return metrics.REGISTRY.get_sample_value("rankmill_row_errors_total", {"kind": kind}) or 0

    mine, _ = misbehaving(tiny_model, **how)
    before = counted()
    scored = mine.score(["big", "cat"], ["moon", "river"])
    assert (len(scored.errors), scored.faults) == (2, {0: kind, 1: kind})
    assert counted() == before  # they are counted with the chunk's answer: another worker may give it


def test_a_pace_is_that_of_a_second_of_forwards_at_least() -> None:
    pace = metrics._Pace()
    assert [pace.now(*totals) for totals in ((0, 0.0), (10, 0.5), (200, 1.0))] == [None, None, 200]


def test_the_windows_of_a_pair_are_one_pair(tiny_model: Path) -> None:
    def counted() -> float:
        return metrics.REGISTRY.get_sample_value("rankmill_pairs_total") or 0

    before = counted()
    scored = engine(tiny_model, backend="torch", long="split").score(
        ["big", "cat", "moon"], ["moon " * 500, "river", "tea " * 300]
    )
    assert scored.windows > 6
    assert counted() == before + 3


def no_temperature(*_: object) -> int:
    raise OSError("a part of a GPU has none")


def test_the_gpu_of_a_worker_is_in_metrics_and_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> tuple[list[float | None], GpuReport | None]:
        names = ("memory_used_bytes", "memory_size_bytes", "utilization_ratio", "temperature_celsius")
        found = [metrics.REGISTRY.get_sample_value(f"rankmill_gpu_{name}") for name in names]
        said = WorkerReport(device="cuda", started=0, **metrics.figures())
        return found, said.gpu

    assert shown() == ([None] * 4, None)
    asked: list[object] = []
    nvml = SimpleNamespace(  # stands in for the library of a GPU's driver, as the project has no GPU
        NVMLError=OSError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=asked.append,
        nvmlDeviceGetHandleByUUID=asked.append,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=50, total=80),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=50),
        nvmlDeviceGetTemperature=no_temperature,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(metrics.gpu, "_nvml", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    metrics.gpu.watch()
    told = GpuReport(use=0.5, memory_used=50, memory_size=80, celsius=None)
    assert shown() == ([50, 80, 0.5, None], told)
    assert set(asked) == {3}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7a")
    shown()
    assert asked.pop() == "MIG-7a"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="aa-b"))
    shown()
    assert asked.pop() == "GPU-aa-b"


def test_without_a_driver_a_worker_only_says_that_it_has_no_figures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu()
    with caplog.at_level(logging.WARNING, "rankmill.workers"):
        gpu.watch()  # the real library, which finds no driver here
    assert list(gpu.collect()) == []
    assert "the figures of the GPU cannot be read" in caplog.text


def test_a_heartbeat_reports_while_another_thread_imports_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.gpu, "_nvml", SimpleNamespace())

    def device() -> str:
        return WorkerReport(device="cpu", started=1.0, **metrics.figures()).device

    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert device() == "cpu"
    monkeypatch.setattr(sys.modules["torch"], "cuda", ModuleType("torch.cuda"), raising=False)
    assert device() == "cpu"


def test_a_worker_s_record_is_renewed_if_it_or_its_report_is_lost(server: Server) -> None:
    worker = RQWorker(["q"], connection=client_for(server.url, 10))
    worker.register_birth()
    worker.lease_seconds = 2
    server.client.persist(worker.key)

    def fails() -> WorkerReport:
        raise ZeroDivisionError("no report")

    orders: Any = SimpleNamespace(news=threading.Event())
    heartbeat = WorkerHeartbeat(worker, 0.05, fails, lambda: False, lambda: None, orders)
    heartbeat.start()
    try:
        wait_for(lambda: server.client.ttl(worker.key) > 0)
        server.client.delete(worker.key)
        wait_for(lambda: server.client.ttl(worker.key) > 0)
        assert server.client.hget(worker.key, "birth")
    finally:
        heartbeat.stop()


def test_a_worker_that_loads_a_model_is_alive_and_not_ready(
    server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    go = tmp_path / "load"
    workers(
        worker_class="tests.harness.misbehaving.PatientWorker",
        environ={"PYTHONPATH": str(Path(__file__).parents[2]), "LOAD": str(go)},
    )
    assert page(server, "readyz") == (200, "ready\n")  # nobody has asked for a model yet
    run = Client(server.url, model=str(tiny_model)).submit(PAIRS[:9])
    wait_for(lambda: page(server, "readyz") == (503, f"loading {tiny_model}\n"))
    assert page(server, "healthz") == (200, "alive\n")
    go.touch()
    run.scores(timeout=60)
    assert page(server, "readyz") == (200, "ready\n")


def test_a_worker_without_redis_is_alive_and_not_ready(server: Server, workers: StartWorker) -> None:
    worker = workers()
    url = (the_report(server).metrics_url or "").removesuffix("/metrics")
    assert get(f"{url}/elsewhere")[0] == 404
    server.client.shutdown(nosave=True)
    wait_for(lambda: get(f"{url}/readyz")[0] == 503, worker)
    (line,) = get(f"{url}/readyz")[1].splitlines()
    assert line.startswith(("Redis cannot serve: ", "Redis does not answer: "))  # by work, by probe
    assert get(f"{url}/healthz") == (200, "alive\n")
    assert get(f"{url}/metrics")[0] == 200


def test_workers_of_a_host_take_successive_ports(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environ = {"RANKMILL_METRICS_ADDRESS": f"127.0.0.1:{port}"}
        workers(environ=environ)
        workers(environ=environ)
        names = queue_workers(server.client, "rankmill").scoring
        urls = {report.metrics_url or "" for report in worker_reports(server.client, names).values()}
        assert len(urls) == 2
        for url in urls:
            assert "rankmill_pairs_total 0.0" in get(url)[1]
            assert int(url.split(":")[2].split("/")[0]) > port
    assert f"metrics_address: port {port} is in use, using " in (tmp_path / "worker.log").read_text()


def test_a_worker_can_be_told_to_serve_nothing(server: Server, workers: StartWorker) -> None:
    workers(environ={"RANKMILL_METRICS_ADDRESS": "none"})
    assert the_report(server).metrics_url is None


def test_clients_that_break_off_leave_no_traceback(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    workers()
    where = urllib.parse.urlsplit(the_report(server).metrics_url or "")
    for said in (b"", b"GET /met", b"nonsense\r\n\r\n"):
        with socket.create_connection((str(where.hostname), where.port or 0)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            client.sendall(said)
    assert page(server, "healthz") == (200, "alive\n")
    assert "Traceback" not in (tmp_path / "worker.log").read_text()


def test_embedded_workers_listen_nowhere(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "pairs.csv").write_text("query,passage\nbig cat,moon\n")
    nowhere = {"RANKMILL_METRICS_ADDRESS": "192.0.2.1:9808"}  # with which a worker cannot start
    done = score_file("pairs.csv", "--model", tiny_model, cwd=tmp_path, environ=nowhere)
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    "address", ["9808", "127.0.0.1", "127.0.0.1:many", "127.0.0.1:99999", "192.0.2.1:9808"]
)
def test_an_address_that_is_none_is_said_in_one_line(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^metrics_address: ") as raised:
        serve(answer(lambda: (pytest.fail("nobody asks"), "")), "metrics_address", address)
    assert address in str(raised.value)
