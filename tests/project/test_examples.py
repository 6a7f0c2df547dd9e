"""The examples run as they are; that of plain RQ is in tests/workers/queue/test_score_pairs.py."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from examples import fastapi_service
from rankmill import Client
from rankmill.extensions.gateway.testing import served
from rankmill.testing import FakeWorkers, fake_workers
from tests.conftest import ENVIRON, Server, run_command, wait_for
from tests.harness.tools import free_port

__all__ = ["fake_workers"]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(script: str, *words: str, cwd: Path) -> str:
    done = run_command("python", EXAMPLES / script, *words, cwd=cwd, timeout=240)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.slow
def test_the_asyncio_producer(shared_queue: Server, tmp_path: Path) -> None:
    assert "50 requests of 20 pairs" in run("asyncio_producer.py", shared_queue.url, cwd=tmp_path)


@pytest.mark.slow
def test_the_notebook(tmp_path: Path) -> None:
    stats, relevant, best, other = run("notebook.py", cwd=tmp_path).splitlines()
    assert stats.startswith("250 pairs, ")
    assert "errors: {}" in stats
    assert int(relevant.partition("%")[0].rpartition(" ")[2]) >= 80
    assert best.endswith("passage 1")
    assert other.endswith("passage 0")


def test_the_fastapi_service_cancels_the_run_of_a_caller_that_goes(
    fake_workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastapi_service, "TIMEOUT", 3600)
    body = b'{"query": "q", "passages": ["a", "b"]}'
    head = "POST /rerank HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    fake_workers.seconds = 3600
    with served(fastapi_service.app) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
            wait_for(lambda: bool(fake_workers.runs))
        wait_for(lambda: fake_workers.runs[0].is_cancelled)
        fake_workers.seconds = 0
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
            assert caller.recv(4096).startswith(b"HTTP/1.1 200")
    assert not fake_workers.runs[1].is_cancelled


def test_the_fastapi_service(shared_queue: Server, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "uvicorn", "examples.fastapi_service:app"]
    log = (tmp_path / "log").open("wb")
    service = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", address.rpartition(":")[2]],
        cwd=EXAMPLES.parent, env={**ENVIRON, "REDIS_URL": shared_queue.url}, stdout=log, stderr=log,
    )  # fmt: skip

    def ask(**asked: Any) -> Any:
        body = json.dumps(asked).encode()
        request = urllib.request.Request(
            f"http://{address}/rerank", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def answers() -> bool:
        try:
            return bool(ask(query="q", passages=[]) == [])
        except urllib.error.URLError:
            return False

    try:
        wait_for(answers, service)
        # The service waits only 30 s for scores, and a worker of a busy machine may still load its model.
        Client(shared_queue.url, model="demo").score([("a query", "a passage")])
        best, other = ask(query="how far is the moon", passages=["Cheese.", "About 384,400 km."])
        assert (best["index"], other["index"], best["error"]) == (1, 0, None)
        assert best["score"] > other["score"]
    finally:
        service.terminate()
        assert service.wait(timeout=60) in {0, -signal.SIGTERM}
        log.close()
