"""What the admin's key allows from the page, and that nothing is allowed without it."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from rq import Queue
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from rankmill.cluster.failed import failed_jobs
from rankmill.cluster.snapshot import read_cluster
from rankmill.extensions.runners.store import FileRunStore
from rankmill.jobs.contract.file_request import FileOrder, FileRequest
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import set_aside
from tests.conftest import Server, StartExporter, StartWorker, wait_for
from tests.harness.browser import browser
from tests.harness.runs import stored_run

KEY = "a-key-of-the-admin"
ORDER = FileOrder(request=FileRequest(inputs=("/a.csv",), output="/b.csv"), spec=ScoreSpec(model="m"))


@pytest.fixture
def page(server: Server, exporters: StartExporter) -> str:
    """URL of a page with an admin's key."""
    return exporters(server.url, RANKMILL_PAGE_ADMIN_KEY=f"{KEY}\n")  # as `echo` writes it to a file


def ask(url: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of an answer; ``_`` in names of headers stands for a dash."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    reply = connection.getresponse()
    assert reply.headers["Access-Control-Allow-Origin"] is None
    text = reply.read()
    return reply.status, json.loads(text) if reply.headers["Content-Type"] == "application/json" else text


def act(url: str, action: str, about: str) -> tuple[int, str]:
    """Do something with the key; the status, and what is said."""
    body = json.dumps({"action": action, "id": about}).encode()
    signed = {"authorization": f"Bearer {KEY}", "content_type": "application/json"}
    status, found = ask(url, "POST", "/api/actions", body, **signed)
    return status, found.get("text") or found["error"]


def test_without_an_admin_s_key_there_is_nothing_to_ask_for(server: Server, exporters: StartExporter) -> None:
    url = exporters(server.url)
    assert ask(url, "GET", "/api/cluster.json")[1]["has_admin"] is False
    assert ask(url, "GET", "/api/jobs.json")[0] == 404
    assert ask(url, "POST", "/api/actions", b"{}", authorization="Bearer ")[0] == 404


def test_a_request_without_the_key_or_not_as_the_page_sends_it_is_refused(
    server: Server, page: str, tmp_path: Path
) -> None:
    run = stored_run(RunStore(server.client))
    body = json.dumps({"action": "cancel", "id": run.id}).encode()
    good = {"authorization": f"Bearer {KEY}", "content_type": "application/json"}
    for key in ("", KEY, "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", "Bearer é"):
        assert ask(page, "GET", "/api/jobs.json", authorization=key)[0] == 401
        assert ask(page, "POST", "/api/actions", body, **{**good, "authorization": key})[0] == 401
    odd: list[tuple[int, str, bytes, dict[str, str]]] = [
        (405, "GET", b"", {}),
        (405, "OPTIONS", b"", {"origin": "https://elsewhere.example"}),
        (415, "POST", body, {"content_type": "text/plain"}),
        (413, "POST", body, {"content_length": "9" * 5000}),
        (413, "POST", b" " * 4097, {}),
        (411, "POST", body, {"content_length": "-1"}),
        (400, "POST", b"{}", {}),
        (400, "POST", b'{"action": "unlink", "id": "x"}', {}),
        (400, "POST", b'{"action": "cancel", "id": ""}', {}),
        (400, "POST", b"\xff", {}),
        (403, "POST", body, {"host": "elsewhere.example"}),
    ]
    for status, method, sent, headers in odd:
        assert ask(page, method, "/api/actions", sent, **{**good, **headers})[0] == status
    assert RunStore(server.client).load(run.id)
    log = (tmp_path / "exporter.log").read_text()
    assert "a request of 127.0.0.1 has no valid key" in log
    assert KEY not in log


def test_the_page_retries_and_clears_jobs_and_cancels_runs(server: Server, page: str, tmp_path: Path) -> None:
    queue = Queue("rankmill", connection=server.client, serializer=JSONSerializer)
    job = queue.enqueue("rankmill.score_pairs", "no list of pairs", model="demo")
    server.client.lrem(queue.key, 1, job.id)
    queue.failed_job_registry.add(job, ttl=600)
    job.set_status(JobStatus.FAILED)
    set_aside(queue, b"odd", "its data is not JSON")
    _, found = ask(page, "GET", "/api/jobs.json", authorization=f"Bearer {KEY}")
    assert found["jobs"] == [each.model_dump() for each in failed_jobs(server.client)]
    assert act(page, "retry", "odd") == (409, "cannot be retried: no worker can read it")
    assert act(page, "clear", "odd") == (200, "job odd is cleared")
    assert act(page, "retry", job.id) == (200, f"job {job.id} is put back into queue rankmill")
    assert failed_jobs(server.client) == []
    assert server.client.lrange(queue.key, 0, -1) == [job.id.encode()]
    assert act(page, "clear", job.id)[0] == 409
    run = stored_run(RunStore(server.client))
    status, said = act(page, "cancel", run.id)
    assert (status, said[:32]) == (200, f"run {run.id}"[:32])
    assert read_cluster(server.client).runs == ()
    submitted = FileRunStore(server.client, "rankmill-files", 600).submit(ORDER)
    assert act(page, "cancel", submitted.id) == (200, f"submitted run {submitted.id} is cancelled")
    assert act(page, "cancel", run.id)[0] == 409
    log = (tmp_path / "exporter.log").read_text()
    assert f"retry '{job.id}' for 127.0.0.1: job {job.id} is put back into queue rankmill" in log
    assert "retry 'odd' for 127.0.0.1: cannot be retried" in log


def test_a_worker_is_drained_and_resumed_by_its_whole_name(
    server: Server, page: str, workers: StartWorker
) -> None:
    workers(name="worker-10")
    assert act(page, "drain", "worker-1") == (409, "no worker is called worker-1 any more")
    status, said = act(page, "drain", "worker-10")
    waits = "no other worker takes the chunks of queue 'rankmill', and they wait"
    assert (status, said) == (200, f"worker worker-10 is told to drain; {waits}")
    wait_for(lambda: read_cluster(server.client).workers[0].state == "drained")
    assert act(page, "resume", "worker-10") == (200, "worker worker-10 is told to resume")
    wait_for(lambda: read_cluster(server.client).workers[0].state == "idle")


@pytest.mark.slow
def test_in_a_browser_each_action_asks_once_and_needs_the_key(
    server: Server, page: str, tmp_path: Path
) -> None:
    queue = Queue("rankmill", connection=server.client, serializer=JSONSerializer)
    set_aside(queue, b"odd", "<b>its data</b> is not JSON")
    run = stored_run(RunStore(server.client))
    with browser(tmp_path / "browser") as driven:

        def give(key: str) -> None:
            driven.click("#key")
            driven.type(key)
            driven.click("#key-form button:not([type])")

        driven.open(page)
        driven.wait("document.querySelector('#runs td')")
        assert not driven.run("document.querySelector('td button, #jobs td') !== null")
        driven.click("#manage")
        give("a wrong key of some length")
        driven.wait("document.querySelector('#key-error').textContent.includes('not that of page_admin_key')")
        give(KEY)
        driven.click("#jobs td button")
        assert "<b>its data</b> is not JSON" in driven.run("document.querySelector('#jobs').innerText")
        driven.click("#question [data-close]")
        assert len(failed_jobs(server.client)) == 1
        driven.click("#jobs td button")
        driven.click("#yes")
        driven.wait("document.querySelector('#jobs .empty')")
        assert failed_jobs(server.client) == []
        driven.click("#runs td button")
        assert run.id in driven.run("document.querySelector('#question').innerText")
        assert len(read_cluster(server.client).runs) == 1
        driven.click("#yes")
        driven.wait("document.querySelector('#runs .over')")
        assert "is cancelled" in driven.run("document.querySelector('#outcome').textContent")
        driven.click("#manage")
        driven.wait("!document.querySelector('#jobs').checkVisibility()")
    assert read_cluster(server.client).runs == ()
