"""A server that takes no large values breaks the connection: the size is said, and nobody waits for it."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankmill import AsyncClient, Client
from rankmill.jobs.contract.errors import RunFailed, ValueRefused
from tests.conftest import Server, StartWorker, score_file
from tests.harness.models.tiny import make_bert
from tests.harness.tools import free_port

SAID = r"takes no value of \d,[\d,]+ bytes: raise its limit \(proto-max-bulk-len of Redis\), or set a smaller"
LETTERS = [chr(number) for number in range(0x4E00, 0x9000)]


@pytest.fixture
def strict(server: Server) -> Server:
    """A server that takes values of up to 1 MiB, the least that can be set."""
    server.client.config_set("proto-max-bulk-len", "1mb")
    return server


def texts(rows: int) -> list[str]:
    """Texts that together are larger than 1 MiB, also compressed."""
    chance = random.Random(1)
    return ["".join(chance.choices(LETTERS, k=40_000)) for _ in range(rows)]


@pytest.mark.parametrize("over", ["a socket", "TCP"])
def test_the_size_of_a_value_that_is_refused_is_said(strict: Server, over: str) -> None:
    """It was waited for as if the server were away, for ten minutes."""
    pairs, url = [("a", text) for text in texts(40)], strict.url
    if over == "TCP":
        port = free_port()
        strict.client.config_set("port", port)
        url = f"redis://127.0.0.1:{port}"
    with Client(url, model="demo", chunk_size=40) as client, pytest.raises(ValueRefused, match=SAID):
        client.score(pairs, timeout=200)

    async def ask() -> None:
        async with AsyncClient(url, model="demo", chunk_size=40) as client:
            await client.score(pairs, timeout=200)

    with pytest.raises(ValueRefused, match=SAID):
        asyncio.run(ask())


def test_smaller_chunks_are_a_way_out(
    tmp_path: Path, strict: Server, workers: StartWorker, tiny_model: Path
) -> None:
    """Shows: the server takes no value as large as a chunk."""
    pq.write_table(pa.table({"query": ["a"] * 40, "passage": texts(40)}), tmp_path / "in.parquet")
    command = ["in.parquet", "--model", tiny_model, "--redis", strict.url, "-o", "out.parquet"]
    workers()
    done = score_file(*command, "--chunk-size", 40, cwd=tmp_path)
    assert done.code == 1
    assert re.search(SAID, done.complaints[0]), done.err
    again = score_file(*command, "--chunk-size", 4, cwd=tmp_path)
    assert again.code == 0, again.err
    assert len(pq.read_table(tmp_path / "out.parquet")) == 40


def test_a_result_that_is_refused_ends_its_run(tmp_path: Path, strict: Server, workers: StartWorker) -> None:
    """The worker goes on, and takes the next run."""
    model = make_bert(tmp_path / "model", labels=3000)
    pairs = [("big cat", f"moon river {number}") for number in range(128)]
    workers()
    with Client(strict.url, model=str(model), all_labels=True, chunk_size=128) as client:
        with pytest.raises(RunFailed, match=SAID):
            client.score(pairs, timeout=200)
        assert client.score(pairs[:4], timeout=200).shape == (4, 3000)


def test_a_result_that_is_too_large_for_a_payload_ends_its_run(
    tmp_path: Path, server: Server, workers: StartWorker
) -> None:
    """The worker ended, and so did each one that tried the chunk after it."""
    model = make_bert(tmp_path / "model", labels=1_100)
    pairs = [("big cat", f"moon river {number}") for number in range(16_000)]
    workers()
    with Client(server.url, model=str(model), all_labels=True, chunk_size=16_000) as client:
        with pytest.raises(RunFailed, match=r"over the limit of 67,108,864: set a smaller chunk_size"):
            client.score(pairs, timeout=200)
        assert client.score(pairs[:4], timeout=200).shape == (4, 1_100)
