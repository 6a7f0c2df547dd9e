"""The gateway as a service: where it listens, and how it ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from jobs.errors import EmbeddedError
from producer.local.embedded import EmbeddedCluster
from rankmill.cli.gateway import serve as command
from tests.conftest import run_command
from tests.harness.gateways import PAIR, Running, running_gateway
from tests.harness.servers.valkey import Server


def test_it_ranks_texts(gateway: Running) -> None:
    query, texts = PAIR
    reply = gateway.post("/rerank", {"query": query, "texts": texts, "return_text": True})
    assert reply.status == 200
    best, other = reply.json
    assert (best["index"], best["text"], other["index"]) == (1, texts[1], 0)
    assert 0 < other["score"] < best["score"] < 1


def test_it_says_that_it_is_alive(gateway: Running) -> None:
    assert gateway.get("/health").status == 200


def test_one_command_brings_server_and_workers(tmp_path: Path) -> None:
    with running_gateway(None, tmp_path, "--model", "demo", "--workers", "1") as gateway:
        query, texts = PAIR
        assert gateway.post("/rerank", {"query": query, "texts": texts}).json[0]["index"] == 1


def test_it_stops_when_they_cannot_be_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Mock(EmbeddedCluster)
    cluster.check.side_effect = [None, EmbeddedError("the embedded server has stopped")]
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(command, "_LOOK_SECONDS", 0)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    failed: list[EmbeddedError] = []
    command._watch(cluster, failed)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert [str(error) for error in failed] == ["the embedded server has stopped"]


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
