"""The simulated server answers as a real Valkey does, and leaves the same data.

What rankmill sends is recorded (`tests.simulation.recording`) and played in a drawn order against both.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from rankmill.extensions.runners import store
from rankmill.jobs.contract import keys
from rankmill.jobs.protocol import leases, ordered_queue, runs
from rankmill.jobs.protocol.script import Script
from rankmill.jobs.system import system
from rankmill.workers.rq import job
from tests.conftest import Server, serve, wait_for
from tests.simulation.recording import shape_of
from tests.simulation.server import Server as SimulatedServer
from tests.simulation.world import EPOCH, World, _current, living_in

ROOT = Path(__file__).resolve().parents[2]
Commands = list[list[bytes]]

_STREAM_ID = re.compile(rb"\d{13}-\d+")
_TIME = re.compile(rb"18000\d{5}(\.\d+)?")
_SECONDS = 3.0
"""By how much times may differ, beside the longest time between the servers' replies to the same: one carries
it out after the other.
"""


class Player:
    """Sends the same to two servers."""

    def __init__(self, simulated: redis.Redis, real: redis.Redis, seed: int) -> None:
        self.dice = random.Random(seed)
        clients = simulated, real
        self.connections: tuple[Any, ...] = tuple(each.connection_pool.get_connection() for each in clients)
        self.ids: set[tuple[bytes, ...]] = set()
        """Ids that both have given to one entry of a stream."""
        self.sent_ids: list[tuple[bytes, ...]] = []
        """Those to send: no other entry has either. Ids are times: two streams may give the same one."""
        self.lag = 0.0
        """The longest time in seconds between the servers' replies to the same."""

    def play(self, commands: Commands) -> None:
        """Send what is sent at once, and compare the replies."""
        now = time.time()
        commands = [[self._shifted(word, now) for word in words] for words in commands]
        commands = [self._impatient(words) for words in commands]
        chosen = self.dice.choice(self.sent_ids) if self.sent_ids else None
        replies, began = [], time.monotonic()
        for number, connection in enumerate(self.connections):
            sent = [
                [chosen[number] if chosen and _STREAM_ID.fullmatch(word) else word for word in words]
                for words in commands
            ]
            connection.send_packed_command(connection.pack_commands(sent))
            replies.append([self._read(connection) for _ in sent])
        self.lag = max(self.lag, time.monotonic() - began)
        told = "\n".join(repr(words)[:400] for words in commands)
        for words, ours, real in zip(commands, *replies, strict=True):
            if words[0] == b"EXEC" and isinstance(ours, list) and isinstance(real, list):
                assert len(ours) == len(real), told
                for inner, mine, its in zip(commands[1:-1], ours, real, strict=True):
                    self._compare(inner, mine, its, told)
            else:
                self._compare(words, ours, real, told)

    def _read(self, connection: Any) -> Any:
        try:
            return connection.read_response()
        except redis.ResponseError as error:
            return error

    def _compare(self, words: list[bytes], ours: Any, real: Any, told: str) -> None:
        if (
            words[0] == b"XADD"
            and isinstance(ours, bytes)
            and isinstance(real, bytes)
            and b"QUEUED" not in {ours, real}
        ):
            self._remember(ours, real)
            return
        if words[0] == b"TIME":
            ours, real = ours[0], real[0]
        if words[0] in {b"SMEMBERS", b"KEYS"}:
            ours, real = sorted(ours), sorted(real)
        if words[0] == b"SCAN":  # all at once: there are few keys
            ours, real = [ours[0], sorted(ours[1])], [real[0], sorted(real[1])]
        scale = 1000 if words[0] == b"PTTL" else 1
        same = self.alike(ours, real, scale if words[0] in {b"TTL", b"PTTL"} else 0)
        assert same, f"{words[0].decode()}: {ours!r:.500}, and really {real!r:.500}, after\n{told}"

    def _remember(self, ours: bytes, real: bytes) -> None:
        same = {each for each in self.ids if each[0] == ours or each[1] == real}
        self.ids.add((ours, real))
        if same:
            self.sent_ids = [each for each in self.sent_ids if each not in same]
        else:
            self.sent_ids.append((ours, real))

    def alike(self, ours: Any, real: Any, scale: float = 0) -> bool:
        """Whether replies are the same, but for times, ids of entries, and the texts of errors."""
        if isinstance(ours, Exception) or isinstance(real, Exception):
            return _kind(ours) == _kind(real)
        if isinstance(ours, list | tuple) and isinstance(real, list | tuple):
            return len(ours) == len(real) and all(map(self.alike, ours, real))
        if isinstance(ours, dict) and isinstance(real, dict):
            return ours.keys() == real.keys() and all(
                self.alike(value, real[key], scale) for key, value in ours.items()
            )
        if isinstance(ours, set) or isinstance(real, set):
            known = {mine: its for mine, its in self.ids if mine in ours and its in real}
            return {known.get(each, each) for each in ours} == set(real)
        first, second = _number(ours), _number(real)
        if first is not None and second is not None:
            return math.isclose(first, second, abs_tol=max(scale, first > 1e9) * (_SECONDS + self.lag))
        return ours == real or (ours, real) in self.ids

    def _shifted(self, word: bytes, now: float) -> bytes:
        """Times near that of the recording are times near now."""
        if not _TIME.fullmatch(word):
            return word
        return f"{now - 30 + (float(word) - EPOCH) % 60:.3f}".encode()

    def _impatient(self, words: list[bytes]) -> list[bytes]:
        if words[0] in {b"BLMOVE", b"BLPOP"}:
            return [*words[:-1], b"0.01"]
        if b"BLOCK" in words:
            place = words.index(b"BLOCK") + 1
            return [*words[:place], b"5", *words[place + 1 :]]
        return words

    def compare_data(self) -> None:
        """Compare all keys, with their values and expiries."""
        found, began = [], time.monotonic()
        for connection in self.connections:
            data = {}
            names = {*self._ask(connection, b"KEYS", b"*")}
            for key in sorted(names - {keys.probe().encode()}):  # the probe lives for a millisecond
                kind = self._ask(connection, b"TYPE", key)
                read = {
                    b"string": (b"GET", key),
                    b"list": (b"LRANGE", key, b"0", b"-1"),
                    b"set": (b"SMEMBERS", key),
                    b"hash": (b"HGETALL", key),
                    b"zset": (b"ZRANGE", key, b"0", b"-1", b"WITHSCORES"),
                    b"stream": (b"XRANGE", key, b"-", b"+"),
                }[kind]
                value = self._ask(connection, *read)
                if kind == b"zset":
                    value = dict(value)
                data[key] = kind, set(value) if kind == b"set" else value, self._ask(connection, b"TTL", key)
            found.append(data)
        ours, real = found
        self.lag = max(self.lag, time.monotonic() - began)
        assert ours.keys() == real.keys()
        for key, (kind, value, ttl) in ours.items():
            its_kind, its_value, its_ttl = real[key]
            assert kind == its_kind, key
            assert self.alike(value, its_value), f"{key!r}: {value!r:.500}, and really {its_value!r:.500}"
            assert (ttl < 0) == (its_ttl < 0), key
            assert abs(ttl - its_ttl) <= _SECONDS + self.lag, key

    def _ask(self, connection: Any, *words: bytes) -> Any:
        connection.send_packed_command(connection.pack_commands([words]))
        return connection.read_response()


def _kind(reply: Any) -> tuple[str, str]:
    """An error's type, as redis-py has it, and its code."""
    code = getattr(reply, "status_code", None) or str(reply).partition(" ")[0]
    return type(reply).__name__, code if code.isupper() else ""


def _number(reply: Any) -> float | None:
    try:
        return float(reply) if isinstance(reply, bytes | int | float) else None
    except ValueError:
        return None


def recorded(first: int, seeds: int) -> list[list[Commands]]:
    """What simulated clusters send, by its shape."""
    command = [sys.executable, "-m", "tests.simulation.recording", str(first), str(seeds)]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    said = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=True).stdout
    shapes: dict[tuple[str, ...], list[Commands]] = {}
    for texts in json.loads(said):
        commands = [[word.encode("latin-1") for word in words] for words in texts]
        shapes.setdefault(shape_of(commands), []).append(commands)
    return list(shapes.values())


@pytest.fixture
def valkey() -> Iterator[Server]:
    """A server with nothing in it."""
    yield from serve()


def compare(valkey: Server, shapes: list[list[Commands]], seed: int, commands: int) -> None:
    """Play commands in the order of a seed against both servers."""
    world = World(seed)
    world.redis = SimulatedServer(world)
    _current.append(world)
    try:
        player = Player(world.redis.client(), valkey.client, seed)
        began = time.monotonic()
        for number in range(commands):
            world.now = time.monotonic() - began  # expiries of the real server go on, too
            player.play(player.dice.choice(player.dice.choice(shapes)))
            if number % 100 == 99:
                player.compare_data()
    finally:
        _current.remove(world)
        world.unpatch()  # else other tests of this process would have fakeredis as a world has it
        valkey.client.flushall()


def all_scripts() -> set[bytes]:
    """The scripts of the protocol that are run by themselves."""
    modules = (leases, ordered_queue, runs, store, job)
    found = {each for module in modules for each in vars(module).values() if isinstance(each, Script)}
    used = {each for script in found for each in script.uses}
    return {each.text.encode() for each in found - used}


def test_the_simulated_server_is_like_a_real_one(valkey: Server) -> None:
    shapes = recorded(5, 2)
    played = {words[1] for shape in shapes for commands in shape for words in commands if words[0] == b"EVAL"}
    missing = all_scripts() - played
    assert not missing, f"these scripts are not recorded: {missing}"
    compare(valkey, shapes, seed=1, commands=600)


@pytest.mark.long
def test_the_simulated_server_is_like_a_real_one_for_long(valkey: Server) -> None:
    shapes = recorded(1, 40)
    for seed in range(2, 6):
        compare(valkey, shapes, seed, commands=2_000)


def _push(client: Any) -> None:
    client.rpush("list", "a", "b")


def _push_in_a_transaction(client: Any) -> None:
    with client.pipeline() as pipe:
        pipe.rpush("list", "a")
        pipe.lpop("list")  # whoever waits is served when the transaction is over
        pipe.rpush("list", "b")
        pipe.execute()


def _push_by_a_script(client: Any) -> None:
    client.eval("redis.call('RPUSH', KEYS[1], 'a'); redis.call('DEL', KEYS[1])", 1, "list")
    client.eval("redis.call('RPUSH', KEYS[1], 'a', 'b', 'c')", 1, "list")


def _add(client: Any) -> None:
    client.xadd("stream", {"a": "b"}, id="1-1")


WAITS: tuple[Callable[[Any], Any], ...] = (
    lambda client: client.blmove("list", "other", 1, "LEFT", "RIGHT"),
    lambda client: client.blpop(["absent", "list"], 1),
    lambda client: client.xread({"stream": "0"}, block=1000),
    lambda client: client.blpop(["list"], 1),
)


@pytest.mark.parametrize("change", [_push, _push_in_a_transaction, _push_by_a_script, _add])
def test_who_waits_is_served_as_by_a_real_one(valkey: Server, change: Callable[[Any], None]) -> None:
    with ThreadPoolExecutor(len(WAITS)) as threads:
        waiting = []
        for number, wait in enumerate(WAITS, 1):
            waiting.append(threads.submit(wait, valkey.client))
            wait_for(lambda: valkey.client.info("clients")["blocked_clients"] == number)  # noqa: B023
        change(valkey.client)
        real = [each.result() for each in waiting], valkey.client.lrange("other", 0, -1)
    world, replies = World(1), dict[int, Any]()
    world.redis = SimulatedServer(world)

    def waits(number: int) -> None:
        world.sleep(number / 100)
        replies[number] = WAITS[number](world.redis.client())

    with living_in(world):
        processes = [world.process(f"{number}", partial(waits, number)) for number in range(len(WAITS))]

        def changes() -> None:
            world.sleep(0.5)
            change(world.redis.client())

        processes.append(world.process("changes", changes))
        world.run(lambda: not any(each.alive for each in processes), seconds=5)
        assert not world.crashes
        others = world.redis.host.data.get(b"other")
    assert ([replies[number] for number in range(len(WAITS))], others.value if others else []) == real


def test_an_event_that_is_cleared_at_once_still_wakes_its_waiters() -> None:
    world, told = World(1), list[bool]()
    world.redis = SimulatedServer(world)
    with living_in(world):
        event = system.Event()
        waits = world.process("waits", lambda: told.append(event.wait()))

        def changes() -> None:
            world.sleep(0.5)
            event.set()
            event.clear()

        world.process("changes", changes)
        world.run(lambda: not waits.alive, seconds=5)
    assert told == [True]
