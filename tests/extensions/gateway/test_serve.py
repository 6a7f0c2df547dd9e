"""The gateway as a service: where it listens, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
import redis
from fastapi import FastAPI

from rankmill.extensions.gateway import serve as serving
from rankmill.extensions.gateway.commands import serve as command
from rankmill.extensions.gateway.serve import serve
from rankmill.extensions.gateway.settings import GatewaySettings
from rankmill.extensions.grpc import routes as listening
from rankmill.extensions.grpc import tei_pb2 as tei
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import ConfigError, EmbeddedError
from rankmill.jobs.protocol.worker_report import WorkerReport, announce_worker
from rankmill.jobs.runtime.http import SERVICE_PORTS
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system
from rankmill.producer.local.embedded import EmbeddedCluster
from tests.conftest import StartRunner, run_command
from tests.extensions.grpc.test_grpc import call, grpc_address
from tests.harness.gateways import PAIR, Running, running_gateway
from tests.harness.models.tiny import make_bert
from tests.harness.processes import messages_in, wait_for
from tests.harness.servers.valkey import Server

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "batch.py"


def test_it_ranks_texts(gateway: Running) -> None:
    query, texts = PAIR
    reply = gateway.post("/rerank", {"query": query, "texts": texts, "return_text": True})
    assert reply.status == 200
    best, other = reply.json
    assert (best["index"], best["text"], other["index"]) == (1, texts[1], 0)
    assert 0 < other["score"] < best["score"] < 1


def test_a_model_under_another_name_and_a_key_from_the_environment(
    shared_queue: Server, tmp_path: Path
) -> None:
    key = "a-key-of-the-environment"
    given = {"x-api-key": key}
    environ = {"RANKMILL_GATEWAY_API_KEY": f"{key}\n", "RANKMILL_GATEWAY_OPEN_METRICS": "true",
               "RANKMILL_GATEWAY_DIALECT": "vllm"}  # fmt: skip
    models = ["--model", "*", "--model", "rerank-v3.5=demo"]
    with running_gateway(shared_queue.url, tmp_path, *models, environ=environ) as gateway:
        query, texts = PAIR
        body = {"model": "rerank-v3.5", "query": query, "documents": texts}
        assert gateway.post("/v2/rerank", body).status == 401
        reply = gateway.post("/v2/rerank", body, authorization=f"Bearer {key}")
        assert (reply.json["model"], reply.json["results"][0]["index"]) == ("rerank-v3.5", 1)
        assert reply.json["results"][0]["document"] == {"text": texts[1]}  # vLLM's form
        scored = gateway.post("/score", {"queries": query, "documents": texts}, x_api_key=key).json["data"]
        assert scored[1]["score"] == reply.json["results"][0]["relevance_score"]  # and its scale
        assert gateway.get("/models", **given).json["data"][0]["id"] == "rerank-v3.5"
        assert gateway.get("/metrics").status == 200
        assert gateway.get("/v1/cache", **given).status == 403
        assert key not in gateway.log.read_text()


@pytest.mark.parametrize("key", ["sixteen and more", "schlüssel-mit-sechzehn", "too-short\n"])
def test_a_key_that_no_header_brings_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"^gateway_api_key: "):
        load_settings({}, environ={"RANKMILL_GATEWAY_API_KEY": key}).of(GatewaySettings)


def test_info_says_what_is_true_of_the_model(shared_queue: Server, tmp_path: Path) -> None:
    model = make_bert(tmp_path / "epoch=3", labels=2)  # the name of a checkpoint, not NAME=MODEL
    config = json.loads((model / "config.json").read_text())
    limit = config["max_position_embeddings"]
    config["id2label"] = {"0": "cheese", "1": "moon"}
    (model / "config.json").write_text(json.dumps(config))
    for asked, most in (({}, limit), ({"RANKMILL_MAX_LENGTH": "9"}, 9)):
        environ = {"RANKMILL_LABEL": "moon", **asked}
        options = ["--model", f"./{model.name}", "--grpc-address", "127.0.0.1:0"]
        with running_gateway(shared_queue.url, tmp_path, *options, environ=environ) as gateway:
            info = gateway.get("/info").json
            assert info["model_type"]["reranker"] == {
                "id2label": {"0": "cheese", "1": "moon"}, "label2id": {"cheese": 0, "moon": 1}
            }  # fmt: skip
            assert (info["max_input_length"], info["max_batch_tokens"]) == (most, most * 100_000)
            assert info["tokenization_workers"] == 1
            assert info["model_dtype"] == ("bfloat16" if info["scores"]["precision"] == "bf16" else "float32")
            with grpc.insecure_channel(grpc_address(gateway)) as channel:
                assert call(channel, "Info.Info", tei.InfoRequest()).max_input_length == most
            (warmed,) = gateway.post("/v1/cache/warm", {"model": model.name}).json["data"]
            assert "has 2 outputs" in warmed["text"]  # the worker, in another folder, has found it


def test_an_address_of_all_interfaces_takes_both_kinds() -> None:
    """As ``0.0.0.0`` does not take IPv6, people give ``[::]``."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    taken: list[bytes] = []

    def connect(at: str) -> None:
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, int(at.rpartition(":")[2])), timeout=60) as line:
                line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                taken.append(line.recv(9))
        os.kill(os.getpid(), signal.SIGTERM)

    app = FastAPI()
    app.state.gateway = Mock(additions=[], own=load_settings().of(GatewaySettings))

    def begun(at: str) -> None:
        threading.Thread(target=connect, args=[at]).start()

    serve(app, ("::", 0), begun)
    assert taken == [b"HTTP/1.1 "] * 2


def test_it_says_that_it_is_alive(gateway: Running) -> None:
    assert gateway.get("/health").status == 200


def test_one_command_brings_server_and_workers(runners: StartRunner, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    environ = {"RANKMILL_GATEWAY_FILES": str(tmp_path / "files")}
    with running_gateway(None, tmp_path, "--model", "demo", "--workers", "1", environ=environ) as gateway:
        wait_for(lambda: gateway.get("/ready").status == 200, gateway.process)  # a request waits for 15 s
        query, texts = PAIR
        assert gateway.post("/rerank", {"query": query, "texts": texts}).json[0]["index"] == 1
        said = "\n".join(messages_in(gateway.log.read_text()))
        advice = r"^batches wait for a runner: rankmill runner --redis (\S+) (.*)$"
        ((url, options),) = re.findall(advice, said, re.M)
        runner = runners(Server(url, redis.Redis.from_url(url)), *shlex.split(options))
        command = [sys.executable, str(EXAMPLE), gateway.url, "requests.jsonl", "answers.jsonl"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr
        assert [line.partition("  ")[0] for line in done.stdout.splitlines()] == ["q-0", "q-1", "q-2"]
        assert done.stdout.splitlines()[0].endswith("About 384,400 km from the earth.")
        assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 3
        runner.terminate()
        assert runner.wait(timeout=60) == 0


def test_it_stops_when_they_cannot_be_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Mock(EmbeddedCluster)
    cluster.check.side_effect = [None, EmbeddedError("the embedded server has stopped")]
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(command, "_LOOK_SECONDS", 0)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    with command._watched(cluster) as failed:
        wait_for(lambda: sent)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert [str(error) for error in failed] == ["the embedded server has stopped"]


def test_it_sends_itself_no_signal_when_it_ends_them() -> None:
    others = set(threading.enumerate())
    with command._watched(Mock(EmbeddedCluster)) as failed:
        assert "embedded" in [thread.name for thread in set(threading.enumerate()) - others]
    assert "embedded" not in [thread.name for thread in set(threading.enumerate()) - others]
    assert not failed


def test_the_usual_ports_are_left_by_workers_that_look_for_one() -> None:
    assert {serving.PORT, listening.PORT} <= SERVICE_PORTS


def test_a_signal_as_soon_as_the_address_is_known_ends_it_well() -> None:
    def unhandled(*_: object) -> None:
        raise AssertionError("the gateway does not handle signals yet")

    app = FastAPI()
    app.state.gateway = Mock(additions=[], own=load_settings().of(GatewaySettings))
    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        serve(app, ("127.0.0.1", 0), lambda at: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_it_ends_while_it_waits_for_workers_to_load_a_model(server: Server, tmp_path: Path) -> None:
    """Its process waited for the thread, for up to a minute after gateway_stop_seconds."""
    report = WorkerReport(device="cpu", started=1.0, beat=system.now(), drained=True)
    server.client.sadd("rq:workers", "rq:worker:silent")
    server.client.sadd("rq:workers:rankmill", "rq:worker:silent")
    server.client.hset("rq:worker:silent", "queues", "rankmill")
    announce_worker(server.client, "silent", report, ttl=600)
    slow = "from rankmill.extensions.gateway.http import plain_routes; plain_routes._WAIT_SECONDS = 3600"
    environ = {"RANKMILL_GATEWAY_STOP_SECONDS": "0"}
    options = ("--model", "demo")
    with running_gateway(server.url, tmp_path, *options, environ=environ, before=slow) as gateway:
        ask = threading.Thread(target=gateway.post, args=["/v1/cache/warm", {"model": "demo"}])
        ask.start()
        wait_for(lambda: server.client.llen(keys.orders("silent")), gateway.process)
    ask.join()


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_the_time_to_stop_is_a_number(shared_server: Server, value: str) -> None:
    environ = {"RANKMILL_GATEWAY_STOP_SECONDS": value}
    ended = run_command("rankmill", "serve", "--redis", shared_server.url, "--port", "0", environ=environ)
    assert ended.code == 2
    assert "gateway_stop_seconds: Input should be a finite number" in ended.err


def test_a_connection_that_sends_no_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_HEAD_SECONDS", 0.05)
    ended: list[bytes] = []

    def connect(at: str) -> None:
        host, _, port = at.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as line:
            line.sendall(b"GET /hea")
            ended.append(line.recv(1))
        os.kill(os.getpid(), signal.SIGTERM)

    app = FastAPI()
    app.state.gateway = Mock(additions=[], own=load_settings().of(GatewaySettings))
    serve(app, ("127.0.0.1", 0), lambda at: threading.Thread(target=connect, args=[at]).start())
    assert ended == [b""]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1:80"])
def test_an_address_that_others_reach_needs_keys_or_open(address: str, shared_server: Server) -> None:
    shown = f"[{address}]" if address == "::" else address
    ended = run_command("rankmill", "serve", "--redis", shared_server.url, "--address", shown)
    assert ended.code == 2
    (line,) = ended.messages
    assert "there are no keys" in line
    assert "--open" in line


def test_all_outputs_of_a_model_are_refused(shared_server: Server) -> None:
    environ = {"RANKMILL_ALL_LABELS": "true"}
    ended = run_command("rankmill", "serve", "--redis", shared_server.url, "--port", "0", environ=environ)
    (line,) = ended.messages
    assert (ended.code, "all_labels: the gateway gives one score" in line) == (2, True), line


def test_a_dialect_that_is_not_installed_is_refused(shared_server: Server) -> None:
    environ = {"RANKMILL_GATEWAY_DIALECT": "vlm"}
    ended = run_command("rankmill", "serve", "--redis", shared_server.url, "--port", "0", environ=environ)
    (line,) = ended.messages
    assert ended.code == 2
    assert line.endswith("no dialect 'vlm' is installed; installed are "
                         "cohere, infinity, jina, tei, vllm, voyage")  # fmt: skip
