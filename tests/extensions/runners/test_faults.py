"""Submitted runs: whoever dies, every row is in the output once, and what was scored is not scored again."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer

from benchmarks.faults.batches import everybody_dies_in_a_batch
from benchmarks.faults.kills import Damage, damage, finished_jobs, folder_of
from benchmarks.faults.submitted import everybody_dies
from rankmill import Client
from rankmill.extensions.runners import redis_keys as keys
from rankmill.extensions.runners.store import FileRunStore
from rankmill.extensions.runners.submitted import on_server
from rankmill.jobs.contract.errors import RunCancelled, RunExpired, RunFailed
from rankmill.jobs.protocol.accounts import read_accounts
from tests.conftest import (
    ENVIRON,
    QUICK_LEASE,
    Server,
    StartRunner,
    run_command,
    wait_for,
)
from tests.harness.environ import ALL_ROOTS
from tests.harness.held import Held
from tests.harness.preloaded import PreloadedProcess
from tests.harness.runs import SOME_BYTES, kept_bytes
from tests.harness.waiting import waiting_jobs

ROWS, CHUNK, WINDOW = 800, 8, 4
UNHARMED = Damage(lost=0, doubled=0, different=0, moved=0)
SMALL = {"RANKMILL_WINDOW": str(WINDOW)}

_STANDS_STILL = """
import os, time
from rankmill.producer.files.workspace import Workspace
remove = Workspace.remove
def stands_still(work):
    Workspace.remove = remove
    os.kill(os.getpid(), 19)
    time.sleep(60)  # a signal ends that: the run is lost
    remove(work)
Workspace.remove = stands_still"""

_TOLD_IN_A_FINALIZER = """
import os, time
from rankmill.extensions.runners import runner
class Last:
    def __del__(self):
        os.kill(os.getpid(), 15)
        len(self.__dict__)  # Python calls the handler before
def work_on(*_):
    Last()
    time.sleep(60)
runner.work_on = work_on"""

_TOLD_AS_IT_BEGINS_TO_WAIT = """
import os, threading
wait = threading.Condition.wait
def told(self, timeout=None):
    if timeout and threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), 15)
    return wait(self, timeout)
threading.Condition.wait = told"""


@pytest.fixture
def client(queue: Server, tiny_model: Path) -> Client:
    return Client(queue.url, model=str(tiny_model), precision="fp32", chunk_size=CHUNK)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    texts = [f"{'moon river ' * (n % 7)}{n}" for n in range(ROWS)]
    pq.write_table(pa.table({"id": range(ROWS), "query": ["big cat"] * ROWS, "passage": texts}), path)
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.parquet"


def kept_rows(output: Path) -> int:
    """Rows in the journal of a runner that is dead."""
    with suppress(sqlite3.Error):
        journal = sqlite3.connect(f"file:{folder_of(output) / 'journal.db'}?mode=ro", uri=True)
        try:
            return int(journal.execute("SELECT coalesce(sum(rows), 0) FROM chunks").fetchone()[0])
        finally:
            journal.close()
    return 0


def test_it_is_scored_as_score_file_does(
    client: Client, queue: Server, runners: StartRunner, source: Path, output: Path, tmp_path: Path
) -> None:
    options = ["--model", client.settings.model, "--precision", "fp32", "--redis", queue.url]
    submitted = run_command("rankmill", "submit", "a.parquet", "-o", "out.parquet", *options, cwd=tmp_path)
    assert submitted.code == 0, submitted.err
    assert "no runner takes runs" in submitted.err
    run_id = submitted.out.strip()
    status = run_command("rankmill", "status", run_id, "--redis", queue.url)
    assert "is waiting" in status.out, status.err
    runners(queue)
    waited = run_command("rankmill", "wait", run_id, "--redis", queue.url)
    assert waited.code == 0, waited.err
    assert f"{ROWS} of {ROWS} rows scored; scores are in {output}" in waited.out
    quiet = run_command("rankmill", "wait", run_id, "-q", "--redis", queue.url)
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    undisturbed = tmp_path / "undisturbed.parquet"
    assert run_command("score-file", source, "-o", undisturbed, *options).code == 0
    assert damage(output, undisturbed) == UNHARMED
    listed = json.loads(run_command("rankmill", "runs", "--json", "--redis", queue.url).out)
    assert [(run["id"], run["state"]) for run in listed["submitted"]] == [(run_id, "done")]
    refused = run_command("rankmill", "submit", source, "-o", output, *options)
    assert (refused.code, refused.out) == (2, "")
    assert f"{output} exists already; replace it with --force" in refused.err
    again = client.submit_file(str(source), str(output))  # whose paths are those of the runners' hosts
    failed = run_command("rankmill", "wait", again.id, "--json", "--redis", queue.url)
    assert json.loads(failed.out)["state"] == "failed"
    assert (failed.code, failed.err.count("\n")) == (1, 1), failed.err
    assert f"{output} exists already; replace it with --force" in failed.err
    assert not list(queue.client.scan_iter("rq:job:*"))


@pytest.fixture
def held_source(tmp_path: Path) -> Path:
    """As `source`; the worker of `held` does not go past its middle."""
    path = tmp_path / "held.parquet"
    texts = [f"river {n}" if n != ROWS // 2 else "hold" for n in range(ROWS)]
    pq.write_table(pa.table({"id": range(ROWS), "query": ["big cat"] * ROWS, "passage": texts}), path)
    return path


@pytest.fixture
def held_client(held: Held) -> Client:
    return Client(held.server.url, model=str(held.model), precision="fp32", chunk_size=CHUNK)


def as_if_undisturbed(output: Path, held: Held, source: Path) -> Damage:
    """The damage of an output beside one that is made now."""
    undisturbed = output.with_name("undisturbed.parquet")
    options = ["--model", held.model, "--precision", "fp32", "--redis", held.server.url]
    assert run_command("score-file", source, "-o", undisturbed, *options).code == 0
    return damage(output, undisturbed)


@pytest.mark.slow
def test_a_runner_that_dies_is_followed_and_a_zombie_writes_nothing(
    held: Held, held_client: Client, runners: StartRunner, held_source: Path, output: Path, tmp_path: Path
) -> None:
    """Shows: a runner is killed."""
    before = finished_jobs(held.server.client)
    first = runners(held.server, environ=SMALL)
    run = held_client.submit_file(str(held_source), str(output))
    wait_for(lambda: kept_bytes(output) > SOME_BYTES, first)
    first.kill()
    first.wait()
    kept = kept_rows(output)
    zombie = runners(held.server, environ=SMALL)
    log = tmp_path / "runner.log"
    wait_for(lambda: log.read_text().count("run begins: ") == 2, zombie)
    zombie.send_signal(signal.SIGSTOP)
    third = runners(held.server, environ=SMALL)
    wait_for(lambda: "another score-file is making" in run.status().reason, third)  # the zombie has its lock
    held.go()
    zombie.send_signal(signal.SIGCONT)
    done = run.wait(60)
    assert done.outcome
    assert done.outcome.resumed_rows >= kept > 0
    assert not folder_of(output).exists()
    chunks = -(-ROWS // CHUNK)
    assert finished_jobs(held.server.client) - before <= chunks + 3 * WINDOW
    assert as_if_undisturbed(output, held, held_source) == UNHARMED
    for runner in (zombie, third):
        assert runner.poll() is None


@pytest.mark.slow
def test_a_runner_keeps_its_run_when_the_server_loses_its_data(
    held: Held, held_client: Client, runners: StartRunner, held_source: Path, output: Path
) -> None:
    """Shows: the server restarts without data."""
    runner = runners(held.server, environ=SMALL)
    run = held_client.submit_file(str(held_source), str(output))
    waits = held_client.submit_file(str(held_source), str(output.with_name("other.parquet")))
    wait_for(lambda: kept_bytes(output) > SOME_BYTES, runner)
    held.server.client.flushall()
    wait_for(lambda: held.server.client.exists(keys.file_run(run.id)), runner)
    held.go()
    assert run.wait(60).state == "done"
    assert as_if_undisturbed(output, held, held_source) == UNHARMED
    with pytest.raises(RunExpired, match=f"there is no submitted run {waits.id}: .*has lost its data"):
        waits.status()


def test_a_runner_that_is_stopped_hands_its_run_on_at_once(
    held: Held, held_client: Client, runners: StartRunner, held_source: Path, output: Path
) -> None:
    first = runners(held.server, environ={**SMALL, "RANKMILL_LEASE_SECONDS": "600"})
    run = held_client.submit_file(str(held_source), str(output))
    wait_for(lambda: kept_bytes(output) > SOME_BYTES, first)
    first.terminate()
    assert first.wait(timeout=60) == 0
    assert (run.status().state, run.status().reason) == ("waiting", "its runner was stopped")
    held.go()
    runners(held.server)
    done = run.wait(60)
    assert done.model_dump()["deaths"] == 0
    assert done.outcome
    assert done.outcome.resumed_rows > 0


def test_killed_between_the_output_and_the_end_it_is_done(
    client: Client, queue: Server, runners: StartRunner, source: Path, output: Path, tmp_path: Path
) -> None:
    """Shows: a runner is killed."""
    run = client.submit_file(str(source), str(output), limit=50)
    dies = "import os; from rankmill.extensions.runners.store import FileRunStore as S"
    dies += "; S.end = lambda *_: os.kill(os.getpid(), 9)"
    code = f"{dies}; from rankmill.cli.main import rankmill; rankmill()"
    run_command("python", "-c", code, "runner", "--redis", queue.url, environ={**QUICK_LEASE, **ALL_ROOTS})
    assert len(pq.read_table(output)) == 50
    assert not folder_of(output).exists()
    runners(queue)
    done = run.wait(60)
    assert done.outcome
    assert done.outcome.rows == 50


def test_a_runner_that_stood_still_removes_what_its_successor_could_not(
    client: Client, queue: Server, runners: StartRunner, source: Path, output: Path
) -> None:
    run = client.submit_file(str(source), str(output), limit=50)
    zombie = runners(queue, before=_STANDS_STILL)
    wait_for(output.exists, zombie)
    runners(queue)
    assert run.wait(60).state == "done"
    assert folder_of(output).exists()
    zombie.send_signal(signal.SIGCONT)
    wait_for(lambda: not folder_of(output).exists(), zombie)
    assert len(pq.read_table(output)) == 50


def test_a_runner_stops_although_python_drops_errors_in_finalizers(
    client: Client, queue: Server, runners: StartRunner, source: Path, output: Path
) -> None:
    run = client.submit_file(str(source), str(output), limit=50)
    assert runners(queue, before=_TOLD_IN_A_FINALIZER).wait(timeout=55) == 0
    assert run.status().state == "waiting"


def test_a_runner_that_cannot_begin_is_not_listed(queue: Server) -> None:
    environ = {"RANKMILL_METRICS_ADDRESS": "192.0.2.1:0"}
    done = run_command("rankmill", "runner", "--redis", queue.url, "--read", "/", environ=environ)
    assert (done.code, "metrics_address" in done.err) == (2, True), done.err
    assert not list(queue.client.scan_iter("rankmill:*:runners"))


def test_a_runner_without_a_run_stops_whenever_it_is_told(queue: Server, runners: StartRunner) -> None:
    runner = runners(queue, before=_TOLD_AS_IT_BEGINS_TO_WAIT)
    runner.terminate()
    assert runner.wait(timeout=60) == 0


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_run_whose_end_the_server_has_lost_is_done(
    attempts: int, client: Client, queue: Server, runners: StartRunner, source: Path, output: Path
) -> None:
    """Shows: the server loses its last writes, or a failover does."""
    server: Any = queue.client
    run = client.submit_file(str(source), str(output), limit=50)
    earlier = {key: server.dump(key) for key in server.scan_iter(f"*{run.id}*")}
    runner = runners(queue)
    done = run.wait(60)
    made = output.stat()
    end = json.loads(server.get(keys.file_run(run.id)))
    for key, value in earlier.items():  # as on a replica that lagged
        server.restore(key, 600_000, value, replace=True)
    if attempts == 2:  # the server knows what the first one has made, which came to no place
        known = json.loads(server.get(keys.file_run(run.id)))
        known |= {"outcome": end["outcome"], "seal": {**end["seal"], "identity": "of another file"}}
        server.set(keys.file_run(run.id), json.dumps(known), ex=600)
    assert run.status().state == "waiting"
    server.rpush("rq:queue:rankmill-files", run.id)
    again = run.wait(60)
    assert runner.poll() is None
    assert again.outcome == done.outcome
    assert again.outcome
    assert again.outcome.rows == 50
    assert (output.stat().st_ino, output.stat().st_mtime_ns) == (made.st_ino, made.st_mtime_ns)


def test_cancelled_while_it_waits_and_while_it_runs(
    client: Client, queue: Server, runners: StartRunner, source: Path, output: Path
) -> None:
    waits = client.submit_file(str(source), str(output))
    assert waits.cancel().state == "cancelled"
    assert not queue.client.llen("rq:queue:rankmill-files")
    nobody = Client(queue.url, model=client.settings.model, queue="nobody-listens")
    runs = nobody.submit_file(str(source), str(output))
    runner = runners(queue)
    wait_for(lambda: waiting_jobs(queue.client, "nobody-listens"), runner)
    assert "is cancelled" in run_command("rankmill", "cancel", runs.id[:12], "--redis", queue.url).out
    for run in (waits, runs):
        with pytest.raises(RunCancelled, match=f"submitted run {run.id} was cancelled"):
            run.wait(60)
    assert not waiting_jobs(queue.client, "nobody-listens")
    assert not output.exists()
    assert client.submit_file(str(source), str(output), limit=20).wait(60).state == "done"
    assert not list(queue.client.scan_iter("rq:job:*"))


def test_a_run_cancelled_while_it_waits_leaves_nothing_of_a_dead_runner(
    queue: Server, client: Client, runners: StartRunner, source: Path, output: Path
) -> None:
    """Its chunks leave the queue of the workers, which else would score them for nobody."""
    server: Any = queue.client
    nobody = Client(queue.url, model=client.settings.model, queue="nobody-listens")
    run = nobody.submit_file(str(source), str(output))
    runner = runners(queue)
    wait_for(lambda: waiting_jobs(server, "nobody-listens"), runner)
    runner.kill()
    runner.wait()
    store = FileRunStore(server, "rankmill-files", 600)
    leases = store.queue.started_job_registry.key
    server.zadd(leases, dict.fromkeys(server.zrange(leases, 0, -1), 0))  # its lease has lapsed
    store.recover(15, expired=True)
    assert run.cancel().state == "cancelled"
    next_runner = runners(queue)
    wait_for(lambda: not waiting_jobs(server, "nobody-listens"), next_runner)
    wait_for(lambda: not list(server.scan_iter("rq:job:*")), next_runner)
    assert not list(server.scan_iter("rankmill:run:*"))
    assert run.status().state == "cancelled"
    assert not output.exists()


@pytest.mark.slow
def test_a_file_that_this_host_does_not_see_is_another_runners(
    client: Client, queue: Server, runners: StartRunner, source: Path, output: Path, tmp_path: Path
) -> None:
    """Hosts with files of their own: ``/proc/self/cwd`` is another folder for each process."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    blind = runners(queue, cwd=elsewhere)
    seeing = runners(queue, cwd=tmp_path)
    for number in range(3):
        path = tmp_path / f"out-{number}.parquet"
        run = client.submit_file("/proc/self/cwd/a.parquet", str(path), limit=20)
        assert run.wait(60).state == "done"
    run = client.submit_file("/proc/self/cwd/b.parquet", str(output))
    with pytest.raises(
        RunFailed, match=r"no runner can score it: .*b.parquet: no such file; .*b.parquet: no such"
    ):
        run.wait(60)
    for runner in (blind, seeing):
        runner.terminate()
        assert runner.wait(timeout=60) == 0


def test_what_no_runner_can_do_is_told_in_one_line(
    client: Client, queue: Server, runners: StartRunner, source: Path, output: Path, tmp_path: Path
) -> None:
    runners(queue)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("no column 'text'", {"passage_column": "text"}),
        ("no such model directory on this runner's host", {"model": str(tmp_path / "gone")}),
    ]
    for reason, options in wrong:
        with pytest.raises(RunFailed, match=reason) as failed:
            client.submit_file(str(source), str(output), **options).wait(60)
        assert "\n" not in str(failed.value)
    assert not output.exists()
    with pytest.raises(RunExpired, match="there are no results of run szz"):
        client.attach("szz")


def test_by_its_name_from_plain_rq_and_never_by_a_plain_worker(
    client: Client, queue: Server, runners: StartRunner, source: Path, output: Path
) -> None:
    files = Queue("rankmill-files", connection=queue.client, serializer=JSONSerializer)
    run = client.submit_file(str(source), str(output))
    worker = SimpleWorker([files], connection=queue.client, serializer=JSONSerializer)
    worker.work(burst=True, logging_level="CRITICAL")
    with pytest.raises(RunFailed, match="a worker that is not a runner took its job"):
        run.wait(60)
    request: dict[str, Any] = {"inputs": [str(source)], "output": str(output), "limit": 20}
    order = {"request": request, "spec": {"model": client.settings.model}}
    job = files.enqueue("rankmill.score_file", order)
    strange = files.enqueue("rankmill.score_file", {**order, "surprise": 1})
    runners(queue)
    wait_for(output.exists)
    done = on_server(client.store, client.settings).handle(job.id).wait(60)
    assert done.outcome
    assert done.outcome.rows == 20
    request |= {"limit": 30, "force": True}
    files.enqueue("rankmill.score_file", order, job_id=job.id)  # once more, after its end
    done = on_server(client.store, client.settings).handle(job.id).wait(60)
    assert done.outcome
    assert done.outcome.rows == len(pq.read_table(output)) == 30
    wait_for(lambda: queue.client.hget(f"rq:job:{strange.id}", "status") == b"failed")
    status = json.loads(run_command("rankmill", "status", "--json", "--redis", queue.url).out)
    assert "surprise" in status["set_aside"][0]["reason"]
    assert "rankmill-files" not in [each["name"] for each in status["queues"]]


def test_a_run_is_its_submitter_s_and_never_its_runner_s(
    client: Client, queue: Server, runners: StartRunner, source: Path, output: Path
) -> None:
    def counted(tenant: str) -> int:
        return sum(entry.amounts.pairs for entry in read_accounts(queue.client, 2, tenant))

    before = counted("")  # by other tests of this server
    runners(queue, environ={"RANKMILL_TENANT": "runner"})
    client.submit_file(str(source), str(output), limit=20).wait(60)
    ours = Client(queue.url, model=client.settings.model, tenant="ours")
    ours.submit_file(str(source), f"{output}.csv", limit=30).wait(60)
    assert (counted("") - before, counted("ours"), counted("runner")) == (20, 30, 0)


def start_fork(command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        env = {**ENVIRON, **environ}
        return PreloadedProcess(list(command), cwd=log.parent, env=env, stdout=out, stderr=out)


@pytest.mark.slow
def test_gateway_runner_worker_and_server_die_in_a_batch(tmp_path: Path) -> None:
    """Shows: a gateway is killed."""
    toll = everybody_dies_in_a_batch(tmp_path, lines=2000, kills=1, seed=1, seconds=1.0, start=start_fork)
    assert (toll.lost, toll.doubled, toll.different, toll.moved) == (0, 0, 0, 0)
    assert toll.kills == 7


@pytest.mark.slow
def test_submitter_runner_worker_and_server_die(tmp_path: Path) -> None:
    """Shows: the server restarts with its append-only file."""
    toll = everybody_dies(tmp_path, rows=4000, kills=1, seed=1, seconds=1.0, start=start_fork)
    assert (toll.lost, toll.doubled, toll.different, toll.moved, toll.scored_again) == (0, 0, 0, 0, 0)
    assert toll.kills == 4
    assert 0 < toll.journalled[0] < 4000 <= toll.submitted
