"""What one worker cannot score, another does; and all chunks of a run are in one precision."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.faults.kills import folder_of, stop
from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RunFailed
from rankmill.jobs.contract.run import Settled
from rankmill.jobs.protocol.refusals import RunRefusals
from rankmill.jobs.protocol.worker_report import WorkerReport, announce_worker
from rankmill.jobs.system import system
from rankmill.workers.queue.claim_order import PAUSE, Refusals, StillRefused
from tests.conftest import Server, StartWorker, run_command, score_file, start_command, wait_for
from tests.harness.environ import BIN, ENVIRON, QUICK_LEASE
from tests.harness.models.tiny import make_bert
from tests.harness.tools import needs_package
from tests.harness.waiting import take_out, waiting_jobs

PAIRS = [("big cat", f"moon river {number}") for number in range(300)]
WORKER = "tests.harness.misbehaving.OddWorker"


@pytest.fixture
def client(server: Server, tiny_model: Path) -> Client:
    return Client(server.url, model=str(tiny_model), chunk_size=10, max_retries=0, backend="torch")


def odd(workers: StartWorker, name: str, **how: str) -> None:
    """A worker that is not like others: what its ``auto`` means, which precisions and directories it has."""
    environ = {**how, "PYTHONPATH": str(Path(__file__).parents[2]), "RANKMILL_BACKEND": "torch"}
    workers(worker_class=WORKER, name=name, environ=environ)


def precisions(client: Client, pairs: list[tuple[str, str]]) -> tuple[set[str], set[str], set[int]]:
    """In which precisions pairs were scored, by which workers, and at which attempt."""
    parts = list(client.submit(pairs).tables())
    assert not any(part.scores.null_count for part in parts)
    stats = [part.stats for part in parts if part.stats]
    return (
        {each.precision for each in stats},
        {each.worker for each in stats},
        {each.attempt for each in stats},
    )


def test_workers_that_differ_score_a_run_in_one_precision(client: Client, workers: StartWorker) -> None:
    odd(workers, "a", AUTO="fp32")
    odd(workers, "b", AUTO="bf16")
    found: set[str] = set()
    for _ in range(5):
        precision, _, attempts = precisions(client, PAIRS)
        assert len(precision) == 1
        assert attempts == {1}
        found |= precision
    assert found <= {"fp32", "bf16"}


def test_a_worker_without_the_settled_precision_hands_the_chunks_back(
    client: Client, workers: StartWorker, tmp_path: Path
) -> None:
    odd(workers, "a", AUTO="bf16")
    assert precisions(client, PAIRS[:20]) == ({"bf16"}, {"a"}, {1})
    odd(workers, "b", AUTO="fp32", LACKS="bf16")
    run = client.submit(PAIRS)
    client.store.settle(run._drivers[0].run, Settled("bf16", None))  # as if worker a were the first
    parts = list(run.tables())
    assert {(part.stats.precision, part.stats.worker) for part in parts if part.stats} == {("bf16", "a")}
    assert not run.errors
    assert "left to other workers: precision bf16 is not supported" in (tmp_path / "worker.log").read_text()


def test_a_run_is_scored_by_the_workers_with_its_precision(client: Client, workers: StartWorker) -> None:
    runs = {precision: client.submit(PAIRS) for precision in ("bf16", "fp32")}
    for precision, run in runs.items():
        client.store.settle(
            run._drivers[0].run, Settled(precision, None)
        )  # as if another worker were the first
    odd(workers, "fp32", AUTO="fp32", LACKS="bf16")
    odd(workers, "bf16", AUTO="bf16", LACKS="fp32")
    for precision, run in runs.items():
        parts = list(run.tables())
        assert {(each.stats.precision, each.stats.worker) for each in parts if each.stats} == {
            (precision,) * 2
        }
        assert not run.errors


@pytest.mark.parametrize(
    ("backend", "kinds"), [("openvino", ["int8-64", "int8-128"]), ("onnx", ["int8-dynamic-7bit"])]
)
def test_a_run_in_int8_is_scored_in_the_kind_that_its_first_worker_has(
    client: Client, workers: StartWorker, backend: str, kinds: list[str]
) -> None:
    """On machines with VNNI at least one of these kinds is not the one that a worker would choose itself."""
    needs_package({"openvino": "openvino", "onnx": "onnxruntime"}[backend])
    runs = {kind: client.submit(PAIRS, precision="int8") for kind in kinds}
    for kind, run in runs.items():
        client.store.settle(run._drivers[0].run, Settled(kind, None))  # as if another worker were the first
    workers(environ={"RANKMILL_BACKEND": backend})
    for kind, run in runs.items():
        parts = list(run.tables())
        assert {part.stats.precision for part in parts if part.stats} == {kind}
        assert not run.errors


def test_a_worker_that_loses_its_device_while_it_loads_a_chunks_model_ends_and_another_scores(
    server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    lost = {"worker_class": "tests.harness.misbehaving.LostDeviceWorker", "name": "lost"}
    process = workers(**lost, environ={"PYTHONPATH": str(Path(__file__).parents[2])})
    run = Client(server.url, model=str(tiny_model), chunk_size=10).submit(PAIRS[:30])
    assert process.wait(timeout=60) == 1
    log = (tmp_path / "worker.log").read_text()
    assert log.count("the worker cannot go on: the device is gone") == 1
    assert "Traceback" not in log
    assert not server.client.zcard("rq:wip:rankmill")  # all that it had claimed waits for others
    workers(name="other")
    assert np.isfinite(run.scores(timeout=60)).all()
    assert not run.errors


def test_a_directory_that_one_worker_lacks(
    client: Client, server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    model = make_bert(tmp_path / "model")
    odd(workers, "without", GONE=str(model))
    run = client.submit(PAIRS[:50], model=str(model))
    wait_for(lambda: server.client.xlen(keys.results(run.id)))  # the only worker said so
    odd(workers, "with")
    with pytest.raises(RunFailed, match=r"no such directory on worker host .*put the model at this path"):
        run.scores(timeout=60)
    assert np.isfinite(client.score(PAIRS, timeout=60, model=str(model))).all()
    assert np.isfinite(client.score(PAIRS, timeout=60)).all()  # the other model can be had of both


def test_a_worker_with_a_package_that_cannot_be_imported_leaves_chunks_to_others(
    client: Client, server: Server, workers: StartWorker
) -> None:
    """Its errors used up the attempts of the chunks, and their rows got no score."""
    name = "tests.harness.misbehaving.BrokenPackageWorker"
    workers(worker_class=name, name="broken", environ={"PYTHONPATH": str(Path(__file__).parents[2])})
    with pytest.raises(RunFailed, match=r"'broken' of rankmill\.backends cannot be imported \(No module"):
        client.score(PAIRS[:10], timeout=60)
    workers(name="whole", environ={"RANKMILL_BACKEND": "torch"})
    for _ in range(3):
        assert np.isfinite(client.score(PAIRS, timeout=60)).all()


def test_a_run_that_a_worker_cannot_score_keeps_it_from_no_other(
    client: Client, server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    """Its chunks wait for a worker that is alive and has no time; they are as many, and before and behind.

    Shows: no such model, package or precision.
    """
    model = make_bert(tmp_path / "model")
    announce_worker(server.client, "busy", WorkerReport(device="cpu", started=1, beat=time.time()), 600)
    server.client.sadd("rq:workers:rankmill", "rq:worker:busy")
    pairs = [("big cat", f"moon {number}") for number in range(2000)]
    odd(workers, "without", GONE=str(model))
    assert np.isfinite(client.score(pairs, timeout=120)).all()
    refused = client.submit(iter(pairs), model=str(model))  # a bulk run, too
    assert np.isfinite(client.score(pairs, timeout=60)).all()  # 3 to 6 s; 81 s while it came first each time
    assert server.client.exists(keys.run(refused.id))

    def handed_back() -> int:
        return int(server.client.info("commandstats")["cmdstat_watch"]["calls"])

    before = handed_back()
    time.sleep(3.0)
    assert handed_back() - before <= 20  # a look a second; 64 a second while it took each chunk
    refused.cancel()


def test_the_run_ends_when_every_worker_has_refused_it(
    client: Client, workers: StartWorker, server: Server, tmp_path: Path
) -> None:
    """Shows: no such model, package or precision."""
    model = make_bert(tmp_path / "model")
    odd(workers, "one", GONE=str(model))
    odd(workers, "other", LACKS="fp32")
    with pytest.raises(RunFailed) as failed:
        client.score(PAIRS, timeout=60, model=str(model), precision="fp32")
    message = str(failed.value)
    assert "can score it: one: model /gone/model: no such directory on worker host" in message
    assert "; other: precision fp32 is not supported on cpu" in message
    wait_for(lambda: not server.client.keys("rankmill:run:*"))


def at_home(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a worker for which ``~/model`` is in `folder`: two hosts with other files there."""
    return {
        "HOME": str(folder),
        "RANKMILL_BACKEND": "torch",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **more,
    }


def sees_nothing(model: Path) -> None:
    model.mkdir(parents=True)


def sees_no_weights(model: Path) -> None:
    (make_bert(model) / "model.safetensors").unlink()


def sees_cut_weights(model: Path) -> None:
    weights = make_bert(model) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def sees_a_shorter_model(model: Path) -> None:
    make_bert(model, positions=32)


def sees_an_unknown_family(model: Path) -> None:
    """As with an older release of transformers."""
    config = make_bert(model) / "config.json"
    config.write_text(config.read_text().replace('"bert"', '"bert-of-tomorrow"'))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (sees_nothing, "there is no config.json in it on worker host"),
        (sees_no_weights, "has no *.safetensors"),
        (sees_cut_weights, "bytes, and its header describes"),
        (sees_a_shorter_model, "max_length 64 is more than the 32 positions"),
        (sees_an_unknown_family, "bert-of-tomorrow"),
    ],
)
def test_what_one_host_has_at_the_model_s_place_does_not_end_the_run(
    what: Callable[[Path], None],
    reason: str,
    client: Client,
    workers: StartWorker,
    server: Server,
    tmp_path: Path,
) -> None:
    make_bert(tmp_path / "whole" / "model")
    what(tmp_path / "other" / "model")
    go = tmp_path / "go"
    whole = at_home(tmp_path / "whole", LOAD=str(go))
    workers(worker_class="tests.harness.misbehaving.PatientWorker", name="whole", environ=whole)
    workers(name="other", environ=at_home(tmp_path / "other"))
    run = client.submit(PAIRS, model="~/model", max_length=64)
    wait_for(lambda: server.client.hexists(keys.refusals(run.id), "other"))
    go.touch()
    parts = list(run.tables())
    assert not run.errors
    assert {(part.stats.worker, part.stats.attempt) for part in parts if part.stats} == {("whole", 1)}
    assert reason in (tmp_path / "worker.log").read_text()


def test_a_run_that_one_worker_refuses_does_not_keep_it_from_another_run(
    client: Client, workers: StartWorker, server: Server, tmp_path: Path, tiny_model: Path
) -> None:
    make_bert(tmp_path / "whole" / "model")
    go = tmp_path / "go"
    whole = at_home(tmp_path / "whole", LOAD=str(go))
    workers(worker_class="tests.harness.misbehaving.PatientWorker", name="whole", environ=whole)
    workers(name="other", environ=at_home(tmp_path / "nowhere"))
    refused, wanted = client.submit(PAIRS, model="~/model"), client.submit(PAIRS)
    parts = list(wanted.tables())
    assert {part.stats.worker for part in parts if part.stats} == {"other"}
    go.touch()
    assert np.isfinite(refused.scores(timeout=60)).all()


def test_options_that_a_worker_gets_wrong_end_no_other_run_of_the_model(
    client: Client, workers: StartWorker
) -> None:
    workers(worker_class="tests.harness.misbehaving.UncutWorker", name="alone")
    with pytest.raises(RunFailed, match="would not get its own tokens with the options of this run"):
        client.score(PAIRS, timeout=60, long="split", max_length=24)
    assert np.isfinite(client.score(PAIRS, timeout=60)).all()


def test_a_reason_of_all_workers_is_said_once_without_the_drained_one(
    client: Client, workers: StartWorker, server: Server, tmp_path: Path, tiny_model: Path
) -> None:
    for name in ("one", "two", "three"):
        workers(name=name, environ={"RANKMILL_BACKEND": "torch", **QUICK_LEASE})
    drained = run_command("rankmill", "workers", "drain", "three", "--redis", server.url)
    assert drained.code == 0, drained.err
    with pytest.raises(RunFailed) as failed:
        client.score(PAIRS, timeout=60, label="best")
    assert str(failed.value) == f"model {tiny_model} has no output 'best'; it has 0: LABEL_0"
    with pytest.raises(RunFailed, match="LABEL_0"):  # nothing is left of the first: it is tried again
        client.score(PAIRS, timeout=60, label="best")
    assert np.isfinite(client.score(PAIRS, timeout=60)).all()


def test_a_hub_that_does_not_answer_is_asked_once(client: Client, server: Server, tmp_path: Path) -> None:
    """Its client would try for a minute. The worker is no fork: that client reads its URL when imported."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hub = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        command = [str(BIN / "rq"), "worker", "rankmill", "--worker-class", "rankmill.ScoringWorker"]
        command += ["--serializer", "json", "--url", server.url]
        worker = subprocess.Popen(command, env={**ENVIRON, **hub}, stderr=subprocess.DEVNULL)
        try:
            with pytest.raises(RunFailed, match=f"cannot get model some/model .*{url} does not answer"):
                client.score(PAIRS, timeout=100, model="some/model")
        finally:
            worker.kill()
            worker.wait()
        silent.accept()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_a_directory_that_cannot_be_looked_at_fails_no_rows(client: Client, workers: StartWorker) -> None:
    workers(name="alone")
    with pytest.raises(RunFailed, match=r"cannot load the model in /mmm.*File name too long"):
        client.score(PAIRS, timeout=60, model="/" + 300 * "m")


@pytest.mark.parametrize("retries", [0, 2])
def test_a_plain_worker_beside_others_ends_no_run(
    retries: int, workers: StartWorker, server: Server, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    patient = {"LOAD": str(go), "PYTHONPATH": str(Path(__file__).parents[2])}
    workers(worker_class="tests.harness.misbehaving.PatientWorker", name="right", environ=patient)
    workers(worker_class="rq.SimpleWorker", name="plain", ready=False)
    run = Client(server.url, model="demo", chunk_size=10, max_retries=retries).submit(PAIRS[:100])

    def plain_worker_had_one() -> bool:
        for job in waiting_jobs(server.client)[-1:]:
            take_out(server.client, job)
            server.client.rpush("rq:queue:rankmill", job)  # as RQ's tools do; it sees no other chunk
        return "plain RQ worker, which cannot score" in (tmp_path / "worker.log").read_text()

    wait_for(plain_worker_had_one)
    go.touch()
    parts = list(run.tables())
    assert not run.errors
    assert {(part.stats.worker, part.stats.attempt) for part in parts if part.stats} == {("right", 1)}


def test_a_plain_worker_that_cannot_read_chunks_gets_none(
    client: Client, workers: StartWorker, server: Server, tmp_path: Path
) -> None:
    """RQ's own serializer: each chunk went to this worker first, until it had no attempt left."""
    workers(worker_class="rq.SimpleWorker", name="plain", ready=False, serializer="pickle")
    workers()
    wait_for(lambda: server.client.exists(keys.plain("rankmill")))
    for _ in range(3):  # the worker waits for each of them
        assert not client.score(PAIRS[:3], timeout=60).errors
    assert "score_chunk" not in (tmp_path / "worker.log").read_text()


def test_a_run_that_is_taken_up_again_stays_in_its_precision(
    server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    pairs = pa.table({"query": ["big cat"] * 3000, "passage": [f"moon {number}" for number in range(3000)]})
    pq.write_table(pairs, tmp_path / "a.parquet")
    output = tmp_path / "a.scored.parquet"
    command = [tmp_path / "a.parquet", "--redis", server.url, "--model", tiny_model, "--chunk-size", 16]
    odd(workers, "a", AUTO="bf16")
    process = start_command("score-file", *command, environ={"RANKMILL_WINDOW": "4"})
    assert stop(process, output, 10, signal.SIGKILL)
    assert folder_of(output).exists()
    server.client.flushall()
    odd(workers, "b", AUTO="fp32")
    again = score_file(*command)
    assert again.code == 0, again.err
    assert pq.read_metadata(output).metadata[b"rankmill.precision"] == b"bf16"


def test_a_refusal_is_tried_again_after_a_pause_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(system, "monotonic", lambda: now)
    refusals = Refusals()
    pause = PAUSE.first
    for _ in range(10):
        refusals.open("model", "no such directory")
        now += 0.9 * pause
        assert refusals.why("model") == "no such directory"
        assert refusals.why("other") is None
        assert refusals.reasons() == ("no such directory",)
        now += 0.2 * pause
        assert refusals.why("model") is None
        pause = min(2 * pause, PAUSE.longest)
        assert not refusals.reasons()
    refusals.close("model")
    assert not refusals.why("model")
    refusals.open("model", "again")
    now += 1.1 * PAUSE.first
    assert not refusals.open("model", "again")
    now += 3600
    assert refusals.open("model", "again")  # as if it were the first
    now += 1.1 * PAUSE.first
    assert refusals.why("model") is None


def test_a_run_that_is_still_refused_is_so_for_the_same_option() -> None:
    refusals = Refusals()
    refusals.open("run", "max_length 600 is more", "max_length")
    refusals.open("model", "no such directory")
    for key, option in (("run", "max_length"), ("model", None)):
        with pytest.raises(StillRefused) as refused:
            refusals.check(key)
        assert refused.value.option == option


def test_a_refusal_counts_until_its_worker_tries_again(server: Server) -> None:
    run = Client(server.url, model="demo").submit([("q", "p")]).id
    a, b, c = (RunRefusals(server.client, name, 15) for name in "abc")
    assert a.record(run, "no hub", seconds=-1, ttl=60) == {}
    assert b.refuse(run, "rankmill", "no hub", seconds=60, ttl=60) == "no hub"
    b.take_back(run)
    assert c.record(run, "no room", seconds=60, ttl=60) == {"c": "no room"}
    assert all(server.client.ttl(key) > 0 for key in server.client.scan_iter(f"rankmill:run:{run}:refus*"))
    assert a.record("gone", "no hub", seconds=60, ttl=60) == {"a": "no hub"}
    assert not list(server.client.scan_iter("rankmill:run:gone*"))  # nobody would delete it


def test_a_run_that_has_begun_ends_when_all_refuse_it_for_a_lease(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have lost the report of a live worker, which writes it again within a lease."""
    client = Client(server.url, model="demo")
    run, now = client.submit([("q", "p")]), 100.0
    monkeypatch.setattr(system, "monotonic", lambda: now)
    refusals = RunRefusals(server.client, "a", 15)

    def ends_at(seconds: float) -> bool:
        nonlocal now
        now = 100.0 + seconds
        return refusals.refuse(run.id, "rankmill", "no room", seconds=60, ttl=60) is not None

    assert ends_at(0)  # no worker has begun it
    client.store.settle(run._drivers[0].run, Settled("fp32", None))
    assert not ends_at(50)
    server.client.sadd("rq:workers:rankmill", "rq:worker:b")
    server.client.hset("rq:worker:b", "birth", "x")
    announce_worker(server.client, "b", WorkerReport(device="cpu", started=1, beat=time.time()), 600)
    assert not ends_at(60)
    server.client.unlink(keys.worker("b"))
    assert not any(ends_at(seconds) for seconds in (64, 70, 78))
    assert ends_at(79)
    assert ends_at(110)  # the worker has scored other runs in between
    assert not ends_at(160)  # nobody knows who was there meanwhile
