"""Faults that are planted on a real server: the sentence, the list and the metric name each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from rq.suspension import suspend

from rankmill.cli.main import rankmill
from rankmill.cluster.exporter import ClusterView, exporter_registry
from rankmill.cluster.snapshot import read_cluster
from rankmill.cluster.verdict import QUIET_SECONDS, fault_kinds, verdict
from rankmill.extensions.gateway.watch import tell
from rankmill.extensions.runners import redis_keys
from rankmill.extensions.runners.store import PUT_OFF_SECONDS
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import SetAside
from rankmill.jobs.protocol.worker_report import (
    LAST_REPORTS,
    SCORING_FIELD,
    LastReport,
    WorkerReport,
    announce_worker,
)
from tests.conftest import Server
from tests.harness.runs import stored_run

Plant = Callable[[Any], object]


def worker(client: Any, name: str = "w", **report: object) -> None:
    """A live worker of queue q that waits for work."""
    client.sadd("rq:workers", f"rq:worker:{name}")
    fields = {"birth": "x", "state": "idle", "queues": "q", SCORING_FIELD: 1}
    client.hset(f"rq:worker:{name}", mapping=fields)
    told = {"device": "cpu", "started": 1.0, "beat": time.time(), **report}
    announce_worker(client, name, WorkerReport.model_validate(told), 60)


def wrong_scores(client: Any, name: str = "w") -> None:
    reason = f"Worker {name} has computed wrong scores"
    LAST_REPORTS.add(client, LastReport(worker=name, at=time.time(), reason=reason, runs=("r",)))


def waiting_chunk(client: Any) -> None:
    store = RunStore(client)
    store.enqueue(stored_run(store), {0: Payload(b"pairs", 1)})


def dead_worker(client: Any) -> None:
    worker(client)
    client.delete(keys.worker("w"))


def refusing_worker(client: Any) -> None:
    worker(client, refusals=("no such directory",))


def slow_worker(client: Any) -> None:
    for name, pace in (("a", 100.0), ("b", 100.0), ("c", 10.0)):
        worker(client, name, pace=pace)


def quiet_run(client: Any) -> None:
    worker(client)
    waiting_chunk(client)
    (run,) = (raw.decode() for raw in client.zrange(keys.runs(), 0, -1))
    client.hset(keys.run(run), "created", time.time() - QUIET_SECONDS - 1)


def suspended(client: Any) -> None:
    quiet_run(client)  # which says nothing about the workers
    suspend(client)
    assert [fault.kind for fault in verdict(read_cluster(client)).faults] == ["suspended"]


def memory_left(client: Any, mib: float) -> None:
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", int(used + mib * 2**20))


def evicting(client: Any) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    memory_left(client, 4)
    for number in range(200):
        client.set(f"filler:{number}", "x" * 100_000)


def webhook(client: Any, ahead: float) -> None:
    client.zadd(redis_keys.file_queues(), {"files": 1})
    client.zadd(redis_keys.webhooks("files"), {"run": time.time() + ahead})


def gateways(client: Any, overloaded: int = 0, failed: int = 0) -> None:
    """Two gateways, each with a hundred requests."""
    for _ in range(2):
        tell(client, {"requests": 100, "overloaded": overloaded, "failed": failed})


def submitted_run(client: Any) -> None:
    client.zadd(redis_keys.file_queues(), {"files": 1})
    client.rpush("rq:queue:files", "run")


def failed_job(client: Any) -> None:
    worker(client)
    client.zadd("rq:failed:q", {"job": time.time() + 60})


def damaged_run(client: Any) -> None:
    client.hset(keys.run("x"), "a", "b")
    client.zadd(keys.runs(), {"x": time.time() + 60})


PLANTED: dict[str, tuple[Plant, str]] = {
    "wrong_scores": (wrong_scores, "Worker w has computed wrong scores; it has stopped, 0.0 h ago"),
    "refuses_writes": (lambda client: memory_left(client, -1), "Redis takes no writes, and all wait for it"),
    "no_workers": (waiting_chunk, "Nothing is scored in queue q: no workers, 1 chunk waits"),
    "no_runners": (submitted_run, "No runner takes queue files, where 1 submitted run waits"),
    "suspended": (suspended, "No worker takes chunks, because rq suspend was called"),
    "nearly_full": (lambda client: memory_left(client, 4), "Redis is nearly full"),
    "evicts": (evicting, "Redis has evicted"),
    "stuck_run": (quiet_run, "s, and workers are free"),
    "lost_worker": (dead_worker, "Worker w has died, or cannot reach Redis"),
    "refusing_worker": (
        refusing_worker,
        "Worker w leaves chunks to other workers: no such directory",
    ),
    "slow_worker": (slow_worker, "Worker c is slow: 10 times the time for a token of its peers"),
    "set_aside": (
        lambda client: client.lpush(
            keys.set_aside(), SetAside(job="odd", queue="q", reason="not JSON", at=1.0).written()
        ),
        "1 job could not be read, the last one: not JSON",
    ),
    "failed_jobs": (failed_job, "1 job of queue q failed for good"),
    "gateway_errors": (
        lambda client: gateways(client, failed=5),
        "10 of 200 requests to the gateway failed, in the last minute",
    ),
    "gateway_overload": (
        lambda client: gateways(client, overloaded=80, failed=1),
        "160 of 200 requests to the gateway were refused, because it is overloaded",
    ),
    "webhooks": (lambda client: webhook(client, 30), "1 webhook of queue files could not be delivered"),
    "damaged": (damaged_run, "1 key in Redis cannot be read"),
}


@pytest.mark.parametrize("kind", [kind for kind in fault_kinds() if kind != "extension"])  # test_watch.py
def test_a_planted_fault_is_named_by_status_json_and_metric(kind: str, server: Server) -> None:
    plant, sentence = PLANTED[kind]
    plant(server.client)
    told = verdict(read_cluster(server.client))
    assert sentence in told.sentence
    assert told.faults[0].kind == kind
    shown = CliRunner().invoke(rankmill, ["status", "--redis", server.url], env={"COLUMNS": "200"}).output
    shown = " ".join(shown.split())  # lines may break
    assert sentence in shown
    assert told.faults[0].remedy in shown
    state = CliRunner().invoke(rankmill, ["status", "--json", "--redis", server.url]).stdout
    assert json.loads(state)["verdict"]["faults"][0]["kind"] == kind
    registry = exporter_registry(ClusterView(server.client))
    assert registry.get_sample_value("rankmill_faults", {"kind": kind}) == 1


def test_a_worker_that_has_stopped_is_said_until_it_is_forgotten(server: Server) -> None:
    def forget(name: str) -> Any:
        return CliRunner().invoke(rankmill, ["workers", "forget", name, "--redis", server.url])

    wrong_scores(server.client)
    wrong_scores(server.client)  # started again, it has stopped again
    assert verdict(read_cluster(server.client)).faults[0].remedy.endswith("then rankmill workers forget w")
    unknown = forget("x")
    assert (unknown.exit_code, "those that have: w" in unknown.output) == (2, True)
    for other in ("w1", "w10"):
        wrong_scores(server.client, other)
    assert forget("w").output == "w: forgotten\n"  # not w1 and w10
    several = forget("w")
    assert (several.exit_code, "2 workers begin with w: w1, w10" in several.output) == (2, True)
    assert forget("w1").output + forget("w").output == "w1: forgotten\nw10: forgotten\n"
    assert not verdict(read_cluster(server.client)).faults
    assert forget("w").exit_code == 2


def test_a_cluster_at_work_is_well(server: Server) -> None:
    worker(server.client)
    worker(server.client, "loads", doing="loading")
    waiting_chunk(server.client)
    webhook(server.client, -1)  # a runner sends it soon
    # and the other one when its receiver's host has answered
    server.client.zadd(redis_keys.webhooks("files"), {"put off": time.time() + PUT_OFF_SECONDS - 1})
    server.client.zadd(redis_keys.runners("files"), {"runner": time.time() + 60})
    told = verdict(read_cluster(server.client))
    assert (told.sentence, told.faults) == ("All is well: 2 workers, 1 run", ())


def test_the_speed_is_that_of_all_runs(server: Server) -> None:
    store, now = RunStore(server.client), time.time()
    for _ in range(2):
        far = Progress(rows=3_000, since=now - 30, at=now)
        server.client.set(keys.progress(stored_run(store).id), far.model_dump_json())
    assert verdict(read_cluster(server.client)).sentence == "All is well: 0 workers, 2 runs, 200 pairs/s"
    assert verdict(read_cluster(server.client, page_size=1)).sentence == "All is well: 0 workers, 2 runs"


def test_a_request_in_a_hundred_may_fail_at_the_gateway(server: Server) -> None:
    gateways(server.client, failed=1, overloaded=1)
    assert not verdict(read_cluster(server.client)).faults


def test_a_run_is_not_stuck_while_its_workers_load(server: Server) -> None:
    quiet_run(server.client)
    worker(server.client, doing="proving")
    assert not verdict(read_cluster(server.client)).faults


def test_a_run_is_not_stuck_while_the_only_free_worker_refuses_it(server: Server) -> None:
    quiet_run(server.client)
    worker(server.client, refusals=("no such model directory",))
    assert [fault.kind for fault in verdict(read_cluster(server.client)).faults] == ["refusing_worker"]


def test_chunks_of_dead_workers_wait_until_a_worker_comes(server: Server) -> None:
    """RQ forgets a dead worker within minutes, but not what it had."""
    waiting_chunk(server.client)
    RunStore(server.client).queue("q").take(["bulk"])
    server.client.zadd("rq:wip:q", {"job": time.time() + 60})
    sentence = verdict(read_cluster(server.client)).sentence
    assert sentence == "Nothing is scored in queue q: no workers, 1 chunk waits"
    worker(server.client, drained=True, claimed_jobs=1)
    assert not verdict(read_cluster(server.client)).faults


def test_the_run_of_a_dead_runner_waits_until_a_runner_comes(server: Server) -> None:
    server.client.zadd(redis_keys.file_queues(), {"files": 1})
    server.client.zadd("rq:wip:files", {"run:token": time.time() + 60})
    sentence = verdict(read_cluster(server.client)).sentence
    assert sentence == "No runner takes queue files, where 1 submitted run waits"


def test_a_drained_worker_that_would_take_the_waiting_chunks_is_named(server: Server) -> None:
    waiting_chunk(server.client)
    worker(server.client, "lost")
    server.client.delete(keys.worker("lost"))
    worker(server.client, "my box", drained=True)
    fault = verdict(read_cluster(server.client)).faults[0]
    assert fault.text == "Nothing is scored in queue q: all workers are drained, 1 chunk waits"
    assert fault.remedy == "rankmill workers resume 'my box' makes one take chunks"


def test_nobody_looks_lost_because_the_server_takes_no_heartbeats(server: Server) -> None:
    dead_worker(server.client)
    waiting_chunk(server.client)
    memory_left(server.client, -1)
    kinds = [fault.kind for fault in verdict(read_cluster(server.client)).faults]
    assert kinds == ["refuses_writes", "nearly_full"]


def test_no_chunks_will_wait_for_a_lost_worker_that_cannot_be_drained(server: Server) -> None:
    dead_worker(server.client)
    refused = CliRunner().invoke(rankmill, ["workers", "drain", "w", "--redis", server.url])
    assert (refused.exit_code, "w is lost" in refused.output) == (1, True)
    assert "will wait" not in refused.output


def test_a_fault_says_where_a_worker_runs_if_its_name_does_not(server: Server) -> None:
    for name in ("w", "box.cpu.7"):
        worker(server.client, name, refusals=("no such directory",))
        server.client.hset(f"rq:worker:{name}", mapping={"hostname": "box", "pid": 7})
    texts = {fault.text.partition(" leaves")[0] for fault in verdict(read_cluster(server.client)).faults}
    assert texts == {"Worker w (host box, process 7)", "Worker box.cpu.7"}


def test_the_worst_comes_first(server: Server) -> None:
    dead_worker(server.client)
    waiting_chunk(server.client)
    told = verdict(read_cluster(server.client))
    assert [fault.kind for fault in told.faults] == ["no_workers", "lost_worker"]
    assert told.sentence.endswith("(and 1 other fault)")
