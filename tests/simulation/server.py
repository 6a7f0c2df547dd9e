"""A simulated server in virtual time, with connections that break and hosts that fail.

Others may go first at each command, and at its reply. What the server has done when a connection breaks is
drawn: nothing, the first commands of a pipeline that is no transaction, or the whole of what was sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import redis

from rankmill.jobs.runtime.connection import pool_for
from rankmill.jobs.runtime.patience import Patience
from tests.simulation import connection as connections
from tests.simulation.connection import Client, Connection
from tests.simulation.host import CLOSED, Command, Host, Refusal, Socket
from tests.simulation.world import Armed, Process, World, strike

_FOR_RUNNERS = frozenset({b"rq:queue:rankmill-files", b"rq:wip:rankmill-files"})
"""Lists that are not evicted here: submitted runs that are in none are lost, as the guarantees say."""


class Late(NamedTuple):
    """Commands of a client that has given up; they may arrive all the same, later."""

    sock: Any
    commands: list[Command]


@dataclass(eq=False)
class Server:
    """The server of a world: the host that clients find, and what is wrong with it and with the network.

    Attributes
    ----------
    host
        The master.
    away, why
        Until when nobody can connect, and every command fails; the reason.
    frozen
        Until when it does not answer; then it carries out what was sent to it.
    broken
        The share of commands at which the connection breaks.
    cut_off
        Until when nothing goes to and from these processes.
    after
        What happens when so many more commands of a process are carried out, and before the last one's reply.
    armed
        Faults that wait for commands with some text, and strike before the reply.
    left_behind, other
        Processes that talk to another host, which was the master before and does not know that.
    refusals
        What it refuses now.
    evicting
        The share of commands after which a key is evicted, and whether only keys with an expiry are.
    commands
        Commands that it has carried out; those of a transaction or a script count as one.
    calls
        Commands by name, each of a pipeline; those inside scripts are their script's.
    """

    world: World
    host: Host = field(default_factory=Host)
    away: float = -1.0
    why: str = "Connection refused."
    frozen: float = -1.0
    broken: float = 0.0
    cut_off: dict[Process, float] = field(default_factory=dict)
    after: dict[Process, tuple[int, Callable[[], object]]] = field(default_factory=dict)
    armed: list[Armed] = field(default_factory=list)
    left_behind: set[Process] = field(default_factory=set)
    other: Host | None = None
    refusals: list[Refusal] = field(default_factory=list)
    evicting: tuple[float, bool] | None = None
    commands: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    late: list[Late] = field(default_factory=list)

    def __post_init__(self) -> None:
        connections.prepare(self.world)

    @property
    def fake(self) -> Host:
        """The master, as fakeredis has it."""
        return self.host

    def time(self) -> float:
        """Seconds since 1970, by the server's clock."""
        return self.host.time()

    def client(self, wait_seconds: float = 600.0) -> redis.Redis:
        """A client as `rankmill.jobs.runtime.connection.client_for` makes it."""
        pool: Any = pool_for("redis://simulated", Patience(wait_seconds))
        pool.connection_class = Connection
        pool.connection_kwargs |= {"server": self.host, "driver_info": connections.NAMELESS}
        client: Any = Client.from_pool(pool)
        # Redis-py writes names of commands in capitals: none has to be changed to these.
        client.response_callbacks = dict(client.response_callbacks)
        return client  # type: ignore[no-any-return]

    @property
    def serves(self) -> bool:
        """Whether it answers everybody now, as it should, and forgets nothing."""
        return self.takes_writes and not (self.broken or self.evicting)

    @property
    def takes_writes(self) -> bool:
        """Whether it answers everybody now and does what it is told, though it may forget that."""
        return not (self.refusals or self.other) and self.world.now >= max(self.away, self.frozen)

    def reaches(self, process: Process) -> bool:
        """Whether a process and the server can talk to each other."""
        cut = self.world.now < self.cut_off.get(process, -1.0)
        return not cut and not any(sock.silent and sock.process is process for sock in self.host.sockets)

    def takes_writes_of(self, process: Process) -> bool:
        """Whether a process can write something now."""
        refuses = any(refusal.flag in {"write", "loading"} for refusal in self.refusals)
        return self.reaches(process) and not refuses and self.world.now >= max(self.away, self.frozen)

    # Who finds whom

    def host_for(self, process: Process | None) -> Host:
        """The host to which a process connects."""
        return self.other if self.other and process in self.left_behind else self.host

    def let_in(self, timeout: float) -> None:
        """Raise an error if nobody can connect, or the current process cannot within so many seconds."""
        self._wait_for_network(self.world.now + timeout)
        if self.world.now < self.away:
            raise redis.ConnectionError(self.why)

    def _wait_for_network(self, deadline: float) -> None:
        if not self.cut_off:
            return
        task = self.world.current
        until = self.cut_off.get(task.process, -1.0) if task else -1.0
        while self.world.now < until:
            self.world.wait(max(min(until, deadline) - self.world.now, 0.0))
            if deadline <= self.world.now < until:
                raise TimeoutError

    def waits_for(self, sock: Socket) -> bool:
        """Whether a client is still there to wait for a key."""
        return all(sock is not late.sock for late in self.late)

    # What it does

    @contextmanager
    def away_from_server(self) -> Iterator[None]:
        """The time in which another than the server computes."""
        before, self.world.server_clock = self.world.server_clock, None
        try:
            yield
        finally:
            self.world.server_clock = before

    def serve(self, connection: Connection, commands: list[Command]) -> None:
        """Carry out what a connection has sent, unless it breaks first; it may break before the replies."""
        try:
            self._serve(connection, commands)
        except BaseException:  # a signal may interrupt it, as redis-py
            connection.disconnect()
            raise

    def _serve(self, connection: Connection, commands: list[Command]) -> None:
        sock: Any = connection._sock
        deadline = self.world.now + float(connection.socket_timeout or "inf")
        chance = self.world.random.random() if self.broken else 1.0
        try:
            if sock.silent or self.cut_off or self.world.now < self.frozen:
                self._under_way(sock, deadline)
        except TimeoutError:
            self.world.tell(commands, "no answer to")
            if not sock.silent:
                connection._sock = None  # it closes the connection, while what it has sent is under way
                self.late.append(Late(sock, commands))
            raise redis.TimeoutError("Timeout reading from simulated") from None
        if self.world.now < self.away or sock._killed or chance < self.broken / 2:
            if chance < self.broken / 4 and commands[0][0].upper() != b"MULTI":
                commands = commands[: self.world.random.randrange(len(commands))]
                self._carry_out(sock, commands)
            raise redis.ConnectionError(CLOSED)
        self.world.tell(commands)
        self._carry_out(sock, commands)
        if self.after:
            self._count(sock.process)
        if self.armed and sock.process:
            words = "; ".join(" ".join(each.decode(errors="replace") for each in words) for words in commands)
            strike(self.armed, words, sock.process)
        try:
            if sock.silent or self.cut_off:
                self._under_way(sock, deadline, answered=True)
        except TimeoutError:
            self.world.tell("its reply does not come")
            raise redis.TimeoutError("Timeout reading from simulated") from None
        self.world.give_way()  # the reply is under way
        if chance < self.broken:
            self.world.tell("its reply is lost")
            raise redis.ConnectionError(CLOSED)

    def _count(self, process: Process | None) -> None:
        """A command of a process is carried out, and its reply is not sent yet."""
        if process in self.after:
            left, do = self.after.pop(process)
            if left:
                self.after[process] = left - 1, do
            else:
                do()

    def _under_way(self, sock: Socket, deadline: float, *, answered: bool = False) -> None:
        """Wait while network or server stand still; raises `TimeoutError` at the `deadline`."""
        if sock.silent:
            self.world.wait(max(deadline - self.world.now, 0.0))
            raise TimeoutError
        if self.cut_off:
            self._wait_for_network(deadline)
        while not answered and self.world.now < self.frozen:
            self.world.wait(max(min(self.frozen, deadline) - self.world.now, 0.0))
            if deadline <= self.world.now < self.frozen:
                raise TimeoutError

    def _carry_out(self, sock: Socket, commands: list[Command]) -> None:
        if sock._killed or sock._server is None:
            raise redis.ConnectionError(CLOSED)
        self.commands += 1
        host: Any = sock._server
        before, self.world.server_clock = self.world.server_clock, host.clock  # not that of the caller's host
        try:
            sock.carry_out(commands)
            host.serve_blocked()
        finally:
            self.world.server_clock = before
        if self.evicting and self.world.random.random() < self.evicting[0]:
            self._evict(host, volatile=self.evicting[1])

    def _evict(self, host: Host, *, volatile: bool) -> None:
        data = host.data._dict
        keys = [
            key
            for key, item in data.items()
            if key not in _FOR_RUNNERS and (item.expireat is not None or not volatile)
        ]
        if keys:
            key = next(islice(keys, self.world.random.randrange(len(keys)), None))
            self.world.tell(f"evicted: {key.decode(errors='replace')}")
            del data[key]
            self.world.history.lose()

    def evict(self, part: str) -> None:
        """Evict all keys with this in their names."""
        data = self.host.data._dict
        for key in [each for each in data if part.encode() in each]:
            self.world.tell(f"evicted: {key.decode(errors='replace')}")
            del data[key]
        self.world.history.lose()

    def deliver_late(self) -> None:
        """Carry out what clients had sent that have given up meanwhile; of some, nothing arrives any more."""
        late, gone = self.late, set()
        for each in late:
            if each.sock._killed or each.sock._server is None or self.world.random.random() < 0.3:
                continue
            self.world.tell(each.commands, "late:")
            self._carry_out(each.sock, each.commands)
            gone.add(each.sock)
        self.late = []
        for each in late:
            if each.sock._server is not None:
                each.sock.close()

    # What becomes of it

    def pause(self, seconds: float, *, why: str = "Connection refused.") -> None:
        """Be away for some seconds."""
        self.away, self.why = self.world.now + seconds, why
        self.host.drop()

    def jump(self, seconds: float) -> None:
        """Let the server's clock jump."""
        self.host.clock += seconds
        if seconds < 0:
            self.world.history.set_back()

    def snapshot(self) -> Any:
        """The data as it is now."""
        return self.host.snapshot()

    def restore(self, data: Any) -> None:
        """Go back to earlier data: a replica that lags becomes the master, or a file lacks its end."""
        self.world.history.lose()
        self.host.drop()
        self.host.restore(data)

    def divide(self, left_behind: Iterable[Process]) -> None:
        """Let a replica become the master, while some processes go on talking to the one before."""
        self.world.history.lose()
        self.left_behind = set(left_behind)
        self.other, self.host = self.host, self.host.clone(self.host.clock)
        self.other.drop([each for each in self.other.sockets if each.process not in self.left_behind])

    def unite(self) -> None:
        """Let the master of before be the new one's replica: what was written there is thrown away."""
        other, self.other, self.left_behind = self.other, None, set()
        if other:
            self.world.history.lose()
            other.drop()
