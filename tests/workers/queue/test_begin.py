"""How a worker begins a job, on a real server."""

from __future__ import annotations

import pytest
from rq.executions import Execution
from rq.serializers import JSONSerializer

from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.workers.rq.job import ScoringJob
from tests.conftest import Server
from tests.harness.waiting import waiting_jobs


@pytest.mark.parametrize("put_back", [False, True])
def test_a_job_that_is_put_back_and_begun_is_in_the_queue_once(server: Server, put_back: bool) -> None:
    client = Client(server.url, model="demo")
    run = client.submit([("q", "p")], priority="bulk")
    queue, job_id = client.store.queue(client.settings.queue), keys.job_id(run.id, 0)
    assert queue.take(["bulk"]).job_id == job_id.encode()
    if put_back:  # by another worker, after some seconds
        queue.rescue(job_id.encode(), b"seen", 100, 5)
        queue.rescue(job_id.encode(), b"seen", 106, 5)
        assert waiting_jobs(server.client, queue.name) == [job_id]
    job = ScoringJob.fetch(job_id, queue.connection, serializer=JSONSerializer)
    assert isinstance(job, ScoringJob)
    with queue.connection.pipeline() as pipe:
        execution = Execution.create(job, 15, pipeline=pipe, worker_name="w")
        job.begin(execution, queue, pipe)
        assert pipe.execute()[-1] == 1
    assert not waiting_jobs(server.client, queue.name)
    assert not server.client.lrange(queue.intermediate_queue_key, 0, -1)
    queue.push_job_id(job_id, at_front=True)  # its worker hands it back
    assert waiting_jobs(server.client, queue.name) == [job_id]
    run.cancel()
