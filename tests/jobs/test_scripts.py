"""Lua scripts: each file of the package is one that is run, says what it does, and runs on a real server."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from pathlib import Path

import pytest

import rankmill.extensions.gateway.keys
import rankmill.extensions.runners
import rankmill.jobs.protocol
import rankmill.workers.rq
from rankmill.jobs.protocol.leases import UNRENEWED_SECONDS
from rankmill.jobs.protocol.script import Script
from rankmill.producer.client.aio.bridge import run
from rankmill.producer.client.aio.connection import LoopRedis
from tests.conftest import Server

ROOT = Path(__file__).resolve().parents[2] / "rankmill"
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.lua"))
HOLD = "jobs/protocol/lua/hold.lua"


def scripts() -> dict[str, Script]:
    """All scripts, by their files."""
    packages = (
        rankmill.extensions.gateway.keys,
        rankmill.extensions.runners,
        rankmill.jobs.protocol,
        rankmill.workers.rq,
    )
    modules = [
        importlib.import_module(each.name)
        for package in packages
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    found = [each for module in modules for each in vars(module).values() if isinstance(each, Script)]
    return {each.path: each for each in found}


def test_each_file_is_a_script_that_is_run() -> None:
    assert sorted(scripts()) == FILES


@pytest.mark.parametrize("path", FILES)
def test_a_script_says_what_it_takes_and_is_one_that_a_server_takes(server: Server, path: str) -> None:
    script = scripts()[path]
    said = " ".join(
        line.removeprefix("-- ") for line in (ROOT / path).read_text().splitlines() if line.startswith("-- ")
    )
    is_for_others = any(script in each.uses for each in scripts().values())
    assert is_for_others or all(word in said for word in ("KEYS", "ARGV", "Returns"))
    assert server.client.script_load(script.text)


def test_a_script_s_text_is_sent_once(server: Server) -> None:
    script = Script(HOLD)

    def calls(command: str) -> int:
        stats = server.client.info("commandstats")
        return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])

    for number in range(3):
        script.run(server.client, ["held"], f"holder {number}", 60, 0)
    assert (calls("eval"), calls("evalsha")) == (1, 3)
    server.client.script_flush()  # as after a restart
    script.run(server.client, ["held"], "holder 3", 60, 0)
    assert server.client.zcard("held") == 4
    with server.client.pipeline() as pipe:
        script.run(pipe, ["held"], "holder 4", 60, 0)
        pipe.execute()
    assert server.client.zcard("held") == 5


def test_a_script_runs_in_a_task(server: Server) -> None:
    async def hold_twice() -> None:
        client = LoopRedis(server.url, 10)
        try:
            for number in range(2):
                await run(Script(HOLD).run, client, ["held"], f"holder {number}", 60, 0)
        finally:
            await client.loop_client.aclose()

    asyncio.run(hold_twice())
    assert server.client.zcard("held") == 2


def test_leases_are_bound_by_what_live_processes_leave_unrenewed() -> None:
    assert f"math.max(length, {UNRENEWED_SECONDS})" in scripts()["jobs/protocol/lua/bound.lua"].text
