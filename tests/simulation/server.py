"""A simulated server: fakeredis, in virtual time, with connections that break.

Others may go first at each command, and at its reply. What the server has done when a connection breaks is
drawn: nothing, or the whole of what was sent.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import redis
from fakeredis import FakeServer
from fakeredis._clients._sync import FakeBaseConnection
from fakeredis._command_args_parsing import Timeout
from fakeredis._commands import command
from fakeredis._socket import FakeSocket

from rankmill.jobs.runtime.connection import WaitingPool
from rankmill.jobs.runtime.patience import Patience
from tests.simulation.world import EPOCH, World, world


class Socket(FakeSocket):
    """A connection's side at the server."""

    @command(name="BLMOVE", fixed=(bytes, bytes, bytes, bytes, Timeout))
    def blmove(self, source: bytes, target: bytes, take: bytes, put: bytes, timeout: float) -> Any:
        """fakeredis does not wait where the list is not there."""
        sides = take.upper() == b"LEFT", put.upper() == b"LEFT"

        def move(first: bool) -> Any:
            moved = self._blmovem_pass(source, target, *sides, False, 1, True, first)
            return moved[0] if moved else None

        return self._blocking(timeout, move)

    def _blocking(
        self,
        timeout: float | None,
        func: Callable[[bool], Any],
        shape: Callable[[Any], Any] | None = None,
    ) -> Any:
        found = func(True)
        if found is not None or self._in_transaction:
            return found if shape is None else shape(found)
        here = world().current
        deadline = world().now + timeout if timeout else None
        changed = world().redis.changed
        while found is None and here:
            left = None if deadline is None else deadline - world().now
            if left is not None and left <= 0:
                break
            changed.append(here)
            world().at_server = False
            world().wait(left)
            world().at_server = True
            if here in changed:
                changed.remove(here)
            if self._killed or self._server is None:
                raise redis.ConnectionError("Connection closed by server.")
            self._db.time = world().redis.time()
            found = func(False)
        return found if shape is None else shape(found)


class Connection(FakeBaseConnection, redis.Connection):
    """A process's side of a connection."""

    def _connect(self) -> FakeSocket:
        server = world().redis
        world().give_way()
        if why := server.refuses():
            raise redis.ConnectionError(why)
        self._server = server.fake
        return Socket(
            server.fake,
            client_class=redis.Redis,
            db=self.db,
            lua_modules=set(),
            client_info=self._client_info,
        )

    def connect(self) -> None:
        if self._sock and getattr(self._sock, "_killed", False):
            self.disconnect()
        super().connect()

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self._sock:
            self.connect()
        data = command if isinstance(command, bytes) else b"".join(command)
        here = world()
        here.give_way()
        here.redis.serve(self, data)

    def check_health(self) -> None:
        pass

    def can_read(self, timeout: float | None = 0) -> bool:
        return bool(self._sock and self._sock.responses and self._sock.responses.qsize())

    def read_response(self, disable_decoding: Any = False, **kwargs: Any) -> Any:
        if self._sock is None or self._sock.responses is None or not self._sock.responses.qsize():
            self.disconnect()
            raise redis.ConnectionError("Connection closed by server.")
        return super().read_response(disable_decoding=disable_decoding, **kwargs)

    def disconnect(self, *args: Any, **options: Any) -> None:
        sock, self._sock = self._sock, None
        if sock is not None and sock._server is not None:
            sock.close()


class Server:
    """The server of a world, which may be away, lose its data, or fall back to an earlier state.

    Attributes
    ----------
    away
        Until when nobody can connect, and every command fails.
    commands
        Commands that it has carried out; those of a transaction or a script count as one.
    """

    def __init__(self, mine: World) -> None:
        self.world = mine
        self.fake = FakeServer(version=(8,), server_type="valkey")
        self.fake.lock = threading.RLock()  # type: ignore[assignment]  # all run on one thread
        self.changed: list[Any] = []
        self.away = -1.0
        self.why = "Connection refused."
        self.broken = 0.0
        """The share of commands at which the connection breaks."""
        self.remembers = False
        """Whether to keep the data of about a second ago."""
        self.earlier: Any = {}
        self._remember_at = 0.0
        self.commands = 0
        self.fake.dbs[0].add_change_callback(self._wake_waiting)

    def time(self) -> float:
        """Seconds since 1970, by the server's clock."""
        return EPOCH + self.world.now

    def refuses(self) -> str | None:
        return self.why if self.world.now < self.away else None

    def serve(self, connection: Connection, data: bytes) -> None:
        """Carry out what a connection has sent, unless it breaks first; it may break before the replies."""
        chance = self.world.random.random() if self.broken else 1.0
        if self.refuses() or getattr(connection._sock, "_killed", False) or chance < self.broken / 2:
            connection.disconnect()
            raise redis.ConnectionError("Connection closed by server.")
        self.commands += 1
        self.world.tell(_words(data))
        if self.remembers and self.world.now >= self._remember_at:
            self.earlier, self._remember_at = self.snapshot(), self.world.now + 1.0
        sock: Any = connection._sock
        self.world.at_server = True  # its clock is not that of the caller's host
        try:
            sock.sendall(data)
        except BaseException:  # as redis-py does when a signal interrupts it
            connection.disconnect()
            raise
        finally:
            self.world.at_server = False
        self.world.give_way()  # the reply is under way
        if chance < self.broken:
            self.world.tell("its reply is lost")
            connection.disconnect()
            raise redis.ConnectionError("Connection closed by server.")

    def _wake_waiting(self) -> None:
        waiting, self.changed = self.changed, []
        for task in waiting:
            self.world.wake(task)

    def drop_connections(self) -> None:
        for sock in list(self.fake.sockets):
            sock._killed = True
            self.fake.sockets.remove(sock)
            sock._cleanup(self.fake)
        self._wake_waiting()

    def pause(self, seconds: float, *, why: str = "Connection refused.") -> None:
        """Be away for some seconds."""
        self.away, self.why = self.world.now + seconds, why
        self.drop_connections()

    def snapshot(self) -> Any:
        """The data as it is now."""
        return copy.deepcopy(dict(self.fake.dbs[0]._dict))

    def restore(self, data: Any) -> None:
        """Go back to earlier data: a replica that lags becomes the master, or a file lacks its end."""
        database = self.fake.dbs[0]
        database._dict.clear()
        database._expiry_heap.clear()
        for key, item in copy.deepcopy(data).items():
            database[key] = item
        self.drop_connections()

    def client(self, wait_seconds: float = 600.0) -> redis.Redis:
        """A client as `rankmill.jobs.runtime.connection.client_for` makes it."""
        pool: Any = WaitingPool(
            connection_class=Connection,
            server=self.fake,
            max_connections=64,
            timeout=1,
            retry=Patience(wait_seconds),
        )  # type: ignore[no-untyped-call]
        return redis.Redis.from_pool(pool)


def _words(data: bytes) -> str:
    """The commands in what a connection has sent, for the trace."""
    parts = data.split(b"\r\n")
    words: list[str] = []
    at = 0
    while at < len(parts) and parts[at].startswith(b"*") and len(words) < 8:
        count = int(parts[at][1:])
        texts = []
        at += 1
        for _ in range(count):
            size = int(parts[at][1:])
            texts.append(parts[at + 1][:40].decode(errors="replace") if len(parts[at + 1]) == size else "…")
            if len(parts[at + 1]) != size:
                return "; ".join([*words, " ".join(texts)])
            at += 2
        words.append(" ".join(texts[:6]).replace("\n", " "))
    return "; ".join(words)[:300]
