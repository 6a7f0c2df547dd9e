"""How a request wakes a worker that is full of bulk work, on a real server."""

from __future__ import annotations

import threading

import pytest

from benchmarks.cluster import wait_until
from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.workers.queue import intake
from rankmill.workers.queue.intake import Bell
from tests.conftest import Server


def test_a_ring_that_comes_too_late_for_a_worker_is_passed_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_LISTEN_SECONDS", 60)  # the first one's command still listens
    queue = Client(server.url, model="demo").store.queue("q")
    heard = {name: threading.Event() for name in ("paused", "listening")}
    bells = {name: Bell([queue], event.set) for name, event in heard.items()}
    for number, bell in enumerate(bells.values(), 1):
        bell.listen()
        wait_until(lambda number=number: server.client.info("clients")["blocked_clients"] == number)  # type: ignore[misc]
    bells["paused"].pause()
    server.client.lpush(keys.bell("q"), 1)
    assert heard["listening"].wait(30)
    assert not heard["paused"].is_set()
    # a ring stays for one who listens later
    bells["listening"].pause()
    heard["listening"].clear()
    server.client.lpush(keys.bell("q"), 1)
    wait_until(lambda: 0 < server.client.ttl(keys.bell("q")) <= 60)
    bells["paused"].listen()
    assert heard["paused"].wait(30)
    assert not heard["listening"].is_set()
    bells["paused"].pause()
