"""The examples run as they are; that of plain RQ is in tests/workers/queue/test_score_pairs.py."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ENVIRON, Server, run_command, wait_for
from tests.harness.tools import free_port

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
        best, other = ask(query="how far is the moon", passages=["Cheese.", "About 384,400 km."])
        assert (best["index"], other["index"], best["error"]) == (1, 0, None)
        assert best["score"] > other["score"]
    finally:
        service.terminate()
        assert service.wait(timeout=60) in {0, -signal.SIGTERM}
        log.close()
