"""What goes wrong in a simulated cluster, drawn from the seed; each fault is a line that can be left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import redis

from tests.simulation.history import LEASE
from tests.simulation.host import CLOSED, Refusal
from tests.simulation.world import Armed, Process

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time, in seconds; ``amount`` is what its kind makes of it.

    Its `target` is a part of what it strikes: of the commands that somebody sends, of a write and the name of
    its file, or of a key. Without one a number or chance decides, and another thing is struck as soon as the
    product sends or writes one more.
    """

    at: float
    kind: str
    amount: float = 0.0
    which: int = 0
    target: str = ""

    def __str__(self) -> str:
        target = f", {self.target!r}" if self.target else ""
        return f"{self.at:.2f} s: {self.kind} ({self.amount:.2f}, {self.which}{target})"


def kill(cluster: Cluster, fault: Fault) -> None:
    """A worker's process ends at once; another starts after `amount` seconds."""
    if living := [each for each in cluster.workers if each.alive]:
        cluster.world.end(living[fault.which % len(living)], 137)


def lose(cluster: Cluster, fault: Fault) -> None:
    """A worker's host is gone at once, so nobody tells the server that its connections are."""
    if living := [each for each in cluster.workers if each.alive]:
        process = living[fault.which % len(living)]
        for sock in cluster.world.redis.host.sockets:
            sock.silent |= sock.process is process
        cluster.world.end(process, 137)


def stop(cluster: Cluster, fault: Fault) -> None:
    """A worker stands still for `amount` seconds, perhaps for longer than its lease, and then goes on."""
    living = [each for each in cluster.workers if each.alive and not each.stopped]
    if living:
        process = living[fault.which % len(living)]
        cluster.world.stop(process)
        cluster.later(fault.amount, lambda: cluster.world.go_on(process))


def term(cluster: Cluster, fault: Fault) -> None:
    """A worker gets SIGTERM; another starts a second after its end."""
    if living := [each for each in cluster.workers if each.alive and not each.stopped]:
        cluster.terminate(living[fault.which % len(living)])


def drain(cluster: Cluster, fault: Fault) -> None:
    """Somebody orders a worker to take no jobs, and after `amount` seconds to go on."""
    if living := [each for each in cluster.workers if each.alive]:
        cluster.drain(living[fault.which % len(living)], fault.amount)


def restart(cluster: Cluster, fault: Fault) -> None:
    """The server is away for `amount` seconds, and comes back with its data."""
    cluster.world.redis.pause(fault.amount)


def flush(cluster: Cluster, fault: Fault) -> None:
    """The server comes back after `amount` seconds without any data."""
    cluster.world.redis.restore({})
    cluster.world.redis.pause(fault.amount)


def roll_back(cluster: Cluster, fault: Fault) -> None:
    """The server goes away a second later and comes back after `amount` seconds, without that last second."""
    _later_without_writes(cluster, 1.0, fault.amount)


def fail_over(cluster: Cluster, fault: Fault) -> None:
    """A replica stops to hear of writes; up to 2 s later it is the master, first read-only for some time.

    The clock of its host differs, for odd `which`, by up to an hour.
    """
    server, lag = cluster.world.redis, (0.1, 0.5, 1.0, 2.0)[fault.which % 4]

    def promoted() -> None:
        if fault.which % 2:
            server.jump((fault.amount - 10.0) * 100)
        _refuses(
            cluster, Refusal("write", "READONLY You can't write against a read only replica."), fault.amount
        )

    _later_without_writes(cluster, lag, 1.0, promoted)


def two_masters(cluster: Cluster, fault: Fault) -> None:
    """For ten seconds, some processes talk to a master that is none any more; its writes are thrown away."""
    server = cluster.world.redis
    if server.other is None:
        here = _processes(cluster)
        server.divide(here[number] for number in range(len(here)) if (number + fault.which) % 2)
        cluster.later(10.0, server.unite)


def load(cluster: Cluster, fault: Fault) -> None:
    """The server is started again, and reads its data for `amount` seconds."""
    cluster.world.redis.host.drop()
    _refuses(cluster, Refusal("loading", "LOADING Redis is loading the dataset in memory"), fault.amount)


def full(cluster: Cluster, fault: Fault) -> None:
    """For `amount` seconds the server has no memory, or hardly any."""
    why = "OOM command not allowed when used memory > 'maxmemory'."
    _refuses(cluster, Refusal("denyoom", why, (1.0, 0.5)[fault.which % 2]), fault.amount)


def no_replicas(cluster: Cluster, fault: Fault) -> None:
    """For `amount` seconds the server takes no writes, as no replica would get them."""
    _refuses(cluster, Refusal("write", "NOREPLICAS Not enough good replicas to write."), fault.amount)


def evict(cluster: Cluster, fault: Fault) -> None:
    """For ten seconds, the server evicts keys that have an expiry."""
    _evicts(cluster, volatile=True)


def evict_any(cluster: Cluster, fault: Fault) -> None:
    """For ten seconds, the server evicts any keys, or at once all with the `target` in their names."""
    if fault.target:
        cluster.world.redis.evict(fault.target)
    else:
        _evicts(cluster, volatile=False)


def freeze(cluster: Cluster, fault: Fault) -> None:
    """The server does not answer for `amount` seconds; then it carries out all that was sent to it."""
    server = cluster.world.redis
    server.frozen = max(server.frozen, cluster.world.now + fault.amount)
    cluster.later(fault.amount, server.deliver_late)


def cut_off(cluster: Cluster, fault: Fault) -> None:
    """Nothing goes from and to a process for `amount` seconds.

    For `which` of 32 and more it begins between one of its next commands and the reply; with a `target`,
    between that and its reply, of whoever sends it: the first time or, by `which`, a later one.
    """
    server = cluster.world.redis

    def begin(process: Process) -> None:
        cluster.world.history.disturb(fault.amount + LEASE)
        server.cut_off[process] = cluster.world.now + fault.amount
        cluster.later(fault.amount, server.deliver_late)

    if fault.target:
        server.armed.append(Armed(fault.which, begin, fault.target))
    elif here := _processes(cluster):
        process = here[fault.which % len(here)]
        if fault.which < 32:
            begin(process)
        else:
            server.after[process] = fault.which % 8, partial(begin, process)


def half_open(cluster: Cluster, fault: Fault) -> None:
    """The connections of a process, or for odd `which` of all, are dead, and neither side is told."""
    here = _processes(cluster)
    for sock in cluster.world.redis.host.sockets:
        if fault.which % 2 or (here and sock.process is here[fault.which % len(here)]):
            sock.silent = True


def server_clock(cluster: Cluster, fault: Fault) -> None:
    """The server is started again on a host whose clock differs by up to an hour."""
    server = cluster.world.redis
    server.jump((fault.amount - 10.0) * 100)
    server.pause(1.0)


def breaks(cluster: Cluster, fault: Fault) -> None:
    """For ten seconds, connections break at one in ten commands, before or after it is carried out.

    With a `target`, one breaks before the reply to that: the first time or, by `which`, a later one.
    """
    server = cluster.world.redis

    def lose(_: Process) -> NoReturn:
        cluster.world.tell("its reply is lost")
        raise redis.ConnectionError(CLOSED)

    if fault.target:
        server.armed.append(Armed(fault.which, lose, fault.target))
    else:
        server.broken = 0.1
        cluster.later(10.0, lambda: setattr(server, "broken", 0.0))


def miscompute(cluster: Cluster, fault: Fault) -> None:
    """A worker's device computes wrong scores from now on, until its process ends; the probes will tell."""
    if living := [each for each in cluster.workers if each.alive]:
        cluster.world.history.broken.setdefault(living[fault.which % len(living)], cluster.world.now)


def jump(cluster: Cluster, fault: Fault) -> None:
    """The clock of a worker's host jumps by up to an hour."""
    if cluster.workers:
        cluster.workers[fault.which % len(cluster.workers)].clock += (fault.amount - 10.0) * 360


def _processes(cluster: Cluster) -> list[Process]:
    return [each for each in cluster.world.processes if each.alive and each.name not in {"world", "checker"}]


def _later_without_writes(
    cluster: Cluster, lag: float, seconds: float, then: Callable[[], None] = lambda: None
) -> None:
    """After `lag` seconds, go back to the data of now, and be away for some seconds."""
    server = cluster.world.redis
    data = server.snapshot()

    def lost() -> None:
        server.restore(data)
        server.pause(seconds)
        then()

    cluster.later(lag, lost)


def _refuses(cluster: Cluster, refusal: Refusal, seconds: float) -> None:
    refusals = cluster.world.redis.refusals
    refusals.append(refusal)
    cluster.later(seconds, lambda: refusals.remove(refusal))


def _evicts(cluster: Cluster, *, volatile: bool) -> None:
    cluster.world.redis.evicting = 0.02, volatile
    cluster.later(10.0, lambda: setattr(cluster.world.redis, "evicting", None))


LOSSES = frozenset({"flush", "roll_back", "fail_over", "two_masters", "evict", "evict_any"})
"""Kinds after which the server may lack what it had acknowledged."""

KINDS: dict[str, Callable[[Cluster, Fault], None]] = {
    each.__name__: each
    for each in (
        *(kill, lose, stop, term, drain, breaks, jump, miscompute),
        *(restart, flush, roll_back, fail_over, two_masters, load, full, no_replicas, evict, evict_any),
        *(freeze, cut_off, half_open, server_clock),
    )
}
