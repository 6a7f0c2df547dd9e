"""One process of a simulated server: fakeredis in virtual time, without detours at each command.

What fakeredis asks at each command and a simulated server never needs is left out: access rights, notices of
changed keys, other servers' habits. `test_server.py` compares it with a real server.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis
import redis.connection
from fakeredis import FakeServer
from fakeredis._command_args_parsing import Timeout
from fakeredis._commands import COMMANDS_WITH_SUB, Key, Signature
from fakeredis._core import CommandItem, Database, Item
from fakeredis._helpers import QUEUED, SimpleError, decode_command_bytes
from fakeredis._msgs import (
    COMMAND_IN_SCRIPT_MSG,
    FLAG_DO_NOT_CREATE,
    FLAG_LEAVE_EMPTY_VAL,
    FLAG_NO_SCRIPT,
    FLAG_SKIP_CONVERT_TO_RESP2,
    FLAG_TRANSACTION,
    SCRIPT_ERROR_MSG,
    WRONGTYPE_MSG,
)
from fakeredis._socket import FakeSocket
from fakeredis._socket._resp import convert_to_resp2
from fakeredis.commands_mixins.scripting_mixin import LUA_MODULE, _convert_redis_arg
from fakeredis.model import get_all_commands_info

from tests.simulation.history import History
from tests.simulation.world import EPOCH, Process, Task, world

Command = list[bytes]

CLOSED = "Connection closed by server."
_PLAIN = frozenset({bytes, int, type(None)})
"""Types of replies that are the same in every protocol."""
_BLMOVE = Signature("blmove", "blocking_move", (bytes, bytes, bytes, bytes, Timeout))  # type: ignore[arg-type]


class Refusal(NamedTuple):
    """A reply in place of the work, for a `share` of the commands.

    ``flag``: what is refused, ``write`` or ``denyoom`` commands, or for ``loading`` all others than these.
    """

    flag: str
    why: str
    share: float = 1.0


def flags_of(name: str) -> frozenset[str]:
    """What a server says of a command: whether it writes, is refused while there is no memory, and so on."""
    if not _FLAGS:
        _FLAGS.update(
            (raw.decode(), frozenset(flag.decode() for flag in info[2]))
            for raw, info in get_all_commands_info().items()
        )
    return _FLAGS.get(name, frozenset())


_FLAGS: dict[str, frozenset[str]] = {}


class Plan(NamedTuple):
    """How so many arguments of a command are read.

    ``first``: places of those that are decoded, and how, or of keys without which a reply is known; ``keys``:
    places of keys, and their types.
    """

    first: tuple[tuple[int, Callable[[bytes], Any] | None, Any], ...]
    keys: tuple[tuple[int, Any], ...]
    creates: bool
    keeps_empty: bool
    in_scripts: bool
    converts: bool


class Kind:
    """What is known of a command by its name.

    Attributes
    ----------
    function
        The method of `Socket` that carries it out.
    see
        What the history does with it, if anything.
    queues
        Whether it is kept for the end of a transaction.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.function: Callable[..., Any] = getattr(Socket, signature.func_name)
        self.see = History.SEEN.get(signature.name)
        self.queues = FLAG_TRANSACTION not in signature.flags
        self._plans: dict[int, Plan] = {}

    def plan(self, arguments: Sequence[Any], version: Any) -> Plan:
        """How the arguments are read; raises `SimpleError` if there are too few or too many."""
        return self._plans.get(len(arguments)) or self._new_plan(arguments, version)

    def _new_plan(self, arguments: Sequence[Any], version: Any) -> Plan:
        signature = self.signature
        signature.check_arity(arguments, version)
        types: list[Any] = [*signature.fixed]
        while len(types) < len(arguments):
            types.append(signature.repeat[(len(types) - len(signature.fixed)) % len(signature.repeat)])
        keys = [(place, kind) for place, kind in enumerate(types) if isinstance(kind, Key)]
        decoded = [
            (place, kind.decode, None)
            for place, kind in enumerate(types)
            if not isinstance(kind, Key) and kind is not bytes
        ]
        needed = [
            (place, None, kind.missing_return)
            for place, kind in keys
            if kind.missing_return is not Key.UNSPECIFIED
        ]
        found = Plan(
            tuple(sorted(decoded + needed, key=lambda each: each[0])),
            tuple((place, kind.type_) for place, kind in keys),
            creates=FLAG_DO_NOT_CREATE not in signature.flags,
            keeps_empty=FLAG_LEAVE_EMPTY_VAL in signature.flags,
            in_scripts=FLAG_NO_SCRIPT not in signature.flags,
            converts=FLAG_SKIP_CONVERT_TO_RESP2 not in signature.flags,
        )
        return self._plans.setdefault(len(arguments), found)


_KINDS: dict[bytes, Kind] = {}
"""By what clients and scripts call them; those with a subcommand by both words."""


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
        self.set_words: list[Callable[..., None]] = []
        self.data = self.dbs[0] = Watched(self.lock, self.changed)

    def time(self) -> float:
        """Seconds since 1970, by its clock."""
        return EPOCH + world().now + self.clock

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
        self.data._dict.update(copy.deepcopy(data))

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


class Cell(CommandItem):
    """A key of a command, with its value, or a new one if there is none."""

    _modified = _expireat_modified = False

    def __init__(self, key: bytes, data: Database, value: Any, expireat: float | None) -> None:
        self.key, self.db, self._value, self._expireat = key, data, value, expireat


class Watched(Database):
    """Data that says which keys have changed."""

    def __init__(self, lock: Any, changed: set[bytes]) -> None:
        super().__init__(lock)
        self.changed = changed

    def notify_watch(self, key: bytes) -> None:
        self.changed.add(key)
        for sock in self._watches.get(key, ()):
            sock.notify_watch()

    def get(self, key: bytes, default: Any = None) -> Any:
        item = self._dict.get(key)
        if item is None:
            return default
        if item.expireat is not None and item.expireat < self.time:
            del self._dict[key]
            return default
        return item

    def write_back(self, item: CommandItem, *, keeps_empty: bool) -> None:
        """Keep what a command has made of a key."""
        key, value = item.key, item._value
        self.notify_watch(key)
        if value is None or not (value or keeps_empty or isinstance(value, bytes)):
            self._dict.pop(key, None)
            return
        kept = self._dict.get(key)
        if kept is None:
            kept = self._dict[key] = Item(None)
        kept.value, kept.expireat = value, item._expireat

    def schedule_expiry(self, key: bytes, expireat: float | None) -> None:
        """Nothing: who counts or lists all keys, which is seldom, looks at each."""

    def _remove_expired(self) -> None:
        for key in [key for key, item in self._dict.items() if self.expired(item)]:
            del self._dict[key]

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None  # type: ignore[arg-type]


class Socket(FakeSocket):
    """A connection's side at the server; ``silent``: what either side sends does not arrive any more."""

    silent = False

    def __init__(self, process: Process | None, host: Host, **options: Any) -> None:
        super().__init__(host, client_class=redis.Redis, lua_modules=set(), **options)
        self.process, self._world = process, world()
        self.responses = deque()  # type: ignore[assignment]
        self._words: Command = []
        self._has_written = False

    def carry_out(self, commands: Sequence[Command]) -> None:
        """Carry out commands, one after the other, and leave their replies."""
        calls = self._world.redis.calls
        for words in commands:
            calls[words[0].decode()] += 1
            self._words = words
            self._process_command(words)

    def _process_command(self, fields: Command) -> None:
        """Carry out a command, or keep it for its transaction, and leave its reply."""
        host: Any = self._server
        while host.closed_sockets:
            if gone := host.closed_sockets.pop()():
                gone._cleanup(host)
        host.data.time = EPOCH + self._world.now + host.clock
        transaction = self._transaction
        try:
            kind, arguments = self._known(fields[0], fields[1:])
            if transaction is not None:
                kind.plan(arguments, host.version)  # else it is looked for when the command runs
        except SimpleError as error:
            if transaction is not None:
                self._transaction_failed = True
            self.responses.append(self._decode_result(error))  # type: ignore[union-attr]
            return
        if transaction is not None and kind.queues:
            transaction.append((kind, kind.signature, arguments))
            found: Any = QUEUED.value
        else:
            found = self._run_command(kind, kind.signature, arguments, False)
        if self.responses is not None:
            self.responses.append(found if type(found) in _PLAIN else self._decode_result(found))  # type: ignore[attr-defined]

    def _known(self, word: bytes, arguments: list[bytes]) -> tuple[Kind, list[bytes]]:
        """A command's kind and arguments; raises `SimpleError` if it is unknown, or refused now."""
        kind = _KINDS.get(word)
        if kind is None:
            name = decode_command_bytes(word)
            if name in COMMANDS_WITH_SUB and arguments:
                word = f"{name} {decode_command_bytes(arguments[0])}".encode()
                return self._known(word, arguments[1:])
            # Fakeredis does not wait where the list of a BLMOVE is not there.
            signature = _BLMOVE if name == "blmove" else self._name_to_func(name)[1]
            kind = _KINDS[word] = Kind(signature)
        refusals = self._world.redis.refusals
        if refusals and (why := self._refusal(kind.signature.name, refusals)):
            raise SimpleError(why)
        return kind, arguments

    def _decode_error(self, error: SimpleError) -> Any:
        return redis.connection.DefaultParser.parse_error(error.value)  # type: ignore[no-untyped-call]

    def _expireat(self, key: CommandItem, timestamp: float, *args: bytes) -> int:
        if args:
            return super()._expireat(key, timestamp, *args)
        if key:
            key.expireat = timestamp
        return int(bool(key))

    def _convert_redis_result(self, lua_runtime: Any, result: Any) -> Any:
        if result is None:
            return False
        if type(result) is list:
            plain = (bytes, int)
            convert = self._convert_redis_result
            return lua_runtime.table_from(
                [item if type(item) in plain else convert(lua_runtime, item) for item in result]
            )
        return super()._convert_redis_result(lua_runtime, result)

    def _convert_lua_result(self, result: Any, nested: bool = True) -> Any:
        plain = type(result) is bytes or type(result) is int
        return result if plain else super()._convert_lua_result(result, nested)

    def _empty_stream_read_reply(self, res: Any) -> Any:
        return res or None  # as a real server: fakeredis sends an empty map where nobody waits

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
        """Carry out a command; `func` is its `Kind`, which fakeredis hands through in a transaction."""
        kind: Kind = func
        items: list[CommandItem] = []
        data: Any = self._db
        try:
            plan = kind.plan(args, self._server.version)
            found = self._called(kind.function, plan, args, items, from_script)
        except SimpleError as error:
            found = error
        for item in items:
            if item._modified:
                data.write_back(item, keeps_empty=plan.keeps_empty)
        if kind.see and not isinstance(found, Exception):
            kind.see(self._world.history, args, found)
        if from_script and self._world.redis.refusals and "write" in flags_of(sig.name):
            self._has_written = True
        return found

    def _called(
        self, function: Any, plan: Plan, arguments: list[Any], items: list[CommandItem], from_script: bool
    ) -> Any:
        """The reply of a command to its arguments; `items` gets those that are keys."""
        data, read = self._db, arguments.copy()
        for place, decode, missing in plan.first:
            if decode:
                read[place] = decode(read[place])
            elif read[place] not in data:
                return missing
        for place, kept in plan.keys:
            key = read[place]
            item = data.get(key)
            if item is None:
                new = kept() if kept is not None and kept is not bytes and plan.creates else None
                read[place] = Cell(key, data, new, None)
            elif kept is not None and type(item.value) is not kept:
                raise SimpleError(WRONGTYPE_MSG)
            else:
                read[place] = Cell(key, data, item.value, item.expireat)
            items.append(read[place])
        if from_script and not plan.in_scripts:
            raise SimpleError(COMMAND_IN_SCRIPT_MSG)
        found = function(self, *read)
        if plan.converts and type(found) not in _PLAIN and self._resp_version == 2:
            found = convert_to_resp2(found, "valkey")
        return found

    def add_subkey_event(self, *_: Any) -> None:
        """Nobody is told which fields of a hash have changed."""

    def _lua_redis_call(self, lua_runtime: Any, expected_globals: Any, op: bytes, *args: Any) -> Any:
        words = [word if type(word) is bytes else _convert_redis_arg(word) for word in args]
        kind, arguments = self._known(op, words)
        found = self._run_command(kind, kind.signature, arguments, True)
        plain = type(found) is bytes or type(found) is int
        return found if plain else self._convert_redis_result(lua_runtime, found)

    def eval(self, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        """As fakeredis has it, but a script is compiled once, and the garbage is not collected each time."""
        host: Any = self._server
        if script not in host.scripts:
            lua = self._get_server_runtime(host)
            host.set_words = [lua.eval(f"function(...) {name} = {{...}} end") for name in ("KEYS", "ARGV")]
            host.scripts[script] = lua.compile(script)
            host.script_cache[hashlib.sha1(script).hexdigest().encode()] = script
        set_keys, set_arguments = host.set_words
        set_keys(*keys_and_args[:numkeys])
        set_arguments(*keys_and_args[numkeys:])
        host._lua_current_socket[0] = self
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
                raise redis.ConnectionError(CLOSED)
            found = blocked.reply
        return found if shape is None else shape(found)
