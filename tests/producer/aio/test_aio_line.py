"""Many tasks share a connection and a reader: each gets its own replies and results, and loses none."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import redis
from rq.job import Job

from rankmill import AsyncClient, Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.results import ChunkScores
from rankmill.jobs.protocol.runs import RunStore
from rankmill.producer.client.aio import bridge
from rankmill.producer.client.aio.connection import LoopRedis, Streams
from tests.conftest import Server
from tests.harness.waiting import waiting_jobs
from tests.producer.aio.test_aio import NOBODY, in_a_loop, runs_left
from tests.producer.runs.test_results import STATS
from tests.producer.test_client import PAIRS


def test_tasks_that_share_a_connection_get_their_own_replies(shared_server: Server) -> None:
    """Also if others are cancelled, or have a command that the server refuses or that cannot be sent."""

    async def main() -> None:
        client: Any = LoopRedis(shared_server.url, 60)

        def count(key: str, times: int) -> list[Any]:
            with client.pipeline() as pipe:
                for _ in range(times):
                    pipe.incr(key)
                pipe.expire(key, 60)
                return [*pipe.execute(), client.get(key)]

        def fail() -> None:
            with client.pipeline() as pipe:
                pipe.set("line:text", "text", ex=60)
                pipe.lpush("line:text", 1)
                pipe.execute()

        tasks = [asyncio.create_task(bridge.run(count, f"line:{at}", at)) for at in range(1, 150)]
        refused = [asyncio.create_task(bridge.run(fail)) for _ in range(5)]
        unsendable = asyncio.create_task(bridge.run(client.get, "line:\ud800"))
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for at, reply in enumerate(found, 1):
            if at % 3 == 1:
                assert isinstance(reply, asyncio.CancelledError)
            else:
                assert reply == [*range(1, at + 1), True, str(at).encode()]
        for error in await asyncio.gather(*refused, return_exceptions=True):
            assert isinstance(error, redis.ResponseError)
            assert "WRONGTYPE" in str(error)
        with pytest.raises(UnicodeEncodeError):
            await unsendable
        await client.line.close()
        await client.loop_client.aclose()
        for key in shared_server.client.scan_iter("line:*"):
            shared_server.client.delete(key)

    asyncio.run(main())


def test_tasks_that_wait_for_the_same_run_each_get_its_results(server: Server) -> None:
    """Also if they have read up to different entries, as tasks that collect a detached run may have."""

    async def main() -> None:
        client: Any = LoopRedis(server.url, 60)
        server.client.xadd("run", {"chunk": 0}, id="1")

        def read(after: str) -> list[Any]:
            return [
                entry.decode()
                for _, found in client.xread({"run": after}, block=30_000)
                for entry, _ in found
            ]

        tasks = [asyncio.create_task(bridge.run(read, after)) for after in ("1", "1", "0")]
        assert await tasks[2] == ["1-0"]
        server.client.xadd("run", {"chunk": 1}, id="2")
        assert await asyncio.gather(*tasks[:2]) == [["2-0"], ["2-0"]]
        await client.streams.close()
        await client.loop_client.aclose()

    asyncio.run(main())


def test_a_request_is_stored_with_one_transaction_and_deleted_without(server: Server) -> None:
    """Nothing else is asked of the server before its result is waited for."""

    def transactions() -> int:
        return int(server.client.info("commandstats").get("cmdstat_exec", {"calls": 0})["calls"])

    client = Client(server.url, **NOBODY)
    before = transactions()
    run = client.submit(PAIRS[:20])
    assert transactions() == before + 1
    assert client.store.load(run.id)
    assert len(waiting_jobs(server.client, "nobody-listens")) == 1
    run.cancel()
    assert transactions() == before + 1
    assert not runs_left(server)


def test_results_that_the_shared_reader_has_not_brought_yet_are_not_lost(
    shared_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sweep for lost chunks reads the stream itself: a job that is gone may have ended just now."""

    async def nothing(self: Streams, stream: str, after: str, seconds: float) -> list[Any]:
        await asyncio.sleep(0)
        return []

    monkeypatch.setattr(Streams, "read", nothing)
    monkeypatch.setattr("rankmill.producer.collect.driver._SWEEP_SECONDS", 0)
    store = RunStore(shared_server.client)

    async def work(client: AsyncClient) -> None:
        run = await client.submit(PAIRS[:3])
        job = keys.job_id(run.id, 0)
        with shared_server.client.pipeline() as pipe:  # as a worker ends a job
            pipe.lrem(keys.waiting("nobody-listens", run.id), 1, job)
            pipe.delete(Job.key_for(job))
            result = ChunkScores(0, pa.array([1, 2, 3], pa.float32()), pa.nulls(3, pa.string()), STATS)
            store.add_result(pipe, run.id, result, 60)
            pipe.execute()
        np.testing.assert_array_equal(await run.scores(timeout=60), [1, 2, 3])
        assert run.stats.retries == 0

    in_a_loop(shared_server.url, work, **NOBODY)
    assert "lost" not in caplog.text
    assert not waiting_jobs(shared_server.client, "nobody-listens")
