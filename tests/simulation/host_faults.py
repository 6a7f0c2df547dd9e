"""What goes wrong on the hosts of producers and runners: processes that die at any write, and their disks."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from tests.simulation.producers import KILLED
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.faults import Fault


def kill_producer(cluster: Cluster, fault: Fault) -> None:
    """A producer, or a runner, is killed; the same command is given again a second later."""
    if living := _living(cluster):
        cluster.world.end(living[fault.which % len(living)], KILLED)


def stop_producer(cluster: Cluster, fault: Fault) -> None:
    """A producer, or a runner, stands still for `amount` seconds and then goes on."""
    if living := [each for each in _living(cluster) if not each.stopped]:
        process = living[fault.which % len(living)]
        cluster.world.stop(process)
        cluster.later(fault.amount, lambda: cluster.world.go_on(process))


def end_runner(cluster: Cluster, fault: Fault) -> None:
    """A runner gets SIGTERM."""
    if living := [each for each in cluster.runners if each.alive]:
        cluster.world.signal(living[fault.which % len(living)], signal.SIGTERM)


def kill_at_write(cluster: Cluster, fault: Fault) -> None:
    """Whoever makes one of the next changes of a file is killed there."""
    if cluster.disk:
        cluster.disk.arm(fault.which, lambda process: cluster.world.kill(process, KILLED), fault.target)


def stop_at_write(cluster: Cluster, fault: Fault) -> None:
    """Whoever makes one of the next changes of a file stands still there for `amount` seconds."""

    def stop(process: Process) -> None:
        cluster.world.stop(process)
        cluster.later(fault.amount, lambda: cluster.world.go_on(process))

    if cluster.disk:
        cluster.disk.arm(fault.which, stop, fault.target)


def lose_power(cluster: Cluster, fault: Fault) -> None:
    """The host with the files loses power at one of the next changes of a file."""

    def lose(process: Process) -> None:
        assert cluster.disk
        cluster.world.tell("the host loses power")
        cluster.disk.lose_power()
        cluster.world.vanish()

    if cluster.disk:
        cluster.disk.arm(fault.which, lose, fault.target)


def fill_disk(cluster: Cluster, fault: Fault) -> None:
    """For `amount` seconds, the disk is full."""
    if cluster.disk:
        cluster.disk.full = cluster.world.now + fault.amount


def fail_sync(cluster: Cluster, fault: Fault) -> None:
    """One of the next syncs, or commits of a journal, fails."""

    def fail(process: Process) -> NoReturn:
        assert cluster.disk
        cluster.world.tell("disk: it fails")
        cluster.disk.has_failed = True
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if cluster.disk:
        cluster.disk.arm(fault.which % 8, fail, only=" to be on disk")


def _living(cluster: Cluster) -> list[Process]:
    processes = [each.process for each in cluster.producers if each.alive]
    return [each for each in (*processes, *cluster.runners) if each.alive]


KINDS: dict[str, Callable[[Cluster, Fault], None]] = {
    each.__name__: each
    for each in (
        kill_producer, stop_producer, end_runner, kill_at_write, stop_at_write, lose_power, fill_disk,
        fail_sync,
    )
}  # fmt: skip
