"""score-file as people run it: a process, a real server, real workers."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import os
import pty
import re
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.faults.outages import full
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import (
    SCORING_FIELD,
    WorkerReport,
    announce_worker,
    queue_workers,
    worker_doings,
)
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.collect import presence
from rankmill.producer.collect.presence import WorkerPresence
from rankmill.score.score_file import score_file as score_here
from tests.conftest import BIN, ENVIRON, Server, StartWorker, score_file, start_command, wait_for
from tests.harness.models.tiny import cross_encoder, make_bert
from tests.harness.preloaded import PreloadedProcess
from tests.harness.servers.valkey import nothing_left
from tests.workers.engine.test_engine import some_pairs


@pytest.fixture(scope="module")
def table() -> pa.Table:
    queries, passages = some_pairs(200)
    return pa.table({"id": range(200), "query": queries, "passage": passages})


@pytest.fixture
def source(tmp_path: Path, table: pa.Table) -> Path:
    path = tmp_path / "pairs.parquet"
    pq.write_table(table, path, row_group_size=37)
    return path


def options(queue: Server, model: Path) -> list[object]:
    return ["--redis", queue.url, "--model", model, "--precision", "fp32", "--chunk-size", 16]


def test_a_file_is_scored_as_cross_encoder_would(
    source: Path, table: pa.Table, shared_queue: Server, tiny_model: Path
) -> None:
    done = score_file(source, *options(shared_queue, tiny_model), "--json")
    assert done.code == 0, done.err
    scored = pq.read_table(source.with_name("pairs.scored.parquet"))
    assert scored.drop_columns("score").equals(table)
    assert scored.schema.field("score").type == pa.float32()
    pairs = list(zip(table["query"].to_pylist(), table["passage"].to_pylist(), strict=True))
    expected = cross_encoder(tiny_model).predict(pairs)
    np.testing.assert_allclose(scored["score"].to_numpy(), expected, atol=1e-5)
    summary = done.summary
    assert (summary["rows"], summary["row_errors"], summary["retries"]) == (200, 0, 0)
    assert summary["backend"] in {"torch", "onnx", "openvino"}
    assert summary["precision"] == "fp32"
    assert 0.5 < summary["real_token_share"] <= 1


def test_the_load_of_a_model_is_shown_and_is_no_part_of_the_speed(
    source: Path, server: Server, workers: StartWorker, tiny_model: Path, tmp_path: Path
) -> None:
    slow = {"LOAD_SECONDS": "4", "FORWARDS": str(tmp_path / "forwards")}
    worker = workers(name="w", worker_class="tests.harness.misbehaving.MisbehavingWorker", environ=slow)
    process = start_command("score-file", source, *options(server, tiny_model), "--json")
    wait_for(lambda: worker_doings(server.client, ["w"]).keys() == {"loading"}, worker)
    watch = WorkerPresence(RunStore(server.client), server.url, "rankmill", 60)
    assert watch.doing() == "waiting for a worker"
    watch.look()
    assert re.fullmatch(rf"loading \S+{tiny_model.name} on cpu", watch.doing())
    done = json.loads(process.communicate(timeout=120)[0])
    assert worker_doings(server.client, ["w"]) == {}
    assert done["load_seconds"] > 3.5
    scoring = done["seconds"] - done["startup_seconds"] - done["load_seconds"]
    assert done["pairs_per_second"] == pytest.approx(200 / scoring, rel=0.05)


def test_a_worker_that_scores_has_been_seen(
    source: Path, shared_queue: Server, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are looked for once a second, and one may have scored for most of it."""
    monkeypatch.setattr(WorkerPresence, "since", lambda *_: 1e6)
    settings = load_settings({"redis_url": shared_queue.url, "model": str(tiny_model), "precision": "fp32"})
    request = FileRequest(inputs=(str(source),), output=str(source.with_name("out.parquet")))
    summary = score_here(request, settings)
    assert 0 < summary.startup_seconds <= summary.seconds
    assert summary.pairs_per_second < 1e6


def test_workers_that_cannot_send_heartbeats_still_count(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "_LOOK_SECONDS", 0)
    client = server.client
    client.sadd("rq:workers:rankmill", "rq:worker:w")
    client.hset("rq:worker:w", mapping={"birth": "some time", SCORING_FIELD: 1})
    announce_worker(client, "w", WorkerReport(device="cpu", started=1, beat=1), 600)
    watch = WorkerPresence(RunStore(client), server.url, "rankmill", 60)
    watch.look()
    assert watch.workers == 1
    with full(client):
        client.delete(keys.worker("w"))  # as its expiry does
        assert not queue_workers(client, "rankmill").scoring
        watch.look()
        assert watch.workers == 1
    watch.look()
    assert watch.workers == 0


def test_a_model_s_first_proof_is_shown_with_model_device_and_time(
    source: Path, server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    """On a terminal; the worker has asked transformers, and waits before its own half."""
    held = {"PROVE": str(tmp_path / "go"), "RANKMILL_CACHE_DIR": str(tmp_path / "cache")}
    workers(worker_class="tests.harness.misbehaving.HeldProofWorker", environ=held)
    words = ["score-file", str(source), *map(str, options(server, make_bert(tmp_path / "model")))]
    ours, theirs = pty.openpty()
    process = PreloadedProcess[bytes](
        words,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=theirs,
        env={**ENVIRON, "COLUMNS": "200", "TERM": "xterm"},
    )
    os.close(theirs)
    line, shown = rb"0 of 200 pairs, proving \S+/model on cpu, once on each host: at least \d+ s", b""
    while not re.search(line, shown):
        shown += os.read(ours, 10_000)
    (tmp_path / "go").touch()
    with suppress(OSError):  # the command has ended
        while os.read(ours, 10_000):
            pass
    os.close(ours)
    assert process.wait(timeout=60) == 0


def test_a_run_goes_on_when_its_terminal_is_closed(
    source: Path, server: Server, workers: StartWorker, tiny_model: Path
) -> None:
    ours, theirs = pty.openpty()
    words = ["score-file", str(source), *map(str, options(server, tiny_model))]
    environ = {**ENVIRON, "COLUMNS": "200", "TERM": "xterm"}
    process = PreloadedProcess[bytes](words, stdin=DEVNULL, stdout=DEVNULL, stderr=theirs, env=environ)
    os.close(theirs)
    shown = b""
    while b"0 of 200 pairs" not in shown:
        shown += os.read(ours, 10_000)
    os.close(ours)
    workers()
    assert process.wait(timeout=120) == 0
    assert len(pq.read_table(source.with_name("pairs.scored.parquet"))) == 200


def test_standard_error_may_be_closed(source: Path, shared_queue: Server, tiny_model: Path) -> None:
    words = shlex.join([f"{BIN}/score-file", str(source), *map(str, options(shared_queue, tiny_model))])
    assert subprocess.run(["sh", "-c", f"exec {words} 2>&-"], env=ENVIRON, check=False).returncode == 0
    assert len(pq.read_table(source.with_name("pairs.scored.parquet"))) == 200


def test_of_several_workers_the_one_that_proves_says_how_long(server: Server) -> None:
    """The other waits for the same proof."""
    for name, words in (("a", "proving m on cpu, once: about 20 s"), ("b", "proving m on cpu, once")):
        report = WorkerReport(device="cpu", started=1.0, beat=1.0, doing="proving", doing_words=words)
        announce_worker(server.client, name, report, 60)
    assert worker_doings(server.client, ["a", "b"]) == {"proving": "proving m on cpu, once: about 20 s"}


def test_the_output_says_how_it_was_made(source: Path, shared_queue: Server, tiny_model: Path) -> None:
    score_file(source, *options(shared_queue, tiny_model))
    metadata = pq.read_metadata(source.with_name("pairs.scored.parquet")).metadata
    assert metadata[b"rankmill.model"] == str(tiny_model).encode()
    assert metadata[b"rankmill.precision"] == b"fp32"
    assert metadata[b"rankmill.version"]
    assert b"rankmill.revision" in metadata


def test_all_columns_keep_their_types(tmp_path: Path, shared_queue: Server, tiny_model: Path) -> None:
    noon = dt.datetime(2026, 1, 1, 12)
    table = pa.table(
        {
            "query": pa.array(["q", "q", "r"]).dictionary_encode(),
            "passage": pa.array(["a", "b", "c"], pa.large_string()),
            "when": pa.array([noon, None, noon], pa.timestamp("us", tz="Europe/Berlin")),
            "price": pa.array([decimal.Decimal("1.23"), None, None], pa.decimal128(9, 2)),
            "nested": pa.array([{"a": [1, 2], "b": {"c": "x"}}, None, {"a": [], "b": None}]),
            "raw": pa.array([b"\x00\xff", None, b""], pa.large_binary()),
        },
        metadata={"about": "pairs"},
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert score_file(tmp_path / "a.parquet", *options(shared_queue, tiny_model)).code == 0
    scored, before = (pq.read_table(tmp_path / name) for name in ("a.scored.parquet", "a.parquet"))
    assert scored.drop_columns("score").equals(before)
    assert [scored.schema.field(name).type for name in table.column_names] == before.schema.types
    assert scored.schema.metadata[b"about"] == b"pairs"


def test_nothing_stays_behind_in_redis(source: Path, shared_queue: Server, tiny_model: Path) -> None:
    with nothing_left(shared_queue):
        score_file(source, *options(shared_queue, tiny_model))


def test_rows_without_a_score_are_listed(tmp_path: Path, shared_queue: Server, tiny_model: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(
        '{"query": "q", "passage": "p"}\n{"query": null, "passage": "p"}\n{"query": "q"}\n'
        '{"query": "q", "passage": "lone \\ud800 and \\u0000"}\n'
    )
    done = score_file(source, *options(shared_queue, tiny_model))
    assert done.code == 3
    assert "2 rows have no score" in done.out
    assert pq.read_table(tmp_path / "a.scored.parquet")["score"].is_null().to_pylist() == [
        False,
        True,
        True,
        False,
    ]
    errors = [
        json.loads(line) for line in (tmp_path / "a.scored.parquet.errors.jsonl").read_text().splitlines()
    ]
    (worker,) = queue_workers(shared_queue.client, "rankmill").scoring
    assert errors == [
        {"row": 1, "error": "query is null", "attempts": 1, "worker": worker},
        {"row": 2, "error": "passage is null", "attempts": 1, "worker": worker},
    ]
    again = score_file(source, *options(shared_queue, tiny_model), "--on-null", "fail", "--force")
    assert again.code == 2
    assert "row 1 (counted from 0) has a null query or passage" in again.err


def test_a_4_mb_passage_among_short_ones(tmp_path: Path, shared_queue: Server, tiny_model: Path) -> None:
    texts = ["short", "a moon " * 590_000, "short"]
    pq.write_table(pa.table({"query": ["q"] * 3, "passage": texts}), tmp_path / "a.parquet")
    assert score_file(tmp_path / "a.parquet", *options(shared_queue, tiny_model)).code == 0
    scored = pq.read_table(tmp_path / "a.scored.parquet")
    assert scored["passage"].to_pylist() == texts
    assert scored["score"].null_count == 0


def test_a_header_without_rows_makes_an_empty_output(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("query,passage,label\n")
    done = score_file(tmp_path / "a.csv")
    assert done.code == 0
    scored = pq.read_table(tmp_path / "a.scored.parquet")
    assert len(scored) == 0
    assert scored.schema.field("score").type == pa.float32()


def test_folders_of_the_user_with_names_like_ours_are_left_alone(tmp_path: Path, tiny_model: Path) -> None:
    for name in ("jobs", "workers", "producer", "rankmill", "configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not rankmill')")
    (tmp_path / "a.csv").write_text("query,passage\nq,p\n")
    done = score_file("a.csv", "--model", tiny_model, cwd=tmp_path)
    assert done.code == 0, done.err


def test_columns_and_output_can_be_named(
    tmp_path: Path, table: pa.Table, shared_queue: Server, tiny_model: Path
) -> None:
    pq.write_table(table.rename_columns(["score", "frage", "text"]).slice(0, 5), tmp_path / "a.parquet")
    names = ["--query-column", "frage", "--passage-column", "text", "-o", tmp_path / "b.parquet"]
    refused = score_file(tmp_path / "a.parquet", *options(shared_queue, tiny_model), *names)
    assert refused.code == 2
    assert "has a column 'score' already; name the new one with --score-column" in refused.err
    done = score_file(
        tmp_path / "a.parquet", *options(shared_queue, tiny_model), *names, "--score-column", "ce"
    )
    assert done.code == 0
    assert pq.read_schema(tmp_path / "b.parquet").names == ["score", "frage", "text", "ce"]


def test_several_files_make_one_output(
    tmp_path: Path, table: pa.Table, shared_queue: Server, tiny_model: Path
) -> None:
    inside = tmp_path / "parts"
    inside.mkdir()
    for start in (0, 100):
        pq.write_table(table.slice(start, 100), inside / f"{start:03}.parquet")
    refused = score_file(*inside.iterdir(), *options(shared_queue, tiny_model))
    assert (refused.code, "name it with -o" in refused.err) == (2, True)
    done = score_file(inside, *options(shared_queue, tiny_model), "--json")
    assert done.summary["output"] == str(tmp_path / "parts.scored.parquet")
    assert pq.read_table(tmp_path / "parts.scored.parquet")["id"].to_pylist() == list(range(200))


def test_an_existing_output_is_kept_without_force(
    source: Path, shared_queue: Server, tiny_model: Path
) -> None:
    target = source.with_name("pairs.scored.parquet")
    target.write_text("precious")
    refused = score_file(source, *options(shared_queue, tiny_model))
    assert (refused.code, target.read_text()) == (2, "precious")
    assert "replace it with --force" in refused.err
    assert score_file(source, *options(shared_queue, tiny_model), "--force").code == 0
    assert len(pq.read_table(target)) == 200


def test_the_environment_and_a_config_file_are_heeded(
    source: Path, shared_queue: Server, tiny_model: Path, tmp_path: Path
) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(f"model: {tiny_model}\nprecision: bf16\nactivation: identity\n")
    environ = {"REDIS_URL": shared_queue.url, "RANKMILL_PRECISION": "fp32"}
    done = score_file(source, "--config", config, "--json", environ=environ)
    assert (done.code, done.summary["precision"]) == (0, "fp32")
    logits = pq.read_table(source.with_name("pairs.scored.parquet"))["score"].to_numpy()
    score_file(source, "--config", config, "--activation", "sigmoid", "--force", environ=environ)
    scores = pq.read_table(source.with_name("pairs.scored.parquet"))["score"].to_numpy()
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), atol=1e-6)


def test_quiet_says_nothing_and_messages_go_to_stderr(
    source: Path, shared_queue: Server, tiny_model: Path
) -> None:
    done = score_file(source, *options(shared_queue, tiny_model), "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")


BAD_OPTIONS = {
    "no such input": (["none.parquet"], "none.parquet: no such file"),
    "no such column": (
        ["pairs.parquet", "--query-column", "q"],
        "no column 'q'; it has 'id', 'query', 'passage'",
    ),
    "wrong column type": (["pairs.parquet", "--query-column", "id"], "column 'id' holds int64, not text"),
    "no such folder": (["pairs.parquet", "-o", "none/out.parquet"], "none: no such directory"),
    "unknown format": (["pairs.parquet", "-o", "out.txt"], "cannot tell the format from the name"),
    "output is a folder": (["pairs.parquet", "-o", "dir.parquet"], "dir.parquet is a directory"),
    "bad precision": (["pairs.parquet", "--precision", "fp7"], "precision: "),
    "bad length": (["pairs.parquet", "--max-length", "2"], "max_length: "),
    "bad number": (["pairs.parquet", "--workers", "many"], "workers: "),
    "bad config": (["pairs.parquet", "--config", "bad.yaml"], "bad.yaml: unknown key 'speed'"),
    "nobody there": (
        ["pairs.parquet", "--redis", "redis://me:secret@127.0.0.1:1"],
        "no usable Redis at redis://me:***@127.0.0.1:1",
    ),
    "no such scheme": (
        ["pairs.parquet", "--redis", "localhost:6379"],
        "redis_url: localhost:6379 is not like redis://HOST:PORT/DB",
    ),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_wrong_usage_is_one_line_and_changes_nothing(name: str, source: Path) -> None:
    arguments, message = BAD_OPTIONS[name]
    (source.parent / "dir.parquet").mkdir()
    (source.parent / "bad.yaml").write_text("speed: 1\n")
    before = sorted(source.parent.iterdir())
    done = score_file(*arguments, cwd=source.parent)
    assert (done.code, done.out) == (1 if name == "nobody there" else 2, "")
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert sorted(source.parent.iterdir()) == before


def test_an_input_that_would_be_overwritten_is_refused(source: Path) -> None:
    done = score_file(source, "-o", source, "--force")
    assert (done.code, "is the input itself" in done.err) == (2, True)
    assert len(pq.read_table(source)) == 200
    part = source.parent / "in" / "out" / "part-00001-of-00001.csv"
    part.parent.mkdir(parents=True)
    part.write_text("query,passage\na,b\n")
    options = ["-o", part.parent, "--rows-per-part", "9", "--output-format", "csv", "--force"]
    done = score_file(source.parent / "in", *options)
    assert (done.code, "is the input itself" in done.err, part.exists()) == (2, True, True)


def test_a_command_that_cannot_run_leaves_the_parts_of_an_earlier_one(
    source: Path, table: pa.Table, shared_queue: Server, tiny_model: Path
) -> None:
    part = source.parent / "out" / "part-00001-of-00009.csv"
    part.parent.mkdir()
    part.write_bytes(b"of an earlier run")
    lists = source.with_name("lists.parquet")
    pq.write_table(table.append_column("tags", pa.array([[1]] * len(table))), lists)
    command = ["-o", part.parent, "--rows-per-part", "99", "--output-format", "csv", "--force"]
    command += options(shared_queue, tiny_model)
    for pairs, further, message in (
        (source, ["--query-column", "other"], "no column 'other'"),
        (lists, [], "CSV cannot hold column 'tags'"),
        (source, ["--max-length", "8000"], "max_length 8000 is more than the 128 positions"),
    ):
        done = score_file(pairs, *command, *further)
        assert (done.code, message in done.err, part.exists()) == (2, True, True)
    assert score_file(source, *command).code == 0
    assert sorted(path.name[:10] for path in part.parent.iterdir()) == [
        "part-00001",
        "part-00002",
        "part-00003",
    ]
    assert not part.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable(source: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    done = score_file(source, "-o", tmp_path / "locked" / "out.parquet")
    assert (done.code, "is not writable" in done.err) == (2, True)


def test_a_place_where_no_file_can_be_made(source: Path) -> None:
    done = score_file(source, "-o", "/proc/out.parquet")
    assert (done.code, "/proc" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("some/model-nobody-has", "use --model demo, or a local directory"),
        ("empty", "is not a model: there is no config.json in it"),
    ],
)
def test_a_model_that_is_none_is_one_line(
    model: str, message: str, source: Path, shared_queue: Server
) -> None:
    (source.parent / "empty").mkdir()
    with nothing_left(shared_queue):
        done = score_file(source, "--redis", shared_queue.url, "--model", model, cwd=source.parent)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert len(done.complaints) == 1
    assert not source.with_name("pairs.scored.parquet").exists()
