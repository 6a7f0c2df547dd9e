"""What whoever can write to Redis may make a runner read and write: what its roots name, and nothing else."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rq import Queue
from rq.serializers import JSONSerializer

from rankmill import Client, SubmittedFile
from rankmill.extensions.runners import redis_keys as keys
from rankmill.extensions.runners.settings import RunnerSettings
from rankmill.extensions.runners.submitted import on_server
from rankmill.jobs.contract.errors import (
    ConfigError,
    InputError,
    OutputError,
    RankmillError,
    RunFailed,
    RunnerError,
)
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.collect.journal import Journal
from rankmill.producer.files.corpus.index import on_disk
from rankmill.producer.files.sink import ScoredFile
from rankmill.producer.files.stores.output_record import OutputRecord
from rankmill.producer.files.stores.own_folder import OwnFolder
from rankmill.producer.files.stores.paths import INDEX
from rankmill.producer.files.stores.roots import Roots
from rankmill.producer.files.stores.writing import clear_unfinished, delete, put, whole_file
from rankmill.producer.files.workspace import OutputFile, PartsFolder, Workspace
from rankmill.score.score_file import score_file
from tests.conftest import Server, StartRunner, wait_for

PAIRS = "query,passage\nmoon,a moon\ncat,a cat\n"
PRECIOUS = "ssh-ed25519 AAAA me@home\n"


class Home:
    """A user's files: a runner works in ``work``, and reads and writes there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / "work"
        self.key = path / ".ssh" / "authorized_keys"
        for folder in (self.work, self.work / ".config", self.key.parent, path / "others"):
            folder.mkdir()
        for file in (self.work / "in.csv", self.work / ".config" / "in.csv", path / "others" / "in.csv"):
            file.write_text(PAIRS)
        self.key.write_text(PRECIOUS)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def client(queue: Server, request: pytest.FixtureRequest) -> Client:
    return Client(queue.url, model="demo", file_queue=f"roots-{request.node.name}"[:60])


@pytest.fixture
def start(client: Client, queue: Server, runners: StartRunner, home: Home) -> Any:
    def start(**roots: str) -> Any:
        own = {f"RANKMILL_RUNNER_{use.upper()}": value for use, value in roots.items()}
        defaults = {"RANKMILL_RUNNER_READ": ".", "RANKMILL_RUNNER_WRITE": "."}
        return runners(queue, "--file-queue", client.settings.of(RunnerSettings).file_queue, cwd=home.work,
                       environ={**defaults, **own})  # fmt: skip

    return start


def enqueued(
    client: Client, request: dict[str, Any], run_id: str | None = None, **order: Any
) -> SubmittedFile:
    """A run that somebody enqueues by hand, who needs no release of rankmill."""
    queue = Queue(
        client.settings.of(RunnerSettings).file_queue,
        connection=client.store.redis,
        serializer=JSONSerializer,
    )
    asked = {"request": request, "spec": {"model": "demo", **order.pop("spec", {})}, **order}
    return on_server(client.store, client.settings).handle(
        queue.enqueue("rankmill.score_file", asked, job_id=run_id).id
    )


def refused(run: SubmittedFile, *parts: str) -> None:
    """The run has failed, and each runner has said why in one line."""
    with pytest.raises(RunFailed) as failed:
        run.wait(60)
    for part in parts:
        assert part in str(failed.value), failed.value
    assert "\n" not in str(failed.value)


def everything_below(path: Path) -> dict[str, bytes]:
    return {
        str(each): each.read_bytes() for each in path.rglob("*") if each.is_file() and each.suffix != ".log"
    }


def test_outside_of_the_roots_nothing_is_read_or_written(
    client: Client, start: Any, home: Home, tmp_path: Path
) -> None:
    """Also where links lead, with hidden files, patterns, models and all other things that an order names."""
    start()
    work, others = home.work, home.path / "others"
    (work / "link.csv").symlink_to(others / "in.csv")
    (work / "there").symlink_to(others)
    (work / "circle.csv").symlink_to(work / "circle.csv")
    (work / "queries.tsv").write_text("q0\tmoon\n")
    before = everything_below(tmp_path)
    mine, out = str(work / "in.csv"), str(work / "out.csv")
    run = {"run": mine, "queries": [mine], "corpus": [mine]}
    reads: list[dict[str, Any]] = [
        {"inputs": [str(others / "in.csv")]},
        {"inputs": [str(others / "gone.csv")]},  # whether it is there is not told either
        {"inputs": [f"{others}/*.csv"]},
        {"inputs": [f"{home.path}/*/in.csv"]},
        {"inputs": [f"{work}/*/../../others/in.csv"]},
        {"inputs": [f"{work}/../others/in.csv"]},
        {"inputs": [str(work / "link.csv")]},
        {"inputs": [f"{work}/lin*.csv"]},
        {"inputs": [f"{work}/*/gone*.csv"]},  # nor which names are behind a link
        {"inputs": [str(work / "there" / "in.csv")]},
        {"inputs": [str(work / "there")]},
        {"inputs": [str(work / ".config" / "in.csv")]},
        {"inputs": [f"file://{others}/in.csv"]},
        {"inputs": [f"FILE://{others}/in.csv"]},
        {"inputs": ["local://others/in.csv"]},
        {"inputs": ["http://127.0.0.1:9/latest/meta-data/in.csv"]},
        {"inputs": ["memory://a/in.csv"]},
        {"inputs": ["s3://bucket/in.csv"]},
        {"inputs": [mine], "reuse": str(others / "out.parquet")},
        {**run, "run": str(others / "in.csv")},
        {**run, "queries": [str(others / "in.csv")]},
        {**run, "corpus": [str(others / "in.csv")]},
        {**run, "qrels": str(others / "in.csv")},
        {**run, "corpus": ["irds:beir/arguana"]},
        {"inputs": [mine], "models": [str(home.key.parent), "demo"]},
        {"inputs": [mine], "models": ["~/model", "demo"]},
    ]
    for asked in reads:
        refused(enqueued(client, {"output": out, "force": True, **asked}), "runner_read", "may not read")
    refused(
        enqueued(client, {"inputs": [mine], "output": out}, spec={"model": str(home.key.parent)}),
        "runner_read",
    )
    template = {"model": "demo", "prompt_template": str(home.key)}
    refused(enqueued(client, {"inputs": [mine], "output": out}, spec=template), "an order holds its text")
    refused(enqueued(client, {"inputs": [str(work / "circle.csv")], "output": out}), "lead in a circle")
    writes = [
        str(home.key), f"file://{home.key}", str(others / "out.csv"), str(work / ".config" / "out.csv"),
        str(work / ".out.csv"), str(work / "there" / "out.csv"), f"{work}/../others/out.csv",
        str(work / "out.csv.rankmill" / "x.csv"), "http://127.0.0.1:9/out.csv", "memory://a/out.csv",
        "s3://bucket/out.csv", "local://others/out.csv",
    ]  # fmt: skip
    for output in writes:
        asked = {"inputs": [mine], "output": output, "output_format": "csv", "force": True}
        refused(enqueued(client, asked), "runner_write", "may not write")
        parts = {"inputs": [mine], "output": output, "rows_per_part": 1, "force": True, "restart": True}
        refused(enqueued(client, parts), "runner_write")
    assert everything_below(tmp_path) == before
    assert enqueued(client, {"inputs": [mine], "output": out}).wait(60).state == "done"


def test_a_runner_replaces_only_what_runners_have_made(client: Client, start: Any, home: Home) -> None:
    start()
    mine, notes = str(home.work / "in.csv"), home.work / "notes.csv"
    asked = {"inputs": [mine], "output": str(notes), "force": True}
    notes.write_text("do not lose this")
    refused(enqueued(client, asked), f"{notes}: no runner has left it in this state")
    assert notes.read_text() == "do not lose this"
    notes.unlink()
    listed = notes.with_name("notes.csv.errors.jsonl")
    listed.write_text("nor this")
    refused(enqueued(client, asked), f"{listed}: no runner has left it in this state")
    listed.unlink()
    assert enqueued(client, asked).wait(60).state == "done"
    assert enqueued(client, {**asked, "limit": 1}).wait(60).state == "done"  # it is the runner's own
    assert len(notes.read_text().splitlines()) == 2
    was = notes.stat()
    notes.write_text(notes.read_text().replace("moon", "noom"))  # somebody corrects it, and hides when
    os.utime(notes, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (notes.stat().st_ino, notes.stat().st_size) == (was.st_ino, was.st_size)
    refused(enqueued(client, asked), f"{notes}: no runner has left it in this state")
    assert "noom" in notes.read_text()
    folder = home.work / "parts"
    folder.mkdir()
    part = folder / "part-00009-of-00009.parquet"
    part.write_text("do not lose this")
    in_parts = {"inputs": [mine], "output": str(folder), "rows_per_part": 1, "force": True, "restart": True}
    refused(enqueued(client, in_parts), f"{part}: no runner has left it in this state")
    assert part.read_text() == "do not lose this"
    part.unlink()
    assert enqueued(client, in_parts).wait(60).state == "done"
    assert enqueued(client, in_parts).wait(60).state == "done"
    assert len(list(folder.iterdir())) == 2


def test_a_batch_that_somebody_made_up_touches_no_files(client: Client, start: Any, home: Home) -> None:
    """A batch writes, replaces and removes files beside its output: these are in a folder of its own."""
    start()
    line = {"custom_id": "a", "method": "POST", "url": "/v1/score", "body": {"text_1": "q", "text_2": ["p"]}}
    (home.work / "in.jsonl").write_text(json.dumps(line) + "\n")
    for name in ("pairs.parquet", "scored.parquet"):
        pq.write_table(pa.table({"query": ["a"], "passage": ["b"]}), home.work / name)
    before = everything_below(home.work)
    batch = {"id": "work", "owner": "", "endpoint": "/v1/score", "model": "demo", "kept": 60}
    asked = {"inputs": [str(home.work / "in.jsonl")], "output": str(home.work / "out.jsonl")}
    for batch_id in ("work", "batch_x", "../work"):
        made_up = enqueued(client, asked, kind="batch", details={**batch, "id": batch_id})
        refused(made_up, "a folder that is called for its run")
    run_id = "file-made-up"
    (home.work / f"batch_{run_id}").symlink_to(home.work)
    through = {**asked, "output": str(home.work / f"batch_{run_id}" / "in.jsonl")}
    made_up = enqueued(client, through, run_id, kind="batch", details={**batch, "id": f"batch_{run_id}"})
    refused(made_up, "a folder that is called for its run")
    for details in ({}, {**batch, "kept": "long"}):
        refused(enqueued(client, asked, kind="batch", details=details), "the order of a batch is damaged")
    assert everything_below(home.work) == before


def test_a_record_that_somebody_made_up_leads_nowhere(client: Client, start: Any, home: Home) -> None:
    """A seal in Redis names a file, which a runner looks at: only one that it may write."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    paths = (f"http://127.0.0.1:{server.server_port}/x", "http://user:secret@host/x", str(home.key))
    outputs = [home.work / f"{number}.csv" for number in range(len(paths))]
    runs = [client.submit_file(str(home.work / "in.csv"), str(output)) for output in outputs]
    made = {"rows": 1, "row_errors": 0, "resumed_rows": 0, "errors_file": None, "seconds": 1, "model": "demo",
            "revision": None, "precision": "fp32", "retries": 0}  # fmt: skip
    for run, path in zip(runs, paths, strict=True):
        record = json.loads(client.store.redis.get(keys.file_run(run.id)))
        record |= {"seal": {"path": path, "identity": "1 2 3"}, "outcome": {"output": path, **made}}
        client.store.redis.set(keys.file_run(run.id), json.dumps(record))
    start()
    for run, output in zip(runs, outputs, strict=True):
        assert run.wait(60).state == "done"
        assert output.exists()
    server.shutdown()
    server.server_close()
    assert not asked


def test_a_batch_that_somebody_declares_done_removes_no_files(client: Client, start: Any, home: Home) -> None:
    """What is left of a batch is removed when it is done, and a record in Redis may say so of any file."""
    unfinished = home.path / "others" / ".rankmill-5"
    unfinished.mkdir()
    mine, status = home.work / "in.csv", (home.work / "in.csv").stat()
    seal = {"path": str(mine), "identity": f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"}
    made = {"output": str(mine), "rows": 1, "row_errors": 0, "resumed_rows": 0, "errors_file": None,
            "seconds": 1, "model": "demo", "revision": None, "precision": "fp32", "retries": 0}  # fmt: skip
    batch = {"id": "work", "owner": "", "endpoint": "/v1/score", "model": "demo", "kept": 60}
    (home.work / "scored.parquet").touch()
    runs = [client.submit_file(str(mine), str(home.work / f"{number}.csv")) for number in range(2)]
    for run, folder in zip(runs, (home.work, home.path / "others"), strict=True):
        record = json.loads(client.store.redis.get(keys.file_run(run.id)))
        record |= {"seal": seal, "outcome": made}
        record["order"] |= {"kind": "batch", "details": batch}
        record["order"]["request"]["output"] = str(folder / "out.jsonl")
        client.store.redis.set(keys.file_run(run.id), json.dumps(record))
    start()
    for run in runs:
        assert run.wait(60).state == "done"
    assert unfinished.exists()
    assert (home.work / "scored.parquet").exists()


@pytest.fixture
def web(home: Home) -> Iterator[tuple[str, list[str]]]:
    """A server with pairs, and paths that lead to others; and what it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path.startswith("/data/away"):
                self.send_response(302)
                self.send_header("location", "/private/in.csv")
                self.end_headers()
                return
            body = PAIRS.encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                with suppress(OSError):
                    self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_of_a_server_only_what_is_below_the_url_is_asked_for(
    client: Client, start: Any, home: Home, web: tuple[str, list[str]]
) -> None:
    """Also where the server itself sends the runner elsewhere, and with dots in code."""
    url, asked = web
    start(read=f".,{url}/data")
    out = str(home.work / "out.csv")
    for name in ("private/in.csv", "data/%2e%2e/private/in.csv", "data/..%2fprivate/in.csv",
                 "data/x::http:/private/in.csv", "database/in.csv", ".data/in.csv"):  # fmt: skip
        refused(enqueued(client, {"inputs": [f"{url}/{name}"], "output": out}), "runner_read")
    refused(enqueued(client, {"inputs": [f"{url}/data/away.csv"], "output": out}), "/private/in.csv")
    assert not [path for path in asked if "private" in path]
    assert enqueued(client, {"inputs": [f"{url}/data/in.csv"], "output": out}).wait(60).state == "done"


def test_another_runner_with_other_roots_takes_the_run(client: Client, start: Any, home: Home) -> None:
    start()
    start(read=f".,{home.path}/others")
    asked = {"inputs": [str(home.path / "others" / "in.csv")], "output": str(home.work / "out.csv")}
    assert enqueued(client, asked).wait(60).state == "done"


def test_a_link_that_changes_after_it_was_looked_at_leads_nowhere(
    client: Client, start: Any, home: Home, tmp_path: Path
) -> None:
    """Somebody who may write in the folder changes a link again and again while runs read and write there."""
    start()
    inside, others = home.work / "inside", home.path / "others"
    inside.mkdir()
    (inside / "in.csv").write_text(PAIRS.replace("moon", "inside"))
    (others / "in.csv").write_text(PAIRS.replace("moon", "SECRET"))
    stopped = threading.Event()

    def swap() -> None:
        while not stopped.is_set():
            for to in (inside, others):
                (home.work / "new").symlink_to(to)
                (home.work / "new").replace(home.work / "swapped")
                stopped.wait(0.002)

    (home.work / "swapped").symlink_to(inside)
    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for number in range(8):
            read = {"inputs": [f"{home.work}/swapped/in.csv"], "output": f"{home.work}/read-{number}.csv"}
            write = {"inputs": [f"{home.work}/in.csv"], "output": f"{home.work}/swapped/out-{number}.csv"}
            for asked in (read, write):
                with suppress(RunFailed):
                    enqueued(client, asked).wait(60)
    finally:
        stopped.set()
        swapping.join()
    made = "".join(path.read_text() for path in home.work.glob("read-*.csv"))
    assert "SECRET" not in made
    assert [path.name for path in others.rglob("*")] == ["in.csv"]


def test_what_a_link_leads_out_of_the_roots_gets_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the link was another folder while the order was looked at: empty folders were left there."""
    (tmp_path / "work").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "theirs.csv").touch()
    (tmp_path / "others" / ".rankmill-5").mkdir()
    (tmp_path / "made").write_text("scores")
    link = tmp_path / "work" / "swapped"
    link.symlink_to(tmp_path / "others")
    monkeypatch.setattr("rankmill.producer.files.stores.roots._confined", [Roots([], [f"{tmp_path}/work"])])
    for attempt in (
        lambda: OwnFolder(link / "out.csv.rankmill", link / "out.csv"),
        lambda: put(tmp_path / "made", link / "parts" / "part-1.csv"),
        lambda: put(tmp_path / "made", link / "out.csv"),
        lambda: whole_file(link / "out.csv").__enter__(),
        lambda: OutputRecord(link / "out.csv").seal("run"),
        lambda: delete([link / "theirs.csv"], link),
        lambda: clear_unfinished(link),
    ):
        with pytest.raises(RunnerError, match="runner_write"):
            attempt()
    assert {path.name for path in (tmp_path / "others").iterdir()} == {"theirs.csv", ".rankmill-5"}


def test_the_folder_that_is_removed_is_the_one_that_was_opened(tmp_path: Path) -> None:
    link, own, theirs = (tmp_path / name for name in ("swapped", "work", "others"))
    for folder in (own, theirs / "out.csv.rankmill"):
        folder.mkdir(parents=True)
    link.symlink_to(own)
    (theirs / "out.csv.rankmill" / "journal.db").touch()
    with closing(OwnFolder(link / "out.csv.rankmill", link / "out.csv")) as opened:
        link.unlink()
        link.symlink_to(theirs)
        opened.delete("journal.db")
        opened.remove()
    assert [*own.iterdir()] == []
    assert [*(theirs / "out.csv.rankmill").iterdir()] == [theirs / "out.csv.rankmill" / "journal.db"]
    with closing(OwnFolder(own / "out.csv.rankmill", own / "out.csv")) as opened:
        (own / "out.csv.rankmill").rename(own / "moved")
        (theirs / "out.csv.rankmill").rename(own / "out.csv.rankmill")
        with pytest.raises(OSError, match="not empty"):
            opened.remove()
    assert [*(own / "out.csv.rankmill").iterdir()] == [own / "out.csv.rankmill" / "journal.db"]


def test_a_folder_that_somebody_puts_in_place_of_the_new_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could hold links, to which the run would write."""
    folder, make = tmp_path / "out.csv.rankmill", os.mkdir

    def swapped(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        make(name, mode, dir_fd=dir_fd)
        (folder / "output").symlink_to(tmp_path / "theirs")

    monkeypatch.setattr("rankmill.producer.files.stores.own_folder.os.mkdir", swapped)
    with pytest.raises(InputError, match="is not a regular file"):
        OwnFolder(folder, tmp_path / "out.csv")


@pytest.fixture
def leading_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A function that puts a link, out of the roots, in place of a folder in the confined ``work``."""
    others = tmp_path / "others"
    for folder in (tmp_path / "work", others):
        folder.mkdir()
    for name in ("output", "errors.jsonl", "out.csv", "part-00001-of-00001.csv"):
        (others / name).write_text(PRECIOUS)
    before = everything_below(others)
    monkeypatch.setattr(
        "rankmill.producer.files.stores.roots._confined", [Roots([str(tmp_path)], [f"{tmp_path}/work"])]
    )

    def swap(pattern: str) -> None:
        (folder,) = (tmp_path / "work").glob(pattern)
        folder.rename(tmp_path / "work" / "moved")
        folder.symlink_to(others)

    yield swap
    assert everything_below(others) == before


def test_a_new_file_is_written_in_the_folder_that_was_made(
    tmp_path: Path, leading_out: Callable[[str], None]
) -> None:
    with whole_file(tmp_path / "work" / "out.csv") as partial:
        leading_out(".rankmill-*")
        partial.write_text("mine")
    assert (tmp_path / "work" / "out.csv").read_text() == "mine"


def test_an_output_is_written_in_the_folder_that_was_opened(
    tmp_path: Path, leading_out: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(*arguments: Any, **named: Any) -> ScoredFile:
        leading_out("*.rankmill")
        return ScoredFile(*arguments, **named)

    monkeypatch.setattr("rankmill.score.score_file.ScoredFile", swapped)
    (tmp_path / "in.csv").write_text("query,passage\n")
    request = FileRequest(inputs=(str(tmp_path / "in.csv"),), output=str(tmp_path / "work" / "out.csv"))
    with pytest.raises(OutputError, match="was removed or replaced"):
        score_file(request, load_settings({"model": "demo", "redis_url": "redis://127.0.0.1:1"}))
    assert not (tmp_path / "work" / "out.csv").exists()


def test_the_folder_that_gets_the_output_is_the_one_that_was_looked_at(
    tmp_path: Path, leading_out: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner may write in the other one too, but not replace what others have made there."""
    roots = Roots([str(tmp_path)], [str(tmp_path)])
    monkeypatch.setattr("rankmill.producer.files.stores.roots._confined", [roots])
    note = OutputRecord.note

    def swapped(*arguments: Any) -> None:
        note(*arguments)
        leading_out("mine")

    monkeypatch.setattr(OutputRecord, "note", swapped)
    (tmp_path / "in.csv").write_text("query,passage\n")
    output = tmp_path / "work" / "mine" / "out.csv"
    output.parent.mkdir()
    request = FileRequest(inputs=(str(tmp_path / "in.csv"),), output=str(output))
    score_file(request, load_settings({"model": "demo", "redis_url": "redis://127.0.0.1:1"}))
    assert (tmp_path / "work" / "moved" / "out.csv").exists()


def test_the_parts_that_are_deleted_are_those_that_were_looked_at(
    tmp_path: Path, leading_out: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are read once: a second check, after the link was swapped, would fail."""
    roots = Roots([str(tmp_path)], [str(tmp_path)])
    monkeypatch.setattr("rankmill.producer.files.stores.roots._confined", [roots])
    check = OutputRecord.check

    def swapped(*arguments: Any) -> None:
        check(*arguments)
        leading_out("mine")

    monkeypatch.setattr(OutputRecord, "check", swapped)
    output = tmp_path / "work" / "mine"
    output.mkdir()
    part = output / "part-00001-of-00001.csv"
    part.write_text("mine")
    OutputRecord(output).note({part: part})
    with Workspace(PartsFolder(output), restart=True, force=True) as work:
        work.begin({})
    assert [*(tmp_path / "work" / "moved").iterdir()] == []


@pytest.mark.parametrize("moment", ["__init__", "_check_format"])
def test_a_journal_that_is_not_in_the_folder_is_refused(
    tmp_path: Path, leading_out: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    begin = getattr(Journal, moment)

    def swapped(journal: Journal, *arguments: Any) -> None:
        leading_out("*.rankmill")
        begin(journal, *arguments)

    monkeypatch.setattr(Journal, moment, swapped)
    place = OutputFile(tmp_path / "work" / "out.csv")
    with pytest.raises(RankmillError), Workspace(place, restart=False, force=False) as work:
        work.check()


def test_an_index_beside_the_corpus_leads_a_runner_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write beside the corpus could put links there, to the texts of an index elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(0o700)
    corpora = [tmp_path / "work" / "corpus.tsv", tmp_path / "others" / "corpus.tsv"]
    for corpus, text in zip(corpora, ("mine", "SECRET"), strict=True):
        corpus.parent.mkdir()
        corpus.write_text(f"d0\t{text}\n")
        on_disk([corpus], ["unchanged"])
    beside, theirs = (corpus.with_name(f"corpus.tsv{INDEX}") for corpus in corpora)
    for name in ("texts", "hashes", "rows"):
        (beside / name).unlink()
        (beside / name).symlink_to(theirs / name)
    before = everything_below(tmp_path / "work")
    roots = Roots([f"{tmp_path}/work"], [f"{tmp_path}/work"])
    monkeypatch.setattr("rankmill.producer.files.stores.roots._confined", [roots])
    for _ in range(2):
        index = on_disk([corpora[0]], ["unchanged"])
        assert index.take(index.find(pa.array(["d0"]))).to_pylist() == ["mine"]
    assert everything_below(tmp_path / "work") == before


def test_roots_that_make_no_sense_are_refused() -> None:
    for read, write, message in (
        (["file:///data"], ["."], "runner_read: file:///data: name a folder by its path"),
        (["memory://a"], ["."], "runner_read: memory://a: "),
        (["."], ["https://host/out"], "runner_write: https://host/out: nothing can be written to https://"),
        (["."], ["memory://a"], "runner_write: memory://a: "),
    ):
        with pytest.raises(ConfigError) as refusal:
            Roots(read, write)
        assert str(refusal.value).startswith(message)


def test_prefixes_end_with_a_whole_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    roots = Roots([str(tmp_path / "data"), "s3://bucket/in"], ["s3://bucket/out"])
    roots.check_name(f"{tmp_path}/data/a.csv", "read")
    roots.check_name("s3://bucket/in/*.csv", "read")
    roots.check_name("s3://bucket/out/a.csv", "write")
    for name in (f"{tmp_path}/database/a.csv", "s3://bucket/inside/a.csv", "s3://bucket/*/a.csv",
                 "s3://bucket/out/a.csv", "S3://bucket/in/a.csv", "s3a://bucket/in/a.csv",
                 "irds:x"):  # fmt: skip
        with pytest.raises(RunnerError, match="runner_read"):
            roots.check_name(name, "read")
    with pytest.raises(InputError):
        roots.check_name("s3://bucket/in/../a.csv", "read")
    Roots(["irds:"], []).check_name("irds:beir/arguana", "read")


def test_what_a_runner_cannot_do_is_no_end_of_the_runner(client: Client, start: Any, home: Home) -> None:
    runner = start()
    refused(enqueued(client, {"inputs": ["/gone.csv"], "output": "/gone/out.csv"}), "runner_read")
    wait_for(lambda: runner.poll() is None, runner)
