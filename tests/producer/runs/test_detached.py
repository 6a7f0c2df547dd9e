"""Runs whose scores any process fetches by their id, until they expire."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from rankmill import Client, ScoringRun
from rankmill.cli.main import rankmill
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import InputError, RunCancelled, RunExpired, RunFailed, RunTimeout
from rankmill.jobs.contract.keys import ChunkId, PieceId
from rankmill.jobs.contract.results import ChunkFailure, ChunkScores, ChunkStats
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.system import system
from rankmill.producer.collect import driver
from tests.conftest import Server, run_command, wait_for
from tests.harness.waiting import lose_waiting, waiting_jobs

STATS = ChunkStats(
    worker="w", device="cpu", device_name="cpu", backend="torch", precision="fp32", revision=None,
    attempt=1, tokens=1, padded_tokens=1, batches=1, seconds=0.1,
)  # fmt: skip
PAIRS = [("big cat", f"moon river {number}") for number in range(40)]


@pytest.fixture
def alone(shared_server: Server, request: pytest.FixtureRequest) -> Client:
    """A client of a queue without workers."""
    return Client(
        shared_server.url, model="m", queue=request.node.name, chunk_size=10, no_workers_seconds=None
    )


def attached(client: Client, run_id: str) -> ScoringRun:
    found = client.attach(run_id)
    assert isinstance(found, ScoringRun)
    return found


def write(
    client: Client, run: ScoringRun, chunk: ChunkId, scores: list[float], revision: str | None = None
) -> None:
    found = client.store.load(run.id)
    assert found is not None
    errors = pa.nulls(len(scores), pa.string())
    stats = STATS.model_copy(update={"revision": revision})
    client.store.write_result(found, ChunkScores(chunk, pa.array(scores, pa.float32()), errors, stats))


def queued(client: Client) -> list[str]:
    return waiting_jobs(client.store.redis, client.settings.queue)


def wait_until(run: ScoringRun, condition: Callable[[], bool]) -> None:
    """Wait for the scores of a run, until they are there or `condition` holds."""

    def is_over() -> bool:
        with suppress(RunTimeout):
            run.scores(1)
            return True
        return condition()

    wait_for(is_over)  # after the first second, unless the machine is busy


def test_scores_of_a_killed_submitter_are_fetched_by_another_process(
    shared_queue: Server, tiny_model: Path
) -> None:
    """Shows: the submitter of a detached run is killed."""
    code = (
        "import os; from rankmill import Client; "
        "pairs = [('big cat', f'moon river {n}') for n in range(40)]; "
        f"client = Client({shared_queue.url!r}, model={str(tiny_model)!r}, precision='fp32', chunk_size=7); "
        "print(client.submit([*pairs, ('cat', None)], detached=True).id, flush=True); os.kill(os.getpid(), 9)"
    )
    died = run_command("python", "-c", code)
    assert died.code == -signal.SIGKILL, died.err
    client = Client(shared_queue.url, model=str(tiny_model), precision="fp32")
    run = attached(client, died.out.strip())
    scores = run.scores(60)
    expected = client.score(PAIRS, timeout=60)
    assert np.allclose(scores[:-1], expected, atol=1e-5)
    assert dict(scores.errors) == {40: "passage is null"}
    assert (run.progress.rows, run.progress.row_errors) == (41, 1)
    assert np.array_equal(attached(client, run.id).scores(60), scores, equal_nan=True)
    run.cancel()
    with pytest.raises(RunExpired, match=f"there are no results of run {run.id}: they are kept for 86,400 s"):
        client.attach(run.id)


def test_chunks_that_are_lost_and_rows_that_kill_their_worker(
    alone: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that wait for the same run agree on the pieces of a chunk."""
    monkeypatch.setattr(driver, "_SWEEP_SECONDS", 0.1)
    run = alone.submit(PAIRS, detached=True)
    stored = alone.store.load(run.id)
    assert stored is not None
    assert queued(alone) == [keys.job_id(run.id, start) for start in (0, 10, 20, 30)]
    assert not alone.store.find(run.id)  # it would be listed as unfinished until it expires
    lose_waiting(alone.store.redis, alone.settings.queue)
    for start in (0, 20):  # the first one kills its worker, the second one is lost
        alone.store.redis.delete(f"rq:job:{keys.job_id(run.id, start)}")
    alone.store.write_result(stored, ChunkFailure(chunk=0, message="died", fatal=False, died=True))
    pieces: list[ChunkId] = [PieceId(0, 0, 5), PieceId(0, 5, 5)]
    # the list was lost, too: what it had is put back, and the others are submitted
    wait_until(run, lambda: len(queued(alone)) == 5)
    assert queued(alone) == [keys.job_id(run.id, number) for number in [10, 30, 20, *pieces]]
    with pytest.raises(RunTimeout, match="0 rows were done when the time was over"):
        run.scores(0.1)
    other = attached(alone, run.id)
    with pytest.raises(RunTimeout):
        other.scores(1)
    assert len(queued(alone)) == 5  # nothing twice
    write(alone, run, pieces[1], [5.0] * 5)
    alone.store.write_result(
        stored, ChunkFailure(chunk=pieces[0], message="ValueError: bad", fatal=False, attempts=4)
    )
    for start in (10, 20, 30):
        write(alone, run, start, [float(start)] * 10)
    for each in (run, other, attached(alone, run.id)):
        scores = each.scores(60)
        assert scores[5:].tolist() == [5.0] * 5 + [10.0] * 10 + [20.0] * 10 + [30.0] * 10
        assert dict(scores.errors) == dict.fromkeys(range(5), "ValueError: bad")
    run.cancel()


def test_results_of_another_content_of_the_model_are_not_taken(
    alone: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_SWEEP_SECONDS", 0.1)
    run = alone.submit(PAIRS[:20], detached=True)
    alone.store.redis.delete(*(f"rq:job:{job}" for job in queued(alone)))
    write(alone, run, 0, [1.0] * 10, revision="a")
    write(alone, run, 10, [2.0] * 10, revision="b")
    with pytest.raises(RunTimeout, match="10 rows were done"):
        run.scores(1)
    write(alone, run, 10, [3.0] * 10, revision="a")
    for each in (run, attached(alone, run.id)):
        assert each.scores(60).tolist() == [1.0] * 10 + [3.0] * 10
    run.cancel()


def test_how_a_run_ends_without_scores(alone: Client) -> None:
    run = alone.submit(PAIRS, detached=True)
    stored = alone.store.load(run.id)
    assert stored is not None
    alone.store.write_result(stored, ChunkFailure(chunk=10, message="no such model", fatal=True))
    with pytest.raises(RunFailed, match="no such model"):
        run.scores(60)
    run.cancel()
    assert not queued(alone)
    cancelled = alone.submit(PAIRS, detached=True)
    told = CliRunner().invoke(rankmill, ["cancel", cancelled.id, "--redis", alone_url(alone)])
    assert "4 waiting chunks have left queue" in told.output
    with pytest.raises(RunCancelled):
        cancelled.scores(60)
    gone = alone.submit(PAIRS, detached=True)
    for key in alone.store.redis.scan_iter(f"rankmill:run:{gone.id}:*"):
        alone.store.redis.delete(key)
    with pytest.raises(RunExpired, match="unless the run is cancelled or the server loses its data"):
        gone.scores(60)


def test_commands_wait_for_it_and_list_its_errors(alone: Client) -> None:
    run = alone.submit(PAIRS[:20], detached=True)
    write(alone, run, 0, [1.0] * 10)
    failure = ChunkFailure(chunk=10, message="no memory", fatal=False, attempts=2, worker="w")
    found = alone.store.load(run.id)
    assert found is not None
    server = ["--redis", alone_url(alone)]
    late = CliRunner().invoke(rankmill, ["wait", run.id, "--timeout", "0", *server])
    assert (late.exit_code, "10 rows were done when the time was over" in late.output) == (1, True)
    alone.store.write_result(found, failure)
    waited = CliRunner().invoke(rankmill, ["wait", run.id, *server])
    assert waited.exit_code == 3
    assert f"run {run.id}: 20 rows are scored, 10 of them have an error" in waited.output
    quiet = CliRunner().invoke(rankmill, ["wait", run.id, "-q", *server])
    assert (quiet.exit_code, quiet.output) == (3, "")
    listed = CliRunner().invoke(rankmill, ["errors", run.id, "--json", *server])
    rows = [json.loads(line) for line in listed.output.splitlines()]
    assert rows[0] == {"row": 10, "error": "no memory", "attempts": 2, "worker": "w"}
    assert [row["row"] for row in rows] == [*range(10, 20)]
    run.cancel()
    unknown = CliRunner().invoke(rankmill, ["wait", run.id, *server])
    assert (unknown.exit_code, f"there are no results of run {run.id}" in unknown.output) == (2, True)


def test_the_command_goes_on_waiting_while_there_is_no_worker(
    alone: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended after a minute, in whatever time it was told to wait."""
    run = alone.submit(PAIRS, detached=True)
    now = system.monotonic
    monkeypatch.setattr(system, "monotonic", lambda: 60 * now())
    late = CliRunner().invoke(rankmill, ["wait", run.id, "--timeout", "120", "--redis", alone_url(alone)])
    monkeypatch.undo()
    assert (late.exit_code, "0 rows were done when the time was over" in late.output) == (1, True)
    run.cancel()


def test_what_cannot_be_detached_leaves_nothing(alone: Client) -> None:
    small = Client(
        settings=alone.settings.model_copy(update={"window_mib": 1, "redis_url": alone_url(alone)})
    )
    noise = np.random.default_rng(1).integers(0x4E00, 0x9000, (300, 4000))
    pairs = [("q", "".join(map(chr, row))) for row in noise]
    with pytest.raises(InputError, match=r"need more than 1 MiB in Redis \(window_mib\): .* submit_file"):
        small.submit(pairs, detached=True)
    with pytest.raises(InputError, match="there are no pairs"):
        alone.submit([], detached=True)
    with pytest.raises(InputError, match="pair 1 is"):
        alone.submit([("a", "b"), "c"], detached=True)  # type: ignore[arg-type]
    assert not queued(alone)


def alone_url(client: Client) -> str:
    return "unix://" + str(client.store.redis.connection_pool.connection_kwargs["path"])


def test_all_collectors_of_a_detached_run_share_the_count_of_attempts(
    alone: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_SWEEP_SECONDS", 0.1)
    client = Client(
        alone_url(alone), model="m", queue=alone.settings.queue, max_retries=2, no_workers_seconds=None
    )
    run = client.submit(PAIRS[:10], detached=True)
    job = keys.job_id(run.id, 0)
    submissions = 0
    while queued(client) == [job] and submissions < 5:  # it is lost, another process looks
        submissions += 1
        client.store.redis.delete(f"rq:job:{job}")
        lose_waiting(client.store.redis, client.settings.queue)
        wait_until(attached(client, run.id), lambda: queued(client) == [job])
    assert submissions == 3
    for each in (run, attached(client, run.id)):
        assert set(each.scores(60).errors.values()) == {"given up after attempt 3: it was lost"}
    run.cancel()
    assert not [*client.store.redis.scan_iter(f"rankmill:run:{run.id}:[^c]*")]


def test_collectors_that_look_at_the_same_time_count_an_attempt_once(
    alone: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one took what the first one had just sent for lost, and gave it up: good rows failed."""
    client = Client(
        alone_url(alone), model="m", queue=alone.settings.queue, max_retries=0, no_workers_seconds=None
    )
    run = client.submit(PAIRS[:10], detached=True)
    stored = client.store.load(run.id)
    assert stored is not None
    client.store.redis.delete(f"rq:job:{keys.job_id(run.id, 0)}")
    client.store.write_result(stored, ChunkFailure(chunk=0, message="died", fatal=False, died=True))
    other = Client(alone_url(alone), queue=alone.settings.queue, no_workers_seconds=None)
    missing = RunStore.missing

    def missing_before_another_sends(store: RunStore, *arguments: Any) -> list[ChunkId]:
        found = missing(store, *arguments)
        monkeypatch.undo()
        with pytest.raises(RunTimeout):
            attached(other, run.id).scores(1)
        return found

    monkeypatch.setattr(RunStore, "missing", missing_before_another_sends)
    with pytest.raises(RunTimeout):
        run.scores(2)
    halves: list[ChunkId] = [PieceId(0, 0, 5), PieceId(0, 5, 5)]
    assert client.store.failed_attempts(stored) == dict.fromkeys(halves, 0)
    assert {keys.job_id(run.id, half) for half in halves} <= {*queued(client)}
    for half in halves:
        write(client, run, half, [5.0] * 5)
    assert run.scores(60).tolist() == [5.0] * 10
    run.cancel()
