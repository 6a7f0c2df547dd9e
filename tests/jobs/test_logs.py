"""Logs: one id follows a chunk from producer to worker and back, and nothing private is in them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.protocol.recovery import hand_on_jobs
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.runtime.logs import set_up
from tests.conftest import ENVIRON, Server, StartWorker, run_command, score_file, start_command, wait_for
from tests.harness.models.tiny import make_bert

ROOT = Path(__file__).resolve().parents[2]
SECRET = "Zanzibar"


def lines(text: str) -> list[dict[str, Any]]:
    """Every line is an object."""
    return [json.loads(line) for line in text.splitlines()]


def saying(found: Sequence[dict[str, Any]], words: str) -> list[dict[str, Any]]:
    return [line for line in found if words in line["message"]]


def test_one_id_follows_a_chunk_from_producer_to_worker_and_back(
    server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    source = tmp_path / "a.parquet"
    pq.write_table(pa.table({"query": ["cat"] * 50, "passage": [*map(str, range(49)), None]}), source)
    worker = workers(name="w1", environ={"RANKMILL_LOG_LEVEL": "debug"})
    done = score_file(source, "--redis", server.url, "--model", tiny_model, "--chunk-size", 25, "-v")
    assert done.code == 3, done.err
    producer = lines(done.err)
    (begins,) = saying(producer, "run begins: 50 rows")
    (complete,) = saying(producer, "run complete: 50 rows, 1 without a score")
    run = begins["run"]
    assert complete["run"] == run
    worker.terminate()
    worker.wait(timeout=30)
    own = lines((tmp_path / "worker.log").read_text())
    assert all(line["worker"] == "w1" for line in own)
    for chunk in (0, 25):
        ids = {"run": run, "chunk": chunk, "job": keys.job_id(run, chunk)}
        for where, words in ((producer, "submitted 25 rows"), (own, "claimed 25 rows"),
                             (own, "scored 25 rows"), (producer, "collected 25 rows")):  # fmt: skip
            (line,) = [line for line in saying(where, words) if line["chunk"] == chunk]
            assert ids.items() <= line.items()
            assert line["level"] == "debug"
    assert {line["worker"] for line in saying(producer, "collected")} == {"w1"}


def test_logs_hold_neither_texts_nor_secrets_above_debug(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    model = make_bert(tmp_path / "model", extra_words=["raise", "exhaust", "kill", "hang"])
    source = tmp_path / "a.parquet"
    passages = [f"{SECRET} raise", f"{SECRET} kill"]
    pq.write_table(pa.table({"query": [f"{SECRET}?"] * 2, "passage": passages}), source)
    environ = {"FORWARDS": str(tmp_path / "forwards"), "PYTHONPATH": str(ROOT)}
    misbehaving = {"worker_class": "tests.harness.misbehaving.MisbehavingWorker", "environ": environ}
    running = [workers(name="w0", **misbehaving)]
    command = ["score-file", source, "--redis", server.url, "--model", model]
    process = start_command(*command, environ={"RANKMILL_MAX_RETRIES": "0"})

    def ended() -> bool:
        if running[-1].poll() is not None:
            hand_on_jobs(RunStore(server.client), "rankmill", f"w{len(running) - 1}")
            running.append(workers(name=f"w{len(running)}", ready=False, **misbehaving))
        return process.poll() is not None

    wait_for(ended)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    records = (tmp_path / "a.scored.parquet.errors.jsonl").read_text()
    assert "cannot be scored" in records
    assert "its worker died" in records
    logs = err + (tmp_path / "worker.log").read_text()
    assert "tried again in two halves" in logs
    assert SECRET.lower() not in logs.lower()


def test_a_terminal_gets_lines_for_a_person(server: Server, tmp_path: Path) -> None:
    code = (
        "import logging; from rankmill.jobs.runtime.logs import about, set_up; set_up('info', 'auto')\n"
        "with about(run='0af', chunk=7):\n"
        "    logging.getLogger('rankmill.producer').info('hello\\nthere redis://me:secret@host')\n"
        "    logging.getLogger('rankmill.producer').debug('too much')\n"
    )

    def run(stderr: int) -> None:
        subprocess.run([sys.executable, "-c", code], stderr=stderr, check=True, cwd=ROOT, env=ENVIRON)

    ours, theirs = pty.openpty()
    run(theirs)
    shown = os.read(ours, 10_000).decode().strip()
    assert shown[8:] == " info    hello there redis://me:***@host  run=0af chunk=7"
    out, into = os.pipe()
    run(into)
    line = json.loads(os.read(out, 10_000))
    assert line["message"] == "hello\nthere redis://me:***@host"
    assert {"run": "0af", "chunk": 7, "level": "info", "logger": "rankmill.producer"}.items() <= line.items()
    for descriptor in (ours, theirs, out, into):
        os.close(descriptor)


def test_what_threads_write_at_once_is_whole_lines_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a line that is written over, such as a bar, the last state; an object of JSON as it is."""
    set_up("info", "json")

    def write(name: str) -> None:
        for number in range(200):
            for part in (name, " says ", f"{number}\n"):
                sys.stderr.write(part)

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stderr.write("10%\r50%\r100%\n")
    sys.stderr.write('{"rows": 7}\n')
    *told, bar, summary = lines(capsys.readouterr().err)
    assert {line["message"] for line in told} == {f"{name} says {n}" for name in "ab" for n in range(200)}
    assert (bar["message"], summary) == ("100%", {"rows": 7})


@pytest.mark.parametrize("flags", [["-v"], ["-q"], []])
def test_levels_come_from_rq_s_flags_too(
    flags: list[str], server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    client = Client(server.url, model=str(tiny_model))
    client.submit([("q", "p")])
    command = ["worker", "rankmill", "--worker-class", "rankmill.ScoringWorker", "--serializer", "json"]
    done = run_command("rq", *command, "--url", server.url, "--burst", *flags, cwd=tmp_path)
    assert done.code == 0, done.err
    found = lines(done.err)
    assert bool(saying(found, "scored 1 rows")) == (flags == ["-v"])
    assert bool(saying(found, "listening on rankmill")) == (flags != ["-q"])
    assert not done.out
