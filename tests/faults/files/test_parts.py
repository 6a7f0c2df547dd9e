"""An output in parts: no part is torn, missing or doubled, whenever the producer dies."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.faults.kills import finished_jobs, folder_of, stop
from tests.conftest import (
    Outcome,
    Server,
    run_command,
    score_file,
    start_command,
    wait_for,
)
from tests.harness.waiting import waiting_jobs

pytestmark = pytest.mark.own_precision

ROWS, PART, CHUNK = 1100, 200, 16
COUNT = -(-ROWS // PART)
NULLS = {0, 199, 200, 1099}
ENVIRON = {"RANKMILL_WINDOW": "4"}

start = partial(start_command, "score-file")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of pairs."""
    folder = tmp_path_factory.mktemp("pairs") / "in"
    folder.mkdir()
    texts = [None if n in NULLS else f"{'moon river ' * (n % 7)}{n}" for n in range(ROWS)]
    table = pa.table({"id": range(ROWS), "query": ["big cat"] * ROWS, "passage": texts})
    pq.write_table(table.slice(0, 700), folder / "a.parquet")
    pq.write_table(table.slice(700), folder / "b.parquet")
    return folder


@pytest.fixture(scope="module")
def options(queue: Server, tiny_model: Path) -> list[object]:
    return ["--redis", queue.url, "--model", tiny_model, "--precision", "fp32", "--chunk-size", CHUNK]


@pytest.fixture(scope="module")
def whole(pairs: Path, options: list[object]) -> pa.Table:
    """The output of the same command in one file."""
    output = pairs.parent / "whole.parquet"
    assert score_file(pairs, *options, "-o", output).code == 3
    return pq.read_table(output)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def command(pairs: Path, options: list[object], output: Path) -> list[object]:
    return [pairs, *options, "-o", f"{output}/", "--rows-per-part", PART]


def name(number: int, count: int = COUNT) -> str:
    return f"part-{number:05}-of-{count:05}.parquet"


def check(output: Path, whole: pa.Table, *, complete: bool = True) -> int:
    """Check that the parts that are there are the first ones, and whole; return their number."""
    found = sorted(path.name for path in output.glob("part-*"))
    assert found == [name(number) for number in range(1, len(found) + 1)]
    for number, each in enumerate(found):
        part, expected = pq.read_table(output / each), whole.slice(number * PART, PART)
        assert part.drop_columns("score").equals(expected.drop_columns("score"))
        assert part["score"].to_pylist() == pytest.approx(expected["score"].to_pylist(), abs=1e-5)
        listed = output / f"_{each}.errors.jsonl"
        rows = (
            [json.loads(line)["row"] for line in listed.read_text().splitlines()] if listed.exists() else []
        )
        assert rows == sorted(row for row in NULLS if row // PART == number)
    if complete:
        assert len(found) == COUNT
        assert not folder_of(output).exists()
    return len(found)


def dies(at: str, number: int, *command: object) -> Outcome:
    """Run score-file; it is killed instead of calling the function `at` for the `number`-th time."""
    code = f"""
import itertools, os
import {at.rpartition(".")[0].rpartition(".")[0]} as module
holder, _, name = {at!r}.removeprefix(module.__name__ + ".").partition(".")
holder = getattr(module, holder)
calls, real = itertools.count(1), getattr(holder, name)
def call(*arguments, **options):
    if next(calls) == {number}:
        os.kill(os.getpid(), 9)
    return real(*arguments, **options)
setattr(holder, name, call)
from rankmill.cli.score import score_file
score_file()
"""
    return run_command("python", "-c", code, *command, environ=ENVIRON)


def test_parts_are_the_output_of_one_file(command: list[object], output: Path, whole: pa.Table) -> None:
    done = score_file(*command, "--json")
    assert (done.code, done.summary["rows"], done.summary["row_errors"]) == (3, ROWS, len(NULLS))
    assert (done.summary["output"], done.summary["errors_file"]) == (
        str(output), f"{output}/_part-*.errors.jsonl"
    )  # fmt: skip
    check(output, whole)
    assert pq.read_table(output).num_rows == ROWS  # the lists of errors are skipped
    about = pq.read_metadata(output / name(2)).metadata
    assert (about[b"rankmill.part"], about[b"rankmill.parts"]) == (b"2", str(COUNT).encode())
    assert about[b"rankmill.precision"] == b"fp32"


@pytest.mark.slow
def test_killed_many_times_no_part_is_torn_missing_or_doubled(
    command: list[object], output: Path, whole: pa.Table, queue: Server
) -> None:
    before, parts, kills = finished_jobs(queue.client), 0, 0
    done: Outcome | None = None
    for writes in (4, 9, 1, 14, 7):
        process = start(*command, "--json", environ=ENVIRON)
        was_killed = stop(process, output, writes, signal.SIGKILL)
        out, err = process.communicate()
        found = check(output, whole, complete=not was_killed)
        assert found >= parts
        parts = found
        if not was_killed:
            done = Outcome(process.returncode, out, err)
            break
        kills += 1
    assert kills
    done = done or score_file(*command, "--json", environ=ENVIRON)
    assert (done.code, done.summary["rows"], done.summary["row_errors"]) == (3, ROWS, len(NULLS)), done.err
    check(output, whole)
    wait_for(lambda: not waiting_jobs(queue.client))
    chunks = sum(-(-len(whole.slice(at, PART)) // CHUNK) for at in range(0, ROWS, PART))
    assert chunks <= finished_jobs(queue.client) - before <= chunks + kills * 4


@pytest.mark.parametrize(
    ("at", "number"),
    [
        ("rankmill.producer.collect.journal.Journal.finish", 1),  # the part is there, and nobody has noted it
        pytest.param("rankmill.producer.collect.journal.Journal.finish", COUNT, marks=pytest.mark.slow),
        # The list of row errors is there, its part is not.
        pytest.param("rankmill.producer.files.stores.writing.os.replace", 2, marks=pytest.mark.slow),
        # Two parts are done, the third has not begun.
        pytest.param("rankmill.producer.files.sink.ScoredParts._open", 3, marks=pytest.mark.slow),
    ],
)
def test_killed_at_the_worst_moment(
    at: str, number: int, command: list[object], output: Path, whole: pa.Table
) -> None:
    """Shows: score-file is killed as it puts the output in place."""
    died = dies(at, number, *command)
    assert died.code == -9, died.err
    there = check(output, whole, complete=False)
    assert there == {"finish": number, "replace": 0, "_open": 2}[at.rpartition(".")[2]]
    done = score_file(*command, "--json")
    assert (done.code, done.summary["resumed_rows"] >= min(there * PART, ROWS)) == (3, True), done.err
    assert done.summary["row_errors"] == len(NULLS)
    check(output, whole)


def test_what_is_done_is_neither_read_nor_scored_again(
    command: list[object], output: Path, whole: pa.Table, pairs: Path, queue: Server
) -> None:
    assert dies("rankmill.producer.collect.journal.Journal.finish", 5, *command).code == -9
    before = finished_jobs(queue.client)
    process = start(*command, "--json", "-v", environ=ENVIRON)
    out, err = process.communicate()
    assert (process.returncode, json.loads(out)["resumed_rows"] >= 4 * PART) == (3, True), err
    assert "submitted" not in err.partition("continuing")[0]
    assert finished_jobs(queue.client) - before <= -(-(ROWS - 4 * PART) // CHUNK) + 2
    check(output, whole)


def test_a_part_that_is_gone_is_told_and_restart_starts_over(
    command: list[object], output: Path, whole: pa.Table
) -> None:
    assert dies("rankmill.producer.collect.journal.Journal.finish", 3, *command).code == -9
    (output / name(1)).unlink()
    refused = score_file(*command)
    assert (refused.code, "part 1 is gone" in refused.err, "--restart" in refused.err) == (2, True, True)
    changed = score_file(*command[:-1], 300)
    assert (changed.code, "--rows-per-part was 200 and is 300" in changed.err) == (2, True), changed.err
    done = score_file(*command, "--restart", "--json")
    assert (done.code, done.summary["resumed_rows"]) == (3, 0), done.err
    check(output, whole)


def test_parts_that_are_there_are_not_mixed_with_new_ones(command: list[object], output: Path) -> None:
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    old = output / name(9, 9)
    old.write_bytes(b"old")
    refused = score_file(*command)
    assert (refused.code, f"{old} exists already; replace it with --force" in refused.err) == (2, True)
    assert score_file(*command, "--force").code == 3
    assert sorted(path.name for path in output.glob("[!_]*")) == [
        "notes.txt", *(name(number) for number in range(1, COUNT + 1))
    ]  # fmt: skip
    assert "exists already" in score_file(*command).err


def test_an_input_that_changes_leaves_no_parts(command: list[object], output: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"query": "q", "passage": f"moon {n}"}) + "\n" for n in range(ROWS)]
    source.write_text("".join(lines))
    process = start(source, *command[1:], environ=ENVIRON)
    wait_for((folder_of(output) / "output").exists, process)  # the input has been looked at
    source.write_text("".join(lines).replace("moon", "poon"))
    _, err = process.communicate()
    (line,) = Outcome(process.returncode, "", err).complaints
    assert (process.returncode, f"{source} has changed while it was read" in line) == (1, True), line
    assert not output.exists() or not list(output.iterdir())
    assert not folder_of(output).exists()


def test_shards_in_parts_are_merged(
    pairs: Path, options: list[object], tmp_path: Path, whole: pa.Table
) -> None:
    for shard in (1, 2):
        done = score_file(
            pairs, *options, "-o", tmp_path / str(shard), "--rows-per-part", PART, "--shard", f"{shard}/2"
        )
        assert done.code == 3, done.err
    merged = run_command("rankmill", "merge", tmp_path / "2", tmp_path / "1", "-o", tmp_path / "out.parquet")
    assert merged.code == 3, merged.err
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.drop_columns("score").equals(whole.drop_columns("score"))
    listed = (tmp_path / "out.parquet.errors.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in listed] == sorted(NULLS)
    lost = tmp_path / "2" / name(3, 3)
    lost.unlink()
    merged = run_command("rankmill", "merge", tmp_path / "1", tmp_path / "2", "-o", tmp_path / "o.parquet")
    assert (merged.code, f"{lost.parent}: part 3 of 3 of shard 2 of 2 is not there" in merged.err) == (
        2,
        True,
    ), merged.err
    files = list(tmp_path.glob("[12]/part-*"))
    merged = run_command("rankmill", "merge", *files, "-o", tmp_path / "o.parquet")
    assert (merged.code, "part 3 of 3 of shard 2 of 2 is not there" in merged.err) == (2, True), merged.err


def test_parts_inside_the_inputs_folder_are_no_input(
    pairs: Path, options: list[object], tmp_path: Path
) -> None:
    source = tmp_path / "a.csv"
    source.write_text("query,passage\n" + "".join(f"q,moon {n}\n" for n in range(50)))
    command = [tmp_path, *options, "-o", tmp_path / "out", "--rows-per-part", 20, "--output-format", "csv"]
    assert dies("rankmill.producer.collect.journal.Journal.finish", 2, *command).code == -9
    done = score_file(*command, "--json")
    assert (done.code, done.summary["rows"]) == (0, 50), done.err
    lines = [path.read_text().splitlines() for path in sorted((tmp_path / "out").iterdir())]
    assert [len(each) for each in lines] == [21, 21, 11]
    assert [line.split(",")[1] for each in lines for line in each[1:]] == [f"moon {n}" for n in range(50)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "file"], "file is a file; --rows-per-part needs a folder"),
        (["-o", "no/where"], "no: no such directory"),
        (["-o", "out", "--top-k", 2], "--rows-per-part keeps the rows in the input's order"),
        (["-o", "out", "--output-format", "trec"], "--rows-per-part keeps the rows in the input's order"),
    ],
)
def test_wrong_parts(pairs: Path, tmp_path: Path, arguments: list[object], message: str) -> None:
    (tmp_path / "file").touch()
    done = score_file(pairs, *arguments, "--rows-per-part", 5, cwd=tmp_path)
    assert (done.code, message in done.err) == (2, True), done.err
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208


def test_an_empty_input_is_one_empty_part(options: list[object], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("query,passage\n")
    done = score_file(tmp_path / "a.csv", *options, "--rows-per-part", 5)
    assert done.code == 0, done.err
    (part,) = (tmp_path / "a.scored").iterdir()
    assert (part.name, pq.read_table(part).num_rows) == (name(1, 1), 0)
