"""What a gateway takes on, whom it serves, and how it stops."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from starlette.requests import Request

from rankmill.cluster.snapshot import read_cluster
from rankmill.extensions.gateway import bodies as bodies_module
from rankmill.extensions.gateway import load_shedding
from rankmill.extensions.gateway.bodies import BodyMemory
from rankmill.extensions.gateway.keys.api_keys import KeyStore
from rankmill.extensions.gateway.load_shedding import LoadShedder, speed
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.extensions.gateway.watch import SeenGateways
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RankmillError, RunFailed
from rankmill.jobs.contract.priority import Priority, new_run_id
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import STAGES, WorkerReport, announce_worker
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.client.aio import bridge
from rankmill.producer.client.aio.connection import LoopRedis
from tests.harness.gateways import PAIR, Reply, Running, running_gateway
from tests.harness.processes import wait_for
from tests.harness.servers.valkey import Server, nothing_left
from tests.harness.waiting import take_out

QUERY, TEXTS = PAIR
BODY = {"query": QUERY, "texts": TEXTS}


@pytest.fixture(scope="module")
def narrow(shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway with a limit of one request at a time, on a queue that nobody listens on."""
    options = ["--model", "demo", "--queue", "nobody"]
    environ = {
        "RANKMILL_GATEWAY_REQUESTS": "1",
        "RANKMILL_GATEWAY_PAIRS": "3",
        "RANKMILL_GATEWAY_STOP_SECONDS": "1",
        "RANKMILL_GATEWAY_ORIGINS": "https://app.example",
        "RANKMILL_GATEWAY_HOSTS": "gateway.example",
    }
    directory = tmp_path_factory.mktemp("narrow")
    with running_gateway(shared_server.url, directory, *options, environ=environ) as running:
        yield running


def test_while_one_request_waits_the_next_is_told_to_come_back(narrow: Running) -> None:
    raw = json.dumps(BODY).encode()
    head = "POST /rerank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, _, port = narrow.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as line:
        line.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        wait_for(lambda: "in_progress 1.0" in narrow.get("/metrics").body.decode())
        refused = narrow.post("/rerank", BODY)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json == {
            "error": "1 requests are in progress; send it again later",
            "error_type": "Overloaded",
        }
        assert narrow.get("/health").status == 200
    wait_for(lambda: "in_progress 0.0" in narrow.get("/metrics").body.decode())


def test_more_pairs_than_allowed_are_refused(narrow: Running) -> None:
    reply = narrow.post("/v2/rerank", {"query": "q", "documents": ["a"] * 4})
    assert (reply.status, reply.json["message"]) == (
        413,
        "4 pairs are more than the 3 of one request: send fewer at a time",
    )


def test_a_query_that_would_be_repeated_too_often_is_refused(narrow: Running) -> None:
    reply = narrow.post("/rerank", {"query": "q", "texts": ["x" * ((1 << 20) + 1)]})
    assert reply.status == 422


def test_only_named_origins_and_hosts_may_use_the_gateway(narrow: Running) -> None:
    reply = narrow.get("/health", origin="https://app.example", host="gateway.example")
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert "access-control-allow-origin" not in narrow.get("/health", origin="https://evil.example").headers


def test_all_bodies_together_are_bounded() -> None:
    memory = BodyMemory(100)
    with memory.body() as first:
        first.count(100)
        with ExitStack() as others:
            for _ in range(7):
                others.enter_context(memory.body()).count(100)
            with memory.body() as last, pytest.raises(Refusal) as refused:
                last.count(1)
        assert (refused.value.kind, refused.value.retry_after) == ("overloaded", 1)
    with memory.body() as again:
        again.count(100)
    assert memory.taken == 0


def test_a_body_that_does_not_come_gives_its_place_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "READ_SECONDS", 0.01)

    async def read() -> None:
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        request = Request(scope, receive=asyncio.Event().wait)  # type: ignore[arg-type]
        with BodyMemory(100).body() as body, pytest.raises(Refusal) as refused:
            await body.read(request)
        assert refused.value.kind == "slow"

    asyncio.run(read())


def report(**counts: Any) -> WorkerReport:
    stages = tuple(counts.pop("forward", 0.0) if name == "forward" else 0.0 for name in STAGES)
    return WorkerReport.model_validate(
        {"device": "cpu", "started": 1.0, "beat": time.time(), "stage_seconds": stages, **counts}
    )


def test_a_workers_speed_stands_for_those_that_have_scored_nothing() -> None:
    assert speed([]) is None
    assert speed([report()]) is None
    assert speed([report(tokens=10_000, forward=2.0)]) == 5000
    assert speed([report(tokens=10_000, forward=2.0), report(tokens=9_000, forward=9.0)]) == 10_000
    assert speed([report(tokens=10_000, forward=2.0), report(drained=True)]) == 5000


def test_requests_are_refused_while_too_many_seconds_of_requests_wait(server: Server) -> None:
    settings = load_settings({"gateway_backlog_seconds": 10})
    announce_worker(server.client, "w", report(tokens=10_000, forward=10.0), 60)
    server.client.sadd("rq:workers:rankmill", "rq:worker:w")
    waiting = [f"r{number:032x}-0" for number in range(400)]
    bulk = [f"{number:032x}-0" for number in range(1000)]
    queue = RunStore(server.client).queue("rankmill")
    for job in (*waiting, *bulk):
        queue.place(server.client, job, at_front=False)

    async def look() -> None:
        client = LoopRedis(server.url, 10)
        load = LoadShedder(settings, client)
        await bridge.run(load.look)
        assert load.backlog_seconds == pytest.approx(40)
        with (
            pytest.raises(Refusal, match="need 40 s for the requests that wait") as refused,
            load.request(),
        ):
            pass
        assert (refused.value.kind, refused.value.retry_after) == ("overloaded", 30)
        for job in waiting[:390]:
            take_out(server.client, job)
        await bridge.run(load.look)
        assert load.backlog_seconds == pytest.approx(1)
        with load.request():
            pass
        await client.loop_client.aclose()

    asyncio.run(look())


def test_what_a_gateway_refuses_and_fails_is_told_to_the_cluster(server: Server) -> None:
    """What is wrong with a request is no fault of the gateway; a bug is. The server refuses it at first."""

    async def main() -> None:
        client = LoopRedis(server.url, 10)
        load = LoadShedder(load_settings({"gateway_requests": 1}), client)
        with load.request(), pytest.raises(Refusal), load.request():
            pass
        for error in (Refusal("invalid", ""), Refusal("timeout", ""), RunFailed("it fails"), KeyError("bug")):
            with suppress(Exception), load.request():
                raise error
        server.client.config_set("min-replicas-to-write", 1)
        with pytest.raises(RankmillError):
            await bridge.run(load.look)
        server.client.config_set("min-replicas-to-write", 0)
        for _ in range(2):  # counts are told once
            await bridge.run(load.look)
        await client.loop_client.aclose()

    asyncio.run(main())
    assert read_cluster(server.client).extensions["gateway"] == SeenGateways(
        requests=6, overloaded=1, failed=3
    )


def test_a_request_is_taken_only_if_the_workers_have_time_for_it(server: Server) -> None:
    """2,000 pairs of 100 tokens take ten seconds; 30 s may wait, and 40 requests come at once."""
    settings = load_settings({"gateway_backlog_seconds": 30})
    request: tuple[int, int, Priority, str] = (800_000, 2000, "bulk", "me")

    async def come(load: LoadShedder) -> tuple[int, list[float]]:
        taken, told = 0, list[float]()
        with ExitStack() as stack:
            for _ in range(40):
                try:
                    stack.enter_context(load.work(*request))
                    taken += 1
                except Refusal as refusal:
                    told.append(refusal.retry_after or 0)
        with load.work(*request):  # those have ended
            pass
        return taken, told

    async def main() -> None:
        client = LoopRedis(server.url, 10)
        load = LoadShedder(settings, client)
        assert (await come(load))[0] == 1  # nobody knows how fast they are: one at a time
        with load.work(4000, 10, "request", "me"), load.work(4000, 10, "request", "me"):
            pass
        announce_worker(server.client, "w", report(tokens=200_000, forward=10.0), 60)
        server.client.sadd("rq:workers:rankmill", "rq:worker:w")
        load = LoadShedder(settings, client)
        await bridge.run(load.look)
        taken, told = await come(load)
        assert (taken, set(told)) == (3, {10})
        bulk = keys.job_id(new_run_id("bulk", "another"), 0)
        RunStore(server.client).queue("rankmill").place(server.client, bulk, at_front=False)
        await bridge.run(load.look)
        assert (await come(load))[0] == 2  # it gets half of the workers' time
        await client.loop_client.aclose()

    asyncio.run(main())


def test_once_nothing_waits_any_request_is_taken(server: Server) -> None:
    """A minute of work is more than may wait, so it comes when nothing else does."""
    settings = load_settings({"gateway_backlog_seconds": 30})
    large: tuple[int, int, Priority, str] = (4_800_000, 12_000, "bulk", "me")

    async def main() -> None:
        client = LoopRedis(server.url, 10)
        load = LoadShedder(settings, client)
        announce_worker(server.client, "w", report(tokens=200_000, pairs=1999, forward=10.0), 60)
        server.client.sadd("rq:workers:rankmill", "rq:worker:w")
        await bridge.run(load.look)
        for rounds in range(3):
            ends = deque[ExitStack]()
            for pairs in range(1, 40):
                small = ExitStack()
                small.enter_context(load.work(397 * pairs, pairs, "request", "me"))
                ends.append(small)
                if pairs % 3:
                    ends.popleft().close()
            said = r"need 3 s for the requests that wait already, and \d\d s for this one"
            with pytest.raises(Refusal, match=said) as refused, load.work(*large):
                pass
            assert refused.value.retry_after == 3
            for each in ends:
                each.close()
            with load.work(*large):
                pass
            load.note(397 * 40, 4001 + rounds, 1)
        await client.loop_client.aclose()

    asyncio.run(main())


def test_a_gateway_is_ready_while_a_worker_has_its_model(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_shedding, "_SPEED_SECONDS", 0.0)

    async def main() -> None:
        client = LoopRedis(server.url, 10)
        load = LoadShedder(load_settings({"model": "shop@live"}), client)

        async def seen(**models: tuple[str, ...]) -> str | None:
            server.client.delete("rq:workers:rankmill")
            for name, each in models.items():
                announce_worker(server.client, name, report(models=each), 60)
                server.client.sadd("rq:workers:rankmill", f"rq:worker:{name}")
            await bridge.run(load.look)
            return load.unready

        assert await seen() == "there is no worker"
        assert await seen(old=()) == "no worker has loaded the model"
        assert await seen(old=("shop@v1",)) is None
        assert await seen(old=(), new=()) is None  # unloaded as it was idle
        assert await seen(new=()) == "no worker has loaded the model"  # as of a rollout that cannot load it
        server.client.set(keys.worker("odd"), "{}")  # of another format, say: the others are seen
        server.client.sadd("rq:workers:rankmill", "rq:worker:odd")
        load = LoadShedder(load_settings({"model": "shop@live"}), client)
        await bridge.run(load.look)
        assert load.unready == "no worker has loaded the model"
        announce_worker(server.client, "new", report(models=("shop@v1",), tokens=10_000, forward=2.0), 60)
        await bridge.run(load.look)
        assert load.unready is None
        await client.loop_client.aclose()

    asyncio.run(main())


def test_a_gateway_knows_its_model_by_a_path_that_begins_elsewhere(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop").mkdir()
    monkeypatch.chdir(tmp_path)
    announce_worker(server.client, "w", report(models=(str(tmp_path / "shop"),)), 60)
    server.client.sadd("rq:workers:rankmill", "rq:worker:w")

    async def look() -> None:
        client = LoopRedis(server.url, 10)
        load = LoadShedder(load_settings({"model": "./shop"}), client)
        await bridge.run(load.look)
        assert load.unready is None
        await client.loop_client.aclose()

    asyncio.run(look())


@pytest.mark.parametrize("known_from", ["a large request", "the workers"])
def test_how_many_tokens_texts_have_is_known_from_the_first_on(server: Server, known_from: str) -> None:
    """A Chinese character is a token; a fourth of that is English's."""
    settings = load_settings({"gateway_backlog_seconds": 30})

    async def main() -> None:
        client = LoopRedis(server.url, 10)
        load = LoadShedder(settings, client)
        pairs = 1000 if known_from == "the workers" else 0
        announce_worker(server.client, "w", report(tokens=200_000, pairs=pairs, forward=10.0), 60)
        server.client.sadd("rq:workers:rankmill", "rq:worker:w")
        await bridge.run(load.look)
        if not pairs:
            load.note(200_000, 200_000, 10)
            load.note(10_000_000, 500_000, 10)  # of texts that were cut
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(load.work(200_000, 1000, "bulk", "me"))  # ten seconds each
            with pytest.raises(Refusal, match=r"need (29|30) s"):
                stack.enter_context(load.work(200_000, 1000, "bulk", "me"))
        await client.loop_client.aclose()

    asyncio.run(main())


def test_with_keys_only_their_holders_are_served(server: Server, tmp_path: Path) -> None:
    store = KeyStore(server.client)
    shop, _ = store.create("shop", days=1, models=("demo",), requests_at_once=1)
    boss, _ = store.create("boss", days=1, admin=True)
    options = ["--model", "demo", "--model", "other", "--address", "0.0.0.0"]
    environ = {"RANKMILL_GATEWAY_STOP_SECONDS": "1"}
    with running_gateway(server.url, tmp_path, *options, environ=environ) as gateway:
        here = Running(gateway.url.replace("0.0.0.0", "127.0.0.1"), gateway.process, gateway.log)
        refused = here.post("/v2/rerank", {"query": "q", "documents": ["a"]})
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert "give an API key" in refused.json["message"]
        for path in ("/metrics", "/v1/models", "/info"):
            assert here.get(path).status == 401
        for path in ("/health", "/docs", "/openapi.json", "/"):
            assert here.get(path).status == 200
        for header in ({"authorization": f"Bearer {shop}"}, {"authorization": shop}, {"x-api-key": shop}):
            assert [each["id"] for each in here.get("/v1/models", **header).json["data"]] == ["demo"]
        forbidden = here.post(
            "/v2/rerank", {"query": "q", "documents": ["a"], "model": "other"}, x_api_key=shop
        )
        assert forbidden.status == 403
        assert here.get("/v1/cache", **{"x-api-key": shop}).status == 403
        assert here.get("/v1/cache", **{"x-api-key": boss}).json == {"object": "list", "data": []}
        text = here.get("/metrics", **{"x-api-key": boss}).body.decode()
        assert re.search(
            r'requests_total\{dialect="cohere",key="shop",route="/v2/rerank",status="403"\}', text
        )
        assert shop not in gateway.log.read_text()


def test_a_gateway_that_is_told_to_stop_finishes_what_it_has(shared_queue: Server, tmp_path: Path) -> None:
    body = {
        "queries": QUERY,
        "documents": [f"words {number} " * 40 for number in range(60)],
        "model": "demo",
    }
    replies: list[Reply] = []
    environ = {"RANKMILL_GATEWAY_STOP_SECONDS": "120"}  # a busy machine may need as long
    with running_gateway(shared_queue.url, tmp_path, "--model", "demo", environ=environ) as gateway:
        thread = threading.Thread(target=lambda: replies.append(gateway.post("/score", body)))
        thread.start()
        wait_for(lambda: "run begins" in gateway.log.read_text())
        gateway.process.send_signal(signal.SIGTERM)
        thread.join()
        assert gateway.process.wait(timeout=150) == 0
    assert [reply.status for reply in replies] == [200]
    assert len(json.loads(replies[0].body)["data"]) == 60


def test_a_request_that_takes_longer_than_the_time_to_stop_is_given_up(
    shared_server: Server, tmp_path: Path
) -> None:
    environ = {"RANKMILL_GATEWAY_STOP_SECONDS": "1"}
    options = ["--model", "demo", "--queue", "nobody"]
    with (
        nothing_left(shared_server),
        running_gateway(shared_server.url, tmp_path, *options, environ=environ) as gateway,
    ):
        raw = json.dumps(BODY).encode()
        head = "POST /rerank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as line:
            line.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            wait_for(lambda: "run begins" in gateway.log.read_text())
            gateway.process.send_signal(signal.SIGTERM)
            assert gateway.process.wait(timeout=60) == 0
            assert line.recv(1000).startswith(b"HTTP/1.1 503")
        assert "timeout graceful shutdown exceeded" in gateway.log.read_text()


def test_events_of_a_batch_do_not_keep_a_gateway_from_stopping(server: Server, tmp_path: Path) -> None:
    environ = {"RANKMILL_GATEWAY_FILES": str(tmp_path)}
    with running_gateway(server.url, tmp_path, "--model", "demo", environ=environ) as gateway:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key="anything", max_retries=0) as client:
            file = client.files.create(file=("in.csv", b"query,passage\nmoon,a moon\n"), purpose="batch")
        batch = gateway.post("/v1/batches", {"input_file_id": file.id}).json["id"]
        with urllib.request.urlopen(f"{gateway.url}/v1/batches/{batch}/events", timeout=60) as events:
            assert events.readline() == b"event: batch\n"
            gateway.process.send_signal(signal.SIGTERM)
            assert b"validating" in events.read()  # it ends as a whole; if it is cut off, this raises
