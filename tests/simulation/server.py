"""A simulated server: fakeredis, in virtual time, with connections that break and hosts that fail.

Others may go first at each command, and at its reply. What the server has done when a connection breaks is
drawn: nothing, the first commands of a pipeline that is no transaction, or the whole of what was sent.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import redis
from fakeredis import FakeServer
from fakeredis._clients._sync import FakeBaseConnection
from fakeredis._command_args_parsing import Timeout
from fakeredis._commands import Signature
from fakeredis._core import Database
from fakeredis._helpers import SimpleError
from fakeredis._msgs import SCRIPT_ERROR_MSG
from fakeredis._socket import FakeSocket
from fakeredis.commands_mixins.scripting_mixin import LUA_MODULE
from fakeredis.model import get_all_commands_info

from rankmill.jobs.runtime.connection import pool_for
from rankmill.jobs.runtime.patience import Patience
from tests.simulation.world import EPOCH, Process, Task, World, world

Command = list[bytes]

_CLOSED = "Connection closed by server."
_BLMOVE = Signature("blmove", "blocking_move", (bytes, bytes, bytes, bytes, Timeout))  # type: ignore[arg-type]


def flags_of(name: str) -> frozenset[str]:
    """What a server says of a command: whether it writes, is refused while there is no memory, and so on."""
    if not _FLAGS:
        _FLAGS.update(
            (raw.decode(), frozenset(flag.decode() for flag in info[2]))
            for raw, info in get_all_commands_info().items()
        )
    return _FLAGS.get(name, frozenset())


_FLAGS: dict[str, frozenset[str]] = {}


class Replies(deque[Any]):
    """The replies that a client has not read; as much of a `queue.Queue` as fakeredis uses."""

    put, get, get_nowait, qsize = deque.append, deque.popleft, deque.popleft, deque.__len__

    def __bool__(self) -> bool:
        return True  # fakeredis asks whether there is a queue at all


@dataclass(eq=False)
class Blocked:
    """A client that waits for a key: who it is, how it is served, and its reply once it was."""

    task: Task
    sock: Socket
    words: frozenset[bytes]
    until: float
    serve: Callable[[bool], Any]
    reply: Any = None


class Host(FakeServer):
    """One process of a server: its data, its clock, its clients.

    Parameters
    ----------
    clock
        How far its clock is ahead, in seconds.
    """

    def __init__(self, clock: float = 0.0) -> None:
        super().__init__(version=(8,), server_type="valkey")
        self.lock = threading.RLock()  # type: ignore[assignment]  # all run on one thread
        self.clock = clock
        self.blocked: list[Blocked] = []
        self.changed: set[bytes] = set()
        self.scripts: dict[bytes, Callable[[], Any]] = {}
        self.data = self.dbs[0] = Watched(self.lock, self.changed)

    def serve_blocked(self) -> None:
        """Serve the clients that wait for keys that have changed, the first before the others."""
        while self.changed and self.blocked:
            changed = set(self.changed)
            self.changed.clear()
            for each in list(self.blocked):
                here = each.task.process.alive or each.sock.silent  # else its host has closed the connection
                if not here or each.until < world().now:
                    self.blocked.remove(each)
                elif not each.words.isdisjoint(changed) and (found := each.serve(False)) is not None:
                    each.reply = found
                    self.blocked.remove(each)
                    world().wake(each.task)
        self.changed.clear()

    def clone(self, clock: float = 0.0) -> Host:
        """Another one with a copy of the data."""
        other = Host(clock)
        other.restore(self.snapshot())
        return other

    def snapshot(self) -> Any:
        """The data as it is now."""
        return copy.deepcopy(dict(self.data._dict))

    def restore(self, data: Any) -> None:
        """Go on with a copy of earlier data."""
        self.data._dict.clear()
        self.data._expiry_heap.clear()
        for key, item in copy.deepcopy(data).items():
            self.data[key] = item

    def drop(self, sockets: Iterable[Socket] | None = None) -> None:
        """Break some connections, or all."""
        for sock in list(self.sockets if sockets is None else sockets):
            sock._killed = True
            self.sockets.remove(sock)
            sock._cleanup(self)
        for each in list(self.blocked):
            if each.sock._killed:
                self.blocked.remove(each)
                world().wake(each.task)


class Watched(Database):
    """Data that says which keys have changed."""

    def __init__(self, lock: Any, changed: set[bytes]) -> None:
        super().__init__(lock)
        self.changed = changed

    def notify_watch(self, key: bytes) -> None:
        self.changed.add(key)
        for sock in self._watches.get(key, ()):
            sock.notify_watch()


class Socket(FakeSocket):
    """A connection's side at the server; ``silent``: what either side sends does not arrive any more."""

    silent = False

    def __init__(self, process: Process | None, host: Host, **options: Any) -> None:
        super().__init__(host, client_class=redis.Redis, lua_modules=set(), **options)
        self.process = process
        self.responses = Replies()  # type: ignore[assignment]
        self._words: Command = []
        self._has_written = False

    def put_response(self, msg: Any) -> None:
        if self.responses is not None:
            self.responses.put(msg)

    def carry_out(self, commands: Sequence[Command]) -> None:
        """Carry out commands, one after the other, and leave their replies."""
        calls = world().redis.calls
        for words in commands:
            calls[words[0].decode()] += 1
            self._words = words
            self._process_command(words)

    def _name_to_func(self, cmd_name: str) -> tuple[Any, Signature]:
        refusals = world().redis.refusals
        if refusals and (why := self._refusal(cmd_name, refusals)):
            raise SimpleError(why)
        if cmd_name == "blmove":  # fakeredis does not wait where the list is not there
            return self.blocking_move, _BLMOVE
        return super()._name_to_func(cmd_name)

    def _refusal(self, name: str, refusals: Sequence[Refusal]) -> str | None:
        """Why the server does not carry out a command now; for a transaction, any of its commands."""
        flags = flags_of(name)
        if name == "exec" and self._transaction is not None:
            flags = flags.union(*(flags_of(signature.name) for _, signature, _ in self._transaction))
        in_script = self._script_resp is not None
        queued = self._transaction is not None and name not in {"exec", "discard", "multi", "watch"}
        for each in refusals:
            if each.flag == "denyoom":
                refused = not (in_script and self._has_written) and (queued or "denyoom" in flags)
            elif each.flag == "write":
                refused = "write" in flags
            else:
                refused = not in_script and each.flag not in flags
            if refused and world().random.random() < each.share:
                if name != "exec":
                    return each.why
                self._forget_transaction()
                self._clear_watches()
                return f"EXECABORT Transaction discarded because of: {each.why}"
        return None

    def _run_command(self, func: Any, sig: Signature, args: list[Any], from_script: bool) -> Any:
        found = super()._run_command(func, sig, args, from_script)
        if (see := world().history.SEEN.get(sig.name)) and not isinstance(found, Exception):
            see(world().history, args, found)
        if from_script and world().redis.refusals and "write" in flags_of(sig.name):
            self._has_written = True
        return found

    def eval(self, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        """As fakeredis has it, but a script is compiled once, and the garbage is not collected each time."""
        host: Any = self._server
        if script not in host.scripts:
            host.scripts[script] = self._get_server_runtime(host).compile(script)
        table = host._lua_runtime.table_from
        host._lua_current_socket[0] = self
        host._lua_set_keys_argv(table(keys_and_args[:numkeys]), table(keys_and_args[numkeys:]))
        self._script_resp, self._has_written = 2, False
        try:
            result = host.scripts[script]()
        except LUA_MODULE.LuaError as error:
            raise SimpleError(SCRIPT_ERROR_MSG.format("", error)) from None
        finally:
            self._script_resp = None
        return self._convert_lua_result(result, nested=False)

    def blocking_move(self, source: bytes, target: bytes, take: bytes, put: bytes, timeout: float) -> Any:
        """BLMOVE."""
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
        found, here = func(True), world().current
        if found is None and not self._in_transaction and here and world().redis.waits_for(self):
            host: Any = self._server
            until = world().now + (timeout or float("inf"))
            blocked = Blocked(here, self, frozenset(self._words), until, func)
            host.blocked.append(blocked)
            try:
                with world().redis.away_from_server():
                    world().wait(timeout or None)
            finally:  # a signal may interrupt it
                if blocked in host.blocked:
                    host.blocked.remove(blocked)
            if self._killed or self._server is None:
                raise redis.ConnectionError(_CLOSED)
            found = blocked.reply
        return found if shape is None else shape(found)


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
        if self._sock and getattr(self._sock, "_killed", False):
            self.disconnect()
        super().connect()

    def pack_commands(self, commands: Any) -> Any:
        """The commands as lists of words, which nobody has to take apart again."""
        return [self._packed(each) for each in commands]

    def _packed(self, command: Sequence[Any]) -> Command:
        name, *rest = command
        encode = self.encoder.encode
        first = name.encode().split() if isinstance(name, str) else [name]
        return [*first, *(each if type(each) is bytes else encode(each) for each in rest)]  # type: ignore[no-untyped-call]

    def send_command(self, *args: Any, **options: Any) -> None:
        self.send_packed_command([self._packed(args)], options.get("check_health", True))

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._sock and self._sock._killed:
            self.disconnect()
        if not self._sock:
            self.connect_check_health(check_health=False)
        if check_health:
            redis.Connection.check_health(self)  # type: ignore[no-untyped-call]
        here = world()
        here.give_way()
        here.redis.serve(self, command)

    def can_read(self, timeout: float | None = 0) -> bool:
        return bool(self._sock and self._sock.responses is not None and self._sock.responses.qsize())

    def read_response(self, disable_decoding: Any = False, **kwargs: Any) -> Any:
        if self._sock is None or self._sock.responses is None or not self._sock.responses.qsize():
            self.disconnect()
            raise redis.ConnectionError(_CLOSED)
        found = super().read_response(disable_decoding=disable_decoding, **kwargs)
        if isinstance(found, redis.ConnectionError):  # LOADING, say: redis-py closes the connection
            self.disconnect()
            raise found
        self.next_health_check = world().monotonic() + self.health_check_interval
        return found

    def disconnect(self, *args: Any, **options: Any) -> None:
        sock, self._sock = self._sock, None
        if sock is not None and sock._server is not None:
            sock.close()


class Refusal(NamedTuple):
    """A reply in place of the work, for a `share` of the commands.

    ``flag``: what is refused, ``write`` or ``denyoom`` commands, or for ``loading`` all others than these.
    """

    flag: str
    why: str
    share: float = 1.0


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
    left_behind: set[Process] = field(default_factory=set)
    other: Host | None = None
    refusals: list[Refusal] = field(default_factory=list)
    evicting: tuple[float, bool] | None = None
    commands: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    late: list[Late] = field(default_factory=list)

    @property
    def fake(self) -> Host:
        """The master, as fakeredis has it."""
        return self.host

    def time(self) -> float:
        """Seconds since 1970, by the server's clock."""
        return EPOCH + self.world.now + self.host.clock

    def client(self, wait_seconds: float = 600.0) -> redis.Redis:
        """A client as `rankmill.jobs.runtime.connection.client_for` makes it."""
        pool: Any = pool_for("redis://simulated", Patience(wait_seconds))
        pool.connection_class = Connection
        pool.connection_kwargs["server"] = self.host
        return redis.Redis.from_pool(pool)

    @property
    def serves(self) -> bool:
        """Whether it answers everybody now, as it should, and forgets nothing."""
        wrong = self.broken or self.refusals or self.evicting or self.other
        return not wrong and self.world.now >= max(self.away, self.frozen)

    def reaches(self, process: Process) -> bool:
        """Whether a process and the server can talk to each other."""
        cut = self.world.now < self.cut_off.get(process, -1.0)
        return not cut and not any(sock.silent and sock.process is process for sock in self.host.sockets)

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

    def away_from_server(self) -> _AsHost:
        """For the time in which another than the server computes."""
        return _AsHost(self.world, None)

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
            raise redis.ConnectionError(_CLOSED)
        self.world.tell(commands)
        self._carry_out(sock, commands)
        try:
            self._under_way(sock, deadline, answered=True)
        except TimeoutError:
            self.world.tell("its reply does not come")
            raise redis.TimeoutError("Timeout reading from simulated") from None
        self.world.give_way()  # the reply is under way
        if chance < self.broken:
            self.world.tell("its reply is lost")
            raise redis.ConnectionError(_CLOSED)

    def _under_way(self, sock: Socket, deadline: float, *, answered: bool = False) -> None:
        """Wait while network or server stand still; raises `TimeoutError` at the `deadline`."""
        if sock.silent:
            self.world.wait(max(deadline - self.world.now, 0.0))
            raise TimeoutError
        self._wait_for_network(deadline)
        while not answered and self.world.now < self.frozen:
            self.world.wait(max(min(self.frozen, deadline) - self.world.now, 0.0))
            if deadline <= self.world.now < self.frozen:
                raise TimeoutError

    def _carry_out(self, sock: Socket, commands: list[Command]) -> None:
        if sock._killed or sock._server is None:
            raise redis.ConnectionError(_CLOSED)
        self.commands += 1
        host: Any = sock._server
        with _AsHost(self.world, host.clock):  # its clock is not that of the caller's host
            sock.carry_out(commands)
            host.serve_blocked()
        if self.evicting and self.world.random.random() < self.evicting[0]:
            self._evict(host, volatile=self.evicting[1])

    def _evict(self, host: Host, *, volatile: bool) -> None:
        data = host.data._dict
        keys = [key for key, item in data.items() if item.expireat is not None] if volatile else data
        if keys:
            key = next(islice(keys, self.world.random.randrange(len(keys)), None))
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


class _AsHost:
    """Within the ``with`` block the clock is that of a server's host; ``None``: that of the process."""

    def __init__(self, mine: World, clock: float | None) -> None:
        self._world, self._clock = mine, clock

    def __enter__(self) -> None:
        self._world.server_clock, self._clock = self._clock, self._world.server_clock

    def __exit__(self, *_: object) -> None:
        self._world.server_clock = self._clock
