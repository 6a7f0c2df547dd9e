"""Whenever the producer dies, the same command goes on: nothing lost, doubled or scored in vain."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.faults.kills import Damage, damage, finished_jobs, folder_of, run_under_kills, stop
from rankmill.jobs.protocol.accounts import read_accounts
from tests.conftest import (
    Outcome,
    Server,
    run_command,
    score_file,
    start_command,
    wait_for,
)
from tests.harness.models.tiny import make_bert
from tests.harness.servers.disks import fill, resize, small_disk
from tests.harness.waiting import waiting_jobs

ROWS, CHUNK, WINDOW = 800, 8, 4
NULLS = {0, 5, ROWS - 1}
UNHARMED = Damage(lost=0, doubled=0, different=0, moved=0)
IN_SMALL_CHUNKS = {"RANKMILL_WINDOW": str(WINDOW), "RANKMILL_CHUNK_SIZE": str(CHUNK)}
"""For a command that is to be interrupted; the same command without it is quick to finish."""

start = partial(start_command, "score-file")


def write_pairs(path: Path, nulls: set[int] | None = None) -> Path:
    texts = [None if n in (nulls or ()) else f"{'moon river ' * (n % 7)}{n}" for n in range(ROWS)]
    pq.write_table(pa.table({"id": range(ROWS), "query": ["big cat"] * ROWS, "passage": texts}), path)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "a.parquet")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "a.scored.parquet"


@pytest.fixture
def command(source: Path, queue: Server, tiny_model: Path) -> list[object]:
    return [source, "--redis", queue.url, "--model", tiny_model, "--precision", "fp32"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, queue: Server, tiny_model: Path) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    source = write_pairs(directory / "a.parquet")
    done = score_file(source, "--redis", queue.url, "--model", tiny_model, "--precision", "fp32")
    assert done.code == 0, done.err
    return directory / "a.scored.parquet"


def interrupt(command: list[object], output: Path, sent: signal.Signals = signal.SIGKILL) -> Outcome:
    """Run the command until something of it is kept, and stop it."""
    process = start(*command, environ=IN_SMALL_CHUNKS)
    assert stop(process, output, 10, sent)
    out, err = process.communicate()
    assert not output.exists()
    assert folder_of(output).exists()
    return Outcome(process.returncode, out, err)


def test_killed_many_times_it_repeats_only_what_was_in_flight(
    command: list[object], output: Path, undisturbed: Path, queue: Server
) -> None:
    """Shows: score-file is killed, or its host restarts.
    Shows: score-file or a runner continues within `run_ttl`.
    """
    size = CHUNK // 2  # so that all kills find it at work
    before = finished_jobs(queue.client)
    end = run_under_kills(
        [*command, "--json", "--chunk-size", size],
        output,
        kills=6,
        writes=10,
        seed=1,
        environ={**IN_SMALL_CHUNKS, "RANKMILL_TENANT": "killed"},
        begin=start,
    )
    assert (end.kills, end.code) == (6, 0), end.err
    assert damage(output, undisturbed) == UNHARMED
    assert json.loads(end.out)["resumed_rows"] > 0
    wait_for(lambda: not waiting_jobs(queue.client))
    chunks = -(-ROWS // size)
    assert chunks <= finished_jobs(queue.client) - before <= chunks + end.kills * WINDOW
    assert not folder_of(output).exists()
    assert not list(queue.client.scan_iter("rankmill:run:*"))
    assert not list(queue.client.scan_iter("rq:job:*"))
    entries = read_accounts(queue.client, 2, "killed")
    assert sum(entry.amounts.pairs for entry in entries) == ROWS
    assert sum(entry.amounts.cached + entry.amounts.failed for entry in entries) == 0
    assert {entry.tenant for entry in entries} == {"killed"}


@pytest.mark.slow
def test_a_ranked_compressed_text_file_continues_too(
    source: Path, command: list[object], tmp_path: Path, undisturbed: Path
) -> None:
    output = tmp_path / "out.csv.gz"
    ranked = [*command, "-o", output, "--top-k", 3]
    interrupt(ranked, output)
    done = score_file(*ranked, "--json")
    assert (done.code, done.summary["rows"]) == (0, ROWS)
    assert done.summary["resumed_rows"] > 0
    table = pq.read_table(undisturbed)
    order = np.argsort(-table["score"].to_numpy(), kind="stable")[:3]
    lines = gzip.decompress(output.read_bytes()).decode().splitlines()
    assert lines[0] == "id,query,passage,score,rank"
    assert [line.partition(",")[0] for line in lines[1:]] == [str(row) for row in order]
    assert not folder_of(output).exists()


@pytest.mark.long
def test_killed_with_its_server_and_workers(source: Path, tmp_path: Path, undisturbed: Path) -> None:
    model = make_bert(tmp_path / "model")  # the same weights as the tiny model's, elsewhere
    arguments: list[object] = [source, "--model", model, "--precision", "fp32"]
    output = tmp_path / "a.scored.parquet"
    end = run_under_kills(arguments, output, kills=2, writes=15, seed=3, environ=IN_SMALL_CHUNKS)
    assert (end.kills, end.code) == (2, 0), end.err
    assert "continuing: " in end.err
    assert damage(output, undisturbed) == UNHARMED
    assert not folder_of(output).exists()


def test_after_ctrl_c_the_same_command_continues(command: list[object], output: Path, queue: Server) -> None:
    """Shows: Ctrl-C or SIGTERM."""
    done = interrupt(command, output, signal.SIGINT)
    assert done.code == 130
    (line,) = done.complaints
    assert "interrupted; the output is not complete" in line
    assert f"scored rows are kept in {folder_of(output)}: the same command continues" in line
    assert not list(queue.client.scan_iter("rankmill:run:*"))
    assert not waiting_jobs(queue.client)
    again = score_file(*command, "--json")
    assert again.code == 0
    assert f"continuing: {again.summary['resumed_rows']:,} rows are scored already" in again.err
    assert 0 < again.summary["resumed_rows"] < again.summary["rows"] == ROWS


def test_what_is_damaged_in_the_journal_is_scored_again(
    command: list[object], output: Path, undisturbed: Path
) -> None:
    """Shows: the journal is torn or damaged."""
    interrupt(command, output)
    with sqlite3.connect(folder_of(output) / "journal.db") as journal:
        journal.execute("UPDATE chunks SET scores = x'00' WHERE chunk = 0")
        journal.execute(
            "UPDATE chunks SET about = replace(about, 'tokens', 'tokuns') WHERE chunk = ?", (CHUNK,)
        )
    journal.close()
    again = score_file(*command)
    assert again.code == 0, again.err
    assert again.err.count("is scored again, ") == 2
    assert damage(output, undisturbed) == UNHARMED


@pytest.mark.parametrize("size", ["auto", pytest.param(CHUNK - 1, marks=pytest.mark.slow)])
def test_a_run_continues_with_the_cuts_it_has(
    size: object, command: list[object], output: Path, undisturbed: Path
) -> None:
    interrupt(command, output)
    done = score_file(*command, "--chunk-size", size, "--json")
    assert (done.code, done.summary["resumed_rows"] > 0) == (0, True), done.err
    assert damage(output, undisturbed) == UNHARMED


def test_another_command_is_refused_and_restart_starts_over(
    command: list[object], source: Path, output: Path, tmp_path: Path
) -> None:
    interrupt(command, output)
    other = make_bert(tmp_path / "other", seed=1)
    changes: dict[str, list[object]] = {
        f"--model was {command[4]} and is {other}": [*command[:4], other, *command[5:]],
        f"--model was {command[4]} and is {command[4]}, {other}": [*command, "--model", other],
        "--precision was fp32 and is bf16": [*command, "--precision", "bf16"],
        "--score-column was score and is ce": [*command, "--score-column", "ce"],
    }
    for message, words in changes.items():
        refused = score_file(*words)
        (line,) = refused.err.strip().splitlines()
        assert (refused.code, message in line, "--restart" in line) == (2, True, True), line
    write_pairs(source, nulls={1})
    refused = score_file(*command)
    assert (refused.code, f"input 1 ({source}) was" in refused.err) == (2, True), refused.err
    assert not output.exists()
    restarted = score_file(*command, "--restart", "--json")
    assert (restarted.code, restarted.summary["resumed_rows"]) == (3, 0)
    assert not folder_of(output).exists()


def test_a_model_changed_in_place_is_refused(
    source: Path, output: Path, tmp_path: Path, queue: Server
) -> None:
    model = make_bert(tmp_path / "model")
    command = [source, "--redis", queue.url, "--model", model]
    interrupt(command, output)
    make_bert(model, seed=1)
    refused = score_file(*command)
    assert (refused.code, "model.safetensors was" in refused.err) == (2, True), refused.err


def test_all_row_errors_of_a_resumed_run_are_listed(
    command: list[object], source: Path, output: Path
) -> None:
    write_pairs(source, NULLS)
    interrupt(command, output)
    done = score_file(*command)
    assert (done.code, pq.read_table(output)["score"].null_count) == (3, len(NULLS))
    lines = output.with_name(output.name + ".errors.jsonl").read_text().splitlines()
    errors: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [error["row"] for error in errors] == sorted(NULLS)
    assert all((error["error"], error["attempts"]) == ("passage is null", 1) for error in errors)
    assert all(error["worker"] for error in errors)


def test_two_at_a_time_are_refused(source: Path, output: Path, queue: Server) -> None:
    command = [source, "--redis", queue.url, "--model", "demo", "--queue", "nobody-listens"]
    first = start(*command)
    wait_for(lambda: len(waiting_jobs(queue.client, "nobody-listens")), None)
    for options in ([], ["--restart"], ["--force"]):
        second = score_file(*command, *options)
        assert (second.code, f"another score-file is making {output}" in second.err) == (2, True)
    first.send_signal(signal.SIGINT)
    first.communicate()
    assert first.returncode == 130
    assert not folder_of(output).exists()  # nothing was scored, so there is nothing to keep


def test_killed_between_the_output_and_the_end(command: list[object], output: Path) -> None:
    """Shows: score-file is killed as it puts the output in place."""
    dies = "import os; from rankmill.producer.files.workspace import Workspace"
    dies += "; Workspace.remove = lambda self: os.kill(os.getpid(), 9)"
    code = f"{dies}; from rankmill.cli.score import score_file; score_file()"
    run_command("python", "-c", code, *command)
    assert len(pq.read_table(output)) == ROWS
    assert folder_of(output).exists()
    done = score_file(*command, "--json")
    assert (done.code, done.summary["resumed_rows"], done.summary["rows"]) == (0, ROWS, ROWS), done.err
    assert not folder_of(output).exists()
    assert "exists already" in score_file(*command).err


def test_killed_while_its_folder_is_removed(command: list[object], output: Path) -> None:
    dies = "import os, shutil; shutil.rmtree = lambda folder: os.kill(os.getpid(), 9)"
    run_command("python", "-c", f"{dies}; from rankmill.cli.score import score_file; score_file()", *command)
    assert len(pq.read_table(output)) == ROWS
    assert folder_of(output).exists()
    again = score_file(*command)
    assert (again.code, "exists already" in again.err) == (2, True), again.err
    assert not folder_of(output).exists()
    assert score_file(*command, "--force").code == 0


def test_a_damaged_journal_is_told(command: list[object], output: Path) -> None:
    """Shows: the journal is torn or damaged."""
    interrupt(command, output)
    for path in folder_of(output).glob("journal.db*"):
        path.write_bytes(os.urandom(20_000))
    refused = score_file(*command)
    assert (refused.code, len(refused.err.strip().splitlines())) == (2, 1)
    assert "is damaged" in refused.err
    assert "start over with --restart" in refused.err
    assert score_file(*command, "--restart").code == 0


@pytest.mark.parametrize("kind", ["parquet", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_an_input_that_changes_while_it_is_scored_makes_no_output(
    kind: str, command: list[object], source: Path, output: Path
) -> None:
    """Shows: the input changes in a run."""
    if kind == "jsonl":
        rows = pq.read_table(source).to_pylist()
        source = source.with_suffix(".jsonl")
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = start(source, *command[1:], environ=IN_SMALL_CHUNKS)
    wait_for((folder_of(output) / "output").exists, process)  # the input has been looked at
    if kind == "jsonl":
        source.write_text("".join(json.dumps({**row, "query": "other"}) + "\n" for row in rows[1:]))
    else:
        write_pairs(source, NULLS)
    out, err = process.communicate()
    done = Outcome(process.returncode, out, err)
    (line,) = done.complaints
    assert (done.code, f"{source} has changed while it was read" in line) == (1, True), line
    assert "kept" not in line
    assert not output.exists()
    assert not folder_of(output).exists()
    again = score_file(source, *command[1:], "--json")  # nothing of what was scored before is used
    assert (again.code, again.summary["resumed_rows"]) == (0 if kind == "jsonl" else 3, 0)


@pytest.mark.parametrize("how", ["directory", pytest.param("glob", marks=pytest.mark.slow)])
def test_an_output_inside_the_inputs_folder_is_taken_up_again(
    how: str, command: list[object], source: Path, undisturbed: Path
) -> None:
    folder = source.parent / "in"
    folder.mkdir()
    source.rename(folder / "a.parquet")
    output = folder / "out.parquet"
    named = folder if how == "directory" else f"{folder}/**/*.parquet"
    command = [named, *command[1:], "-o", output]
    interrupt(command, output)
    assert (folder_of(output) / "output").exists()
    done = score_file(*command, "--json")
    assert (done.code, 0 < done.summary["resumed_rows"] < ROWS) == (0, True), done.err
    assert damage(output, undisturbed) == UNHARMED
    again = score_file(*command, "--json", "--force")  # the output is not scored as well
    assert (again.code, again.summary["rows"]) == (0, ROWS), again.err
    output.unlink()
    interrupt(command, output)
    assert score_file(*command, "--restart", "--json").summary["resumed_rows"] == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "128k") as folder:
        yield folder


@pytest.mark.parametrize(
    ("kilobytes", "chunk", "kept"),
    [
        pytest.param(24, 16, False, marks=pytest.mark.slow),
        (200, 16, True),
        pytest.param(1000, 250, True, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_one_line_and_the_same_command_continues(
    kilobytes: int,
    chunk: int,
    kept: bool,
    command: list[object],
    source: Path,
    disk: Path,
    undisturbed: Path,
) -> None:
    """Too small for the journal's beginnings, for its growth, for the output.

    Shows: the disk of the output is full.
    """
    command = [*command, "--chunk-size", chunk]
    output = disk / "out.parquet"
    texts = [os.urandom(2000).hex() for _ in range(ROWS)]  # 1.6 MB however it is compressed
    pq.write_table(pq.read_table(source).append_column("ballast", pa.array(texts)), source)
    resize(disk, f"{kilobytes}k")
    full = score_file(*command, "-o", output)
    assert (full.code, len(full.complaints)) == (1, 1), full.err
    reason = "No space left on device" if chunk == 250 else "database or disk is full"
    assert f"cannot write {disk}" in full.err
    assert reason in full.err
    assert [path.name for path in disk.iterdir()] == (["out.parquet.rankmill"] if kept else [])
    if kept:
        others = fill(disk)
        still = score_file(*command, "-o", output)
        assert (still.code, len(still.complaints)) == (1, 1), still.err
        assert any(said in still.err for said in ("disk is full", "No space left on device")), still.err
        others.unlink()
    resize(disk, "16m")
    done = score_file(*command, "-o", output, "--json")
    assert (done.code, done.summary["resumed_rows"] > 0) == (0, kept), done.err
    assert damage(output, undisturbed) == UNHARMED
    assert [path.name for path in disk.iterdir()] == ["out.parquet"]
