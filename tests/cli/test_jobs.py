"""rankmill jobs: what has failed is listed with its reason, retried or cleared."""

from __future__ import annotations

import json
import time
from datetime import datetime

import pytest
from click.testing import CliRunner
from rq import Queue, SimpleWorker
from rq.job import JobStatus
from rq.serializers import JSONSerializer

from rankmill import Client
from rankmill.cli.main import rankmill as command_line
from rankmill.cluster.failed import clear, failed_jobs, retry
from rankmill.cluster.snapshot import read_cluster
from rankmill.cluster.verdict import verdict
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.protocol.rq import record_failure
from rankmill.jobs.protocol.set_aside import set_aside
from tests.conftest import Outcome, Server, StartWorker, wait_for
from tests.harness.waiting import waiting_jobs


def rankmill(*arguments: object) -> Outcome:
    done = CliRunner().invoke(command_line, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Outcome(done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def queue(server: Server) -> Queue:
    return Queue("rankmill", connection=server.client, serializer=JSONSerializer)


def ended_at(queue: Queue, job: str) -> datetime | None:
    found = queue.fetch_job(job)
    return found.ended_at if found else None


def test_a_failed_job_is_listed_with_its_reason_retried_and_cleared(
    server: Server, workers: StartWorker, queue: Queue
) -> None:
    at = ("--redis", server.url.replace("unix://", "unix://producer:PASSWORD@"))
    assert "No failed jobs" in rankmill("jobs", *at).out
    job = queue.enqueue("rankmill.score_pairs", "no list of pairs", model="demo")
    worker = workers(name="w1")
    wait_for(lambda: job.get_status() == "failed")
    listed = rankmill("jobs", *at)
    assert "pairs" in listed.out.splitlines()[1]
    (found,) = json.loads(rankmill("jobs", "--json", *at).out)
    assert (found["id"], found["state"], found["final"]) == (job.id, "failed", "")
    assert str(worker.pid) in rankmill("workers", "--redis", server.url).out
    assert "failed for good: rankmill jobs lists them" in rankmill("status", "--redis", server.url).out
    assert time.time() - 60 < found["at"] <= time.time() + 1
    ended = ended_at(queue, job.id)
    assert rankmill("jobs", "retry", job.id, *at).out == f"{job.id}: put back into queue rankmill\n"
    wait_for(lambda: ended_at(queue, job.id) not in {None, ended})
    assert rankmill("jobs", "clear", "--all", *at).out == f"{job.id}: cleared\n"
    for again in ((), ("retry", "--all"), ("clear", "--all")):
        assert "No failed jobs" in rankmill("jobs", *again, *at).out
    assert not server.client.exists(job.key)


def test_the_age_of_a_failure_is_known_if_the_worker_died(server: Server, queue: Queue) -> None:
    """Nobody wrote the end of such a job."""
    job = queue.enqueue("rankmill.score_pairs", [], model="demo")
    with server.client.pipeline() as pipe:
        record_failure(job, "its worker died", pipe)
        pipe.execute()
    server.client.zadd(queue.failed_job_registry.key, {job.id: 4e9})
    (listed,) = failed_jobs(server.client)
    assert listed.reason == "its worker died"
    assert listed.at == pytest.approx(time.time(), abs=60)


def test_a_job_that_has_left_the_list_meanwhile_is_not_retried(server: Server, queue: Queue) -> None:
    job = queue.enqueue("rankmill.score_pairs", [], model="demo")
    server.client.zadd(queue.failed_job_registry.key, {job.id: 4e9})
    job.set_status(JobStatus.FAILED)
    (listed,) = failed_jobs(server.client)
    assert retry(server.client, listed) == "put back into queue rankmill"
    with pytest.raises(InputError, match="was retried or cleared just now"):
        retry(server.client, listed)
    job.delete()
    with pytest.raises(InputError, match="it has expired"):
        retry(server.client, listed)


@pytest.mark.parametrize("listed_before", [False, True])
def test_a_failed_job_that_was_enqueued_again_under_its_id_is_not_deleted(
    server: Server, queue: Queue, listed_before: bool
) -> None:
    job = queue.enqueue("rankmill.score_pairs", "no list of pairs", model="demo", job_id="nightly")
    with server.client.pipeline() as pipe:
        pipe.lrem(queue.key, 1, job.id)
        record_failure(job, "no list of pairs", pipe)
        pipe.execute()
    if listed_before:
        (listed,) = failed_jobs(server.client)
        retry(server.client, listed)
    else:
        queue.enqueue("rankmill.score_pairs", [["q", "p"]], model="demo", job_id="nightly")
        (listed,) = failed_jobs(server.client)
        with pytest.raises(InputError, match="it was enqueued again since it failed"):
            retry(server.client, listed)
    assert clear(server.client, listed) == "cleared"
    assert not failed_jobs(server.client)
    assert (job.get_status(), queue.job_ids) == (JobStatus.QUEUED, ["nightly"])


def test_what_other_applications_have_on_the_server_is_left_alone(server: Server) -> None:
    """Their failed jobs were deleted by `clear --all`, and their queues were said to lack ScoringWorkers."""
    queue = Queue("emails", connection=server.client)
    queue.enqueue("mails.send", "a")
    failed = queue.enqueue("mails.send", "b")
    SimpleWorker([queue], connection=server.client, name="mailer").register_birth()  # type: ignore[no-untyped-call]
    with server.client.pipeline() as pipe:
        pipe.lrem(queue.key, 1, failed.id)
        record_failure(failed, "no such address", pipe)
        pipe.execute()
    assert "No failed jobs" in rankmill("jobs", "clear", "--all", "--redis", server.url).out
    assert failed.id in queue.failed_job_registry
    cluster = read_cluster(server.client)
    assert (cluster.queues, verdict(cluster).faults) == ((), ())


def test_chunks_of_runs_and_unreadable_jobs_are_not_retried(server: Server, queue: Queue) -> None:
    at = ("--redis", server.url.replace("unix://", "unix://producer:PASSWORD@"))
    run = Client(server.url, model="demo", chunk_size=10).submit([("moon", "a moon")] * 10)
    run._drivers[0].fill()
    (chunk,) = waiting_jobs(server.client, queue.name)
    server.client.zadd(queue.failed_job_registry.key, {chunk: 4e9})
    set_aside(queue, b"odd", "its data is not JSON")
    (odd, failed) = json.loads(rankmill("jobs", "--json", *at).out)
    assert (odd["id"], odd["reason"], odd["state"]) == ("odd", "its data is not JSON", "set aside")
    assert (failed["id"], failed["state"]) == (chunk, "failed")
    done = rankmill("jobs", "retry", chunk, "odd", *at)
    assert done.code == 1
    assert "odd: cannot be retried: no worker can read it" in done.err
    assert f"{chunk}: cannot be retried: its run has its failure already" in done.err
    assert rankmill("jobs", "clear", *at).code == 2
    assert "no failed job is called it" in rankmill("jobs", "clear", "it", *at).err
    assert rankmill("jobs", "clear", chunk, "odd", *at).code == 0
    cluster = read_cluster(server.client)
    assert (cluster.set_aside, cluster.queues[0].failed) == ((), 0)
    assert server.client.exists(f"rq:job:{chunk}"), "its producer may look at it"
    run.cancel()
