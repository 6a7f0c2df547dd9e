"""The gateway as a service: where it listens, and how it ends."""

from __future__ import annotations

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

import pytest
import redis
from fastapi import FastAPI

from rankmill.cli.gateway import serve as command
from rankmill.gateway import serve as serving
from rankmill.gateway.serve import serve
from rankmill.jobs.contract.errors import EmbeddedError
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.local.embedded import EmbeddedCluster
from tests.conftest import StartRunner, run_command
from tests.harness.gateways import PAIR, Running, running_gateway
from tests.harness.processes import wait_for
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
    environ = {"RANKMILL_GATEWAY_API_KEY": key, "RANKMILL_GATEWAY_OPEN_METRICS": "true",
               "RANKMILL_GATEWAY_DIALECT": "vllm"}  # fmt: skip
    models = ["--model", "rerank-v3.5=demo"]
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


def test_it_says_that_it_is_alive(gateway: Running) -> None:
    assert gateway.get("/health").status == 200


def test_one_command_brings_server_and_workers_and_names_the_runner_that_the_example_needs(
    runners: StartRunner, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    environ = {"RANKMILL_GATEWAY_FILES": str(tmp_path / "files")}
    with running_gateway(None, tmp_path, "--model", "demo", "--workers", "1", environ=environ) as gateway:
        wait_for(lambda: gateway.get("/ready").status == 200, gateway.process)  # a request waits for 15 s
        query, texts = PAIR
        assert gateway.post("/rerank", {"query": query, "texts": texts}).json[0]["index"] == 1
        ((url, options),) = re.findall(r"^batches wait for a runner: rankmill runner --redis (\S+) (.*)$",
                                       gateway.log.read_text(), re.M)  # fmt: skip
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
    with command._watched(Mock(EmbeddedCluster)) as failed:
        assert "embedded" in [thread.name for thread in threading.enumerate()]
    assert "embedded" not in [thread.name for thread in threading.enumerate()]
    assert not failed


def test_a_signal_as_soon_as_the_address_is_known_ends_it_well() -> None:
    def unhandled(*_: object) -> None:
        raise AssertionError("the gateway does not handle signals yet")

    app = FastAPI()
    app.state.gateway = Mock(grpc=None)
    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        serve(app, load_settings(), ("127.0.0.1", 0), None, lambda at: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)


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
    app.state.gateway = Mock(grpc=None)
    serve(
        app,
        load_settings(),
        ("127.0.0.1", 0),
        None,
        lambda at: threading.Thread(target=connect, args=[at]).start(),
    )
    assert ended == [b""]


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1:80"])
def test_an_address_that_others_reach_needs_keys_or_open(address: str, shared_server: Server) -> None:
    shown = f"[{address}]" if address == "::" else address
    ended = run_command("rankmill", "serve", "--redis", shared_server.url, "--address", shown)
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert "there are no keys" in line
    assert "--open" in line


def test_all_outputs_of_a_model_are_refused(shared_server: Server) -> None:
    environ = {"RANKMILL_ALL_LABELS": "true"}
    ended = run_command("rankmill", "serve", "--redis", shared_server.url, "--port", "0", environ=environ)
    (line,) = ended.err.splitlines()
    assert (ended.code, "all_labels: the gateway gives one score" in line) == (2, True), line
