"""What was used, by whom: of real workers that are killed, in the command, the gateway and the exporter."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import redis
from rq import Queue, Repeat

from rankmill import Client
from rankmill.cluster.usage import UsageMetrics
from rankmill.extensions.gateway.keys.api_keys import KeyStore
from rankmill.jobs.contract.results import NO_DEVICE, Amounts
from rankmill.jobs.protocol.accounts import Entry, read_accounts
from rankmill.jobs.protocol.worker_report import queue_workers
from rankmill.jobs.runtime.hosts import cpu_name
from rankmill.producer.client.runs import ScoringRun
from tests.conftest import Server, StartWorker, run_command, score_file, wait_for
from tests.harness.gateways import running_gateway


def used(client: redis.Redis, tenant: str) -> dict[str, Amounts]:
    return {entry.device: entry.amounts for entry in read_accounts(client, 2, tenant)}


def test_every_row_counts_once_though_workers_are_killed(
    server: Server, workers: StartWorker, tiny_model: Path
) -> None:
    """Shows: workers are killed, and chunks are scored again."""
    doomed = [workers(), workers()]
    client = Client(server.url, model=str(tiny_model), tenant="live", chunk_size=16, precision="fp32")
    run = client.submit([("big cat", f"{'moon ' * (row % 9)}{row}") for row in range(3000)])
    for number, _ in enumerate(run.tables()):
        if number in {10, 90}:
            doomed.pop().send_signal(signal.SIGKILL)
            workers()
    device = cpu_name().replace("|", " ")
    found = used(server.client, "live")
    assert found[device].pairs == 3000
    assert found[device].tokens == run.stats.tokens
    assert found[device].microseconds > 0
    assert found.get(NO_DEVICE, Amounts()) == Amounts()


def test_rows_that_need_no_work_and_rows_without_a_score_are_told_apart(
    server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    workers()
    passages = [None, *(f"moon {row % 50}" for row in range(199))]
    pq.write_table(pa.table({"query": ["big cat"] * 200, "passage": passages}), tmp_path / "in.parquet")
    done = score_file(
        tmp_path / "in.parquet", "--redis", server.url, "--model", tiny_model, "--tenant", "files",
        "--chunk-size", 200,
    )  # fmt: skip
    assert done.code == 3, done.err
    found = used(server.client, "files")
    assert sum(amounts.pairs for amounts in found.values()) == 50
    assert found[NO_DEVICE] == Amounts(cached=149, failed=1)
    shown = run_command("rankmill", "usage", "--redis", server.url, "--by", "key")
    assert shown.code == 0, shown.err
    assert "files" in shown.out
    assert "149" in shown.out
    listed = json.loads(run_command("rankmill", "usage", "--redis", server.url, "--json").out)
    assert sum(each["pairs"] for each in listed["data"]) == 50
    assert {each["key"] for each in listed["data"]} == {"files"}


def test_a_detached_run_counts_once_and_a_job_by_name_belongs_to_nobody(
    server: Server, workers: StartWorker, tiny_model: Path
) -> None:
    """Shows: a detached run is collected."""
    workers()
    client = Client(server.url, model=str(tiny_model), tenant="detached", chunk_size=4)
    run = client.submit([("a", f"b {row}") for row in range(20)], detached=True)
    for _ in range(2):
        found = Client(server.url, tenant="detached").attach(run.id)
        assert isinstance(found, ScoringRun)
        assert len(found.scores(timeout=60)) == 20
    assert {entry.tenant for entry in read_accounts(server.client, 2)} == {"detached"}
    assert sum(amounts.pairs for amounts in used(server.client, "detached").values()) == 20
    queue = Queue("rankmill", connection=server.client, serializer="json")
    for pairs in (2, 4):  # the second job has the id of the first one
        named = {"model": str(tiny_model), "job_id": "nightly"}
        job = queue.enqueue("rankmill.score_pairs", [["a", "b"], ["a", "c"]], **named)
        wait_for(job.latest_result)
        assert sum(amounts.pairs for amounts in used(server.client, "").values()) == pairs
        job.delete()
    job = queue.enqueue("rankmill.score_pairs", [["a", "b"]], model=str(tiny_model), repeat=Repeat(times=2))
    wait_for(lambda: len(job.results()) == 3)
    assert sum(amounts.pairs for amounts in used(server.client, "").values()) == 4 + 3


def test_a_key_sees_its_own_and_an_admin_everybody_s(
    server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    worker = workers()
    wait_for(lambda: queue_workers(server.client, "rankmill").scoring, worker)
    keys = KeyStore(server.client)
    shop, _ = keys.create("shop", days=1)
    other, _ = keys.create("other", days=1)
    admin, _ = keys.create("boss", days=1, admin=True)
    with running_gateway(server.url, tmp_path, "--model", str(tiny_model)) as gateway:
        wait_for(lambda: gateway.get("/ready").status == 200, worker)
        body = {"query": "a", "documents": ["b", "c", "d"]}
        for text in (shop, shop, other):
            reply = gateway.post("/v1/rerank", body, authorization=f"Bearer {text}")
            assert reply.status == 200, reply.json
        seen = {
            text: gateway.get("/v1/usage", authorization=f"Bearer {text}").json["data"]
            for text in (shop, other, admin)
        }
        assert gateway.get("/v1/usage").status == 401
    names = {text: {each["model"] for each in data} for text, data in seen.items()}
    assert names == {shop: {tiny_model.name}, other: {tiny_model.name}, admin: {str(tiny_model)}}
    pairs = {
        text: sorted((each["key"], each["pairs"]) for each in data if each["device"])
        for text, data in seen.items()
    }
    assert pairs == {shop: [("shop", 6)], other: [("other", 3)], admin: [("other", 3), ("shop", 6)]}


def test_metrics_of_what_was_used_fall_at_no_midnight() -> None:
    metrics = UsageMetrics()

    def seen(*days: tuple[int, int]) -> float:
        entries = [Entry(day, "g", "shop", "m", "cpu", Amounts(pairs)) for day, pairs in days]
        family = next(each for each in metrics.families(entries) if each.name == "rankmill_usage_pairs")
        (sample,) = family.samples
        assert sample.labels == {"tenant": "shop", "model": "m", "device": "cpu"}
        return sample.value

    assert seen((1, 5)) == 0  # used before this exporter: an earlier one has counted it
    assert seen((1, 7), (2, 1)) == 3
    assert seen((2, 4), (3, 1)) == 7
    assert seen((2, 4), (3, 2)) == 8
    assert seen((2, 1), (3, 2)) == 8  # the server has lost something
    assert seen((2, 2), (3, 2)) == 9


def test_what_was_used_is_not_told_twice_when_a_tenant_s_name_becomes_known() -> None:
    """Who attaches to a detached run may not know its tenant, and counts for the digits of its id."""
    metrics = UsageMetrics()

    def seen(*entries: Entry) -> dict[str, float]:
        family = next(each for each in metrics.families(entries) if each.name == "rankmill_usage_pairs")
        return {sample.labels["tenant"]: sample.value for sample in family.samples}

    assert seen() == {}
    assert seen(Entry(1, "g", "", "m", "cpu", Amounts(5))) == {"g": 5}
    assert seen(Entry(1, "g", "shop", "m", "cpu", Amounts(7))) == {"shop": 7}
    assert seen(Entry(9, "g", "", "m", "cpu", Amounts(1))) == {"shop": 8}
