"""What people do with RQ's own commands while runs go on; a dashboard of RQ's does the first all the time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import redis
from rq import Queue
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend

from rankmill.jobs.contract.errors import RankmillError
from tests.simulation.world import Process, world

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.faults import Fault


def rq_info(cluster: Cluster, fault: Fault) -> None:
    """``rq info --interval 1`` for `amount` seconds, which cleans the registries of all queues."""
    _each_second(cluster, fault, _count)


def rq_requeue(cluster: Cluster, fault: Fault) -> None:
    """``rq requeue --all``, once a second for `amount` seconds."""
    _each_second(cluster, fault, _requeue)


def rq_empty(cluster: Cluster, fault: Fault) -> None:
    """``rq empty`` deletes the jobs in RQ's own list."""
    cluster.world.process("operator", lambda: _queue(cluster).empty())  # type: ignore[no-untyped-call]


def rq_suspend(cluster: Cluster, fault: Fault) -> None:
    """``rq suspend``, and ``rq resume`` after `amount` seconds."""

    def main() -> None:
        client, history = cluster.world.redis.client(), world().history
        suspend(client)
        until, told = world().now + fault.amount, dict[Process, float]()
        while world().now < until:  # also workers that are started meanwhile
            there = [each for each in cluster.workers if each.alive and each not in history.drained]
            told |= (new := dict.fromkeys(there, world().now))
            history.drained |= new
            world().sleep(1.0)
        resume(client)
        for each, since in told.items():
            if history.drained.get(each) == since:  # else it was drained, too
                del history.drained[each]

    cluster.world.process("operator", main)


def _each_second(cluster: Cluster, fault: Fault, do: Callable[[Cluster], None]) -> None:
    until = cluster.world.now + fault.amount

    def main() -> None:
        while world().now <= until:
            with suppress(redis.RedisError, RankmillError):  # the server is away
                do(cluster)
            world().sleep(1.0)

    cluster.world.process("operator", main)


def _queue(cluster: Cluster) -> Queue:
    client = cluster.world.redis.client()
    return Queue(cluster.settings.queue, connection=client, serializer=JSONSerializer)


def _count(cluster: Cluster) -> None:
    for queue in Queue.all(connection=cluster.world.redis.client(), serializer=JSONSerializer):
        counted: Any = (queue.started_job_registry, queue.finished_job_registry, queue.failed_job_registry)
        for each in counted:
            _ = each.count


def _requeue(cluster: Cluster) -> None:
    failed = _queue(cluster).failed_job_registry
    for job_id in failed.get_job_ids():
        with suppress(NoSuchJobError, InvalidJobOperation):
            failed.requeue(job_id)


KINDS: dict[str, Callable[[Cluster, Fault], None]] = {
    each.__name__: each for each in (rq_info, rq_requeue, rq_empty, rq_suspend)
}
