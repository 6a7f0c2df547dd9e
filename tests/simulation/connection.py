"""A process's side of a connection to the simulated server: redis-py's, without sockets and figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import datetime
from queue import Full
from types import SimpleNamespace
from typing import Any, NoReturn

import fakeredis._socket._base
import redis
import redis._himport_exec
import redis.asyncio.client
import redis.client
import redis.connection
import redis.utils
import rq.job
import rq.serializers
import rq.utils
import rq.worker.base
from fakeredis._clients._sync import FakeBaseConnection
from fakeredis._socket import FakeSocket
from redis.driver_info import DriverInfo

import rankmill.jobs.runtime.connection as connection_module
from rankmill.jobs.runtime.connection import WaitingPool
from tests.simulation.host import CLOSED, Command, Socket
from tests.simulation.world import Event, World, world

_FIGURES = (
    "record_operation_duration", "record_error_count", "record_connection_count", "get_pool_name",
    "record_connection_create_time", "record_connection_wait_time", "parse_himport_set_args",
)  # fmt: skip
"""What redis-py does at each command that nobody sees here."""


def prepare(mine: World) -> None:
    """Let clients take their connections from a `Pool`, and count nothing."""
    mine.patch(connection_module, "WaitingPool", Pool)
    for module in (redis.client, redis.connection):
        for name in _FIGURES:
            if hasattr(module, name):
                mine.patch(module, name, _nothing)
    for module in (redis.client, redis.asyncio.client):
        # The beginning of an error's text is enough.
        mine.patch(module, "truncate_text", lambda text: text[:100])
    # Fakeredis lets real threads wait for a connection's replies, of which there are none here.
    mine.patch(fakeredis._socket._base, "queue", SimpleNamespace(Queue=deque))
    mine.patch(fakeredis._socket._base, "threading", SimpleNamespace(Event=Event))
    mine.patch(redis.utils, "get_lib_version", lambda: "8")  # else it is read from a file for each client
    mine.patch(redis._himport_exec, "pipeline_prepares", lambda *_: [])  # nobody has such field sets
    mine.patch(rq.utils, "utcparse", datetime.fromisoformat)  # RQ's takes a hundred times as long
    for module in _TELLERS_OF_TIME:
        mine.patch(module, "utcformat", _utcformat)
    mine.patch(rq.serializers, "Serializer", object)  # a protocol, whose methods are looked for each time


NAMELESS = DriverInfo(name=None, lib_version=None)
"""A client that does not tell its library's name: nobody asks for it."""


_TELLERS_OF_TIME = (rq.job, rq.worker.base)


def _utcformat(when: datetime) -> str:
    """As RQ's, which takes ten times as long."""
    return f"{when.replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _NoQueue:
    """In place of the queue of free connections, which redis-py fills for each client."""

    queue = ()

    def __init__(self, size: int) -> None:
        pass

    def put_nowait(self, _: object) -> NoReturn:
        raise Full


class Pool(WaitingPool):
    """The connections of a client that nobody uses, without locks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, queue_class=_NoQueue)  # type: ignore[no-untyped-call]
        self._free: list[Connection] = []

    def _take(self) -> Connection:
        if not self._free and len(self._connections) >= self.max_connections:
            raise redis.MaxConnectionsError("all connections of this process are in use")
        connection: Connection = self._free.pop() if self._free else self.make_connection()  # type: ignore[no-untyped-call]
        try:
            connection.connect()
            if connection.can_read():  # somebody was interrupted before the reply
                connection.disconnect()
                connection.connect()
        except BaseException:
            self.release(connection)
            raise
        return connection

    def release(self, connection: Any) -> None:
        self._free.append(connection)


class Client(redis.Redis):
    """A client that does at a command what redis-py's does, and measures nothing."""

    def execute_command(self, *words: Any, **options: Any) -> Any:
        connection: Any = self.connection or self.connection_pool.get_connection()

        def send() -> Any:
            connection.send_command(*words, **options)
            return self.parse_response(connection, words[0], **options)  # type: ignore[no-untyped-call]

        try:
            return connection.retry.call_with_retry(
                send, lambda error, failures: connection.disconnect(), with_failure_count=True
            )
        finally:
            if not self.connection:
                self.connection_pool.release(connection)

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> Pipeline:
        return Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class Pipeline(redis.client.Pipeline):
    """A pipeline that asks nothing about replies that it only counts, and measures nothing."""

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands = self.command_stack
        if self.watching or self.scripts or not commands:
            return super().execute(raise_on_error)
        connection: Any = self.connection or self.connection_pool.get_connection()
        self.connection = connection  # `reset` gives it back
        # An attribute hides the method of this name.
        is_one: Any = vars(self)["transaction"] or self.explicit_transaction
        send = self._execute_transaction if is_one else self._execute_pipeline
        try:
            return connection.retry.call_with_retry(  # type: ignore[no-any-return]
                lambda: send(connection, commands, raise_on_error),
                lambda error, failures: connection.disconnect(),
                with_failure_count=True,
            )
        finally:
            self.reset()

    def parse_response(self, connection: Any, command_name: str, **options: Any) -> Any:
        if command_name == "_":  # of a command within a transaction
            return connection.read_response()
        return super().parse_response(connection, command_name, **options)  # type: ignore[no-untyped-call]


class Connection(FakeBaseConnection, redis.Connection):
    """A process's side of a connection."""

    def _connect(self) -> FakeSocket:
        here = world()
        here.give_way()
        here.redis.let_in(float(self.socket_connect_timeout or "inf"))
        process = here.current.process if here.current else None
        host = here.redis.host_for(process)
        self._server = host
        return Socket(process, host, db=self.db, client_info=self._client_info)

    def connect(self) -> None:
        if self._sock:
            if not self._sock._killed:
                return
            self.disconnect()
        super().connect()

    def pack_commands(self, commands: Any) -> Any:
        """The commands as lists of words, which nobody has to take apart again."""
        return [self._packed(each) for each in commands]

    def _packed(self, command: Sequence[Any]) -> Command:
        encoded = self._encoded
        words = [
            word if type(word) is bytes else word.encode() if type(word) is str else encoded(word)
            for word in command
        ]
        return words if b" " not in words[0] else [*words[0].split(), *words[1:]]

    def _encoded(self, word: Any) -> bytes:
        return b"%d" % word if type(word) is int else self.encoder.encode(word)  # type: ignore[no-untyped-call]

    def send_command(self, *args: Any, **options: Any) -> None:
        self.send_packed_command([self._packed(args)], options.get("check_health", True))

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._sock and self._sock._killed:
            self.disconnect()
        if not self._sock:
            self.connect_check_health(check_health=False)
        here = world()
        if check_health and here.monotonic() > self.next_health_check:
            redis.Connection.check_health(self)  # type: ignore[no-untyped-call]
        here.give_way()
        here.redis.serve(self, command)

    def can_read(self, timeout: float | None = 0) -> bool:
        return bool(self._sock and self._sock.responses)

    def read_response(self, disable_decoding: Any = False, **kwargs: Any) -> Any:
        sock = self._sock
        if sock is None or not sock.responses:
            self.disconnect()
            raise redis.ConnectionError(CLOSED)
        found = sock.responses.popleft()
        if isinstance(found, Exception):
            if isinstance(found, redis.ConnectionError):  # LOADING, say: redis-py closes the connection
                self.disconnect()
            raise found
        self.next_health_check = sock._world.monotonic() + self.health_check_interval
        return found if disable_decoding or not self.encoder.decode_responses else self._decode(found)

    def disconnect(self, *args: Any, **options: Any) -> None:
        sock, self._sock = self._sock, None
        if sock is not None and sock._server is not None:
            sock.close()
