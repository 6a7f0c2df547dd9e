"""The live page, in a real browser; and the figures behind it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from benchmarks.simulated import SECONDS
from rankmill import Client
from rankmill.cli.main import rankmill
from rankmill.cluster.exporter import ClusterView, exporter_registry
from rankmill.cluster.snapshot import Snapshot, WorkerState, read_cluster
from rankmill.extensions.page.dashboard import WINDOW_SECONDS, History, quantiles
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import LATENCY_BUCKETS, GpuReport, WorkerReport, announce_worker
from tests.cluster.test_cluster import read
from tests.conftest import ENVIRON, QUICK_LEASE, Server, StartWorker, wait_for
from tests.harness.browser import shown
from tests.harness.environ import SIMULATED
from tests.harness.preloaded import PreloadedProcess
from tests.harness.runs import stored_run
from tests.harness.tools import free_port, meanwhile

pytestmark = pytest.mark.own_precision

PAGE = Path(__file__).resolve().parents[3] / "rankmill" / "extensions" / "page" / "static"


@pytest.fixture
def page(server: Server) -> Iterator[str]:
    """URL of the page of the exporter of `server`."""
    url = f"http://127.0.0.1:{free_port()}/"
    command = ["rankmill", "exporter", "--redis", server.url, "--address", url.split("/")[2]]
    process = PreloadedProcess(command, env=ENVIRON, stderr=subprocess.DEVNULL)
    wait_for(lambda: answers(url), process)
    yield url
    process.terminate()
    process.wait(timeout=60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60):
            return True
    except urllib.error.URLError:
        return False


def figures(url: str, page: str = "0") -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{url}api/cluster.json?page={page}", timeout=60) as reply:
            found: dict[str, Any] = json.load(reply)
    except urllib.error.HTTPError as error:  # 503
        found = json.load(error)
    return found


def text(html: str, element: str) -> str:
    found = re.search(rf'id="{element}"[^>]*>(.*?)</(?:table|dd|p)>', html, re.S)
    assert found, element
    return re.sub(r"<[^>]+>", " ", found[1]).replace("&nbsp;", " ").replace("\xa0", " ")


@pytest.mark.slow
def test_a_browser_shows_workers_runs_and_that_redis_is_away(
    server: Server, workers: StartWorker, page: str, tmp_path: Path
) -> None:
    client = Client(server.url, model="demo", chunk_size=32, window=8)
    busy_for_long = {
        SECONDS: "5",
        "RANKMILL_CLAIM_AHEAD": "32",
    }  # it sleeps, and leaves the CPU to the browser
    worker = workers(name="worker-7", worker_class=SIMULATED, environ={**busy_for_long, **QUICK_LEASE})
    pairs: list[tuple[str, str | None]] = [("big cat", None)]
    run = client.submit(pairs + [("big cat", "the moon " * 40)] * 499_999)
    reader = threading.Thread(target=read, args=(run,))
    reader.start()
    pages, host = [""], re.escape(socket.gethostname())

    def busy() -> bool:
        pages.append(shown(page, tmp_path / "browser"))
        found = re.search(rf"worker-7\s+rankmill\s+{host}\s+busy\s+demo\s+cpu", text(pages[-1], "workers"))
        progress = re.search(r'<progress max="1" value="([0-9.e-]+)"', pages[-1])
        return bool(found and progress and 0 < float(progress[1]) < 1)

    wait_for(busy, worker)
    html = pages[-1]
    assert "All is well: 1 worker, 1 run" in text(html, "state")
    assert run.id[:12] in text(html, "runs")
    assert "of 500,000" in text(html, "runs")
    assert text(html, "alive").strip() == "1"
    assert html.count("<canvas") == 4
    wait_for(lambda: (figures(page)["rates"]["pairs_per_second"] or 0) > 0)
    run.cancel()
    reader.join()
    worker.kill()
    wait_for(lambda: figures(page)["cluster"]["workers"][0]["state"] == "lost")
    html = shown(page, tmp_path / "browser")
    assert re.search(rf"worker-7\s+rankmill\s+{host}\s+lost", text(html, "workers"))
    assert re.search(rf"Worker worker-7 \(host {host}, process {worker.pid}\) has died", text(html, "state"))
    assert "start another" in text(html, "faults")
    assert "No runs." in text(html, "runs")
    server.client.shutdown(nosave=True)
    wait_for(lambda: "error" in figures(page))
    html = shown(page, tmp_path / "browser")
    assert "Redis is away" in text(html, "faults")
    assert 'id="notice" class="notice" role="alert" hidden' not in html


def test_what_comes_from_redis_is_text_and_nothing_else(server: Server, page: str, tmp_path: Path) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\">"
    run = stored_run(RunStore(server.client), model=evil, rows=500_000)
    server.client.set(keys.progress(run.id), Progress(rows=499_999, since=1.0, at=2.0).model_dump_json())
    server.client.sadd("rq:workers", "rq:worker:w")
    report = WorkerReport(device="cpu", started=time.time(), beat=time.time(), refusals=(f"no model {evil}",))
    announce_worker(server.client, "w", report, 600)
    gpu = GpuReport(use=0.875, memory_used=3 * 2**29, memory_size=80 * 2**30, celsius=64)
    use = {"cpu": 1.75, "gpu": gpu, "resident_bytes": 2**31, "model_hits": 3, "model_loads": 1}
    drained = report.model_copy(update={**use, "drained": True, "refusals": ()})
    server.client.sadd("rq:workers", "rq:worker:x")
    announce_worker(server.client, "x", drained, 600)
    html = shown(page, tmp_path / "browser")
    assert "&lt;img src=x" in html
    assert "99% of 500,000" in text(html, "runs")
    assert "<img" not in html
    assert "<title>rankmill</title>" in html
    assert "idle, refuses some chunks" in text(html, "workers")
    assert "no model &lt;img src=x" in html
    figures_of_x = r"x\s+unknown\s+drained.*1\.8 cores\s+2\.0 GiB\s+GPU 88%, 64 °C\s+1\.5 of 80\.0 GiB\s+75%"
    assert re.search(figures_of_x, text(html, "workers"), re.S)
    assert "0 busy, 1 drained" in text(html, "alive-more")


def test_workers_in_trouble_come_first_then_a_row_for_each_host(
    server: Server, page: str, tmp_path: Path
) -> None:
    for number in range(40):
        host = f"node-{number % 10 + 1}"
        name = f"{host}.cuda{number // 10}"
        server.client.sadd("rq:workers", f"rq:worker:{name}")
        born: dict[Any, Any] = {
            "birth": "x",
            "scoring": 1,
            "state": "busy",
            "hostname": host,
            "queues": "rankmill",
        }
        server.client.hset(f"rq:worker:{name}", mapping=born)
        report = WorkerReport(device="cuda", started=1.0, beat=time.time(), pairs=1, drained=number == 4)
        if number:
            announce_worker(server.client, name, report, 600)  # the first one is lost
    from rankmill.extensions.runners.redis_keys import file_queues  # the other tests run without runners

    server.client.zadd(file_queues(), {"files": 1})
    html = shown(page, tmp_path / "browser")
    workers = text(html, "workers")
    assert re.search(r"Heartbeat\s+node-1\.cuda0\s+rankmill\s+node-1\s+lost", workers)
    assert re.search(r"node-5\.cuda0\s+rankmill\s+node-5\s+drained", workers)
    folded = re.findall(r"▸ (\d) busy\s+(node-\d+)", workers)
    hosts = [f"node-{number}" for number in range(1, 11)]
    assert folded == [("3" if host in {"node-1", "node-5"} else "4", host) for host in hosts]
    assert "node-2.cuda" not in workers
    assert text(html, "alive-more") == "38 busy, 1 drained, 1 lost"
    assert "Submitted runs in queue files: 0 waiting, 0 running" in text(html, "lines")
    assert "No requests lately." in html
    server.client.shutdown(nosave=True)
    html = shown(page, tmp_path / "browser")
    assert text(html, "state") == "Redis is away."
    assert text(html, "alive-more") == "Redis is away"
    assert html.count('<span class="stale">Redis is away</span>') == 4
    assert "node-" not in html


def test_runs_are_paged_whatever_is_asked_for(server: Server, page: str) -> None:
    store = RunStore(server.client)
    for _ in range(120):
        stored_run(store)
    sizes = [len(figures(page, asked)["cluster"]["runs"]) for asked in ("0", "2", "9", "-1", "x", "9" * 30)]
    assert sizes == [50, 20, 0, 50, 50, 0]


def test_nothing_is_inline_and_nothing_comes_from_elsewhere(page: str) -> None:
    with urllib.request.urlopen(page, timeout=60) as reply:
        policy = reply.headers["Content-Security-Policy"]
        html = reply.read().decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=|https?://", html)
    ours = [PAGE / "page.js", PAGE / "page.css"]
    assert not [path for path in ours if re.search("innerHTML|https?://|@import", path.read_text())]
    for name in re.findall(r'(?:src|href)="([^"]+)"', html):
        assert answers(page + name)


def test_a_slow_worker_is_named_by_page_status_and_exporter(server: Server) -> None:
    paces = {"one": 5000.0, "two": 4000.0, "three": 400.0, "alone": 10.0}
    for name, pace in paces.items():
        server.client.sadd("rq:workers", f"rq:worker:{name}")
        server.client.hset(f"rq:worker:{name}", mapping={"birth": "x", "scoring": 1})
        device = "cuda" if name == "alone" else "cpu"
        report = WorkerReport(device=device, started=1.0, beat=time.time(), pace=pace)
        announce_worker(server.client, name, report, 600)
    workers = {worker.name: worker for worker in read_cluster(server.client).workers}
    assert [name for name, worker in workers.items() if worker.is_slow] == ["three"]
    assert workers["three"].relative_pace == pytest.approx(0.1)
    assert workers["alone"].relative_pace is None
    shown = CliRunner().invoke(rankmill, ["status", "--redis", server.url], env={"COLUMNS": "200"}).output
    assert "Worker three is slow: 10 times the time for a token of its peers" in shown
    registry = exporter_registry(ClusterView(server.client))
    assert registry.get_sample_value("rankmill_worker_relative_pace", {"worker": "three"}) == pytest.approx(
        0.1
    )


def test_the_latency_of_requests_is_told_apart_from_that_of_bulk_work() -> None:
    history = History()
    counts = [0] * (len(LATENCY_BUCKETS) + 1)
    quick, slow = LATENCY_BUCKETS.index(0.1), LATENCY_BUCKETS.index(30)
    history.add(look(10))
    requests, every = [*counts], [*counts]
    requests[quick], every[quick], every[slow] = 4, 4, 9
    history.add(look(20, request_latency_counts=tuple(requests), latency_counts=tuple(every)))
    rates = history.rates
    assert rates.request_latency
    assert rates.bulk_latency
    assert rates.request_latency[2] <= 0.1
    assert rates.bulk_latency[0] > 20
    requests[slow] = 10  # a report may be ahead with its requests
    history.add(look(30, request_latency_counts=tuple(requests), latency_counts=tuple(every)))
    assert history.rates.request_latency
    assert history.rates.request_latency[0] > 20
    assert history.rates.bulk_latency is None


def look(at: float, **report: Any) -> Snapshot:
    """A cluster with one worker that says `report`."""
    made = WorkerReport(device="cpu", started=0.0, beat=at, **report)
    worker = WorkerState(name="w", queues=("q",), state="busy", beat_seconds=0.0, report=made)
    return Snapshot(at=at, queues=(), workers=(worker,), runs=(), runs_total=0, page=0, page_size=50)


def test_rates_are_differences_between_reports() -> None:
    history = History()
    history.add(look(10, pairs=1000, tokens=50, padded_tokens=100))
    assert history.rates.pairs_per_second is None
    counts = [0] * (len(LATENCY_BUCKETS) + 1)
    counts[LATENCY_BUCKETS.index(0.1)] = 4
    done: dict[str, Any] = {"pairs": 1500, "tokens": 140, "padded_tokens": 200, "row_errors": 3}
    done |= {"stage_seconds": (5, 0, 0, 15, 0), "latency_counts": tuple(counts)}
    history.add(look(20, **done))
    rates = history.rates
    assert (rates.pairs_per_second, rates.speeds, rates.row_errors) == (50, {"w": 50}, 3)
    assert rates.padding == pytest.approx(0.1)
    assert rates.stages == {"wait": 0.25, "fetch": 0, "tokenize": 0, "forward": 0.75, "write": 0}
    assert rates.bulk_latency == pytest.approx((0.0875, 0.09875, 0.09975))
    for second in range(21, 21 + 2 * WINDOW_SECONDS):
        history.add(look(second, **done))
    assert history.rates.pairs_per_second == 0
    assert history.rates.bulk_latency is None
    history.add_gap(99)
    series = history.series()
    assert series["at"][-1] == 99
    assert series["pairs_per_second"][-1] is None


@pytest.mark.usefixtures("interleaved")
def test_the_page_may_be_asked_for_while_a_point_is_added() -> None:
    history = History()
    for second in range(500):
        history.add_gap(second)
    with meanwhile(lambda: history.add_gap(1.0), 10_000_000):
        for _ in range(200):
            assert len({len(values) for values in history.series().values()}) == 1


def test_a_worker_that_starts_again_counts_from_nothing() -> None:
    history = History()
    history.add(look(10, pairs=1000))
    again = look(15, pairs=5)
    report = again.workers[0].report
    assert report
    worker = again.workers[0].model_copy(update={"report": report.model_copy(update={"started": 12.0})})
    history.add(again.model_copy(update={"workers": (worker,)}))
    assert history.rates.pairs_per_second is None


def test_a_report_with_other_buckets_is_refused() -> None:
    with pytest.raises(ValidationError):
        WorkerReport(device="cpu", started=0, beat=0, latency_counts=(1, 2))


@pytest.mark.parametrize("seconds", [0.02, 0.4, 71, 400, 10_000, 70_000])
def test_the_median_of_a_long_wait_is_near_it(seconds: float) -> None:
    counts = [sum(bound < seconds for bound in LATENCY_BUCKETS) == place for place in range(45)]
    found = quantiles([10 * there for there in counts])
    assert found
    assert found[0] == pytest.approx(seconds, rel=0.34)


def test_quantiles_are_within_what_was_counted() -> None:
    empty = [0] * (len(LATENCY_BUCKETS) + 1)
    assert quantiles(empty) is None
    beyond = quantiles([*empty[:-1], 3])
    assert beyond
    assert set(beyond) == {LATENCY_BUCKETS[-1]}
    first = quantiles([7, *empty[1:]])
    assert first
    assert 0 < first[0] < first[1] < first[2] <= LATENCY_BUCKETS[0]
