"""Submitted runs in Redis: what hosts whose clocks differ make of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.leases import server_time
from rankmill.jobs.protocol.submitted.request import FileOrder, FileRequest
from rankmill.jobs.protocol.submitted.store import FileRunStore
from rankmill.jobs.system import system
from tests.conftest import Server

ORDER = FileOrder(request=FileRequest(inputs=("/a.csv",), output="/b.csv"), spec=ScoreSpec(model="m"))


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_leases_and_pauses_follow_the_server_s_clock(
    ahead: float, shared_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = system.now
    monkeypatch.setattr(system, "now", lambda: now() + ahead)
    server: Any = shared_server.client
    store = FileRunStore(server, f"files{ahead}", 600)
    store.submit(ORDER)
    claim = store.claim("a", 15)
    assert claim
    server.delete(store.queue.started_job_registry.key, keys.file_run(claim.run.id))

    def seconds_until(key: str, member: str) -> float:
        return float(server.zscore(key, member)) - server_time(server)

    assert store.renew(claim, 15) == "forgotten"
    assert 5 < seconds_until(store.queue.started_job_registry.key, claim.entry) <= 15
    store.note_webhook(claim.run, 30)
    assert 20 < seconds_until(keys.webhooks(store.queue.name), claim.run.id) <= 30
    other = store.submit(ORDER)
    server.set(keys.file_run(other.id), json.dumps({**json.loads(other.written()), "format": 99}))
    assert store.claim("a", 15) is None
    assert -5 < seconds_until(store.queue.scheduled_job_registry.key, other.id) <= 5
