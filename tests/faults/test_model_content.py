"""All rows of an output are of one content of the model, whatever becomes of its directory."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.faults.kills import folder_of, stop
from rankmill import AsyncClient, Client
from rankmill.jobs.contract.errors import RunFailed
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.model_files import model_content
from rankmill.jobs.runtime.settings import load_settings
from rankmill.score.progress import Show
from rankmill.score.score_file import score_file as score_here
from tests.conftest import Server, StartWorker, score_file, start_command, wait_for
from tests.faults.test_refusals import odd
from tests.harness.models.tiny import make_bert, put_weights
from tests.workers.engine.test_engine import one_at_a_time

pytestmark = pytest.mark.own_precision

PAIRS = [("big cat", f"moon river {number}") for number in range(300)]


@pytest.fixture
def models(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Path, Path]:
    """A model's directory, a copy of what is in it, and what replaces it; a parameter: the weights' path."""
    old, new = (make_bert(tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new")))
    if place := getattr(request, "param", None):
        put_weights(old, place)
        put_weights(new, place)
    return shutil.copytree(old, tmp_path / "model"), old, new


@pytest.fixture
def client(server: Server, models: tuple[Path, Path, Path]) -> Client:
    options: dict[str, Any] = {
        "chunk_size": 10,
        "window": 2,
        "max_retries": 0,
        "precision": "fp32",
        "activation": "identity",
    }
    return Client(server.url, model=str(models[0]), backend="torch", **options)


def replace(model: Path, new: Path) -> None:
    """Replace the weights, as a deployment does."""
    shutil.copyfile(new / "model.safetensors", model / ".new")
    (model / ".new").replace(model / "model.safetensors")


def expected(model: Path) -> np.ndarray:
    return one_at_a_time(model, *map(list, zip(*PAIRS, strict=True)))


def test_a_directory_that_is_replaced_in_a_run_is_for_the_next_run(
    client: Client, workers: StartWorker, models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Shows: the model's files change in a run."""
    model, old, new = models
    odd(workers, "a")
    run = client.submit(PAIRS)
    parts = iter(run.tables())
    scores = [*next(parts).scores.to_pylist()]
    replace(model, new)
    odd(workers, "b")
    for part in parts:
        scores += part.scores.to_pylist()
    np.testing.assert_allclose(scores, expected(old), atol=1e-5)
    assert (set(run.stats.workers), run.stats.revision) == ({"a"}, model_content(old))
    both = f"has content {model_content(new):.12}, and the run has {model_content(old):.12}"
    assert both in (tmp_path / "worker.log").read_text()
    again = client.submit(PAIRS)
    np.testing.assert_allclose(again.scores(60), expected(new), atol=1e-5)
    assert again.stats.revision == model_content(new)


@pytest.mark.parametrize("models", [None, ".weights/one.safetensors"], indirect=True)
def test_hosts_with_other_files_at_the_same_path_do_not_mix(
    client: Client, server: Server, workers: StartWorker, models: tuple[Path, Path, Path]
) -> None:
    """Live runs, detached ones, and those of asyncio."""
    odd(workers, "a")
    odd(workers, "b", OTHER=str(models[2]))
    either = [expected(model) for model in models[1:]]

    async def by_asyncio() -> np.ndarray:
        settings = client.settings.model_dump(include={"model", "precision", "activation", "chunk_size"})
        async with AsyncClient(server.url, **settings) as other:
            return await other.score(PAIRS, timeout=60)

    for _ in range(2):
        run = client.submit(PAIRS)
        live = run.scores(60)
        (name,) = run.stats.workers
        np.testing.assert_allclose(live, either[name == "b"], atol=1e-5)
        for scores in (client.submit(PAIRS, detached=True).scores(60), asyncio.run(by_asyncio())):
            assert any(np.allclose(scores, each, atol=1e-5) for each in either)


def test_a_run_ends_with_both_digests_when_nobody_has_its_content(
    client: Client, server: Server, workers: StartWorker, models: tuple[Path, Path, Path]
) -> None:
    """Shows: the model's files change in a run."""
    model, old, new = models
    first = workers(worker_class="tests.harness.misbehaving.OddWorker", name="a", environ=QUICK)
    parts = iter(client.submit(PAIRS).tables())
    next(parts)
    first.kill()
    odd(workers, "b", OTHER=str(new), **QUICK)
    with pytest.raises(RunFailed) as failed:
        list(parts)
    assert f"{model} on worker host" in str(failed.value)
    both = f"has content {model_content(new):.12}, and the run has {model_content(old):.12}"
    assert both in str(failed.value)
    wait_for(lambda: not server.client.keys("rankmill:run:*"))


QUICK = {
    "RANKMILL_HEARTBEAT_SECONDS": "0.5", "RANKMILL_LEASE_SECONDS": "2", "RANKMILL_BACKEND": "torch",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}  # fmt: skip
"""A worker whose death is soon seen."""


def test_a_run_that_is_taken_up_again_stays_with_its_content(
    server: Server, workers: StartWorker, models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    model, old, new = models
    pairs = pa.table({"query": ["big cat"] * 3000, "passage": [f"moon {number}" for number in range(3000)]})
    pq.write_table(pairs, tmp_path / "a.parquet")
    output = tmp_path / "a.scored.parquet"
    command = [tmp_path / "a.parquet", "--redis", server.url, "--model", model, "--chunk-size", 16]
    first = workers(worker_class="tests.harness.misbehaving.OddWorker", name="a", environ=QUICK)
    process = start_command("score-file", *command, environ={"RANKMILL_WINDOW": "4"})
    assert stop(process, output, 10, signal.SIGKILL)
    assert folder_of(output).exists()
    server.client.flushall()
    first.kill()
    with sqlite3.connect(folder_of(output) / "journal.db") as journal:
        journal.execute("DELETE FROM chunks WHERE chunk = 0")  # so no row of the output is ready
    journal.close()
    odd(workers, "b", OTHER=str(new), **QUICK)
    again = score_file(*command)
    both = f"has content {model_content(new):.12}, and the run has {model_content(old):.12}"
    assert again.code == 1
    assert both in again.err
    assert "scored rows are kept in" in again.err
    odd(workers, "c")
    done = score_file(*command)
    assert done.code == 0, done.err
    assert pq.read_metadata(output).metadata[b"rankmill.revision"].decode() == model_content(old)
    replace(model, new)
    refused = score_file(*command, "--reuse", output, "-o", tmp_path / "b.parquet")
    assert (refused.code, "they are of another revision" in refused.err) == (2, True), refused.err


class Replacing:
    """A view of the progress that replaces the model when the first rows are done."""

    def __init__(self, model: Path, new: Path) -> None:
        self._left = [(model, new)]

    @contextmanager
    def __call__(self, total: int) -> Iterator[Show]:
        yield self._show

    def _show(self, progress: Progress, workers: int, doing: str) -> None:
        if self._left and progress.rows:
            replace(*self._left.pop())


@pytest.fixture
def request_of_pairs(tmp_path: Path) -> FileRequest:
    pairs = pa.table({"query": [query for query, _ in PAIRS], "passage": [passage for _, passage in PAIRS]})
    pq.write_table(pairs, tmp_path / "a.parquet")
    output = str(tmp_path / "out.parquet")
    return FileRequest(inputs=(str(tmp_path / "a.parquet"),), output=output, on_null="fail")


def test_the_output_says_which_content_it_is_of(
    server: Server,
    workers: StartWorker,
    models: tuple[Path, Path, Path],
    request_of_pairs: FileRequest,
    tmp_path: Path,
) -> None:
    model, old, new = models
    odd(workers, "a")
    flags = {"redis_url": server.url, "model": str(model), "precision": "fp32", "chunk_size": 10, "window": 2}
    settings = load_settings({**flags, "activation": "identity"})
    score_here(request_of_pairs, settings, view=Replacing(model, new))
    content = pq.read_metadata(tmp_path / "out.parquet").metadata[b"rankmill.revision"].decode()
    assert content == model_content(old)
    scores = pq.read_table(tmp_path / "out.parquet")["score"].to_pylist()
    np.testing.assert_allclose(scores, expected(old), atol=1e-5)
