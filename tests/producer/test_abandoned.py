"""What is read and never closed keeps nobody: the garbage collector may run where it would wait for ever."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rankmill import Client
from rankmill.jobs.contract.errors import InputError, RankmillError, RunCancelled, RunFailed, RunTimeout
from rankmill.jobs.protocol.worker_report import QueueWorkers
from rankmill.producer.client.runs import ScoringRun
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files import source
from rankmill.testing import FakeClient, FakeWorkers
from tests.conftest import Server, StartWorker, run_command, wait_for
from tests.producer.files.test_source import opened

ABANDON = """
import gc, json, sys, threading
from rankmill.producer.files.formats.base import TextColumns
from rankmill.producer.files.inputs import find_files
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.source import open_source
from rankmill import Client

gc.disable()

def abandon(rows):  # in a cycle with somebody who is dropped
    class Caller: pass
    caller = Caller()
    caller.itself, caller.rows = caller, rows
    next(rows)

for name in json.loads(sys.argv[1]):
    source = open_source(find_files([name]), TextColumns("query", "passage"), allow_nulls=False)
    abandon(source.tables(Sizing(7)))
if len(sys.argv) > 2:
    client = Client(sys.argv[2], model="demo", chunk_size=10)
    abandon(client.submit(((str(n), "moon") for n in range(100000))).tables())

# Whoever starts or ends a thread needs this lock; a thread that is waited for could not end.
with threading._active_limbo_lock:
    print(gc.collect() > 0)
thread = threading.Thread(target=print, args=["goes on"])
thread.start()
thread.join()
"""


@pytest.mark.parametrize("error", [OSError("the disk is gone"), KeyboardInterrupt()])
def test_a_run_whose_rows_cannot_be_read_to_their_end_gives_no_scores_later(error: BaseException) -> None:
    def pairs() -> Iterator[tuple[str, str]]:
        for number in range(50):
            yield "q", f"p {number}"
        raise error

    run = FakeClient(chunk_size=4, window=1).submit(pairs())
    with pytest.raises(type(error)):
        run.scores(timeout=60)
    with pytest.raises(RunCancelled):
        run.scores(timeout=60)


def test_a_run_that_has_failed_gives_no_scores_later(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FakeWorkers()
    workers.seconds = 3600
    client = FakeClient(chunk_size=4, window=1, fake_workers=workers)
    plain = QueueWorkers(scoring=frozenset(), other=frozenset({"plain"}))
    with monkeypatch.context() as patch:
        patch.setattr(client.store, "workers", lambda queue: plain)
        run = client.submit(("q", f"p {number}") for number in range(50))
        with pytest.raises(RunFailed, match="served by a plain RQ worker"):
            run.scores(timeout=60)
    workers.seconds = 0
    assert workers.runs[0].is_cancelled
    with pytest.raises(RunCancelled):
        run.scores(timeout=60)


def test_a_run_that_was_iterated_gives_no_scores_without_the_rows_that_were_read() -> None:
    run = FakeClient(chunk_size=4).submit([("q", f"p {number}") for number in range(50)])
    assert next(iter(run)) is not None
    with pytest.raises(InputError, match="were read by iterating it"):
        run.scores(timeout=60)
    whole = FakeClient(chunk_size=4).submit([("q", f"p {number}") for number in range(50)])
    assert len(list(whole)) == whole.wait(timeout=60).rows == 50
    whole.cancel()
    with pytest.raises(InputError, match="were read by iterating it"):
        whole.scores(timeout=60)


def test_an_iteration_gives_the_rows_that_scores_has_read() -> None:
    def score(_: str, passage: str) -> float:
        if passage == "p 20" and run.stats.rows < 40:
            workers.seconds = 3600  # no further chunk is scored for now
        return float(passage.removeprefix("p "))

    workers, rows = FakeWorkers(score), [("q", f"p {number}") for number in range(50)]
    run = FakeClient(chunk_size=4, window=1, fake_workers=workers).submit(rows)
    while not workers.seconds or run.stats.rows < 12:
        with pytest.raises(RunTimeout):
            run.scores(timeout=0.2)
    assert run.stats.rows < 50
    workers.seconds = 0
    assert list(run) == list(range(50))
    again = FakeClient(chunk_size=4, fake_workers=workers).submit(rows)
    assert again.scores(timeout=60).tolist() == list(again) == list(again) == list(range(50))


def test_a_second_iteration_of_the_same_rows_is_refused() -> None:
    run = FakeClient(chunk_size=100).submit([("q", f"p {number}") for number in range(50)])
    assert next(iter(run)) is not None
    with pytest.raises(InputError, match="were read by iterating it: submit the rows again"):
        list(run)


def test_a_run_whose_last_score_was_read_is_ended_by_a_wait() -> None:
    """An iteration beside the rows does not ask whether there is a further score."""
    client, rows = FakeClient(chunk_size=4), [("q", f"p {number}") for number in range(10)]
    run = client.submit(rows)
    assert len(list(zip(rows, run, strict=False))) == run.wait(timeout=60).rows == 10
    assert client.fake_workers.runs[0].is_complete


def test_a_detached_run_that_was_read_in_part_may_be_attached_to() -> None:
    client = FakeClient(chunk_size=4)
    run = client.submit([("q", f"p {number}") for number in range(50)], detached=True)
    assert next(iter(run)) is not None
    for read in (run.scores, lambda: list(run)):
        with pytest.raises(InputError, match="attach to it again"):
            read()
    attached = client.attach(run.id)
    assert isinstance(attached, ScoringRun)
    assert len(attached.scores(timeout=60)) == 50


def rows_of(count: int) -> pa.Table:
    return pa.table({"query": [f"q{n}" for n in range(count)], "passage": ["the moon " * 20] * count})


def written(folder: Path) -> list[str]:
    from pyarrow import csv, feather, parquet

    table = rows_of(20_000)
    parquet.write_table(table, folder / "a.parquet", row_group_size=500)
    csv.write_csv(table, folder / "a.csv")
    (folder / "a.csv.gz").write_bytes(gzip.compress((folder / "a.csv").read_bytes()))
    (folder / "a.tsv").write_text((folder / "a.csv").read_text().replace('"', "").replace(",", "\t"))
    feather.write_feather(table, folder / "a.arrow", chunksize=500, compression="uncompressed")
    lines = [json.dumps(row) for row in table.to_pylist()]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "a.json").write_text(f"[{','.join(lines)}]")
    return sorted(str(path) for path in folder.iterdir())


def test_an_abandoned_reader_is_collected_while_a_thread_starts(tmp_path: Path) -> None:
    names = written(tmp_path)
    done = run_command("python", "-c", ABANDON, json.dumps(names))
    assert done.out.split("\n")[:2] == ["True", "goes on"], done.err


def test_an_abandoned_run_is_collected_while_a_thread_starts(server: Server, workers: StartWorker) -> None:
    workers()
    done = run_command("python", "-c", ABANDON, "[]", server.url)
    assert done.out.split("\n")[:2] == ["True", "goes on"], done.err


def test_the_file_of_a_reader_is_closed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_AHEAD_BATCHES", 2)
    for name in written(tmp_path):
        with closing(opened(Path(name)).tables(Sizing(7))) as tables:
            next(tables)
        wait_for(lambda: not is_open(name))  # noqa: B023 -- it is called in the loop
        assert next(tables, None) is None


def is_open(name: str) -> bool:
    return any(str(link.resolve()) == name for link in Path("/proc/self/fd").iterdir())


class Stream:
    """Pairs that note when they are closed."""

    def __init__(self) -> None:
        self.closed = ""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        try:
            for row in range(100_000):
                yield f"q{row}", "moon"
        finally:
            self.closed = "by the run"


def test_a_run_closes_what_it_reads_when_it_ends(server: Server) -> None:
    client = Client(server.url, model="demo", chunk_size=10)
    rows = Stream()
    run = client.submit(rows)
    assert not rows.closed
    run.cancel()
    assert rows.closed
    with pytest.raises(RunCancelled):
        run.scores()
    given = iter(Stream())
    client.submit(given).cancel()
    assert next(given, None) is None


def test_a_run_of_several_models_closes_what_it_reads(server: Server) -> None:
    client = Client(server.url, chunk_size=10)
    rows: Any = Stream()
    with pytest.raises(RankmillError):
        client.score_models(rows, ["demo", "demo@1"], timeout=0.1)
    assert rows.closed


def test_a_stream_of_arrow_is_closed_by_a_failed_run(server: Server) -> None:
    released: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            while True:
                yield rows_of(10).to_batches()[0]
        finally:
            released.append(1)

    reader = pa.RecordBatchReader.from_batches(rows_of(1).schema, batches())
    run = Client(server.url, model="demo", chunk_size=10).submit(reader)
    del reader
    assert not released
    run.cancel()
    assert released
