"""What is promised of scores is in the output; --deterministic promises bits, and --verify compares them."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankmill import Client
from rankmill.jobs.contract.errors import RunFailed
from tests.conftest import Server, score_file
from tests.harness.environ import QUICK_LEASE
from tests.harness.models.tiny import make_bert
from tests.harness.processes import StartWorker

ROWS = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("model") / "a", hidden=128)


@pytest.fixture(scope="module")
def pairs() -> pa.Table:
    texts = [f"{'moon river cat ' * (n % 11)}{n}" for n in range(ROWS)]
    return pa.table({"query": [f"q {n % 3}" for n in range(ROWS)], "passage": texts})


def test_bits_are_equal_over_orders_chunks_workers_and_a_kill(
    server: Server, workers: StartWorker, model: Path, pairs: pa.Table
) -> None:
    same = {"RANKMILL_BACKEND": "torch"}  # what is fastest may differ with the number of threads
    first = workers(environ={**same, "RANKMILL_THREADS": "1"})
    workers(environ={**same, "RANKMILL_THREADS": "3", "RANKMILL_TOKEN_BUDGET": "256"})
    chance, found = np.random.default_rng(0), []
    names, kinds = set[str](), set[str]()
    spec: dict[str, Any] = {"model": str(model), "precision": "fp32", "deterministic": True}
    with Client(server.url) as client:
        for number in range(10):
            order = chance.permutation(ROWS)
            spec["chunk_size"] = (7, 40, ROWS)[number % 3]
            run = client.submit(pairs.take(order), **spec)
            if number == 6:
                first.kill()
            scores = run.scores(timeout=100)
            bits = np.empty(ROWS, np.uint32)
            bits[order] = np.asarray(scores).view(np.uint32)
            found.append(bits)
            names |= run.stats.workers.keys()
            kinds.add(run.stats.contract()["kind"])
    assert (len(names), len(kinds)) == (2, 1)
    assert all((bits == found[0]).all() for bits in found)


def test_a_worker_of_another_kind_leaves_the_run(
    server: Server, workers: StartWorker, model: Path, pairs: pa.Table
) -> None:
    first = workers()
    options: dict[str, Any] = {"model": str(model), "deterministic": True, "chunk_size": 20}
    with Client(server.url, window=2) as client:
        run = client.submit(pairs, **options)
        tables = run.tables()
        next(tables)
        first.send_signal(signal.SIGTERM)
        first.wait(timeout=60)
        workers(environ={"MKL_CBWR": "COMPATIBLE", **QUICK_LEASE})
        with pytest.raises(
            RunFailed, match=r"the run is deterministic, and its bits are those of .*MKL_CBWR"
        ):
            list(tables)
        assert len(client.submit(pairs, **options).scores(timeout=100)) == ROWS


def test_the_output_says_what_a_large_model_was_compared_with(
    server: Server, workers: StartWorker, model: Path, pairs: pa.Table, tmp_path: Path
) -> None:
    source, output = tmp_path / "a.parquet", tmp_path / "a.scored.parquet"
    pq.write_table(pairs, source)

    def told() -> tuple[Any, Any, Any]:
        flags = ("--redis", server.url, "--model", model, "--json", "--restart", "--force")
        done = score_file(source, *flags)
        assert done.code == 0, done.err
        with Client(server.url, model=str(model)) as client:
            run = client.submit([("moon", "river")])
            run.wait(timeout=100)
        metadata = pq.read_metadata(output).metadata.get(b"rankmill.reference")
        return done.summary["reference"], metadata, run.stats.contract().get("reference")

    usual = workers()
    assert told() == (None, None, None)
    usual.terminate()
    usual.wait(timeout=60)
    workers(
        worker_class="tests.harness.misbehaving.LargeModelWorker",
        environ={"RANKMILL_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert told() == ("own", b"own", "own")


@pytest.fixture(scope="module")
def scored(
    shared_queue: Server, model: Path, pairs: pa.Table, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("scored") / "a.parquet"
    pq.write_table(pairs, path)
    done = score_file(
        path,
        "--redis",
        shared_queue.url,
        "--model",
        model,
        "--precision",
        "fp32",
        "--deterministic",
        "--json",
    )
    assert done.code == 0, done.err
    assert done.summary["deterministic"]
    assert done.summary["bound"] > 0
    assert done.summary["kind"].startswith(done.summary["backend"])
    return path.with_name("a.scored.parquet")


def changed(path: Path, to: Path, row: int | None = None, by: float = 0.0, **about: str | None) -> Path:
    """A copy with another score in a row, by its lowest bit and `by`, and other metadata."""
    table = pq.read_table(path)
    scores = table["score"].to_numpy().copy()
    if row is not None:
        scores.view(np.uint32)[row] ^= 1
        scores[row] += by
    table = table.set_column(table.schema.get_field_index("score"), "score", pa.array(scores))
    kept = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    kept |= {key.decode(): value.decode() for key, value in pq.read_metadata(path).metadata.items()}
    kept |= {f"rankmill.{name}": value for name, value in about.items()}
    known = {name: value for name, value in kept.items() if value is not None and name != "ARROW:schema"}
    pq.write_table(table.replace_schema_metadata(known), to)
    return to


def test_verify_compares_bits(shared_queue: Server, scored: Path, tmp_path: Path) -> None:
    done = score_file("--verify", scored, "--redis", shared_queue.url, "--sample", 100)
    assert done.code == 0, done.err
    assert "100 of 240 rows were scored again, and all have the same bits" in done.out
    wrong = changed(scored, tmp_path / "wrong.parquet", row=17)
    done = score_file("--verify", wrong, "--redis", shared_queue.url, "--json")
    assert done.code == 1
    assert (done.summary["differ"], done.summary["first"], done.summary["sampled"]) == (1, 17, 240)


def test_verify_holds_other_files_to_their_bound(shared_queue: Server, scored: Path, tmp_path: Path) -> None:
    usual: dict[str, Any] = {"kind": None, "deterministic": None}
    near = changed(scored, tmp_path / "near.parquet", row=17, bound="1e-4", **usual)
    done = score_file("--verify", near, "--redis", shared_queue.url)
    assert done.code == 0, done.err
    assert "the same score to 0.0002, as was proven" in done.out
    far = changed(scored, tmp_path / "far.parquet", row=17, by=0.01, bound="1e-4", **usual)
    done = score_file("--verify", far, "--redis", shared_queue.url)
    assert done.code == 1
    assert "1 do not have the same score to 0.0002, as was proven" in done.out
    assert "the first is row 17" in done.out


def test_verify_names_what_it_cannot_compare(
    shared_queue: Server, scored: Path, model: Path, tmp_path: Path
) -> None:
    def why(*options: object) -> str:
        done = score_file("--redis", shared_queue.url, *options)
        assert done.code == 2, done.out
        return " ".join(re.sub("[│╭╮╰╯─]", " ", done.err).split())

    assert f"it was scored with model {model}, not demo" in why("--verify", scored, "--model", "demo")
    assert "scored with precision fp32, not bf16" in why("--verify", scored, "--precision", "bf16")
    template = tmp_path / "prompt.jinja"
    template.write_text("{{ query }} {{ passage }}")
    options: dict[str, Any] = {"max_length": "64", "prompt_template": template.read_text()}
    other = changed(scored, tmp_path / "options.parquet", **options, bound=None, kind=None)
    given = ("--prompt-template", template, "--max-length")
    assert "scored with max_length 64, not 32" in why("--verify", other, *given, 32)
    assert "no bound of its scores was proven" in why("--verify", other, *given, 64)
    neither = changed(scored, tmp_path / "neither.parquet", kind=None, deterministic=None, bound=None)
    assert "no bound of its scores was proven" in why("--verify", neither)
    other = changed(scored, tmp_path / "other.parquet", kind="a toaster")
    assert "its scores have the bits of a toaster, and the workers here" in why("--verify", other)
    assert "--sample has no effect without --verify" in why(scored, "--sample", 3)
    assert "INPUT has no effect with --verify" in why(scored, "--verify", scored)
    assert "--model has no effect with --verify" in why("--verify", scored, "--model", "a", "--model", "b")
    moved = shutil.copytree(model, tmp_path / "model")
    named = changed(scored, tmp_path / "named.parquet", model=str(moved))
    (moved / "config.json").write_text((moved / "config.json").read_text() + "\n")
    assert "it was scored with other files of model" in why("--verify", named)


def test_scores_of_another_kind_are_not_reused(shared_queue: Server, scored: Path, tmp_path: Path) -> None:
    source = tmp_path / "more.parquet"
    pq.write_table(pa.table({"query": ["new"], "passage": ["new"]}), source)
    model = pq.read_metadata(scored).metadata[b"rankmill.model"].decode()
    options = ("--redis", shared_queue.url, "--model", model, "--force")
    done = score_file(source, *options, "--deterministic", "--reuse", scored)
    assert done.code == 0, done.err
    kinds = {
        pq.read_metadata(each).metadata[b"rankmill.kind"]
        for each in (scored, tmp_path / "more.scored.parquet")
    }
    assert len(kinds) == 1
    other = changed(scored, tmp_path / "other.parquet", kind="a toaster")
    done = score_file(source, *options, "--deterministic", "--reuse", other)
    assert done.code == 2
    assert "have the bits of a toaster" in done.err
    done = score_file(source, *options, "--reuse", scored)
    assert done.code == 2
    assert "another deterministic: True, not none" in done.err
