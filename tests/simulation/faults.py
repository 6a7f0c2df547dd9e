"""What goes wrong in a simulated cluster, drawn from the seed; each fault is a line that can be left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time, in seconds; ``amount`` is what its kind makes of it."""

    at: float
    kind: str
    amount: float = 0.0
    which: int = 0

    def __str__(self) -> str:
        return f"{self.at:.2f} s: {self.kind} ({self.amount:.2f}, {self.which})"


def kill(cluster: Cluster, fault: Fault) -> None:
    """A worker's process ends at once; another starts after `amount` seconds."""
    if living := [each for each in cluster.workers if each.alive]:
        cluster.world.end(living[fault.which % len(living)], 137)


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
    """The server comes back after `amount` seconds without the writes of its last second."""
    server = cluster.world.redis
    server.restore(server.earlier)
    server.pause(fault.amount)


def breaks(cluster: Cluster, fault: Fault) -> None:
    """For ten seconds, connections break at one in ten commands, before or after it is carried out."""
    cluster.world.redis.broken = 0.1
    cluster.later(10.0, lambda: setattr(cluster.world.redis, "broken", 0.0))


def jump(cluster: Cluster, fault: Fault) -> None:
    """The clock of a worker's host jumps by up to an hour."""
    if cluster.workers:
        cluster.workers[fault.which % len(cluster.workers)].clock += (fault.amount - 10.0) * 360


KINDS: dict[str, Callable[[Cluster, Fault], None]] = {
    each.__name__: each for each in (kill, stop, term, drain, restart, flush, roll_back, breaks, jump)
}
