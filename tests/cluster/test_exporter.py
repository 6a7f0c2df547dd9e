"""The exporter: what it says of the cluster, and that it lives without Redis."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import fakeredis
import pytest

from rankmill import Client
from rankmill.cluster import exporter
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.protocol.worker_report import WorkerReport, announce_worker
from rankmill.jobs.runtime.http import split_address
from tests.conftest import QUICK_LEASE, Server, StartExporter, StartWorker, run_command, wait_for
from tests.workers.test_metrics import PAIRS, check_metrics, get

FRESH = "import rankmill.cluster.exporter as e; e._CACHE_SECONDS = 0.1"
"""For exporters that are asked again and again until something is seen."""


def value(url: str, sample: str) -> float | None:
    """Value of a sample of the page, by its name and labels."""
    for line in get(f"{url}/metrics")[1].splitlines():
        name, _, number = line.rpartition(" ")
        if name == sample:
            return float(number)
    return None


def test_the_exporter_shows_the_cluster(
    server: Server, workers: StartWorker, exporters: StartExporter, tmp_path: Path, tiny_model: Path
) -> None:
    url = exporters(server.url, before=FRESH)
    client = Client(server.url, model=str(tiny_model), chunk_size=10)
    run = client.submit(PAIRS)
    wait_for(lambda: value(url, 'rankmill_queue_jobs{queue="rankmill",state="waiting"}') == 10)
    assert value(url, "rankmill_runs_active") == 1
    assert value(url, 'rankmill_queue_backlog_pairs{queue="rankmill"}') == 100
    assert value(url, 'rankmill_queue_backlog_seconds{queue="rankmill"}') is None  # no speed is known
    assert value(url, 'rankmill_queue_workers{queue="rankmill"}') == 0
    age = value(url, 'rankmill_queue_oldest_job_age_seconds{queue="rankmill"}')
    assert age is not None
    wait_for(lambda: (value(url, 'rankmill_queue_oldest_job_age_seconds{queue="rankmill"}') or 0) > age)
    worker = workers(environ=QUICK_LEASE)
    run.scores(timeout=60)
    wait_for(lambda: value(url, "rankmill_cluster_chunks_total") == 10)
    assert value(url, "rankmill_cluster_pairs_total") == 99
    assert value(url, "rankmill_cluster_row_errors_total") == 1
    assert value(url, 'rankmill_queue_backlog_seconds{queue="rankmill"}') == 0
    wait_for(lambda: value(url, 'rankmill_workers{state="idle"}') == 1)
    assert value(url, 'rankmill_queue_workers{queue="rankmill"}') == 1
    assert value(url, 'rankmill_queue_oldest_job_age_seconds{queue="rankmill"}') == 0
    assert value(url, 'rankmill_queue_lost_workers{queue="rankmill"}') == 0
    page = get(f"{url}/metrics")[1]
    worker.kill()
    wait_for(lambda: value(url, 'rankmill_workers{state="lost"}') == 1)
    assert value(url, "rankmill_cluster_chunks_total") == 10  # what it did stays done
    assert value(url, 'rankmill_queue_lost_workers{queue="rankmill"}') == 1
    assert (value(url, 'rankmill_queue_heartbeat_age_seconds{queue="rankmill"}') or 0) > 2
    check_metrics(page)


def test_a_worker_that_is_seen_again_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client = fakeredis.FakeRedis()
    client.sadd("rq:workers", "rq:worker:w", "rq:worker:earlier")
    monkeypatch.setattr(exporter, "_CACHE_SECONDS", 0)
    registry = exporter.exporter_registry(exporter.ClusterView(client))

    def pairs(name: str, pairs: int, started: float = 1.0) -> float | None:
        report = WorkerReport(device="cpu", started=started, beat=time.time(), pairs=pairs)
        announce_worker(client, name, report, 60)
        return registry.get_sample_value("rankmill_cluster_pairs_total")

    assert pairs("earlier", 1000) == 0  # before the exporter's first look
    assert pairs("w", 100) == 100
    client.delete(keys.worker("w"))  # it stood still, or the server has lost its data
    assert pairs("earlier", 1005) == 105
    assert pairs("w", 110) == 115
    assert pairs("w", 150, started=2.0) == 265  # another process


def test_prometheus_is_told_where_live_workers_are(
    server: Server, workers: StartWorker, exporters: StartExporter
) -> None:
    url = exporters(server.url)
    assert json.loads(get(f"{url}/sd")[1]) == [{"targets": []}]
    workers()
    workers(environ={"RANKMILL_METRICS_ADDRESS": "none"})

    def targets() -> list[str]:
        found: list[str] = json.loads(get(f"{url}/sd")[1])[0]["targets"]
        return found

    wait_for(targets)
    (target,) = targets()
    assert "rankmill_pairs_total" in get(f"http://{target}/metrics")[1]


def test_the_exporter_stays_up_without_redis(
    server: Server, exporters: StartExporter, tmp_path: Path
) -> None:
    url = exporters(server.url)
    assert value(url, "rankmill_redis_up") == 1
    server.client.shutdown(nosave=True)
    wait_for(lambda: value(url, "rankmill_redis_up") == 0)
    assert value(url, "rankmill_runs_active") is None
    assert get(f"{url}/sd")[0] == 503
    assert get(f"{url}/healthz") == (200, "alive\n")
    check_metrics(get(f"{url}/metrics")[1])


def test_the_log_says_when_redis_is_away_and_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporter, "_CACHE_SECONDS", 0)
    server = fakeredis.FakeServer()
    view = exporter.ClusterView(fakeredis.FakeRedis(server=server))
    caplog.set_level("INFO", exporter.logger.name)
    for server.connected in (True, False, False, True, True):
        view.look()
    away, back = (each.getMessage() for each in caplog.records if each.name == exporter.logger.name)
    assert away.startswith("Redis does not answer: ")
    assert back == "Redis answers again"


def test_the_exporter_starts_without_redis(exporters: StartExporter, tmp_path: Path) -> None:
    url = exporters("redis://:secret@127.0.0.1:1/0")
    assert value(url, "rankmill_redis_up") == 0
    assert "secret" not in (tmp_path / "exporter.log").read_text()


def test_a_port_in_use_is_an_error_of_exporter_and_gateway_alike() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for command in ("exporter", "serve"):
            done = run_command("rankmill", command, "--redis", "redis://127.0.0.1:1/0", "--address", address)
            assert done.code == 2
            assert f"cannot listen on {address}: Address already in use" in done.err.splitlines()[-1]


def test_an_address_may_name_no_port() -> None:
    assert split_address("exporter_address", "127.0.0.1", 9807) == ("127.0.0.1", 9807)
    for address in ("127.0.0.1", "metrics..svc:9807", "métrics..svc:9807"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            split_address("metrics_address", address)


@pytest.mark.parametrize(
    "options", [[], ["--redis", "elsewhere"], ["--redis", "redis://x", "--address", "here"]]
)
def test_wrong_usage_is_one_line(options: list[str]) -> None:
    done = run_command("rankmill", "exporter", *options)
    assert done.code == 2
    (line,) = done.messages
    assert line.startswith("rankmill exporter: ")
