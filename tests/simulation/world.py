"""Virtual time, processes and their threads, of which one at a time runs, in an order that a seed decides.

A thread is a greenlet. It gives way at each command to the server, wait and lock; who goes on then is drawn.
Nothing waits for real: when nobody can go on, the clock jumps to whoever wakes up next.
"""

from __future__ import annotations

import asyncio.events
import functools
import gc
import heapq
import itertools
import os
import random
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

import greenlet
import rq.utils

from rankmill.jobs.system import System, system
from tests.simulation.history import History

if TYPE_CHECKING:
    from tests.simulation.disk import Disk
    from tests.simulation.server import Server

EPOCH = 1_800_000_000.0
"""When a world begins, in seconds since 1970."""


_running_loop = asyncio.events._get_running_loop

_TICK = 1e-9
"""Seconds that an event takes: else who waits for a time that is over but for a rounding waits for ever."""


class Deadlock(Exception):
    """Nobody can go on, and nobody will wake up."""


class TooLong(Exception):
    """The world has not come to its end in the time, or the events, that it may take."""


@dataclass(eq=False)
class Process:
    """A process of the simulated cluster.

    ``clock`` is how far its clock is ahead, in seconds; ``stopped`` is whether it has got SIGSTOP. ``disk``
    has its files, if it has any; ``handlers`` are those of its signals.
    """

    name: str
    clock: float = 0.0
    stopped: bool = False
    status: int | None = None
    tasks: list[Task] = field(default_factory=list)
    held: list[Task] = field(default_factory=list)
    on_exit: list[Callable[[], None]] = field(default_factory=list)
    disk: Disk | None = None
    handlers: dict[int, Callable[[int, Any], object]] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.status is None


class Task:
    """A thread of a process."""

    numbers = itertools.count()

    def __init__(self, world: World, process: Process, run: Callable[[], object], name: str) -> None:
        self.world, self.process, self.name = world, process, name
        self.number = next(self.numbers)
        self.generation = 0
        self.waits = self.woken = False
        self.signals: list[int] = []
        self.done = False
        self.joining: list[Task] = []
        self.is_main = not process.tasks and process.alive
        self._run = run
        self.resume: greenlet.greenlet = greenlet.greenlet(self._main, parent=world.hub)
        process.tasks.append(self)

    def _main(self) -> None:
        status = 0
        try:
            self._run()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except greenlet.GreenletExit:
            return
        except BaseException as error:
            if not self.process.alive:
                return
            self.world.crashes.append((self.process.name, self.name, error))
            self.world.tell(f"raised {type(error).__name__}: {error}")
            status = 1
        self.done = True
        if self.is_main:
            self.world.end(self.process, status)
        if self in self.process.tasks:
            self.process.tasks.remove(self)
        for task in self.joining:
            self.world.wake(task)


def _unwind(tasks: Iterable[Task]) -> None:
    for task in tasks:
        for _ in range(100):  # code that goes on after an exception meets the next one
            if task.resume.dead:
                break
            task.resume.throw(greenlet.GreenletExit)


class World:
    """A cluster's time and order of events.

    Parameters
    ----------
    seed
        Decides every order and every choice.
    traced
        Whether to keep all events, as text.
    """

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.redis: Server  # set by who makes the world
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.most_events = 500_000
        self.hub = greenlet.getcurrent()
        self.current: Task | None = None
        self.ready: list[Task] = []
        self.timers: list[tuple[float, int, int, Task]] = []
        self.crashes: list[tuple[str, str, BaseException]] = []
        self._traced = traced
        self._told: list[tuple[float, str, object, str]] = []
        self.history = History(self)
        self.graveyard: list[Task] = []
        self.processes: list[Process] = []
        self.computed: Counter[int] = Counter()
        """How often the forward of each pair has ended, by the pair's first token."""
        self.stumbles = 0
        """How many of the next attempts to load a model fail for no known reason."""
        self.over = False
        self.killed: list[Task] = []
        """Threads of killed processes with files, which must still let go of these."""
        self.server_clock: float | None = None
        """How far the server's clock is ahead, while the server computes and not a process."""
        self._patched: list[tuple[object, str, object]] = []
        self._environ: dict[str, str | None] = {}
        self._sequence = itertools.count()
        self._ids = itertools.count()

    # Who runs

    def process(self, name: str, main: Callable[[], object], *, clock: float = 0.0) -> Process:
        """Start a process."""
        process = Process(name, clock)
        self.processes.append(process)
        self.start(Task(self, process, main, f"{name}/main"))
        return process

    def start(self, task: Task) -> None:
        self.ready.append(task)

    def run(self, done: Callable[[], bool], *, seconds: float) -> None:
        """Let everybody run until `done`, which is asked before time goes on.

        Raises `TooLong` when so many seconds of virtual time are over.
        """
        until = self.now + seconds
        while True:
            if self.killed:
                self._let_go()
            if not self.ready:
                if done():
                    break
                self._wake_next(until)
            if task := self._next():
                task.resume.switch()
                self.current = None
        self.current = None

    def _next(self) -> Task | None:
        """Draw who goes on of those that can; ``None``: that one has ended, or stands still."""
        ready = self.ready
        if len(ready) > 1:
            place = int(self.random.random() * len(ready))
            ready[place], ready[-1] = ready[-1], ready[place]
        task = ready.pop()
        if task.process.status is not None or task.done:
            return None
        if task.process.stopped:
            task.process.held.append(task)
            return None
        self.events += 1  # as `_tick` does
        self.now += _TICK
        if self.events > self.most_events:
            raise TooLong(f"more than {self.most_events:,} events")
        self.current = task
        return task

    def _tick(self) -> None:
        self.events += 1
        self.now += _TICK
        if self.events > self.most_events:
            raise TooLong(f"more than {self.most_events:,} events")

    def _wake_next(self, until: float) -> None:
        while self.timers:
            when, _, generation, task = heapq.heappop(self.timers)
            if task.generation != generation or task.done or not task.process.alive:
                continue
            if when > until:
                heapq.heappush(self.timers, (when, next(self._sequence), generation, task))
                self.now = until
                raise TooLong(f"not done after {until:,.0f} s")
            if when > self.now:
                self.now = when
            task.woken = False
            self._go_on(task)
            return
        raise Deadlock

    def _go_on(self, task: Task) -> None:
        """A task waits no more."""
        task.generation += 1
        task.waits = False
        self.ready.append(task)

    def _let_go(self) -> None:
        """Let killed processes close their files; the disk is as if they had not."""
        killed, self.killed = self.killed, []
        self.current = None
        _unwind(killed)
        for disk in {task.process.disk for task in killed if task.process.disk}:
            disk.thaw()

    def bury(self) -> None:
        """Unwind what still waits when all is over: nothing collects a stack that holds on to itself."""
        self.over = True
        _unwind([*self.graveyard, *(task for process in self.processes for task in process.tasks)])

    # What tasks do

    def give_way(self) -> None:
        """Let others go first, perhaps."""
        task = self.current
        if task is None or self.over:
            if greenlet.getcurrent() is not self.hub:
                raise greenlet.GreenletExit  # of a process that was killed
            return
        if self.ready or self.killed or task.process.stopped or self.events >= self.most_events:
            task.resume = greenlet.getcurrent()
            self.ready.append(task)
            self._leave()
        else:  # nobody else can go on now
            self._tick()
        if task.signals:
            self._handle_signals(task)

    def wait(self, seconds: float | None = None) -> bool:
        """Pause until `wake`, or for some seconds; return whether it was woken."""
        task = self.current
        if self.over or task is None:
            raise greenlet.GreenletExit
        when = None if seconds is None else self.now + max(seconds, 0.0)
        task.woken = False
        while True:
            task.resume = greenlet.getcurrent()
            task.generation += 1
            task.waits = True
            if when is not None:
                heapq.heappush(self.timers, (when, next(self._sequence), task.generation, task))
            self._leave()
            if not self._handle_signals(task) or task.woken or (when is not None and self.now >= when):
                return task.woken

    def wake(self, task: Task) -> None:
        """Let a task that waits go on."""
        if task.done or not task.process.alive:
            return
        task.woken = True
        if task.waits:
            self._go_on(task)

    def signal(self, process: Process, number: int) -> None:
        """Send a signal; the main thread calls the process's handler as soon as it runs."""
        main = next((task for task in process.tasks if task.is_main), None)
        if main and process.alive:
            self.tell(f"signal {number} for {process.name}")
            main.signals.append(number)
            if main.waits:
                self._go_on(main)

    def _handle_signals(self, task: Task) -> bool:
        handled = False
        while task.signals:
            handled = True
            number = task.signals.pop(0)
            if handler := task.process.handlers.get(number):
                handler(number, None)
        return handled

    def _leave(self) -> None:
        """Let others run; each thread has an event loop of its own."""
        loop = _running_loop()
        if loop is None:
            self._switch(greenlet.getcurrent())
            return
        asyncio.events._set_running_loop(None)
        try:
            self._switch(greenlet.getcurrent())
        finally:
            asyncio.events._set_running_loop(loop)

    def _switch(self, here: greenlet.greenlet) -> None:
        """Go to who is next, at once if that is a task, else by way of `run`."""
        while self.ready and not self.killed and self.events < self.most_events:
            if task := self._next():
                if task.resume is not here:
                    task.resume.switch()
                return
        self.current = None
        self.hub.switch()

    def sleep(self, seconds: float) -> None:
        self.wait(seconds)

    def tell(self, event: object, how: str = "") -> None:
        """Keep an event for the trace: a text, or commands to the server and `how` they came."""
        if self._traced:
            who = self.current.name if self.current else "world"
            self._told.append((self.now, who, event, how))

    @property
    def trace(self) -> list[str]:
        """The events, as text, if they are kept."""
        return [
            f"{at:10.4f} {who:24} {f'{how} {words_of(event)}'.lstrip() if isinstance(event, list) else event}"
            for at, who, event, how in self._told
        ]

    # What happens to processes

    def end(self, process: Process, status: int) -> None:
        """End a process at once, as SIGKILL or `os._exit` does; no code of it runs any more."""
        if not process.alive:
            return
        process.status = status
        self.tell(f"{process.name} ends with status {status}")
        self.history.ended(process)
        if process.disk:
            process.disk.freeze()
            self.killed += process.tasks
        self.graveyard += process.tasks
        process.tasks, process.held = [], []
        for each in process.on_exit:
            each()

    def exit(self, status: int) -> NoReturn:
        """The current process ends itself."""
        assert self.current
        self.end(self.current.process, status)
        self.vanish()
        raise AssertionError("it is dead")

    def kill(self, process: Process, status: int) -> None:
        """End a process, perhaps the current one."""
        self.end(process, status)
        self.vanish()

    def vanish(self) -> None:
        """Do not return if the current process has ended."""
        task = self.current
        if task and not task.process.alive:
            task.resume = greenlet.getcurrent()
            self.hub.switch()
            raise AssertionError("a dead process goes on")

    def stop(self, process: Process) -> None:
        """SIGSTOP."""
        process.stopped = True

    def go_on(self, process: Process) -> None:
        """SIGCONT."""
        process.stopped = False
        self.ready += process.held
        process.held = []

    # Clocks and chance

    def host_time(self) -> float:
        """Seconds since 1970, by the clock of the host that runs now."""
        ahead = self.server_clock
        if ahead is None:
            ahead = self.current.process.clock if self.current else 0.0
        return EPOCH + self.now + ahead

    def date(self) -> datetime:
        return datetime.fromtimestamp(self.host_time(), UTC)

    def patch(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute until the world is over."""
        before = vars(owner).get(name, getattr(owner, name))  # a class method as such, bound to no class
        self._patched.append((owner, name, before))
        setattr(owner, name, value)

    def patch_environ(self, name: str, value: str) -> None:
        """Set an environment variable until the world is over."""
        self._environ.setdefault(name, os.environ.get(name))
        os.environ[name] = value

    def unpatch(self) -> None:
        for each, before in self._environ.items():
            if before is None:
                os.environ.pop(each, None)
            else:
                os.environ[each] = before
        for owner, name, value in reversed(self._patched):
            setattr(owner, name, value)
        self._patched.clear()

    def monotonic(self) -> float:
        return 1000.0 + self.now

    def unique_id(self) -> str:
        return f"{self.random.getrandbits(96):024x}{next(self._ids):08x}"


_current: list[World] = []
_rq_now, _uuid4 = rq.utils.now, uuid.uuid4


def world() -> World:
    """The world in which the current code runs."""
    return _current[-1]


class Thread:
    """`threading.Thread`, as a task of the current process."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name, self.daemon = name or "thread", daemon
        self._task: Task | None = None

    def start(self) -> None:
        here = world().current
        assert here
        assert self._target
        name = f"{here.process.name}/{self.name}"
        self._task = Task(world(), here.process, lambda: self._target(*self._args, **self._kwargs), name)  # type: ignore[misc]
        world().start(self._task)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        if task is None or task.done or (here := task.world.current) is None:
            return
        if not task.process.alive:  # what a killed process has left is collected in another one
            return
        task.joining.append(here)
        world().wait(timeout)
        if here in task.joining:
            task.joining.remove(here)


class Lock:
    """`threading.Lock`; whoever waits is drawn when it is free."""

    def __init__(self) -> None:
        self._holder: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    reentrant = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        mine = world()
        here = mine.current
        mine.give_way()
        if self.reentrant and self._holder is here and here is not None and self._depth:
            self._depth += 1
            return True
        deadline = None if timeout < 0 else mine.now + timeout
        while self._depth and not (self._holder and not self._holder.process.alive):
            left = None if deadline is None else deadline - mine.now
            if not blocking or (left is not None and left <= 0):
                return False
            assert here
            self._waiting.append(here)
            mine.wait(left)
            if here in self._waiting:
                self._waiting.remove(here)
        self._holder, self._depth = here, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._wake_one()

    def _wake_one(self) -> None:
        if self._waiting:
            world().wake(self._waiting.pop(world().random.randrange(len(self._waiting))))

    def locked(self) -> bool:
        return bool(self._depth)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """`threading.RLock`."""

    reentrant = True


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        here = world().current
        assert here
        depth, self._lock._depth = self._lock._depth, 1
        self._waiting.append(here)
        self._lock.release()
        woken = world().wait(timeout)
        if here in self._waiting:
            self._waiting.remove(here)
        self._lock.acquire()
        self._lock._depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else world().now + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - world().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for task in self._waiting[:n]:
            self._waiting.remove(task)
            world().wake(task)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.world.wake(task)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        mine = world()
        here = mine.current
        if self._set:
            mine.give_way()
            return True
        assert here
        self._waiting.append(here)
        mine.wait(timeout)
        if here not in self._waiting:
            return True  # whoever was woken, is told so even if the event was cleared meanwhile
        self._waiting.remove(here)
        return False


class Semaphore:
    """`threading.BoundedSemaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._free = Event()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        world().give_way()
        while not self._value:
            if not blocking:
                return False
            self._free.clear()
            if not self._free.wait(timeout):
                return False
        self._value -= 1
        return True

    def release(self) -> None:
        self._value += 1
        self._free.set()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Future:
    """`concurrent.futures.Future`."""

    def __init__(self) -> None:
        self._done = Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._done.wait(timeout)
        return self._error

    def cancel(self) -> bool:
        return False


class Executor:
    """`concurrent.futures.ThreadPoolExecutor`."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "executor", *_: Any) -> None:
        self._name, self._most = thread_name_prefix, max_workers
        self._queue: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._changed = Event()
        self._threads: list[Thread] = []
        self._closed = False

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()
        self._queue.append((future, lambda: call(*args, **options)))
        if len(self._threads) < self._most:
            thread = Thread(target=self._run, name=f"{self._name}-{len(self._threads)}")
            self._threads.append(thread)
            thread.start()
        self._changed.set()
        return future

    def map(self, call: Callable[..., Any], *columns: Any) -> Iterator[Any]:
        futures = [self.submit(call, *row) for row in zip(*columns, strict=False)]
        return (future.result() for future in futures)

    def _run(self) -> None:
        while True:
            while not self._queue:
                if self._closed:
                    return
                self._changed.clear()
                self._changed.wait()
            future, call = self._queue.popleft()
            try:
                future._result = call()
            except BaseException as error:
                if isinstance(error, greenlet.GreenletExit):
                    raise
                future._error = error
            future._done.set()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            self._queue.clear()
        self._changed.set()
        for thread in self._threads if wait else ():
            thread.join()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


@functools.lru_cache(maxsize=1)
def _places(modules: int) -> tuple[list[tuple[Any, str]], list[tuple[Any, str]]]:
    """Where the code asks RQ for the time, and for an id; looked for again when there are more `modules`."""
    ours = [each for name, each in sys.modules.items() if name.startswith(("rq.", "rankmill."))]
    now, new_id = (
        [(module, name) for module in ours for name, value in vars(module).items() if value is seen]
        for seen in (_rq_now, _uuid4)
    )
    return now, new_id


@contextmanager
def living_in(mine: World) -> Iterator[World]:
    """Let the code of this block live in a world: its clocks, threads and chance are the world's.

    Garbage is collected at its end: finalizers send commands, and would change another world's events if they
    ran there.
    """
    _current.append(mine)
    gc.disable()
    before = dict(vars(system))
    simulated = System(
        now=mine.host_time,
        monotonic=mine.monotonic,
        sleep=mine.sleep,
        Thread=Thread,  # type: ignore[arg-type]
        Event=Event,  # type: ignore[arg-type]
        Lock=Lock,  # type: ignore[arg-type]
        RLock=RLock,  # type: ignore[arg-type]
        Condition=Condition,  # type: ignore[arg-type]
        Semaphore=Semaphore,  # type: ignore[arg-type]
        Executor=Executor,  # type: ignore[arg-type]
        thread_id=lambda: mine.current.number if mine.current else 0,
        uniform=mine.random.uniform,
        unique_id=mine.unique_id,
        exit=mine.exit,
    )
    vars(system).update(vars(simulated))
    mine.patch(time, "time", mine.host_time)
    mine.patch(time, "monotonic", mine.monotonic)
    mine.patch(time, "sleep", mine.sleep)
    mine.patch(uuid, "uuid4", lambda: uuid.UUID(mine.unique_id()))
    now, new_id = _places(len(sys.modules))
    for module, attribute in now:
        mine.patch(module, attribute, mine.date)
    for module, attribute in new_id:
        mine.patch(module, attribute, lambda: uuid.UUID(mine.unique_id()))
    random.seed(mine.random.random())
    try:
        yield mine
    finally:
        mine.current = None
        for process in mine.processes:
            if process.disk:
                mine.end(process, 0)
        mine._let_go()
        mine.bury()
        mine.unpatch()
        gc.collect()
        gc.enable()
        vars(system).update(before)
        _current.remove(mine)


@dataclass(eq=False)
class Armed:
    """A fault that strikes whoever makes the next event with `only` in its text, or one so many later."""

    left: int
    do: Callable[[Process], object]
    only: str = ""


def strike(armed: list[Armed], event: str, process: Process) -> None:
    """An event has come, and with it the time of some faults, perhaps."""
    for fault in [each for each in armed if each.only in event]:
        fault.left -= 1
        if fault.left < 0:
            armed.remove(fault)
            fault.do(process)


def words_of(commands: Sequence[list[bytes]]) -> str:
    """The beginning of some commands, for the trace."""
    texts = (
        " ".join(word[:40].decode(errors="replace").replace("\n", " ") for word in words[:6])
        for words in commands[:8]
    )
    return "; ".join(texts)[:300]
