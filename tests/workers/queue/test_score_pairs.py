"""`rankmill.score_pairs`: enqueued by name by whoever has RQ, with the scores in RQ's own result."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.trace import INVALID_SPAN
from rq import Queue, Retry, SimpleWorker
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer, PickleSerializer

from rankmill import Client
from rankmill.jobs.protocol.pairs_job import MAX_PAIRS
from rankmill.jobs.protocol.recovery import enqueue_due
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import MAX_DATA
from rankmill.workers.queue.chunks import PairsClaim
from rankmill.workers.rq.job import HeldJob, ScoringJob
from tests.conftest import QUICK_LEASE, Server, StartWorker, wait_for
from tests.harness.environments import environment_with
from tests.harness.held import Held
from tests.harness.models.tiny import cross_encoder, make_bert
from tests.workers.engine.test_engine import some_pairs

pytestmark = pytest.mark.usefixtures("interleaved")

ROOT = Path(__file__).resolve().parents[3]
PAIRS = [list(pair) for pair in zip(*some_pairs(40), strict=True)]


def queue_of(server: Server, name: str = "rankmill", serializer: Any = JSONSerializer) -> Queue:
    return Queue(name, connection=server.client, serializer=serializer)


def result_of(job: Job) -> Any:
    """RQ's own result of a job, once it is there."""
    wait_for(job.latest_result)
    return job.latest_result()


def test_a_script_with_nothing_but_rq_and_redis_gets_scores(shared_queue: Server, tmp_path: Path) -> None:
    python = environment_with(tmp_path / "venv", "rq", "redis")
    without = subprocess.run([python, "-c", "import pyarrow"], cwd=tmp_path, capture_output=True, check=False)
    assert b"ModuleNotFoundError" in without.stderr
    script = [str(python), "-P", str(ROOT / "examples" / "rq_producer.py"), shared_queue.url]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    best, other, missing = done.stdout.splitlines()
    assert "384,400 km" in best
    assert "Cheese" in other
    assert missing.strip() == "row 2 has no score: passage is null"


def test_scores_are_those_of_the_model_in_the_order_of_the_pairs(
    shared_queue: Server, tiny_model: Path
) -> None:
    queue = queue_of(shared_queue)
    spec: dict[str, Any] = {"model": str(tiny_model), "precision": "fp32"}
    pairs = [*PAIRS, [None, "p"], ["q", "lone \ud800 surrogate"]]
    found = result_of(queue.enqueue("rankmill.score_pairs", pairs, **spec))
    assert found.type is found.Type.SUCCESSFUL
    value = found.return_value
    expected = cross_encoder(tiny_model).predict(list(map(tuple, PAIRS)))
    np.testing.assert_allclose(value["scores"][: len(PAIRS)], expected, atol=1e-5)
    assert value["scores"][len(PAIRS)] is None
    assert value["scores"][len(PAIRS) + 1] is not None
    assert value["errors"] == [{"row": len(PAIRS), "error": "query is null"}]
    assert value["stats"]["precision"] == "fp32"
    by_client = Client(shared_queue.url, **spec).score(PAIRS, timeout=60)
    assert np.float32(value["scores"][: len(PAIRS)]).tolist() == pytest.approx(by_client.tolist(), abs=1e-6)
    empty = result_of(queue.enqueue("rankmill.score_pairs", pairs=[], **spec)).return_value
    assert (empty["scores"], empty["errors"]) == ([], [])


BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no list": (("pairs",), {}, "takes one list of pairs"),
    "nothing": ((), {}, "takes one list of pairs"),
    "twice": ((PAIRS,), {"pairs": PAIRS}, "takes one list of pairs"),
    "two lists": ((["q"], ["p"]), {}, "takes one list of pairs"),
    "no pair": ((["qp"],), {}, "pair 0 is str, not a query and a passage"),
    "number": (([["q", "p"], ["q", 5]],), {}, "pair 1 is [str, int], not a query and a passage"),
    "many": (([["q", "p"]] * (MAX_PAIRS + 1),), {}, "takes at most 1,024 pairs, not 1,025"),
    "large": (([["q", "long " * (MAX_DATA // 5)]],), {}, "its data is over 1,048,576 bytes"),
    "option": ((PAIRS,), {"speed": "high"}, "speed: there is no such option"),
    "typo": (
        (PAIRS,),
        {"modle": "demo", "model": None},
        "modle: there is no such option, the nearest is model",
    ),
    "precision": ((PAIRS,), {"precision": "fp7"}, "precision: "),
    "model": ((PAIRS,), {"model": "/gone/model"}, "no such directory"),
    "no model": ((PAIRS,), {"model": None}, "model: "),
}


def test_a_bad_job_fails_alone_with_its_reason(shared_queue: Server, tiny_model: Path) -> None:
    queue, spec = queue_of(shared_queue), {"model": str(tiny_model)}
    jobs = {
        what: queue.enqueue("rankmill.score_pairs", *args, **{**spec, **named})
        for what, (args, named, _) in BAD.items()
    }
    pickled = queue_of(shared_queue, serializer=PickleSerializer).enqueue(
        "rankmill.score_pairs", PAIRS, **spec
    )
    good = queue.enqueue("rankmill.score_pairs", PAIRS, **spec)
    for what, (_, _, reason) in BAD.items():
        found = result_of(jobs[what])
        assert found.type is found.Type.FAILED, what
        (line,) = found.exc_string.splitlines()
        assert reason in line, what
        assert jobs[what].get_status() is JobStatus.FAILED
    assert "enqueue it with serializer=JSONSerializer" in result_of(pickled).exc_string
    assert len(result_of(good).return_value["scores"]) == len(PAIRS)


def test_a_failed_job_is_gone_in_a_week_unless_its_caller_says_when(shared_queue: Server) -> None:
    """RQ would keep it for a year, so `rankmill status` stayed red."""
    queue = queue_of(shared_queue)
    for asked, seconds in [({}, 7 * 86400), ({"failure_ttl": 30}, 30)]:
        job = queue.enqueue("rankmill.score_pairs", PAIRS, model="/gone/model", **asked)
        found = result_of(job)
        assert found.type is found.Type.FAILED
        until = shared_queue.client.zscore(queue.failed_job_registry.key, job.id) or 0.0
        assert seconds - 300 < until - time.time() <= seconds
        assert seconds - 300 < shared_queue.client.ttl(job.key) <= seconds
    kept = queue.enqueue("rankmill.score_pairs", PAIRS, model="/gone/model", failure_ttl=-1)
    found = result_of(kept)
    assert found.type is found.Type.FAILED
    assert shared_queue.client.ttl(kept.key) == -1


def test_a_failed_attempt_is_recorded_once_though_its_reply_is_lost(server: Server) -> None:
    queue, connection = RunStore(server.client).queue("rankmill"), server.client
    given = queue.enqueue("rankmill.score_pairs", PAIRS[:1], retry=Retry(max=3, interval=60))
    job = ScoringJob.fetch(given.id, connection=connection, serializer=JSONSerializer)
    assert isinstance(job, ScoringJob)
    worker = SimpleWorker([queue], connection=connection, serializer=JSONSerializer)
    with connection.pipeline() as pipe:
        execution = Execution.create(job, 60, pipeline=pipe, worker_name=worker.name)
        pipe.lrem(queue.key, 1, job.id)
        pipe.execute()
    claim = PairsClaim(HeldJob(worker, job, queue, execution), INVALID_SPAN, RunStore(connection))
    claim.fail(RuntimeError("boom"))
    assert list(queue.scheduled_job_registry.get_job_ids()) == [job.id]
    enqueue_due(queue, time.time() + 120)  # its pause is over, and then the worker says so again
    claim.fail(RuntimeError("boom"))
    assert (queue.job_ids, queue.scheduled_job_registry.count) == ([job.id], 0)
    now = Job.fetch(given.id, connection=connection, serializer=JSONSerializer)
    assert (now.get_status(), now.retries_left) == (JobStatus.QUEUED, 2)


def test_a_job_that_is_begun_no_longer_expires_as_one_that_waits(
    server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    patient = {"LOAD": str(go), "PYTHONPATH": str(ROOT)}
    job = queue_of(server).enqueue(
        "rankmill.score_pairs", PAIRS, model=str(tiny_model), ttl=600, failure_ttl=6000
    )
    assert 0 < server.client.ttl(job.key) <= 600
    workers(worker_class="tests.harness.misbehaving.PatientWorker", environ=patient)
    wait_for(lambda: job.get_status() is JobStatus.STARTED)
    assert server.client.ttl(job.key) > 600
    go.touch()
    assert len(result_of(job).return_value["scores"]) == len(PAIRS)


def test_a_job_that_is_in_the_queue_twice_is_scored_once(shared_queue: Server, tiny_model: Path) -> None:
    """As redis-py sends what enqueues it again if the reply is lost; its result stays as it is."""
    queue = queue_of(shared_queue)
    job = queue.enqueue("rankmill.score_pairs", PAIRS, model=str(tiny_model))
    result_of(job)
    queue.push_job_id(job.id)
    after = queue.enqueue("rankmill.score_pairs", PAIRS, model=str(tiny_model))
    result_of(after)
    wait_for(lambda: not shared_queue.client.zcard("rq:wip:rankmill"))
    assert (job.get_status(), len(job.results())) == (JobStatus.FINISHED, 1)
    assert 0 < shared_queue.client.ttl(job.key) <= 500


def test_a_job_that_is_cancelled_as_a_worker_takes_it_is_not_begun(server: Server) -> None:
    queue, connection = RunStore(server.client).queue("rankmill"), server.client
    given = queue_of(server).enqueue("rankmill.score_pairs", PAIRS[:1], model="demo")
    assert queue.take(["request"]).job_id == given.id.encode()
    job = ScoringJob.fetch(given.id, connection=connection, serializer=JSONSerializer)
    assert isinstance(job, ScoringJob)
    worker = SimpleWorker([queue], connection=connection, serializer=JSONSerializer)
    given.cancel()
    with connection.pipeline() as pipe:
        job.begin(Execution.create(job, 60, pipeline=pipe, worker_name=worker.name), queue, pipe)
        assert pipe.execute()[-1] == 0
    assert (queue.count, given.get_status()) == (0, JobStatus.CANCELED)


def test_a_later_job_with_the_same_id_gets_the_scores_that_it_asks_for(
    shared_queue: Server, tiny_model: Path
) -> None:
    """The worker took the model and options of the first job with that id."""
    found = {}
    for activation in ("identity", "sigmoid"):
        job = queue_of(shared_queue).enqueue(
            "rankmill.score_pairs",
            PAIRS,
            model=str(tiny_model),
            precision="fp32",
            activation=activation,
            job_id="nightly",
        )
        found[activation] = np.array(result_of(job).return_value["scores"])
        job.delete()
    np.testing.assert_allclose(found["sigmoid"], 1 / (1 + np.exp(-found["identity"])), atol=1e-5)


@pytest.mark.parametrize("again", ["hold", "river"])
def test_another_job_with_the_id_of_one_that_is_scored_is_an_error(held: Held, again: str) -> None:
    """Its caller got the scores of the first one's pairs. The same pairs are scored once."""
    queue, named = queue_of(held.server), {"model": str(held.model), "job_id": "same"}
    job = queue.enqueue("rankmill.score_pairs", [["big cat", "hold"]], **named)
    wait_for(lambda: job.get_status() is JobStatus.STARTED)
    queue.enqueue("rankmill.score_pairs", [["big cat", again]], **named)
    held.go()
    found = result_of(job)
    after = queue.enqueue("rankmill.score_pairs", [["q", "p"]], model=str(held.model))
    assert result_of(after).return_value["errors"] == []
    if again == "hold":
        assert len(found.return_value["scores"]) == 1
    else:
        assert "job same was enqueued again with other pairs or options" in found.exc_string
    assert len(job.results()) == 1


def test_another_job_with_the_id_of_one_that_is_handed_back_gets_its_own_scores(
    server: Server, workers: StartWorker, model_with_marks: Path, tmp_path: Path
) -> None:
    """Its caller got the scores of the first one's pairs: the worker wrote the first job again."""
    environ = {"FORWARDS": str(tmp_path / "forwards"), "PYTHONPATH": str(ROOT)}
    worker = workers(worker_class="tests.harness.misbehaving.MisbehavingWorker", environ=environ)
    queue, named = queue_of(server), {"model": str(model_with_marks), "job_id": "same"}
    job = queue.enqueue("rankmill.score_pairs", [["big cat", "hold"]], **named)
    wait_for(lambda: job.get_status() is JobStatus.STARTED)
    wait_for((tmp_path / "forwards").exists)
    queue.enqueue("rankmill.score_pairs", [["big cat", "river"], [None, "moon"]], **named)

    def has_ended() -> bool:
        worker.terminate()  # the second time, it hands back what is in progress, too
        return worker.poll() is not None

    wait_for(has_ended)
    workers()
    found = result_of(job).return_value
    assert (len(found["scores"]), found["errors"]) == (2, [{"row": 1, "error": "query is null"}])


def test_a_failed_attempt_does_not_bring_back_a_job_whose_id_has_another(server: Server) -> None:
    queue, connection = RunStore(server.client).queue("rankmill"), server.client
    again: dict[str, Any] = {"job_id": "same", "retry": Retry(max=3, interval=60)}
    queue.enqueue("rankmill.score_pairs", PAIRS[:1], **again)
    job = ScoringJob.fetch("same", connection=connection, serializer=JSONSerializer)
    assert isinstance(job, ScoringJob)
    worker = SimpleWorker([queue], connection=connection, serializer=JSONSerializer)
    with connection.pipeline() as pipe:
        execution = Execution.create(job, 60, pipeline=pipe, worker_name=worker.name)
        pipe.execute()
    claim = PairsClaim(HeldJob(worker, job, queue, execution), INVALID_SPAN, RunStore(connection))
    queue.enqueue("rankmill.score_pairs", PAIRS[1:3], **again)
    claim.fail(RuntimeError("boom"))
    assert not queue.scheduled_job_registry.count
    assert "job same was enqueued again with other pairs or options" in result_of(job).exc_string


def test_a_job_outlives_a_worker_that_loses_its_device_while_it_loads_the_model(
    server: Server, workers: StartWorker, tiny_model: Path
) -> None:
    job = queue_of(server).enqueue("rankmill.score_pairs", PAIRS, model=str(tiny_model))
    lost = "tests.harness.misbehaving.LostDeviceWorker"
    process = workers(worker_class=lost, ready=False, environ={"PYTHONPATH": str(ROOT)})
    assert process.wait(timeout=60) == 1
    assert job.latest_result() is None
    workers()
    assert len(result_of(job).return_value["scores"]) == len(PAIRS)


def test_a_job_whose_result_nobody_wants_ends_after_another_worker_has_died(
    shared_queue: Server, tiny_model: Path
) -> None:
    """RQ lists the execution of a dead worker for a minute longer than it keeps its data."""
    client: Any = shared_queue.client
    client.zadd("rq:executions:unwanted", {"of a dead worker": time.time() + 60})
    named: dict[str, Any] = {"model": str(tiny_model), "job_id": "unwanted", "result_ttl": 0}
    job = queue_of(shared_queue).enqueue("rankmill.score_pairs", PAIRS, **named)
    wait_for(lambda: client.hget(job.key, "status") in {None, b"failed"})
    assert not client.exists(job.key)


def test_what_depends_on_a_job_follows_it(shared_queue: Server, tiny_model: Path) -> None:
    first = queue_of(shared_queue).enqueue("rankmill.score_pairs", PAIRS, model=str(tiny_model))
    after = queue_of(shared_queue, "after")
    job = after.enqueue("some.function", depends_on=first)
    wait_for(lambda: job.id in after.job_ids)
    after.delete()


@pytest.mark.slow
def test_a_job_outlives_its_worker_and_leaves_it_if_cancelled(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    slow = make_bert(tmp_path / "slow", hidden=256, layers=6)
    pairs = [["big cat", "the moon over the river " * 20]] * 100
    queue = queue_of(server)
    job = queue.enqueue("rankmill.score_pairs", pairs, model=str(slow))
    worker = workers(environ=QUICK_LEASE)
    wait_for(lambda: job.get_status() is JobStatus.STARTED, worker)
    worker.kill()
    worker = workers(environ=QUICK_LEASE)
    assert len(result_of(job).return_value["scores"]) == 100

    cancelled = queue.enqueue("rankmill.score_pairs", [*pairs] * 10, model=str(slow))
    wait_for(lambda: cancelled.get_status() is JobStatus.STARTED, worker)
    cancelled.cancel()
    after = queue.enqueue("rankmill.score_pairs", [["q", "p"]], model=str(slow))
    assert result_of(after).return_value["errors"] == []
    wait_for(lambda: not server.client.zcard("rq:wip:rankmill"), worker)
    assert cancelled.latest_result() is None
    assert all(server.client.ttl(key) > 0 for key in server.client.scan_iter("rankmill:run:*"))
