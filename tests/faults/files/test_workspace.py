"""The folder beside an output: what others have put there, who takes it away, and failing disks."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.faults.kills import finished_jobs, folder_of
from rankmill.jobs.contract.errors import OutputError
from rankmill.producer.files.stores.output_record import OutputRecord
from rankmill.producer.files.workspace import OutputFile, Workspace
from tests.conftest import Outcome, Server, run_command, score_file, start_command, wait_for
from tests.harness.held import Held
from tests.harness.runs import SOME_BYTES, kept_bytes
from tests.harness.servers.disks import small_disk
from tests.harness.waiting import waiting_jobs

ROWS, CHUNK = 800, 8
SLOWLY = {"RANKMILL_WINDOW": "4", "RANKMILL_CHUNK_SIZE": str(CHUNK)}

start = partial(start_command, "score-file")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    texts = [f"{'moon river ' * (n % 7)}{n}" for n in range(ROWS)]
    pq.write_table(pa.table({"query": ["big cat"] * ROWS, "passage": texts}), path)
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "a.csv"


@pytest.fixture
def command(source: Path, output: Path, queue: Server, tiny_model: Path) -> list[object]:
    return [source, "-o", output, "--redis", queue.url, "--model", tiny_model, "--precision", "fp32"]


def told(done: Outcome, code: int, *parts: str) -> None:
    """The command has ended with this code, and said why in one line."""
    (line,) = done.err.strip().splitlines()
    assert done.code == code, line
    for part in parts:
        assert part in line, line


QUICK = {("lock", "link"), ("lock", "FIFO"), ("journal.db", "FIFO"), ("output", "link")}
PLANTED = [
    pytest.param(name, kind, marks=[] if (name, kind) in QUICK else pytest.mark.slow)
    for name in ("lock", "journal.db", "journal.db-wal", "output", "owner")
    for kind in ("link", "FIFO")
]


@pytest.mark.parametrize(("name", "kind"), PLANTED)
def test_what_is_planted_in_the_folder_is_refused(
    name: str, kind: str, command: list[object], output: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("do not lose this")
    folder_of(output).mkdir()
    place = folder_of(output) / name
    if kind == "link":
        place.symlink_to(precious)
    else:
        os.mkfifo(place)
    told(score_file(*command, timeout=60), 2, f"{place} is not a regular file", "remove it")
    assert precious.read_text() == "do not lose this"
    assert not output.exists()
    place.unlink()
    assert score_file(*command).code == 0
    assert not folder_of(output).exists()


def test_a_folder_that_is_a_link_or_a_file_or_another_users_is_refused(
    command: list[object], output: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious.txt").write_text("do not lose this")
    folder_of(output).symlink_to(elsewhere)
    told(score_file(*command), 2, f"{folder_of(output)} is not a folder", "remove it")
    assert [path.name for path in elsewhere.iterdir()] == ["precious.txt"]
    folder_of(output).unlink()
    os.mkfifo(folder_of(output))
    told(score_file(*command, timeout=60), 2, f"{folder_of(output)} is not a folder", "remove it")
    folder_of(output).unlink()
    if os.geteuid() == 0:
        folder_of(output).mkdir()
        os.chown(folder_of(output), 12345, 12345)
        told(score_file(*command), 2, f"{folder_of(output)} belongs to another user (12345)", "remove it")


def test_nobody_else_can_write_in_the_folder(command: list[object], output: Path) -> None:
    process = start(*command, environ=SLOWLY)
    wait_for((folder_of(output) / "output").exists, process)
    assert folder_of(output).stat().st_mode & 0o077 == 0
    process.kill()
    process.communicate()
    folder_of(output).chmod(0o777)  # with a generous umask
    assert score_file(*command).code == 0


@pytest.mark.parametrize("name", ["a.csv", "a.csv.errors.jsonl"])
def test_force_replaces_nothing_but_files(name: str, command: list[object], output: Path) -> None:
    place = output.with_name(name)
    os.mkfifo(place)
    told(score_file(*command, "--force", timeout=60), 2, f"{place} is not a regular file")
    assert place.is_fifo()
    command[2] = "/dev/full"
    told(score_file(*command, "--force", "--output-format", "csv"), 2, "/dev/full is not a regular file")
    assert Path("/dev/full").is_char_device()


def test_force_replaces_no_fifo_among_parts(command: list[object], output: Path) -> None:
    place = output.with_name("part-00001-of-00001.parquet")
    os.mkfifo(place)
    command[2] = output.parent
    done = score_file(*command, "--rows-per-part", ROWS, "--force", timeout=60)
    told(done, 2, f"{place} is not a regular file")
    assert place.is_fifo()


@pytest.mark.parametrize("what", ["folder", "output's folder", "lock", "journal.db"])
def test_a_run_whose_folder_is_taken_away_ends_at_its_next_write(
    what: str, tmp_path: Path, output: Path, held: Held
) -> None:
    """Shows: the journal's folder is removed."""
    source, queue = tmp_path / "held.parquet", held.server
    texts = [f"river {n}" if n != ROWS // 2 else "hold" for n in range(ROWS)]
    pq.write_table(pa.table({"query": ["big cat"] * ROWS, "passage": texts}), source)
    command = [source, "-o", output, "--redis", queue.url, "--model", held.model, "--precision", "fp32"]
    process = start(*command, environ=SLOWLY)
    folder = folder_of(output)
    wait_for(lambda: kept_bytes(output) > SOME_BYTES, process)
    process.send_signal(signal.SIGSTOP)
    held.go()
    if what in {"lock", "journal.db"}:
        (folder / what).unlink()
    else:
        shutil.rmtree(folder if what == "folder" else output.parent)
    other = None
    if what != "output's folder" and what != "journal.db":  # a second one begins meanwhile, and waits
        other = start(*command, "--queue", "nobody-listens")
        wait_for(lambda: len(waiting_jobs(queue.client, "nobody-listens")) or other.poll() is not None)
    process.send_signal(signal.SIGCONT)
    done = Outcome(0, *process.communicate(timeout=120))
    (line,) = done.complaints
    assert process.returncode == 1, line
    assert "was removed or replaced while the run worked with it: its scores are lost" in line
    assert "are kept" not in line
    assert not output.exists()
    assert finished_jobs(queue.client) < ROWS // CHUNK
    if other and what == "folder":  # the folder is the other's, who still has it
        assert (folder / "journal.db").exists()
        other.send_signal(signal.SIGINT)
        _, said = other.communicate(timeout=60)
        assert other.returncode == 130, said
        assert "Traceback" not in said
    elif other:
        other.kill()
        other.communicate()


def test_an_interrupted_run_to_standard_output_gives_and_keeps_nothing(
    source: Path, tmp_path: Path, held: Held
) -> None:
    texts = [f"river {n}" if n != ROWS // 2 else "hold" for n in range(ROWS)]
    pq.write_table(pa.table({"query": ["big cat"] * ROWS, "passage": texts}), source)
    (tmp_path / "tmp").mkdir()
    command = [source, "-o", "-", "--redis", held.server.url, "--model", held.model, "--precision", "fp32"]
    process = start(*command, environ={**SLOWLY, "TMPDIR": str(tmp_path / "tmp")})
    wait_for(lambda: any(kept_bytes(made) > SOME_BYTES for made in outputs_below(tmp_path / "tmp")), process)
    process.send_signal(signal.SIGINT)
    done = Outcome(0, *process.communicate(timeout=120))
    held.go()
    (line,) = done.complaints
    assert (process.returncode, done.out) == (130, "")
    assert "-o - keeps no scores: only with a file (-o FILE) the same command continues" in line
    assert "are kept" not in line
    assert list((tmp_path / "tmp").iterdir()) == []


def outputs_below(folder: Path) -> list[Path]:
    """The outputs that are being made in temporary folders."""
    return [path.with_suffix("") for path in folder.glob("rankmill-*/*.rankmill")]


FAILS = """
import errno, os, shutil
rename, unlink, rmtree, fsync = os.replace, os.unlink, shutil.rmtree, os.fsync
moved = []
def replace(old, new, **kw):
    rename(old, new, **kw)
    moved.append(new)
def fails(call):
    def wrapped(path, *args, **kw):
        if moved:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return call(path, *args, **kw)
    return wrapped
os.replace, {what} = replace, fails({what})
from rankmill.jobs.system import system
system.fsync = os.fsync
from rankmill.cli.score import score_file
score_file()
"""


@pytest.mark.parametrize("options", [["--top-k", 3], pytest.param([], marks=pytest.mark.slow)])
def test_an_output_that_is_in_place_is_done_whatever_cannot_be_removed(
    options: list[object], command: list[object], output: Path
) -> None:
    done = run_command("python", "-c", FAILS.format(what="os.unlink"), *command, *options, "--json")
    assert (done.code, done.summary["rows"]) == (0, ROWS), done.err
    assert "Traceback" not in done.err
    assert f"{folder_of(output)} is not needed any more, and cannot be removed" in done.err
    assert len(output.read_text().splitlines()) == (3 if options else ROWS) + 1
    again = score_file(*command, *options)  # which finds that the output is its own
    assert (again.code, folder_of(output).exists()) == (0, False), again.err


def test_rows_on_standard_output_are_done_whatever_cannot_be_removed(
    source: Path, command: list[object], tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    environ = {"TMPDIR": str(tmp_path / "tmp")}
    call = ["python", "-c", FAILS.format(what="os.unlink"), source, "-o", "-", "--output-format", "csv"]
    done = run_command(*call, *command[3:], environ=environ)
    assert (done.code, len(done.out.splitlines())) == (0, ROWS + 1), done.err


def test_a_folder_ends_well_whatever_the_disk_says_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Workspace(OutputFile(tmp_path / "out.csv"), restart=False, force=False) as work:
        work.begin({"a": "b"})
        monkeypatch.setattr(os, "close", fails)
    monkeypatch.undo()


def test_an_output_that_the_disk_does_not_confirm_is_said_to_be_there(
    command: list[object], output: Path
) -> None:
    """Shows: the disk does not confirm that the output stays."""
    done = run_command("python", "-c", FAILS.format(what="os.fsync"), *command)
    (line,) = [line for line in done.err.splitlines() if "complete and in its place" in line]
    assert done.code == 1
    assert f"{output} is complete and in its place, but the disk does not confirm that it stays" in line
    assert "the same command continues" in line
    assert len(output.read_text().splitlines()) == ROWS + 1
    assert score_file(*command).code == 0


def test_a_journal_that_cannot_be_opened_is_one_line(command: list[object], output: Path) -> None:
    """Such as where the disk has no inodes left for it."""
    fails = "import sqlite3; c = sqlite3.connect; m = sqlite3.OperationalError\n"
    fails += "def connect(path): raise m('unable to open database file')\n"
    fails += "sqlite3.connect = connect; from rankmill.cli.score import score_file; score_file()"
    done = run_command("python", "-c", fails, *command)
    told(done, 1, f"cannot write {folder_of(output) / 'journal.db'}: unable to open database file")
    assert not folder_of(output).exists()


def test_merge_follows_no_link_at_the_name_of_its_unfinished_file(
    command: list[object], output: Path, tmp_path: Path
) -> None:
    shard = tmp_path / "shard.parquet"
    command[2] = shard
    assert score_file(*command, "--shard", "1/1").code == 0
    precious = tmp_path / "precious.txt"
    precious.write_text("do not lose this")
    merged = tmp_path / "merged.parquet"
    merged.with_name(f".{merged.name}.partial").symlink_to(precious)
    done = run_command("rankmill", "merge", shard, "-o", merged)
    assert done.code == 0, done.err
    assert precious.read_text() == "do not lose this"
    assert len(pq.read_table(merged)) == ROWS


def test_a_record_for_which_there_is_no_room_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4k") as disk:
        (disk / "others").write_bytes(bytes(4096))
        with pytest.raises(
            OutputError, match=r"^cannot write .*/\.out\.csv\.rankmill: No space left on device$"
        ):
            OutputRecord(disk / "out.csv").seal("run", "made")
        assert [path.name for path in disk.iterdir()] == ["others"]
