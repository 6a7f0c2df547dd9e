"""Submitted runs in Redis."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rq import Queue
from rq.job import Job

from rankmill import AsyncClient, AsyncSubmittedFile, Client
from rankmill.cli.main import rankmill
from rankmill.extensions.runners import redis_keys as keys
from rankmill.extensions.runners.orders import kind_of
from rankmill.extensions.runners.record import new_file_run
from rankmill.extensions.runners.store import FileRunStore, RunLease
from rankmill.extensions.runners.submitted import SubmittedFile
from rankmill.extensions.runners.work import work_on
from rankmill.jobs.contract.errors import RunnerError, RunTimeout, StoreError
from rankmill.jobs.contract.file_request import FileOrder, FileRequest
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.leases import RQ_DELAY, server_time
from rankmill.jobs.protocol.set_aside import read_job
from rankmill.jobs.runtime.connection import client_for
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system
from rankmill.producer.collect.journal import Journal
from tests.conftest import Server

ORDER = FileOrder(request=FileRequest(inputs=("/a.csv",), output="/b.csv"), spec=ScoreSpec(model="m"))


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_leases_follow_the_server_s_clock(
    ahead: float, shared_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows: hosts' clocks differ or jump."""
    now = system.now
    monkeypatch.setattr(system, "now", lambda: now() + ahead)
    server: Any = shared_server.client
    store = FileRunStore(server, f"files{ahead}", 600)
    store.submit(ORDER)
    claim = store.claim(15)
    assert claim
    server.delete(store.queue.started_job_registry.key, keys.file_run(claim.run.id))

    def seconds_until(key: str, member: str) -> float:
        return float(server.zscore(key, member)) - server_time(server)

    assert store.renew(claim, 15) == "forgotten"
    assert 5 < seconds_until(store.queue.started_job_registry.key, claim.entry) - RQ_DELAY <= 15
    store.note_webhook(claim.run, 30)
    assert 20 < seconds_until(keys.webhooks(store.queue.name), claim.run.id) <= 30
    other = store.submit(ORDER)
    server.set(keys.file_run(other.id), json.dumps({**json.loads(other.written()), "format": 99}))
    assert store.claim(15) is None
    assert server.lrange(store.queue.key, 0, -1) == [other.id.encode()]
    last = store.submit(ORDER)
    claim = store.claim(15)
    assert claim
    assert claim.run.id == last.id


def test_a_wait_ends_in_time_while_the_server_is_silent(server: Server) -> None:
    store = FileRunStore(client_for(server.url, 5), "files", 600)
    run = SubmittedFile(store, store.submit(ORDER).id)
    process = int(server.client.info("server")["process_id"])
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(RunTimeout, match="it goes on"):
            run.wait(timeout=0.3)
    finally:
        os.kill(process, signal.SIGCONT)


def test_no_time_is_enough_for_a_run_that_has_ended(
    shared_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handle for asyncio raised RunTimeout without a look at the run."""
    monkeypatch.setattr("rankmill.jobs.runtime.patience._LEAST_SECONDS", 10)
    store = FileRunStore(shared_server.client, "files ended", 600)
    store.submit(ORDER)
    claim = store.claim(15)
    assert claim
    assert store.end(RunLease(claim.run.end("done"), claim.entry))
    waits = store.submit(ORDER).id

    async def states() -> list[str]:
        async with AsyncClient(shared_server.url) as client:
            ended, other = [await client.attach(run_id) for run_id in (claim.run.id, waits)]
            assert isinstance(ended, AsyncSubmittedFile)
            assert isinstance(other, AsyncSubmittedFile)
            with pytest.raises(RunTimeout, match="it goes on"):
                await other.wait(timeout=0.01)
            return [(await ended.wait(timeout=0)).state]

    assert asyncio.run(states()) == ["done"]
    assert SubmittedFile(store, claim.run.id).wait(timeout=0).state == "done"


def test_a_cancellation_that_came_too_late_does_not_cancel_the_next_run_with_the_same_id(
    shared_server: Server,
) -> None:
    store = FileRunStore(shared_server.client, "files late", 600)
    submitted = store.submit(ORDER, "again")
    claim = store.claim(15)
    assert claim
    assert store.end(RunLease(claim.run.end("done"), claim.entry))
    assert store.cancel(submitted).state == "done"
    store.submit(ORDER, "again")
    again = store.claim(15)
    assert again
    assert not again.run.is_ended
    assert not store.was_cancelled("again")


def test_a_run_is_listed_while_it_is_scored_for_longer_than_file_run_ttl(
    shared_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileRunStore(shared_server.client, "files listed", 600)
    store.submit(ORDER)
    claim = store.claim(15)
    assert claim
    now = system.now
    monkeypatch.setattr(system, "now", lambda: now() + 601)
    assert store.renew(claim, 15) == "held"
    store.submit(ORDER)  # runs that have expired are forgotten
    assert store.find(claim.run.id) == [claim.run.id]


def test_rq_s_own_code_loses_no_run_of_a_dead_runner(shared_server: Server) -> None:
    """`rq info` and dashboards clean RQ's registries."""
    server: Any = shared_server.client
    store = FileRunStore(server, "files of the dead", 600)
    run = store.submit(ORDER)
    assert store.claim(-60)
    assert store.queue.started_job_registry.count == 1
    store.recover(15, expired=True)
    assert server.lrange(store.queue.key, 0, -1) == [run.id.encode()]


def test_a_runner_that_has_lost_its_run_does_not_list_it(shared_server: Server) -> None:
    server: Any = shared_server.client
    store = FileRunStore(server, "files lost", 600)
    store.submit(ORDER)
    claim = store.claim(15)
    assert claim
    server.zrem(store.queue.started_job_registry.key, claim.entry)
    server.zrem(keys.file_runs(), claim.run.id)
    assert store.renew(claim, 15) == "lost"
    assert server.zscore(keys.file_runs(), claim.run.id) is None


def test_a_run_that_was_submitted_twice_is_held_by_one_runner(shared_server: Server) -> None:
    store = FileRunStore(shared_server.client, "files submitted twice", 600)
    run = store.submit(ORDER)
    store.submit(ORDER, run.id)  # as a client does whose reply was lost
    first = store.claim(15)
    assert first
    assert first.run.id == run.id
    assert store.claim(15) is None
    assert store.end(first)
    assert store.claim(15) is None
    assert store.load(run.id).id == run.id


def test_a_job_that_is_enqueued_again_under_its_id_is_a_new_run(shared_server: Server) -> None:
    store = FileRunStore(shared_server.client, "files again", 600)
    order = {"request": {"inputs": ["/a.csv"], "output": "/b.csv"}, "spec": {"model": "m"}}

    def claimed() -> RunLease:
        store.queue.enqueue("rankmill.score_file", order, job_id="nightly")
        claim = store.claim(15)
        assert claim
        assert claim.run.state == "waiting"
        return claim

    for state in ("done", "failed", "cancelled"):
        claim = claimed()
        assert store.end(RunLease(claim.run.end(state), claim.entry))
        assert store.claim(15) is None
    claim = claimed()
    assert store.hand_back(RunLease(claim.run.changed(started=1.0), claim.entry))
    assert store.cancel(store.load("nightly")).state == "cancelled"
    last = store.claim(15)
    assert last
    assert last.run.state == "cancelled"  # it is not taken for a new one


def test_a_run_that_a_runner_takes_meanwhile_is_found(
    shared_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was enqueued by hand, so it has no record until a runner takes it; its job is gone when it ends."""
    store = FileRunStore(shared_server.client, "files by hand", 600)
    order = {"request": {"inputs": ["/a.csv"], "output": "/b.csv"}, "spec": {"model": "m"}}
    job = store.queue.enqueue("rankmill.score_file", order)

    def ends_first(queue: Queue, raw: bytes) -> Job | None:
        monkeypatch.undo()
        claim = store.claim(15)
        assert claim
        assert store.end(RunLease(claim.run.end("done"), claim.entry))
        return read_job(queue, raw)

    monkeypatch.setattr("rankmill.extensions.runners.store.read_job", ends_first)
    assert store.load(job.id).state == "done"


def test_a_runner_forgets_the_runs_that_it_left_once_they_have_expired(
    shared_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileRunStore(shared_server.client, "files left", 600)
    store.leave("expired")
    later = system.monotonic() + 700
    monkeypatch.setattr(system, "monotonic", lambda: later)
    store.leave("waits")
    assert set(store._left) == {"waits"}


def test_an_order_is_left_to_runners_that_have_an_extension_for_it(without_extensions: None) -> None:
    assert kind_of(ORDER) is None
    order = ORDER.model_copy(update={"kind": "batch"})
    with pytest.raises(RunnerError, match="this runner has no extension for a batch"):
        kind_of(order)


def test_a_runner_without_the_object_store_leaves_the_run_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise StoreError("the object store of s3://texts/a.csv does not answer")

    monkeypatch.setattr("rankmill.extensions.runners.work.find_input", away)
    with pytest.raises(RunnerError, match=r"StoreError: the object store of s3://texts/a\.csv does not"):
        work_on(new_file_run(ORDER), load_settings(), lambda **_: None)


def test_a_runner_that_starts_over_has_scored_rows_before_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal of an output in an object store is on the host of the last runner."""
    (tmp_path / "in.csv").write_text("query,passage\na,b\n")
    files = FileRequest(inputs=(str(tmp_path / "in.csv"),), output=str(tmp_path / "out.csv"))
    run = new_file_run(ORDER.model_copy(update={"request": files})).changed(begun_rows=800)
    noted: dict[str, Any] = {}

    def score_file(*_: object, view: Callable[[int], Any], **__: object) -> None:
        with view(1000) as show:
            for rows in (0, 500):
                show(Progress(rows=rows), 1, "")

    monkeypatch.setattr("rankmill.extensions.runners.work.score_file", score_file)
    work_on(run, load_settings(), lambda *, now=False, **changes: noted.update(changes))
    assert (noted["begun_rows"], noted["progress"].rows) == (0, 500)


def test_a_runner_that_dies_between_two_models_of_a_run_has_scored_no_rows(
    shared_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model may have more scores than another in a run that is continued."""
    (tmp_path / "in.csv").write_text("query,passage\n" + "a,b\n" * 40)
    files = FileRequest(
        inputs=(str(tmp_path / "in.csv"),), output=str(tmp_path / "out.csv"), models=("demo", "other/model")
    )
    run = new_file_run(ORDER.model_copy(update={"request": files})).changed(begun_rows=10)
    settings, noted = load_settings({"redis_url": shared_server.url}), list[dict[str, Any]]()

    def note(*, now: bool = False, **changes: Any) -> None:
        noted.append(changes)
        if len(noted) == 3:
            raise KeyboardInterrupt

    known: dict[Journal, int] = {}
    monkeypatch.setattr("rankmill.producer.files.workspace.differences", lambda *_: "")
    monkeypatch.setattr(Journal, "rows", property(lambda each: known.setdefault(each, 40 - 30 * len(known))))
    with pytest.raises(KeyboardInterrupt):
        work_on(run, settings, note)
    assert {(each["begun_rows"], each["progress"].rows) for each in noted[1:]} == {(10, 10)}


def test_a_weight_needs_no_tenant(shared_server: Server) -> None:
    client = Client(shared_server.url, model="demo", weight=3)
    assert client.submit_file("/a.csv", "/b.csv").status().order.weight == 3


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (["a.parquet"], "name the output of a submitted run"),
        (["a.parquet", "-o", "-"], "a submitted run has no standard output"),
        (["-", "-o", "b.parquet"], "standard input (-) cannot be submitted"),
    ],
)
def test_what_cannot_be_submitted_is_told_without_a_server(files: list[str], why: str) -> None:
    refused = CliRunner().invoke(rankmill, ["submit", *files, "--redis", "redis://127.0.0.1:1"])
    assert refused.exit_code == 2
    assert why in refused.stderr
