"""``python -m tests.simulation.recording``: what rankmill sends to a server, for `test_server.py`.

It prints commands of simulated clusters, and of what these do not have, as JSON: examples for each shape.
A shape is what is sent at once: the names of the commands, and the scripts.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import defaultdict
from itertools import chain

from rankmill.extensions.runners.store import FileRunStore
from rankmill.jobs.contract.file_request import FileOrder, FileRequest
from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.leases import Leases
from rankmill.jobs.protocol.runs import RunStore
from tests.simulation.found import FOUND
from tests.simulation.host import Command
from tests.simulation.scenario import Scenario, play
from tests.simulation.server import Server
from tests.simulation.world import World, _current

EXAMPLES = 8
"""Of each shape, at most."""

_OTHER = frozenset({b"HELLO", b"CLIENT", b"PING", b"INFO"})
"""Commands that are about a connection or the server; fakeredis has no ``INFO server``."""
_IDS = re.compile(rb"[0-9a-f]{32}")

Shape = tuple[str, ...]


def shape_of(commands: list[Command]) -> Shape:
    """The names of the commands, with the scripts of those that run one."""
    named = (words[: 1 + words[0].startswith(b"EVAL")] for words in commands)
    return tuple(dict.fromkeys(" ".join(map(repr, words)) for words in named))


class Recorder:
    """Keeps examples of what is sent, with only a few ids, so that commands meet each other's keys."""

    def __init__(self) -> None:
        self.found: defaultdict[Shape, list[list[Command]]] = defaultdict(list)
        self._seen: defaultdict[Shape, int] = defaultdict(int)
        self._ids: dict[bytes, bytes] = {}
        self._dice = random.Random(1)

    def keep(self, commands: list[Command]) -> None:
        """Perhaps keep what was sent: a fair sample of all of its shape."""
        if commands[0][0] in _OTHER:
            return
        shape = shape_of(commands)
        self._seen[shape] += 1
        kept = self.found[shape]
        place = len(kept) if len(kept) < EXAMPLES else self._dice.randrange(self._seen[shape])
        if place < EXAMPLES:
            kept[place : place + 1] = [[[_IDS.sub(self._few, word) for word in words] for words in commands]]

    def _few(self, found: re.Match[bytes]) -> bytes:
        return self._ids.setdefault(found[0], b"%x".rjust(34, b"a") % (len(self._ids) % 4))


def by_hand() -> None:
    """Send what simulated clusters seldom send, or never: for submitted runs, for leases, for long queues."""
    server = Server(World(0))
    _current.append(server.world)
    server.world.redis = server
    store = FileRunStore(server.client(), "files", 3600)
    leases = Leases(store.redis, "leases", 15)
    order = FileOrder(
        request=FileRequest(inputs=("in.parquet",), output="out.parquet"),
        spec=ScoreSpec(model="m"),
        webhook="https://example.test/",
    )
    for number in range(3):
        leases.take(f"holder {number}", 2)
        leases.renew([f"holder {number}", "other"])
        leases.holders()
        store.runners(f"runner {number}", 15)
        runs = [store.submit(order) for _ in range(3)]
        store.leave(runs[1].id)
        for first in (True, False):
            if claim := store.claim(15):
                store.renew(claim, 15)
                store.refuse(claim.run.id, "runner", "why")
                store.hand_back(claim, first=first)
        if claim := store.claim(15):
            store.end(claim)
        store.recover(15, expired=bool(number))
        store.cancel(runs[2])
        store.take_webhook()
        store.withdraw("runner 0")
    leases.release("holder 0")
    queue = RunStore(store.redis).queue("q")
    run = "0" * 32
    queue.take(["request", "bulk"], worker="worker-1", idle=True, waits=True)
    queue.claim_idle(2)
    for number in range(20):
        queue.push_job_id(f"{run}-{number}", at_front=bool(number % 2))
        queue.push_job_id(f"r{run}-{number}", at_front=bool(number % 3))
    store.redis.rpush(queue.key, f"{run}-21", "by-name-1")
    store.redis.rpush(queue.intermediate_queue_key, f"{run}-22")
    for now in (100, 200):
        queue.rescue(f"{run}-22".encode(), b"seen", now, 5)
    for each in (run, f"r{run}"):
        queue.put_back([f"{each}-{number}" for number in range(30, 0, -1)])
    queue.take(["request", "bulk"], worker="worker-1", idle=True, waits=True, alone=[f"r{run}"])
    queue.count_waiting()
    for each in (run, f"r{run}"):
        queue.remove_run(each, range(12))
    runs_store = RunStore(store.redis)
    runs_store.cancel(new_run(ScoreSpec(model="m"), queue="q", ttl=3600, max_retries=1))
    _current.clear()


def main(first: int, seeds: int) -> None:
    recorder = Recorder()
    carry_out = Server._carry_out

    def record(server: Server, sock: object, commands: list[Command]) -> None:
        recorder.keep(commands)
        carry_out(server, sock, commands)  # type: ignore[arg-type]

    Server._carry_out = record  # type: ignore[method-assign,assignment]
    by_hand()
    for scenario in chain(FOUND[2:3], map(Scenario.drawn, range(first, first + seeds))):
        play(scenario)
    text = [[[word.decode("latin-1") for word in words] for words in each]
            for kept in recorder.found.values() for each in kept]  # fmt: skip
    json.dump(text, sys.stdout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
