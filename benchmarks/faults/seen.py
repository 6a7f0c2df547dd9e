"""Measures how soon a fault among real processes with default settings is known, for the runbook's table.

    python -m benchmarks.faults.seen                  # all, as a table; some minutes
    python -m benchmarks.faults.seen killed slow

Each fault has a server, an exporter and workers of its own, which are well before it is planted. Then
``rankmill status --json`` and the exporter's metrics are read again and again until they name the fault. The
time for Python's start is left out; that of Prometheus, which reads the metrics every 15 s, comes on top.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import redis
import yaml
from click.testing import CliRunner
from rq import Queue
from rq.serializers import JSONSerializer

from benchmarks.cluster import wait_until
from benchmarks.engine.models import random_bert
from benchmarks.faults.submitted import Keeper, Start, start_process
from benchmarks.simulated import SECONDS
from rankmill import Client
from rankmill.cli.main import rankmill
from rankmill.cluster.snapshot import read_cluster
from rankmill.cluster.verdict import verdict
from rankmill.jobs.protocol.worker_report import queue_workers

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "configs" / "prometheus" / "alerts.yml"

_LOOK_SECONDS = 0.25
_LONGEST = 180.0
_PAIR = ("how far is the moon", "About 384,400 km.")
_HANG = "1e9"
"""Seconds in which a simulated worker that hangs would score 1,000 pairs."""

_BUSY_SHARE = 0.1
"""Share of the time in which a worker that is made slow runs; otherwise its process is stopped."""


@dataclass
class Stage:
    """A server and an exporter, and what was started beside them."""

    folder: Path
    start: Start
    keeper: Keeper
    ends: ExitStack
    workers: list[Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.url = self.keeper.url
        self.redis: Any = redis.Redis.from_url(self.url)
        self.model = str(random_bert(self.folder / "model", hidden=64, layers=2))
        self.exporter = self._served("exporter", "--address", "127.0.0.1:0")

    def run(self, *command: str, **environ: str) -> tuple[Popen[bytes], Path]:
        """Start a command, which is killed at the end; returns its process and its log."""
        log = self.folder / f"{len(list(self.folder.iterdir()))}.log"
        process = self.start(command, {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environ}, log)
        self.ends.callback(process.wait)
        self.ends.callback(process.kill)
        return process, log

    def worker(self, worker_class: str = "rankmill.ScoringWorker", **environ: str) -> Popen[bytes]:
        """Start a worker, and wait until it is there."""
        before = queue_workers(self.redis, "rankmill").scoring
        command = ["rq", "worker", "rankmill", "--url", self.url, "--serializer", "json"]
        environ = {"RANKMILL_METRICS_ADDRESS": "none", **environ}
        process, _ = self.run(*command, "--worker-class", worker_class, **environ)
        wait_until(lambda: queue_workers(self.redis, "rankmill").scoring - before, process)
        self.workers.append(process)
        return process

    def runner(self) -> None:
        """Start a runner that sends webhooks to this host."""
        roots = {f"RANKMILL_RUNNER_{use}": str(self.folder) for use in ("READ", "WRITE")}
        hooks = {"RANKMILL_WEBHOOK_SECRET": "whsec_" + "c2Vj" * 8, "RANKMILL_WEBHOOK_HOSTS": "127.0.0.1"}
        self.run("rankmill", "runner", "--redis", self.url, **roots, **hooks)

    def gateway(self, **environ: str) -> str:
        """Start a gateway; returns its address."""
        return self._served("serve", "--port", "0", "--model", self.model, **environ)

    def client(self, model: str | None = None, **options: Any) -> Client:
        return Client(self.url, model=model or self.model, precision="fp32", **options)

    def beside(self, do: Callable[[], object]) -> None:
        """Do something again and again until the end, whatever it raises."""
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                with suppress(Exception):
                    do()

        thread = threading.Thread(target=work, daemon=True)
        self.ends.callback(ended.set)
        thread.start()

    def _served(self, *command: str, **environ: str) -> str:
        process, log = self.run("rankmill", *command, "--redis", self.url, **environ)
        wait_until(lambda: re.search(r" at (http://[\w.:]+)", log.read_text()), process)
        found = re.search(r" at (http://[\w.:]+)", log.read_text())
        assert found
        return found[1]


def _nothing(_: Stage) -> None:
    pass


def _with_worker(stage: Stage) -> None:
    stage.worker()
    stage.client().score([_PAIR], timeout=120)  # it has loaded the model


def _submit(stage: Stage) -> None:
    stage.client().submit([_PAIR])


def _two_at_work(stage: Stage) -> None:
    """Start two workers, wait until they have reported how fast they are, and give both work without end."""
    stage.worker()
    stage.worker()
    client = stage.client(chunk_size=64)
    stage.beside(lambda: client.score([_PAIR] * 4096, timeout=600))
    wait_until(lambda: all(each.relative_pace for each in read_cluster(stage.redis).workers))


def _throttle(stage: Stage) -> None:
    process = stage.workers[0]

    def stop_and_go() -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1 * (1 - _BUSY_SHARE))
        process.send_signal(signal.SIGCONT)
        time.sleep(0.1 * _BUSY_SHARE)

    stage.beside(stop_and_go)


def _two_that_hang(stage: Stage) -> None:
    for _ in range(2):
        stage.worker("benchmarks.simulated.SimulatedWorker", **{SECONDS: _HANG})


def _memory_left(stage: Stage, mib: int) -> None:
    stage.redis.config_set("maxmemory", stage.redis.info("memory")["used_memory"] + (mib << 20))


def _evict(stage: Stage) -> None:
    stage.redis.config_set("maxmemory-policy", "allkeys-lru")
    _memory_left(stage, 4)
    for number in range(200):
        stage.redis.set(f"filler:{number}", "x" * 100_000)


def _odd_job(stage: Stage) -> None:
    stage.redis.hset("rq:job:odd", mapping={"data": b"\xff", "origin": "rankmill"})
    stage.redis.rpush("rq:queue:rankmill", "odd")


def _bad_job(stage: Stage) -> None:
    queue = Queue("rankmill", connection=stage.redis, serializer=JSONSerializer)
    queue.enqueue("rankmill.score_pairs", "no list of pairs", model=stage.model)


def _with_runner(stage: Stage) -> None:
    _with_worker(stage)
    stage.runner()


def _unheard_webhook(stage: Stage) -> None:
    source = stage.folder / "in.csv"
    source.write_text("query,passage\n" + ",".join(f'"{text}"' for text in _PAIR) + "\n")
    output = stage.folder / "out.csv"
    stage.client().submit_file(str(source), str(output), webhook="http://127.0.0.1:1/")


def _ask(stage: Stage, address: str, callers: int) -> None:
    """Let callers ask the gateway again as soon as they have their answer."""
    body = json.dumps({"query": _PAIR[0], "texts": [_PAIR[1]]}).encode()

    def ask() -> None:
        request = urllib.request.Request(f"{address}/rerank", body, {"Content-Type": "application/json"})
        with suppress(urllib.error.URLError), urllib.request.urlopen(request, timeout=60) as reply:
            reply.read()
        time.sleep(0.05)

    for _ in range(callers):
        stage.beside(ask)


class Fault(NamedTuple):
    """How to plant a fault, the kind that the verdict calls it, and its alert; ``ready`` prepares what must
    be well before.
    """

    plant: Callable[[Stage], object]
    kind: str
    alert: str
    ready: Callable[[Stage], object] = _with_worker


FAULTS: dict[str, Fault] = {
    "no workers": Fault(_submit, "no_workers", "RankmillNoWorkers", _nothing),
    "killed worker": Fault(lambda at: at.workers[0].kill(), "lost_worker", "RankmillHeartbeatGap"),
    "stopped worker": Fault(
        lambda at: at.workers[0].send_signal(signal.SIGSTOP), "lost_worker", "RankmillHeartbeatGap"
    ),
    "slow worker": Fault(_throttle, "slow_worker", "RankmillWorkerSlow", _two_at_work),
    "refusing worker": Fault(
        lambda at: at.client("/nowhere/model").submit([_PAIR]), "refusing_worker", "RankmillFault"
    ),
    "Redis full": Fault(lambda at: _memory_left(at, -1), "refuses_writes", "RankmillRedisDown"),
    "Redis nearly full": Fault(lambda at: _memory_left(at, 4), "nearly_full", "RankmillFault"),
    "Redis away": Fault(lambda at: at.keeper.kill(), "", "RankmillRedisDown"),
    "Redis evicts": Fault(_evict, "evicts", "RankmillFault"),
    "stuck run": Fault(_submit, "stuck_run", "RankmillFault", _two_that_hang),
    "set-aside job": Fault(_odd_job, "set_aside", "RankmillFault"),
    "failed job": Fault(_bad_job, "failed_jobs", "RankmillChunksFailed"),
    "webhook": Fault(_unheard_webhook, "webhooks", "RankmillFault", _with_runner),
    "gateway overload": Fault(
        lambda at: _ask(at, at.gateway(RANKMILL_GATEWAY_REQUESTS="1"), 8), "gateway_overload", "RankmillFault"
    ),
    "gateway errors": Fault(
        lambda at: _ask(at, at.gateway(RANKMILL_GATEWAY_REQUEST_SECONDS="1"), 1),
        "gateway_errors", "RankmillFault", _nothing,
    ),
}  # fmt: skip
"""Faults by name. A server that is away has no verdict: ``status`` fails with a line, and the metric is
``rankmill_redis_up``.
"""


class Seen(NamedTuple):
    """Seconds until ``status`` names a fault, and until the metric does; and the sentence."""

    status: float
    metric: float
    sentence: str


def measure(fault: Fault, start: Start = start_process, longest: float = _LONGEST) -> Seen:
    """Plant a fault, and wait until it is named; raises `TimeoutError` after `longest` seconds."""
    with staged(start) as stage:
        fault.ready(stage)
        before = verdict(read_cluster(stage.redis))
        if before.faults:
            raise SystemExit(f"it is not well before: {before.sentence}")
        fault.plant(stage)
        began = time.monotonic()
        status = metric = None
        sentence = ""
        while status is None or metric is None:
            took = time.monotonic() - began
            if took > longest:
                raise TimeoutError(f"{fault.kind}: status {status}, metric {metric}")
            if status is None and (said := _said(stage, fault.kind)):
                status, sentence = time.monotonic() - began, said
            if metric is None and _is_counted(stage, fault.kind):
                metric = time.monotonic() - began
            time.sleep(_LOOK_SECONDS)
        return Seen(status, metric, sentence)


@contextmanager
def staged(start: Start) -> Iterator[Stage]:
    """Yield a stage, whose processes end with the ``with`` block."""
    with tempfile.TemporaryDirectory(prefix="rm-") as name, ExitStack() as ends:
        folder = Path(name)
        keeper = Keeper(folder, appendonly=False)
        ends.callback(keeper.kill)
        yield Stage(folder, start, keeper, ends)


def _said(stage: Stage, kind: str) -> str:
    """The fault's sentence of ``rankmill status``, or the line with which it fails; empty if it says none."""
    environ = {name: None for name in os.environ if name.startswith(("RANKMILL_", "REDIS_URL"))}
    done = CliRunner().invoke(rankmill, ["status", "--json", "--redis", stage.url], env=environ)
    if done.exit_code:
        return done.stderr.strip() if not kind else ""
    faults: list[Mapping[str, str]] = json.loads(done.stdout)["verdict"]["faults"]
    return next((fault["text"] for fault in faults if fault["kind"] == kind), "")


def _is_counted(stage: Stage, kind: str) -> bool:
    with urllib.request.urlopen(f"{stage.exporter}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    wanted = rf'^rankmill_faults{{kind="{kind}"}} [1-9]' if kind else r"^rankmill_redis_up 0"
    return re.search(wanted, text, re.M) is not None


def held() -> dict[str, str]:
    """How long each alert's condition must hold."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule.get("for", "0s") for group in groups for rule in group["rules"]}


def main() -> None:
    """Plant the faults that are named, or all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of: {', '.join(FAULTS)}")
    names = parser.parse_args().faults or FAULTS
    print("| fault | in `status` (s) | in the metric (s) | alert | held for |")
    print("| --- | --- | --- | --- | --- |")
    for name in names:
        fault = FAULTS[name]
        found = measure(fault)
        times = f"{found.status:.1f} | {found.metric:.1f}"
        print(f"| {name} | {times} | `{fault.alert}` | {held()[fault.alert]} |", flush=True)


if __name__ == "__main__":
    main()
