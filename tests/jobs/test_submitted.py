"""Submitted runs in Redis."""

from __future__ import annotations

import fakeredis

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.submitted.request import FileOrder, FileRequest
from rankmill.jobs.protocol.submitted.store import FileRunStore


def test_a_run_that_was_submitted_twice_is_held_by_one_runner() -> None:
    store = FileRunStore(fakeredis.FakeRedis(version=(8,)), "files", 600)
    order = FileOrder(
        request=FileRequest(inputs=("/in.parquet",), output="/out.parquet"), spec=ScoreSpec(model="m")
    )
    run = store.submit(order)
    store.submit(order, run.id)  # as a client does whose reply was lost
    first = store.claim("a", 15)
    assert first
    assert first.run.id == run.id
    assert store.claim("b", 15) is None
    assert store.end(first)
    assert store.claim("b", 15) is None
    assert store.load(run.id).id == run.id
