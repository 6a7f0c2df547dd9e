"""A simulated server: fakeredis, in virtual time, with connections that break.

Others may go first at each command, and at its reply. What the server has done when a connection breaks is
drawn: nothing, or the whole of what was sent.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import redis
from fakeredis import FakeServer
from fakeredis._clients._sync import FakeBaseConnection
from fakeredis._command_args_parsing import Int, Timeout
from fakeredis._commands import command
from fakeredis._helpers import SimpleError
from fakeredis._socket import FakeSocket
from fakeredis.commands_mixins.scripting_mixin import LUA_MODULE

from rankmill.jobs.runtime.connection import WaitingPool
from rankmill.jobs.runtime.patience import Patience
from tests.simulation.world import EPOCH, Task, World, world

_FILLS = {"rpush": 0, "lpush": 0, "linsert": 0, "lmove": 1, "blmove": 1, "xadd": 0}
"""Commands after which somebody may find what it waits for, and which of their words is the key."""


class Socket(FakeSocket):
    """A connection's side at the server."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.responses = queue.SimpleQueue()  # type: ignore[assignment]  # quicker, and without waits

    @command((bytes, Int), (bytes,), flags="s")
    def eval(self, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        """As fakeredis does, but a script is compiled once, and Lua collects its garbage when it wants."""
        fake: Any = self._server
        runtime = self._get_server_runtime(fake)
        compiled = vars(fake).setdefault("compiled", {})
        if script not in compiled:
            compiled[script] = runtime.compile(script)
        fake._lua_current_socket[0] = self
        fake._lua_set_keys_argv(*map(runtime.table_from, (keys_and_args[:numkeys], keys_and_args[numkeys:])))
        self._script_resp = 2
        try:
            result = compiled[script]()
        except LUA_MODULE.LuaError as error:
            raise SimpleError(f"ERR {error}") from None
        finally:
            self._script_resp = None
        return self._convert_lua_result(result, nested=False)

    def _run_command(self, func: Any, sig: Any, args: list[Any], from_script: bool) -> Any:
        self._asked = args
        reply = super()._run_command(func, sig, args, from_script)
        if sig.name in _FILLS:
            world().redis.wake(args[_FILLS[sig.name]])
        if (see := world().history.SEEN.get(sig.name)) and not isinstance(reply, Exception):
            see(world().history, args, reply)
        return reply

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
        keys, waiting = self._asked, world().redis.waiting
        while found is None and here:
            left = None if deadline is None else deadline - world().now
            if left is not None and left <= 0:
                break
            waiting[here] = keys
            world().at_server = False
            world().wait(left)
            world().at_server = True
            waiting.pop(here, None)
            if self._killed or self._server is None:
                raise redis.ConnectionError("Connection closed by server.")
            self._db.time = world().redis.time()
            found = func(False)
        return found if shape is None else shape(found)


class Packer:
    """Leaves commands as lists of words: who makes bytes of them and words of these again is slower."""

    def __init__(self, encode: Callable[[Any], Any]) -> None:
        self._encode = encode

    def pack(self, *words: Any) -> list[list[bytes]]:
        name = words[0].encode() if isinstance(words[0], str) else words[0]
        return [[*name.split(), *(bytes(self._encode(word)) for word in words[1:])]]


class Connection(FakeBaseConnection, redis.Connection):
    """A process's side of a connection."""

    def _construct_command_packer(self, packer: Any) -> Packer:
        return Packer(self.encoder.encode)

    def pack_commands(self, commands: Any) -> list[list[bytes]]:
        return [words for command in commands for words in self._command_packer.pack(*command)]

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
        here = world()
        here.give_way()
        here.redis.serve(self, command)

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
        self.waiting: dict[Task, list[bytes]] = {}
        """Who waits in a blocking command, whose words name the keys."""
        self.away = -1.0
        self.why = "Connection refused."
        self.broken = 0.0
        """The share of commands at which the connection breaks."""
        self.remembers = False
        """Whether to keep the data of about a second ago."""
        self.earlier: Any = {}
        self._remember_at = 0.0
        self.commands = 0
        self.calls: Counter[str] = Counter()
        """Commands by name, each of a pipeline; those inside scripts are their script's."""

    def time(self) -> float:
        """Seconds since 1970, by the server's clock."""
        return EPOCH + self.world.now

    def refuses(self) -> str | None:
        return self.why if self.world.now < self.away else None

    def serve(self, connection: Connection, commands: Sequence[list[bytes]]) -> None:
        """Carry out what a connection has sent, unless it breaks first; it may break before the replies."""
        chance = self.world.random.random() if self.broken else 1.0
        if self.refuses() or getattr(connection._sock, "_killed", False) or chance < self.broken / 2:
            connection.disconnect()
            raise redis.ConnectionError("Connection closed by server.")
        self.commands += 1
        self.world.tell(commands)
        if self.remembers and self.world.now >= self._remember_at:
            self.earlier, self._remember_at = self.snapshot(), self.world.now + 1.0
        sock: Any = connection._sock
        self.world.at_server = True  # its clock is not that of the caller's host
        try:
            if sock._killed:
                raise redis.ConnectionError("Connection closed by server.")
            for words in commands:
                self.calls[words[0].decode()] += 1
                sock._process_command(words)
        except redis.ConnectionError:
            connection.disconnect()
            raise
        finally:
            self.world.at_server = False
        self.world.give_way()  # the reply is under way
        if chance < self.broken:
            self.world.tell("its reply is lost")
            connection.disconnect()
            raise redis.ConnectionError("Connection closed by server.")

    def wake(self, key: bytes | None = None) -> None:
        """Let those look again who wait for a key, or all who wait."""
        for task in [task for task, keys in self.waiting.items() if key is None or key in keys]:
            del self.waiting[task]
            self.world.wake(task)

    def drop_connections(self) -> None:
        for sock in list(self.fake.sockets):
            sock._killed = True
            self.fake.sockets.remove(sock)
            sock._cleanup(self.fake)
        self.wake()

    def pause(self, seconds: float, *, why: str = "Connection refused.") -> None:
        """Be away for some seconds."""
        self.away, self.why = self.world.now + seconds, why
        self.drop_connections()

    def snapshot(self) -> Any:
        """The data as it is now."""
        return copy.deepcopy(dict(self.fake.dbs[0]._dict))

    def restore(self, data: Any) -> None:
        """Go back to earlier data: a replica that lags becomes the master, or a file lacks its end."""
        self.world.history.lose()
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


def words(commands: Sequence[Sequence[bytes]]) -> str:
    """The commands that a connection has sent, for the trace."""
    texts = (" ".join(word[:40].decode(errors="replace") for word in each[:6]) for each in commands[:8])
    return "; ".join(text.replace("\n", " ") for text in texts)[:300]
