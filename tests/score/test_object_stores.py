"""score-file from and to an object store: a real S3 server, and one that goes away."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from click.testing import CliRunner
from rq.suspension import resume, suspend

from rankmill import Client
from rankmill.cli.main import rankmill
from rankmill.jobs.protocol.worker_report import queue_workers
from tests.conftest import Outcome, Server, StartRunner, run_command, score_file, start_command, wait_for
from tests.harness.models.hub import hub
from tests.harness.servers.buckets import Bucket
from tests.harness.servers.proxy import Proxy

pytestmark = pytest.mark.own_precision

SECRET = "TOP-SECRET-KEY"
ROWS, PART = 230, 100
SOON = "import rankmill.producer.files.stores.lock as l; l.BEAT_SECONDS = 0.5"
"""Python that has a host renew its lock often."""


@dataclass
class Place:
    """A bucket with pairs, and how to score them."""

    url: str
    store: s3fs.S3FileSystem
    environ: dict[str, str]
    state: Path
    options: list[object]

    def score(self, *arguments: object, **environ: str) -> Outcome:
        return score_file(*arguments, *self.options, environ={**self.environ, **environ})

    def there(self, folder: str = "out") -> list[str]:
        """Names below a folder of the bucket."""
        self.store.invalidate_cache()
        return sorted(name.partition("/")[2] for name in self.store.find(f"{self.url}/{folder}"))

    def table(self, name: str) -> pa.Table:
        with self.store.open(f"{self.url}/{name}") as file:
            return pq.read_table(file)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    texts = [None if n == 205 else f"{'moon ' * (n % 5)}{n}" for n in range(ROWS)]
    pq.write_table(pa.table({"id": range(ROWS), "query": ["q"] * ROWS, "passage": texts}), path)
    return path


@pytest.fixture(scope="module")
def scored(pairs: Path, shared_queue: Server, tiny_model: Path) -> pa.Table:
    """The pairs with their scores, made on a disk."""
    options = ["--redis", shared_queue.url, "--model", tiny_model, "--precision", "fp32"]
    assert score_file(pairs, *options).code == 3
    return pq.read_table(pairs.with_name("pairs.scored.parquet"))


@pytest.fixture
def place(
    bucket: Bucket,
    s3_store: s3fs.S3FileSystem,
    pairs: Path,
    shared_queue: Server,
    tiny_model: Path,
    tmp_path: Path,
) -> Iterator[Place]:
    s3_store.put_file(str(pairs), f"{bucket.url}/in/pairs.parquet")
    environ = {
        **bucket.environ,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    options = ["--redis", shared_queue.url, "--model", tiny_model, "--precision", "fp32", "--chunk-size", 16]
    yield Place(bucket.url, s3_store, environ, tmp_path / "state", options)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path


def same(found: pa.Table, expected: pa.Table) -> bool:
    close = found["score"].to_pylist() == pytest.approx(expected["score"].to_pylist(), abs=1e-5)
    rest = found.drop_columns("score").equals(expected.drop_columns("score"))
    return bool(close and rest)


def test_from_the_hub_to_the_hub(pairs: Path, scored: pa.Table, place: Place, tmp_path: Path) -> None:
    """Each write there is a commit, so there are only those of the output and its list of errors."""
    files = {"in/pairs.parquet": pairs.read_bytes()}
    name = "hf://datasets/someone/pairs"
    with hub("someone/pairs", files, token="hf_right") as url:
        environ = {
            "HF_ENDPOINT": url,
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_right",
            "HF_HOME": str(tmp_path),
        }
        done = place.score(f"{name}/in/*.parquet", "-o", f"{name}/out/a.parquet", **environ)
        assert done.code == 3, done.err
        assert sorted(files) == ["in/pairs.parquet", "out/a.parquet", "out/a.parquet.errors.jsonl"]
        assert same(pq.read_table(pa.BufferReader(files["out/a.parquet"])), scored)
        again = place.score(f"{name}/in/*.parquet", "-o", f"{name}/out/a.parquet", **environ)
        assert (again.code, "out/a.parquet exists already" in again.err) == (2, True), again.err
        for output, token, message in [
            (
                "hf://datasets/someone/others/a.arrow",
                "hf_right",
                "others: no such repository on the hub",
            ),
            (f"{name}/b.arrow", "hf_wrong", "b.arrow.errors.jsonl: no permission"),
        ]:
            done = place.score(f"{name}/in/*.parquet", "-o", output, **{**environ, "HF_TOKEN": token})
            assert (done.code in {1, 2}, message in done.err) == (True, True), done.err


def test_from_a_bucket_to_a_bucket(place: Place, scored: pa.Table) -> None:
    command = [f"{place.url}/in/*.parquet", "-o", f"{place.url}/out/scored.parquet"]
    done = place.score(*command, "--json", "-v")
    assert (done.code, done.summary["output"]) == (3, f"{place.url}/out/scored.parquet"), done.err
    assert SECRET not in done.err
    assert place.there() == ["out/scored.parquet", "out/scored.parquet.errors.jsonl"]
    assert same(place.table("out/scored.parquet"), scored)
    assert json.loads(place.store.cat(f"{place.url}/out/scored.parquet.errors.jsonl"))["row"] == 205
    assert not list(place.state.rglob("*.rankmill"))
    again = place.score(*command)
    assert (again.code, "/out/scored.parquet exists already; replace it with --force" in again.err) == (
        2,
        True,
    )
    assert place.score(f"{place.url}/in", *command[1:], "--force").code == 3


def test_parts_in_a_bucket_continue_after_a_kill(place: Place, scored: pa.Table) -> None:
    command = [f"{place.url}/in/pairs.parquet", "-o", f"{place.url}/out/", "--rows-per-part", PART]
    dies = (
        "import os; from rankmill.producer.collect.journal import Journal; "
        "Journal.finish = lambda *_: os.kill(os.getpid(), 9)"
    )
    code = f"{dies}; from rankmill.cli.score import score_file; score_file()"
    died = run_command("python", "-c", code, *command, *place.options, environ=place.environ)
    names = [f"out/part-0000{number}-of-00003.parquet" for number in (1, 2, 3)]
    assert (died.code, place.there()) == (-9, ["out/_parts.rankmill", names[0]]), died.err
    (folder,) = place.state.rglob("*.rankmill")
    assert all(SECRET.encode() not in path.read_bytes() for path in folder.iterdir())
    done = place.score(*command, "--json")
    assert (done.code, done.summary["resumed_rows"] >= PART) == (3, True), done.err
    assert place.there() == [f"out/_{names[2][4:]}.errors.jsonl", *names]
    assert same(pa.concat_tables(map(place.table, names)), scored)
    assert not folder.exists()


@pytest.mark.slow
def test_a_submitted_run_reads_and_writes_a_bucket(
    place: Place, scored: pa.Table, shared_queue: Server, runners: StartRunner, tiny_model: Path
) -> None:
    """Also in parts; the submitter itself does not look at the store."""
    client = Client(
        shared_queue.url, model=str(tiny_model), precision="fp32", chunk_size=16, file_queue="buckets"
    )
    source = f"{place.url}/in/pairs.parquet"
    whole = client.submit_file(source, f"{place.url}/out/scored.parquet")
    parts = client.submit_file(source, f"{place.url}/parts/", rows_per_part=PART)
    roots = ["--read", f"/,{place.url}/in", "--write", f"{place.url}/out,{place.url}/parts"]
    runners(shared_queue, "--file-queue", "buckets", *roots, environ=place.environ)
    ended = whole.wait(60)
    assert (ended.state, ended.outcome and ended.outcome.row_errors) == ("done", 1)
    assert same(place.table("out/scored.parquet"), scored)
    assert parts.wait(60).state == "done"
    names = [f"parts/part-0000{number}-of-00003.parquet" for number in (1, 2, 3)]
    assert same(pa.concat_tables(map(place.table, names)), scored)


@contextmanager
def suspended_worker(server: Server) -> Iterator[None]:
    """The server's worker takes no chunk within the ``with`` block."""
    (name,) = queue_workers(server.client, "rankmill").scoring
    suspend(server.client)
    try:
        wait_for(lambda: server.client.hget(f"rq:worker:{name}", "state") == b"suspended")
        yield
    finally:
        resume(server.client)


def test_a_bucket_that_goes_away_and_comes_back(place: Place, scored: pa.Table, shared_queue: Server) -> None:
    with Proxy(place.environ["AWS_ENDPOINT_URL"].partition("//")[2]) as proxy:
        environ = {**place.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
        command = [f"{place.url}/in/pairs.parquet", "-o", f"{place.url}/out", "--rows-per-part", 46, "-v"]
        with suspended_worker(shared_queue):
            process = start_command("score-file", *command, *place.options, environ=environ)
            lines = said(process)
            assert any("submitted" in line for line in lines)  # the input is read, and no score is there
            proxy.refuse = True
            proxy.drop()
        waiting = next(line for line in lines if "trying again" in line)
        assert f"{place.url}/out/" in waiting
        proxy.refuse = False
        assert not [line for line in lines if "Traceback" in line]
        assert process.wait(timeout=60) == 3
    names = [name for name in place.there() if "/part-" in name]
    assert len(names) == ROWS // 46
    assert same(pa.concat_tables(map(place.table, names)), scored)


def test_two_hosts_do_not_make_the_same_output(place: Place) -> None:
    both = []
    for output, lock in (("out", "out/_parts.rankmill"), ("other/a.parquet", "other/_a.parquet.rankmill")):
        parts = ["--rows-per-part", PART] if output == "out" else []
        command = [f"{place.url}/in/pairs.parquet", "-o", f"{place.url}/{output}", *parts]
        waits = [*place.options, "--queue", "nobody"]
        words = ["python", "-c", f"{SOON}; from rankmill.cli.score import score_file; score_file()"]
        first = start_command(*words, *command, *waits, environ=place.environ)
        wait_for(partial(_is_there, place, lock), first)
        elsewhere = {**place.environ, "XDG_STATE_HOME": str(place.state / "other-host")}
        second = start_command(*words, *command, *place.options, environ=elsewhere)
        both.append((output, first, second))  # which watches for a while whether the lock changes
    for output, first, second in both:
        _, err = second.communicate(timeout=120)
        assert second.returncode == 2
        host = socket.gethostname()
        assert f"score-file on host {host} is making {place.url}/{output}; let it finish" in err
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)
    assert place.there() == place.there("other") == []


def _is_there(place: Place, name: str) -> bool:
    return name in place.there(name.partition("/")[0])


def said(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stderr
    return iter(process.stderr.readline, "")


def test_no_permission_and_no_bucket_are_one_line(place: Place, pairs: Path, tmp_path: Path) -> None:
    anonymous = {"FSSPEC_S3": json.dumps({"anon": True})}
    command: list[object] = [pairs, "-o", f"{place.url}/out.parquet"]
    for each in ([f"{place.url}/in/pairs.parquet", "-o", tmp_path / "out.parquet"], command):
        refused = place.score(*each, **anonymous)
        (line,) = refused.complaints
        assert refused.code == 1, refused.err
        assert ": no permission" in line
    done = place.score(*command, "--json")  # the scores have been kept
    assert (done.code, done.summary["resumed_rows"]) == (3, ROWS), done.err
    assert place.there("") == ["in/pairs.parquet", "out.parquet", "out.parquet.errors.jsonl"]
    for other, message in (
        ([pairs, "-o", "s3://there-is-none/out.parquet"], "s3://there-is-none: no such bucket"),
        (
            [pairs, "-o", "s3://there-is-none/out/", "--rows-per-part", 5],
            "s3://there-is-none: no such bucket",
        ),
        ([f"{place.url}/in/pairs.parquet"], "this output has no default: name it with -o"),
        ([f"{place.url}/no.csv", "-o", "out.csv"], f"{place.url}/no.csv: no such object"),
    ):
        refused = place.score(*other)
        (line,) = refused.err.strip().splitlines()
        assert (refused.code, message in line) == (2, True), line
    assert not list(tmp_path.rglob("*.rankmill"))


@pytest.mark.slow
def test_a_run_with_its_corpus_in_a_bucket(place: Place, tmp_path: Path) -> None:
    files = {
        "run.trec": "".join(f"q{q} Q0 d{d} {d + 1} {9 - d} bm25\n" for q in range(2) for d in range(3)),
        "queries.tsv": "q0\tmoon\nq1\tbig cat\n",
        "corpus.jsonl": "".join(
            json.dumps({"_id": f"d{d}", "title": "t", "text": f"moon {d}"}) + "\n" for d in range(3)
        ),
    }
    for name, text in files.items():
        with fsspec.open(f"{place.url}/{name}", "w") as file:
            file.write(text)
    run, queries, corpus = (f"{place.url}/{name}" for name in files)
    command = ["--run", run, "--queries", queries, "--corpus", corpus, "--with-texts"]
    for _ in range(2):  # the second time with the index that is there
        done = place.score(*command, "-o", tmp_path / "out.parquet", "--force")
        assert done.code == 0, done.err
        rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
        assert [(row["query"], row["passage"]) for row in rows[2:4]] == [
            ("moon", "t moon 2"), ("big cat", "t moon 0")
        ]  # fmt: skip
    assert len(list((tmp_path / "cache").rglob("about.json"))) == 1


def told(*arguments: object) -> str:
    done = CliRunner().invoke(rankmill, list(map(str, arguments)))
    assert done.exit_code in {0, 3}, done.output
    return done.stdout


@pytest.mark.slow
def test_shards_negatives_and_measures_in_a_bucket(place: Place, scored: pa.Table) -> None:
    for number in (1, 2):
        shard = [f"{place.url}/in/pairs.parquet", "-o", f"{place.url}/parts/{number}.parquet"]
        assert place.score(*shard, "--shard", f"{number}/2").code == (0, 3)[number - 1]
    merged = f"{place.url}/out/merged.parquet"
    told("merge", f"{place.url}/parts/*.parquet", "-o", merged)
    assert same(place.table("out/merged.parquet"), scored)
    (record,) = place.store.cat(f"{merged}.errors.jsonl").decode().splitlines()
    assert json.loads(record)["row"] == 205
    refused = CliRunner().invoke(rankmill, ["merge", f"{place.url}/parts/2.parquet", "-o", merged])
    assert (refused.exit_code, "exists already" in refused.stderr) == (2, True)

    rows = pa.table(
        {
            "query_id": ["q"] * 4, "doc_id": list("abcd"), "score": [0.9, 0.5, 0.2, 0.1],
            "relevance": [1, None, None, 0], "in_run": [True] * 4, "query": ["moon"] * 4,
            "passage": [f"text {name}" for name in "abcd"], "run_rank": [4, 3, 2, 1],
        }
    )  # fmt: skip
    with place.store.open(f"{place.url}/run.parquet", "wb") as file:
        pq.write_table(rows, file)
    with fsspec.open(f"{place.url}/qrels.txt", "w") as file:
        file.write("q 0 a 1\n")
    told("mine", f"{place.url}/run.parquet", "-o", f"{place.url}/out/negatives.parquet")
    assert place.table("out/negatives.parquet")["negative"].to_pylist() == ["text b", "text c", "text d"]
    qrels = ["--qrels", f"{place.url}/qrels.txt", "--json"]
    measured = json.loads(told("evaluate", f"{place.url}/run.parquet", *qrels))
    assert (measured[1]["measure"], measured[1]["before"], measured[1]["after"]) == ("RR@10", 0.25, 1.0)
    names = ["merged.parquet", "merged.parquet.errors.jsonl", "negatives.parquet"]
    assert place.there() == [f"out/{name}" for name in names]
